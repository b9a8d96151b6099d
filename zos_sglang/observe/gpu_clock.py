"""Device times of some steps, from events, without ever waiting for the device.

Two adjacent steps are sampled at a time: one alone says how long a step takes, the pair says how long the
device had nothing to do in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from zos_sglang.observe.names import Block, Path, code
from zos_sglang.observe.record import Ring

#: A copy to the host that takes longer than this (ns), and than this share of the step, held the step up.
COPY_NS, COPY_SHARE = 50_000, 0.05

_COPY = code("block", Block.COPY)
_HOST_LENGTHS = code("block", Block.HOST_LENGTHS)
_BLOCKED = {
    code("path", plain): code("path", blocked)
    for plain, blocked in (
        (Path.OVERLAP, Path.OVERLAP_BLOCKED),
        (Path.OVERLAP_BLOCKED, Path.OVERLAP_BLOCKED),
        (Path.RESIDENT, Path.RESIDENT_BLOCKED),
        (Path.RESIDENT_BLOCKED, Path.RESIDENT_BLOCKED),
    )
}


class Sample:
    """The events of one step. They are used again and again."""

    __slots__ = ("copied", "copy", "end", "ended", "start", "started", "step")

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self.start, self.end, self.copy = new_event(), new_event(), new_event()
        self.clear(0)

    def clear(self, step: int) -> None:
        self.step = step
        self.started = self.ended = self.copied = False

    def done(self) -> bool:
        return bool((self.copy if self.copied else self.end).query())


class GpuClock:
    """Samples steps `n * every` and `n * every + 1`. Owned by the scheduler's thread.

    Args:
        new_event: makes an event that can be timed.
        forward: the stream of the model; may be replaced while no sample is armed.
        copy: the stream of the readback; None: the copy is queued by somebody else, and not timed.
        every: steps from sample to sample.
        pairs: samples under way at most, in pairs; they are collected every `keeper.SETTLED` steps.
    """

    def __init__(
        self,
        new_event: Callable[[], Any],
        forward: Any = None,
        copy: Any = None,
        *,
        every: int = 64,
        pairs: int = 20,
    ) -> None:
        self.forward, self.copy, self.every = forward, copy, every
        self._free = [Sample(new_event) for _ in range(2 * pairs)]
        self._armed: Sample | None = None
        self.under_way: deque[Sample] = deque()
        self._before: Sample | None = None

    def arm(self, step: int) -> bool:
        """Whether this step is sampled."""
        if self._armed is not None:
            self._free.append(self._armed)  # its launch failed
            self._armed = None
        if step % self.every > 1 or not self._free:
            return False
        self._armed = self._free.pop()
        self._armed.clear(step)
        return True

    def start(self) -> None:
        """The model's forward is about to be queued; of several in one launch the first counts."""
        sample = self._armed
        if sample is not None and not sample.started:
            sample.start.record(self.forward)
            sample.started = True

    def stop(self) -> None:
        """The forward is queued, the copy is not."""
        sample = self._armed
        if sample is not None and sample.started:
            sample.end.record(self.forward)
            sample.ended = True

    def copied(self) -> None:
        """The copy to the host is queued."""
        sample = self._armed
        if sample is not None and sample.ended and self.copy is not None:
            sample.copy.record(self.copy)
            sample.copied = True

    def launched(self, whole: bool) -> None:
        """The launch has returned; not `whole` (its sampling comes later): the sample is dropped."""
        sample, self._armed = self._armed, None
        if sample is None:
            return
        if whole and sample.ended:
            self.under_way.append(sample)
        else:
            self._free.append(sample)

    def oldest(self) -> int | None:
        """The oldest step whose record is not complete yet."""
        return self.under_way[0].step if self.under_way else None

    def collect(self, ring: Ring) -> None:
        """Complete the records of samples that the device has passed, as far as they are written."""
        while self.under_way:
            sample = self.under_way[0]
            if sample.step > ring.newest or not sample.done():
                return
            self.under_way.popleft()
            self._patch(ring, sample)
            if self._before is not None:
                self._free.append(self._before)
            self._before = sample

    def _patch(self, ring: Ring, sample: Sample) -> None:
        step = sample.step
        gpu = _ns(sample.start, sample.end)
        ring.patch(step, "gpu", gpu)
        before = self._before
        if before is not None and before.step == step - 1:
            ring.patch(step, "gpu_gap", _ns(before.end, sample.start))
        if not sample.copied:
            return
        copy = _ns(sample.end, sample.copy)
        ring.patch(step, "d2h", copy)
        if copy > max(COPY_NS, COPY_SHARE * gpu):
            _mark_blocked(ring, step, copy)


def _mark_blocked(ring: Ring, step: int, copy: int) -> None:
    for record in ring.since(step - 1)[:1]:
        path = _BLOCKED.get(int(record["path"]))
        if path is not None and record["step"] == step and record["block"] != _HOST_LENGTHS:
            ring.patch(step, "path", path)
            ring.patch(step, "block", _COPY)
            ring.patch(step, "blocked", copy)


def _ns(start: Any, end: Any) -> int:
    return round(start.elapsed_time(end) * 1e6)
