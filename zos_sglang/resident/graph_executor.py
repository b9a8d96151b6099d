"""Decode steps of the lane as CUDA graphs around upstream's captured model step.

A step is: advance and metadata (one graph), the model (upstream's graph), and for a greedy batch argmax
and emission (one graph); any other batch goes through upstream's own sampler, eagerly. The step right after
`open` runs on what `open` loaded: no advance. Grammars' masks are applied to the logits in place, eagerly,
before the graph of a greedy batch; upstream's sampler applies them itself.

Graphs exist per bucket (upstream's captured batch sizes). The number of rows that are requests is a scalar on
the device: padding rows are computed as upstream computes them, and are neither advanced nor emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zos_sglang.resident import greedy, kernels
from zos_sglang.resident.capture import Capture
from zos_sglang.resident.eligibility import Refusal

Work = Callable[[], None]


class Decode(Protocol):
    """What the executor needs of `upstream.decode_graph.DecodeGraphs`."""

    device: Any
    buckets: list[int]
    capacity: int
    buffers: kernels.StepBuffers

    def metadata(self, live: Any) -> Any: ...
    def bucket(self, rows: int) -> int: ...
    def logits(self, bucket: int) -> Any: ...
    def refuses(self, batch: Any) -> Refusal | None: ...
    def load(self, batch: Any) -> Any: ...
    def keeps(self, loaded: Any, rows: int) -> bool: ...
    def keep(self, loaded: Any, batch: Any, kept: Any) -> Any: ...
    def count_step(self) -> None: ...
    def reload_metadata(self, bucket: int) -> None: ...


@dataclass(frozen=True)
class _Bucket:
    """The parts of a step for one batch size."""

    before: Work
    greedy: Work


class GraphExecutor:
    """`Executor` over upstream's decode graphs.

    Args:
        decode: the adapter.
        depth: slots of the token ring.
        capture: False runs advance, metadata and sampling eagerly (the model graph is upstream's either way).
    """

    graphs = True

    def __init__(self, decode: Decode, *, depth: int, capture: bool = True) -> None:
        device, capacity = decode.device, decode.capacity
        self._decode = decode
        self.ring = torch.zeros((depth, capacity), dtype=torch.int64, device=device)
        self._tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._parts = torch.zeros(capacity * greedy.MOST_PARTS, dtype=torch.int64, device=device)
        self._sampled = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._live = torch.zeros(1, dtype=torch.int64, device=device)
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._metadata = decode.metadata(self._live)
        self.capture = Capture(capture and torch.device(device).type == "cuda")
        self._emit = self.capture("emission of tokens", self._emit_eagerly)
        self._buckets: dict[int, _Bucket] = {}
        #: Steps over all openings: the place in the ring.
        self._count = 0
        self._loaded: Any = None
        self._rows = 0
        self._step = self._next = self._begin = self._begin_next = self._sample = _not_open

    def capture_all(self) -> None:
        """Capture every bucket, largest first, so that serving never waits for it.

        Clobbers upstream's attention metadata; call it at start-up, on the forward stream, with no batch
        loaded.
        """
        for bucket in sorted(self._decode.buckets, reverse=True):
            self._prepare(bucket)

    def refuses(self, batch: Any) -> Refusal | None:
        return self._decode.refuses(batch)

    def open(self, batch: Any) -> None:
        # Before anything is loaded: capturing runs on upstream's buffers.
        bucket = self._prepare(self._decode.bucket(len(batch.reqs)))
        loaded = self._loaded = self._decode.load(batch)
        self._rows = int(loaded.rows)
        self._live.fill_(loaded.rows)
        # Warm-ups of captures count too; the host's count is the right one.
        self._counter.fill_(self._count)
        self._bind(loaded, bucket)

    def _bind(self, loaded: Any, bucket: _Bucket) -> None:
        """The steps of a loaded batch: the first as it is loaded, and those after it."""
        sample = self._greedy(loaded, bucket.greedy) if loaded.greedy else self._sampling(loaded)
        model, before = loaded.model, bucket.before

        def first() -> None:
            model()
            sample()

        def later() -> None:
            before()
            model()
            sample()

        def moved_on() -> None:
            before()
            model()

        self._step, self._next = first, later
        self._begin, self._begin_next, self._sample = model, moved_on, sample

    def step(self) -> None:
        self._decode.count_step()
        self._step()
        self._step = self._next
        self._count += 1

    def begin(self) -> None:
        self._decode.count_step()
        self._begin()
        self._begin = self._begin_next

    def finish(self) -> None:
        self._sample()
        self._count += 1

    def keeping(self, rows: Sequence[int]) -> bool:
        # A bucket that is not captured yet would be now, on the buffers that are in use.
        count = len(rows)
        return self._decode.bucket(count) in self._buckets and self._decode.keeps(self._loaded, count)

    def keep(self, batch: Any, kept: Any) -> None:
        rows = len(kept)
        self._tokens[:rows] = self._tokens[kept]
        self._rows = rows
        self._live.fill_(rows)
        loaded = self._loaded = self._decode.keep(self._loaded, batch, kept)
        self._bind(loaded, self._buckets[loaded.bucket])
        self._step, self._begin = self._next, self._begin_next

    def held(self) -> list[Any]:
        return [self._loaded]

    def refresh(self) -> None:
        self._decode.reload_metadata(self._loaded.bucket)

    @property
    def rows(self) -> int:
        """Rows of the open batch."""
        return self._rows

    def last_tokens(self) -> Any:
        return self._tokens[: self._rows]

    def floor_us(self, replays: int) -> float:
        """Mean time of upstream's model graph alone: same slots and values each time, so nothing changes."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        model = self._loaded.model
        model()
        start.record()
        for _ in range(replays):
            model()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1000 / replays

    def close(self) -> list[Any]:
        held = self.held()
        self._loaded = None
        self._step = self._next = self._begin = self._begin_next = self._sample = _not_open
        return held

    def _prepare(self, size: int) -> _Bucket:
        bucket = self._buckets.get(size)
        if bucket is None:
            # Warm-ups and captures must neither advance nor emit a row.
            self._live.zero_()
            bucket = self._buckets[size] = self._build(size)
        return bucket

    def _build(self, size: int) -> _Bucket:
        logits = self._decode.logits(size)

        def before() -> None:
            self._advance(size)

        def greedy() -> None:
            self._choose(logits)

        return _Bucket(
            self.capture(f"advance and metadata of {size} rows", before),
            self.capture(f"greedy sampling of {size} rows", greedy),
        )

    def _advance(self, size: int) -> None:
        kernels.advance(self._decode.buffers.first(size), self._tokens, self._live)
        self._metadata.write(size)

    def _choose(self, logits: Any) -> None:
        # What upstream's sampler finds with `torch.argmax`: of equal logits and of NaNs the first.
        rows = logits.shape[0]
        count = greedy.parts_of(rows)
        parts = self._parts[: rows * count].view(rows, count)
        greedy.largest_of_parts(logits, parts, self._counter)
        greedy.hand_on(parts, self._tokens, self.ring, self._counter, self._live)

    def _emit_eagerly(self) -> None:
        kernels.emit(self._sampled, self._tokens, self.ring, self._counter, self._live)

    @staticmethod
    def _greedy(loaded: Any, choose: Work) -> Work:
        mask = loaded.mask
        if mask is None:
            return choose

        def masked() -> None:
            mask()
            choose()

        return masked

    def _sampling(self, loaded: Any) -> Work:
        sample, emit, mine = loaded.sample, self._emit, self._sampled[: loaded.rows]

        def sampled() -> None:
            mine.copy_(sample())
            emit()

        return sampled


def _not_open() -> None:
    raise RuntimeError("the executor has no batch")
