"""A GPU made of plain Python, in which a forgotten wait or reference changes the answer.

Operations are queued on streams and run later, in any order that the streams and their waits allow; the
policy decides which. Memory comes from a caching allocator: a block whose last Python reference is gone is
handed out again at once, and kernels hold addresses, not references. So whatever a correct program
must keep in order or keep alive is read wrong here as soon as it does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations
from random import Random
from typing import Any

from zos_sglang.testing.races import device
from zos_sglang.testing.races.device import RANDOM, STREAMS, Streaming

#: Which streams run at once, with whatever they wait for; the others only when somebody waits for them.
EAGER = tuple("+".join(names) for n in range(len(STREAMS) + 1) for names in combinations(STREAMS, n))
LATE, EARLY = EAGER[0], EAGER[-1]
POLICIES = (*EAGER, RANDOM)

Values = tuple[int, ...]
#: An address as a kernel knows it: the block and who owned it when the kernel was queued.
Address = tuple[int, int]


class Stream:
    """Operations in order; waits are operations that are ready once another stream got that far."""

    def __init__(self, gpu: Gpu, name: str, handle: int) -> None:
        self.gpu, self.name, self.cuda_stream = gpu, name, handle
        self.queue: deque[tuple[Callable[[], None] | None, Stream | None, int]] = deque()
        self.queued = 0
        self.done = 0

    def enqueue(self, run: Callable[[], None]) -> None:
        self._push(run, None, 0)

    def wait_stream(self, other: Stream) -> None:
        self._push(None, other, other.queued)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self._push(None, event.stream, event.position)

    def query(self) -> bool:
        return self.done == self.queued

    def ready(self) -> bool:
        return bool(self.queue) and (self.queue[0][1] is None or self.queue[0][1].done >= self.queue[0][2])

    def run_one(self) -> None:
        run, _, _ = self.queue.popleft()
        if run is not None:
            run()
        self.done += 1

    def run_until(self, position: int) -> None:
        """Run what the host waits for, and nothing that it does not depend on."""
        while self.done < position:
            _, other, needed = self.queue[0]
            if other is not None:
                other.run_until(needed)
            self.run_one()

    def _push(self, run: Callable[[], None] | None, other: Stream | None, needed: int) -> None:
        self.queue.append((run, other, needed))
        self.queued += 1
        self.gpu.advance()


class Event(device.Event):
    """The same here; meanwhile other streams may get on."""

    def synchronize(self) -> None:
        self.device.advance()
        super().synchronize()


class Tensor:
    """A reference to a block; the block is free again when the last reference is gone."""

    __slots__ = ("address", "gpu", "pool", "users")

    def __init__(self, gpu: Gpu, pool: str, address: Address) -> None:
        self.gpu, self.pool, self.address = gpu, pool, address
        self.users: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        """Once free, the block is not handed out before `stream` is done with what it has by then."""
        self.users.append(stream)

    def __del__(self) -> None:
        if self.users:
            self.gpu.in_use.append((self.pool, self.address[0], [(s, s.queued) for s in self.users]))
        else:
            self.gpu.free[self.pool].append(self.address[0])


class Gpu(Streaming[Stream]):
    """Streams, memory, and the buffers that every step shares."""

    def __init__(self, policy: str = LATE, seed: int = 0) -> None:
        self.eager = () if policy == RANDOM else tuple(filter(None, policy.split("+")))
        self.random = Random(seed) if policy == RANDOM else None
        self.schedule, self.forward, self.copy = (Stream(self, n, i + 1) for i, n in enumerate(STREAMS))
        self.streams = {s.name: s for s in (self.schedule, self.forward, self.copy)}
        super().__init__(self.schedule)
        self._running = False
        self.blocks: list[tuple[int, Values]] = []
        self.owners = 0
        self.free: dict[str, list[int]] = {name: [] for name in STREAMS}
        #: Blocks without an owner that a stream was said to use: pool, block, and how far it has to get.
        self.in_use: list[tuple[str, int, list[tuple[Any, int]]]] = []
        self.hazards: list[str] = []
        #: Written by the schedule stream for the next step, read by the forward: one slot a batch row.
        self.shared: Values = ()
        #: Static output of the captured graph: the next forward writes over it.
        self.logits: tuple[Any, ...] = ()
        #: Future map and KV cache: by request-pool row.
        self.future: dict[int, int] = {}
        self.kv: dict[int, int] = {}
        #: Grammar states by request, where processing writes them (`Limits.masks_early`).
        self.masks: dict[int, int] = {}

    def advance(self) -> None:
        """The host did something; meanwhile the device may have worked."""
        if self._running:
            return
        self._running = True
        if self.random is not None:
            for _ in range(self.random.choice((0, 0, 1, 2, 6))):
                if ready := [s for s in self.streams.values() if s.ready()]:
                    self.random.choice(ready).run_one()
        else:
            for name in self.eager:
                self.streams[name].run_until(self.streams[name].queued)
        self._running = False

    def empty(self) -> Tensor:
        """Memory from the pool of the current stream; it still holds what its last owner left there."""
        pool = self.current.name
        self._reclaim()
        self.owners += 1
        if self.free[pool]:
            block = self.free[pool].pop()
        else:
            block = len(self.blocks)
            self.blocks.append((0, ()))
        return Tensor(self, pool, (block, self.owners))

    def _reclaim(self) -> None:
        for entry in self.in_use[:]:
            pool, block, users = entry
            if all(stream.done >= position for stream, position in users):
                self.in_use.remove(entry)
                self.reclaimed(block)
                self.free[pool].append(block)

    def reclaimed(self, block: int) -> None:
        """The allocator saw to it that nobody uses this block any more."""

    def touch(self, buffer: Any, label: str, *, writes: bool) -> None:
        """The host, or the operation that runs now, reads or writes a buffer."""

    def tensor(self, values: Sequence[int]) -> Tensor:
        """A tensor filled by the current stream, when its turn comes."""
        out = self.empty()
        self.current.enqueue(lambda to=out.address, v=tuple(values): self.store(to, v))
        return out

    def store(self, to: Address, values: Values) -> None:
        self.touch(("block", to[0]), "tensor", writes=True)
        self.blocks[to[0]] = (to[1], values)

    def load(self, at: Address, n: int, what: str) -> Values:
        """What a kernel finds at an address: the wrong values if the right ones are not there."""
        self.touch(("block", at[0]), what, writes=False)
        owner, values = self.blocks[at[0]]
        if owner != at[1]:
            self.hazards.append(f"{what}: {'not written yet' if owner < at[1] else 'written over'}")
        return (*values, *[-1] * n)[:n]

    def finish(self) -> None:
        for stream in self.streams.values():
            stream.run_until(stream.queued)
