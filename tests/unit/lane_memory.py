"""Page table, KV pool and prefix tree of the lane's simulation.

The host's side is a mirror of what the schedule stream has queued; the device's table changes when that
stream gets there. Pages are handed out again last in, first out, so a page that was freed while somebody
still reads it by an old table has a new owner soon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.unit.virtual_gpu import LATE, Address, Gpu, Tensor, Values
from zos_sglang.resident.window import Window

#: Longest request of any scenario, in tokens.
WIDTH = 256
Key = tuple[int, ...]


class Vector(Tensor):
    """A tensor of lengths, which knows `+`."""

    __slots__ = ()

    def __add__(self, n: int) -> Vector:
        gpu: Any = self.gpu
        out = gpu.empty()

        def add(to: Address = out.address, at: Address = self.address) -> None:
            gpu.store(to, tuple(v + n for v in gpu.whole(at, "lengths")))

        gpu.current.enqueue(add)
        return out


class LaneGpu(Gpu):
    """A virtual GPU with a page table. `kv` maps a slot to what was written there."""

    def __init__(self, policy: str = LATE, seed: int = 0) -> None:
        super().__init__(policy, seed)
        self.table: list[list[int]] = []
        #: The rows that a tensor of rows was made of, for the debug mode of the future map.
        self.hosted: dict[Address, Values] = {}
        #: Which weights the device has, and which ones the host has queued last.
        self.weights = self.weights_queued = 0

    def empty(self) -> Vector:
        tensor = super().empty()
        tensor.__class__ = Vector
        return tensor  # type: ignore[return-value]

    def tensor(self, values: Any) -> Vector:
        return super().tensor(values)  # type: ignore[return-value]

    def update_weights(self) -> None:
        """Queue new weights on the current stream."""
        version = self.weights_queued = self.weights_queued + 1

        def put() -> None:
            self.touch("weights", "weights", writes=True)
            self.weights = version

        self.current.enqueue(put)

    def wrong_weights(self, wanted: int) -> int:
        """1 if a step finds other weights than those it was launched on, which changes its tokens."""
        self.touch("weights", "weights", writes=False)
        return int(self.weights != wanted)

    def whole(self, at: Address, what: str) -> Values:
        self.load(at, 0, what)
        return self.blocks[at[0]][1]

    def row(self, row: int, length: int) -> list[int]:
        """Slots of a row, as the kernel that asks finds them now. Rows outside the table read as slot 0."""
        length = max(length, 0)
        found = self.table[row][:length] if 0 <= row < len(self.table) else []
        return found + [0] * (length - len(found))

    def slot(self, row: int, position: int) -> int:
        return self.row(row, max(position, 0) + 1)[-1]


class Memory:
    """Stock's side: `req_to_token`, the allocator and the radix cache. Page 0 is the padding page."""

    def __init__(self, gpu: LaneGpu, rows: int, pages: int, page_size: int) -> None:
        self.gpu, self.page_size, self.pages = gpu, page_size, pages
        self.free = list(range(1, pages + 1))[::-1]
        self.mirror = [[0] * WIDTH for _ in range(rows)]
        gpu.table = [[0] * WIDTH for _ in range(rows)]
        self.tree: dict[Key, int] = {}
        self.locks: Counter[Key] = Counter()
        self.taken_by_lane = 0

    # ------------------------------------------------------------ pages

    def room(self) -> int:
        """Pages that stock can have, after evicting what nobody uses."""
        return len(self.free) + sum(not self.locks[key] for key in self.tree)

    def new_pages(self, length: int, to: int) -> int:
        return -(-to // self.page_size) - -(-length // self.page_size)

    def alloc(self, count: int) -> list[int]:
        assert self.make_room(count), "the pool is empty"
        return [self.free.pop() for _ in range(count)]

    def make_room(self, count: int) -> bool:
        """Evict what nobody uses until `count` pages are free; whether they are."""
        while len(self.free) < count:
            unused = [key for key in self.tree if not self.locks[key]]
            if not unused:
                return False
            self.give(self.tree.pop(max(unused, key=len)))
        return True

    def give(self, *pages: int) -> None:
        for page in pages:
            assert 0 < page <= self.pages and page not in self.free, f"page {page} was freed twice"
            self.free.append(page)

    # ------------------------------------------------------------ the page table

    def write(self, row: int, start: int, slots: list[int]) -> None:
        """Write entries of a row, on the current stream, which is the schedule stream."""
        gpu = self.gpu
        assert gpu.current is gpu.schedule
        self.mirror[row][start : start + len(slots)] = slots

        def put() -> None:
            gpu.table[row][start : start + len(slots)] = slots

        gpu.schedule.enqueue(put)

    def extend(self, req: Any, to: int) -> list[int]:
        """Slots for a request's tokens up to `to`, written to its row; returns the new ones."""
        kv, size = req.kv, self.page_size
        start = kv.kv_committed_len
        assert kv.kv_allocated_len == start, "stock allocates behind a reservation"
        pages = self.alloc(self.new_pages(start, to))
        slots: list[int] = []
        for position in range(start, to):
            if position % size:
                slots.append((slots[-1] if slots else self.mirror[kv.req_pool_idx][position - 1]) + 1)
            else:
                slots.append(pages.pop(0) * size)
        self.write(kv.req_pool_idx, start, slots)
        kv.kv_committed_len = kv.kv_allocated_len = to
        return slots

    def pages_of(self, req: Any) -> list[int]:
        """Pages that are the request's own: behind what the tree owns, up to what is allocated."""
        kv = req.kv
        row = self.mirror[kv.req_pool_idx][kv.cache_protected_len : kv.kv_allocated_len]
        return sorted({slot // self.page_size for slot in row})

    # ------------------------------------------------------------ the prefix tree

    def match(self, req: Any) -> None:
        """Begin a request's row with the pages of the longest prefix that the tree has."""
        tokens, size = req.tokens(), self.page_size
        keys: list[Key] = []
        while (n := (len(keys) + 1) * size) < len(tokens) and tuple(tokens[:n]) in self.tree:
            keys.append(tuple(tokens[:n]))
        self._lock(req, keys)
        req.prefilled = len(keys) * size
        kv = req.kv
        kv.cache_protected_len = kv.kv_committed_len = kv.kv_allocated_len = req.prefilled
        self.write(kv.req_pool_idx, 0, [self.tree[k] * size + i for k in keys for i in range(size)])

    def publish(self, req: Any, up_to: int) -> None:
        """Give whole pages to the tree. Where it has that prefix already, its page replaces ours."""
        size, row, kv, tokens = self.page_size, req.kv.req_pool_idx, req.kv, req.tokens()
        keys = [tuple(tokens[: n * size]) for n in range(1, up_to // size + 1)]
        slots: list[int] = []
        for at in range(kv.cache_protected_len // size, len(keys)):
            mine = self.mirror[row][at * size] // size
            kept = self.tree.setdefault(keys[at], mine)
            if kept != mine:
                self.give(mine)
            slots += [kept * size + i for i in range(size)]
        self.write(row, kv.cache_protected_len, slots)
        kv.cache_protected_len = len(keys) * size
        self._lock(req, keys)

    def _lock(self, req: Any, keys: list[Key]) -> None:
        self.locks.subtract(req.locked)
        self.locks.update(keys)
        req.locked = keys

    def release(self, req: Any) -> None:
        """Upstream's `release_kv_cache`: what is finished is published, everything else is free again."""
        kv = req.kv
        if req.finished():
            owned = min(kv.kv_committed_len, len(req.tokens()))
            assert owned == kv.kv_allocated_len or len(req.tokens()) < kv.kv_committed_len
            self.publish(req, owned)
        assert kv.kv_allocated_len == kv.kv_committed_len, "released with a reservation"
        self.give(*self.pages_of(req))
        self._lock(req, [])
        kv.req_pool_idx = None
        kv.kv_committed_len = kv.kv_allocated_len = kv.cache_protected_len = 0

    def check(self, live: list[Any]) -> None:
        """Every page is free, the tree's, or exactly one live request's."""
        owned = [*self.free, *self.tree.values()]
        for req in live:
            owned += self.pages_of(req)
        assert sorted(owned) == list(range(1, self.pages + 1)), "pages leaked or owned twice"
        assert not any(n for n in self.locks.values() if n < 0)
        assert self.locks.total() == sum(len(r.locked) for r in live), "locks leaked"


class LanePool:
    """`KvPool` over the fake memory; `faults` maps a method to the call at which it fails."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.page_size = memory, memory.page_size
        self.faults: Callable[[str], None] = lambda name: None
        self.rows: list[int] = []
        self.lengths: list[int] = []

    def reserve(self, batch: Any, done: int, wanted: int) -> Window | None:
        # As the real one's: a tensor of lengths, made for the kernel that writes the slots.
        assert batch.seq_lens + done is not None
        self.rows, lengths = batch.rows, batch.seq_lens_cpu.numpy() + done
        self.lengths = lengths.tolist()
        return Window.reserve(self, lengths, wanted)

    def free_slots(self) -> int:
        return len(self.memory.free) * self.page_size

    def make_room(self, slots: int) -> None:
        self.memory.make_room(-(-slots // self.page_size))

    def take(self, count: int) -> list[int]:
        assert count <= len(self.memory.free), "taking evicts"
        self.faults("take")
        return self.memory.alloc(count)

    def give_back(self, taken: list[int]) -> None:
        self.memory.give(*taken)

    def pick(self, taken: list[int], indices: list[int]) -> list[int]:
        return [taken[i] for i in indices]

    def write(self, taken: list[int], steps: int) -> None:
        self.faults("write")
        memory, size, pages = self.memory, self.page_size, list(taken)
        if size == 1:
            for i, (row, n) in enumerate(zip(self.rows, self.lengths, strict=True)):
                memory.write(row, n, taken[i :: len(self.rows)])
            return
        for row, n in zip(self.rows, self.lengths, strict=True):
            last = memory.mirror[row][n - 1]
            crosses = (n + steps - 1) // size != (n - 1) // size
            new = pages.pop(0) * size if crosses else 0
            memory.write(
                row,
                n,
                [
                    last + at - (n - 1) if at // size == (n - 1) // size else new + at % size
                    for at in range(n, n + steps)
                ],
            )
        assert not pages
