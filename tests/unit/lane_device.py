"""Model and executors of the lane's simulation: kernels on the virtual GPU that know addresses only."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.unit.fake_batch import NO_GRAMMAR, Result
from tests.unit.lane_fakes import LaneBatch, choose, kv_of, logits
from tests.unit.lane_memory import LaneGpu
from tests.unit.lane_ring import Ring
from tests.unit.virtual_gpu import Address, Event
from zos_sglang.resident.eligibility import Refusal


def decode_row(gpu: LaneGpu, slots: list[int], slot: int, token: int, temp: int) -> int:
    """Logits of a row of a decode step: `slots` are those of the tokens before, `slot` the one to write."""
    before = [gpu.kv.get(s, 0) for s in slots]
    gpu.kv[slot] = kv_of(before, token, len(slots))
    return logits([*before, gpu.kv[slot]], len(slots) + 1, temp)


class LaneWorker:
    """Upstream's model worker: the ordinary launch."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.shared_read_done_event: Event | None = None

    def forward_batch_generation(self, batch: LaneBatch, **_: Any) -> Result:
        world, gpu = self.world, self.world.gpu
        n = len(batch.reqs)
        result = Result(world.next_serial(), n)
        new = batch.extend_lens or [1] * n
        assert batch.input_ids and batch.sampling_info and gpu.current is gpu.forward
        tokens, temps = batch.input_ids.address, batch.sampling_info.temps.address
        rows, lengths = batch.req_pool_indices.address, batch.seq_lens.address
        slots: list[list[int]] = []

        def metadata() -> None:
            found = gpu.load(rows, n, "rows of requests"), gpu.load(lengths, n, "lengths")
            slots.extend(gpu.row(row, max(length, 1)) for row, length in zip(*found, strict=True))

        gpu.current.enqueue(metadata)
        if world.records_read_done():
            self.shared_read_done_event = Event(gpu)
            self.shared_read_done_event.record(gpu.forward)
        found_logits = gpu.empty()

        def model(to: Address = found_logits.address, weights: int = gpu.weights_queued) -> None:
            words, temp = gpu.load(tokens, sum(new), "input tokens"), gpu.load(temps, n, "temperatures")
            wrong = gpu.wrong_weights(weights)
            sampled, start = [], 0
            for i, row in enumerate(slots):
                for at in range(max(len(row) - new[i], 0), len(row)):
                    token = decode_row(
                        gpu, row[:at], row[at], words[start + at - len(row) + new[i]], temp[i] + wrong
                    )
                sampled.append(token)
                start += new[i]
            gpu.store(to, tuple(sampled))

        gpu.current.enqueue(model)
        result.copy_to_cpu = partial(world.copy_to_cpu, result)
        draw = partial(self._sample, result, batch.reqs[:], batch.masks, found_logits)
        if batch.has_grammar:
            result.delay_sample_func = draw
        else:
            draw()
        return result

    def _sample(self, result: Result, reqs: Any, masks: Any, found: Any) -> Result:
        """The masks come from the grammars on the host, as they are now."""
        gpu, n = self.world.gpu, len(reqs)
        states, out = gpu.tensor(masks()), gpu.empty()
        result.next_token_ids = out

        def kernel(to: Address = out.address, m: Any = states.address, at: Any = found.address) -> None:
            both = gpu.load(at, n, "logits"), gpu.load(m, n, "grammar masks")
            gpu.store(to, tuple(choose(logit, state) for logit, state in zip(*both, strict=True)))

        gpu.current.enqueue(kernel)
        return result


class VirtualExecutor:
    """What both executors have in common. `faults` is called with the name of each thing that may fail."""

    graphs = False

    def __init__(self, gpu: LaneGpu, depth: int, capacity: int) -> None:
        self.gpu, self.capacity, self.ring = gpu, capacity, Ring(gpu, depth, capacity)
        self.faults: Any = lambda name: None
        self.batch: LaneBatch | None = None
        self.refreshes = self.floors = 0
        #: Masks: two pinned buffers, which the device reads when it gets there, and what it has read.
        self.pinned, self.turn = [[NO_GRAMMAR] * capacity for _ in "12"], 0
        self.states = [NO_GRAMMAR] * capacity
        self.begun = False
        #: The masks that each step was sampled with, in the order of the steps.
        self.masked: list[list[int]] = []

    def refuses(self, batch: LaneBatch) -> Refusal | None:
        return Refusal.BATCH_SIZE if len(batch.reqs) > self.capacity else None

    def open(self, batch: LaneBatch) -> None:
        assert self.batch is None and self.gpu.current is self.gpu.forward
        self.faults("open")
        self.batch, self.rows, self.fresh = batch, len(batch.reqs), True
        self.load(batch)
        self.begun = False
        self.no_masks()
        self.faults("opened")

    def no_masks(self) -> None:
        def fill() -> None:
            self.states[:] = [NO_GRAMMAR] * self.capacity

        self.gpu.current.enqueue(fill)

    def step(self) -> None:
        assert self.batch is not None and not self.batch.has_grammar
        self._begin()
        self.finish()

    def begin(self) -> None:
        assert self.batch is not None and self.batch.has_grammar
        self._begin()

    def _begin(self) -> None:
        """`faults` "step": before anything is queued; "stepped": the model is queued, no token emitted."""
        assert self.batch is not None and self.gpu.current is self.gpu.forward
        assert not self.begun, "the step before is not sampled"
        self.faults("step")
        if not self.fresh:
            self.advance()
        self.fresh = False
        self.model()
        self.faults("stepped")
        self.begun = True

    def finish(self) -> None:
        assert self.batch is not None and self.gpu.current is self.gpu.forward
        assert self.begun, "a step is sampled twice"
        self.begun = False
        if self.batch.has_grammar:
            self.fill(self.batch.masks())
        self.emit()

    def fill(self, masks: list[int]) -> None:
        self.masked.append(masks)
        self.turn ^= 1
        buffer, name = self.pinned[self.turn], ("mask buffer", self.turn)
        self.gpu.touch(name, "masks", writes=True)
        buffer[: len(masks)] = masks

        def copy() -> None:
            self.gpu.touch(name, "masks", writes=False)
            self.states[: len(masks)] = buffer[: len(masks)]

        self.gpu.current.enqueue(copy)

    def keeping(self, rows: list[int]) -> bool:
        assert not self.begun and not self.fresh
        self.faults("keeping")
        return True

    def keep(self, batch: LaneBatch, kept: list[int]) -> None:
        """`faults` "keep": the tokens are the rest's already, and nothing else is."""
        assert batch is self.batch and self.gpu.current is self.gpu.forward
        self.rows = len(kept)
        self.narrow_tokens(kept)
        self.faults("keep")
        self.narrow(batch, kept)
        self.no_masks()

    def refresh(self) -> None:
        assert self.gpu.current is self.gpu.forward
        self.refreshes += 1
        self.faults("refresh")
        self.reload()

    def floor_us(self, replays: int) -> float:
        self.floors += replays
        self.faults("floor")
        return 1.5

    def close(self) -> list[Any]:
        held, self.batch = self.held(), None
        return held

    def narrow_tokens(self, kept: list[int]) -> None: ...
    def narrow(self, batch: LaneBatch, kept: list[int]) -> None: ...
    def load(self, batch: LaneBatch) -> None: ...
    def advance(self) -> None: ...
    def model(self) -> None: ...
    def emit(self) -> None: ...
    def reload(self) -> None: ...
    def held(self) -> list[Any]:
        return []


class GraphLike(VirtualExecutor):
    """As the graph executor over FA3: static buffers, and a page table of its own to which each step appends.

    What an opening does not overwrite is still there from the one before: the rows behind the last.
    """

    graphs = True

    def __init__(self, gpu: LaneGpu, depth: int, capacity: int) -> None:
        super().__init__(gpu, depth, capacity)
        self.live = 0
        self.row, self.length, self.slot, self.token, self.temp, self.logits, self.sampled = (
            [0] * capacity for _ in "1234567"
        )
        self.pages: list[list[int]] = [[] for _ in range(capacity)]
        with gpu.on(gpu.forward):
            self.tokens = gpu.empty()

    def load(self, batch: LaneBatch) -> None:
        gpu, n = self.gpu, len(batch.reqs)
        assert batch.input_ids and batch.out_cache_loc and batch.sampling_info
        tensors = batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc, batch.input_ids
        at = [t.address for t in (*tensors, batch.sampling_info.temps)]
        names = "rows of requests", "lengths", "slots", "input tokens", "temperatures"

        def copy() -> None:
            self.live = n
            found = [gpu.load(a, n, what) for a, what in zip(at, names, strict=True)]
            for buffer, values in zip(
                (self.row, self.length, self.slot, self.token, self.temp), found, strict=True
            ):
                buffer[:n] = values

        gpu.current.enqueue(copy)
        self.reload()

    def reload(self) -> None:
        def gather() -> None:
            for i in range(self.live):
                self.pages[i] = self.gpu.row(self.row[i], self.length[i] - 1)

        self.gpu.current.enqueue(gather)

    def narrow_tokens(self, kept: list[int]) -> None:
        """The newest tokens, and with them the inputs of the next step."""

        def gather(to: Address = self.tokens.address) -> None:
            self.sampled[: len(kept)] = [self.sampled[i] for i in kept]
            self.live = len(kept)
            self.gpu.store(to, tuple(self.sampled))

        self.gpu.current.enqueue(gather)

    def narrow(self, batch: LaneBatch, kept: list[int]) -> None:
        def gather() -> None:
            for buffer in (self.row, self.length, self.slot, self.token, self.temp):
                buffer[: len(kept)] = [buffer[i] for i in kept]

        self.gpu.current.enqueue(gather)

    def advance(self) -> None:
        def kernel() -> None:
            for i in range(self.live):
                self.pages[i].append(self.slot[i])
                self.token[i], self.length[i] = self.sampled[i], self.length[i] + 1
                self.slot[i] = self.gpu.slot(self.row[i], self.length[i] - 1)

        self.gpu.current.enqueue(kernel)

    def model(self) -> None:
        def graph(weights: int = self.gpu.weights_queued) -> None:
            wrong = self.gpu.wrong_weights(weights)
            for i in range(self.live):
                args = self.pages[i], self.slot[i], self.token[i], self.temp[i] + wrong
                self.logits[i] = decode_row(self.gpu, *args)

        self.gpu.current.enqueue(graph)

    def emit(self) -> None:
        def kernel(to: Address = self.tokens.address) -> None:
            for i in range(self.live):
                self.sampled[i] = choose(self.logits[i], self.states[i])
            self.gpu.store(to, tuple(self.sampled))
            self.ring.emit(self.sampled[: self.live])

        self.gpu.current.enqueue(kernel)

    def last_tokens(self) -> Any:
        return self.tokens


class EagerLike(VirtualExecutor):
    """As the eager executor: each step makes new tensors and reads the page table itself."""

    def load(self, batch: LaneBatch) -> None:
        assert batch.sampling_info
        self.inputs, self.lengths, self.slots = batch.input_ids, batch.seq_lens, batch.out_cache_loc
        self.indices, self.temps = batch.req_pool_indices, batch.sampling_info.temps

    def narrow_tokens(self, kept: list[int]) -> None:
        self.inputs = self._gathered(self.inputs, kept)

    def narrow(self, batch: LaneBatch, kept: list[int]) -> None:
        assert batch.sampling_info
        self.lengths = self._gathered(self.lengths, kept)
        self.indices, self.temps = batch.req_pool_indices, batch.sampling_info.temps

        def positions(at: Address = batch.seq_lens.address) -> None:
            """Upstream makes them from the lengths, and every step makes them anew."""
            self.gpu.load(at, len(kept), "lengths of the rest")

        self.gpu.current.enqueue(positions)

    def _gathered(self, tensor: Any, kept: list[int]) -> Any:
        gpu, out = self.gpu, self.gpu.empty()

        def gather(at: Address = tensor.address, to: Address = out.address) -> None:
            values = gpu.load(at, max(kept) + 1, "rows that stay")
            gpu.store(to, tuple(values[i] for i in kept))

        gpu.current.enqueue(gather)
        return out

    def advance(self) -> None:
        gpu, n = self.gpu, self.rows
        self.lengths = self.lengths + 1
        self.slots = gpu.empty()

        def gather(
            to: Any = self.slots.address, r: Any = self.indices.address, at: Any = self.lengths.address
        ) -> None:
            found = gpu.load(r, n, "rows of requests"), gpu.load(at, n, "lengths")
            gpu.store(to, tuple(gpu.slot(row, length - 1) for row, length in zip(*found, strict=True)))

        gpu.current.enqueue(gather)

    def model(self) -> None:
        gpu, n, self.out = self.gpu, self.rows, self.gpu.empty()
        assert self.inputs and self.slots
        at = [t.address for t in (self.indices, self.lengths, self.slots, self.inputs, self.temps)]
        names = "rows of requests", "lengths", "slots", "input tokens", "temperatures"

        def forward(to: Address = self.out.address, weights: int = gpu.weights_queued) -> None:
            found = [gpu.load(a, n, what) for a, what in zip(at, names, strict=True)]
            wrong = gpu.wrong_weights(weights)
            gpu.store(
                to,
                tuple(
                    decode_row(gpu, gpu.row(row, length - 1), slot, token, temp + wrong)
                    for row, length, slot, token, temp in zip(*found, strict=True)
                ),
            )

        gpu.current.enqueue(forward)

    def emit(self) -> None:
        gpu, n, self.inputs = self.gpu, self.rows, self.gpu.empty()

        def kernel(at: Address = self.out.address, to: Address = self.inputs.address) -> None:
            tokens = [choose(*pair) for pair in zip(gpu.load(at, n, "logits"), self.states[:n], strict=True)]
            gpu.store(to, tuple(tokens))
            self.ring.emit(tokens)

        gpu.current.enqueue(kernel)

    def last_tokens(self) -> Any:
        return self.inputs

    def held(self) -> list[Any]:
        return [self.indices, self.lengths, self.slots, self.inputs, self.temps] if self.batch else []

    def close(self) -> list[Any]:
        held = super().close()
        for name in ("indices", "lengths", "slots", "inputs", "temps", "out"):
            self.__dict__.pop(name, None)
        return held
