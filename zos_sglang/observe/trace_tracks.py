"""Where a step lies on the four tracks of a trace, from its record.

The scheduler's thread does the work of `schedule` and of `processing`; `forward` and `copy` are the device's.
Slices of one track never overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from zos_sglang.observe.names import code
from zos_sglang.observe.record import STEP

#: In the order in which they are shown; a track's number is its place, from 1.
TRACKS = ("schedule", "forward", "copy", "processing")

#: Begin and end in ns of the records' clock; None where nothing is known to show.
Span = tuple[int, int]

#: How the forward's place is known. `call`: the device is not asynchronous, so it is the call itself.
#: `events`: its length comes from device events. `estimated`: from when the result was seen.
Source = Literal["call", "events", "estimated"]

Row: Any = NamedTuple("Row", [(name, int) for name in STEP.names or ()])  # type: ignore[misc]

_WAITED = code("ready", "waited")


class Placed(NamedTuple):
    """One step on the four tracks."""

    schedule: Span
    forward: Span | None
    copy: Span | None
    processing: Span | None
    source: Source


def rows_of(records: np.ndarray) -> Iterator[Any]:
    """Records of dtype `STEP` as named tuples of Python integers."""
    return map(Row._make, records.tolist())


class Tracks:
    """Places steps one after the other; remembers where each track ended.

    Args:
        asynchronous: whether the device works on its own while the scheduler's thread goes on.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._ends = [0] * len(TRACKS)
        # The last sample: of a copy, and of a forward by its mode and rows.
        self._d2h = 0
        self._gpu: dict[tuple[int, int], int] = {}

    def place(self, row: Any) -> Placed:
        """Places of the next step; steps come in order."""
        begin = row.t_intake or row.t_select or row.t_launch
        # Without overlap the result before is waited for and processed in the middle of this iteration. The
        # slice begins after it, else scheduling would seem to run beside the forward that it waits for.
        processed = self._ends[3]
        if begin < processed <= row.t_launch:
            begin = processed
        schedule = self._put(0, begin, row.t_launched)
        forward, source = self._forward(row)
        copy = self._copy(row, forward) if forward else None
        processing = self._put(3, row.t_process, row.t_output) if row.t_process and row.t_output else None
        return Placed(schedule, forward, copy, processing, source)

    def _put(self, track: int, begin: int, end: int) -> Span:
        begin = max(begin, self._ends[track])
        # A slice of no length binds no arrow.
        end = max(end, begin + 1)
        self._ends[track] = end
        return begin, end

    def _forward(self, row: Any) -> tuple[Span | None, Source]:
        begin = row.t_forward
        if not self.asynchronous:
            # The result is there when the call returns.
            end = row.t_ready if begin < row.t_ready <= row.t_launched else row.t_launched
            return (self._put(1, begin, end) if begin else None), "call"
        if row.d2h >= 0:
            self._d2h = row.d2h
        shape = (row.forward, row.rows)
        if row.gpu >= 0:
            self._gpu[shape] = row.gpu
        if not begin or (row.gpu < 0 and not row.t_ready):
            return None, "estimated"
        begin = max(begin, self._ends[1])
        end = row.t_ready - self._d2h
        if row.gpu >= 0:
            if row.ready == _WAITED:
                return self._put(1, end - row.gpu, end), "events"
            return self._put(1, begin, begin + row.gpu), "events"
        if row.ready != _WAITED and shape in self._gpu:
            # When it was seen is an upper bound; the last sample of such a step is nearer.
            end = min(end, begin + self._gpu[shape])
        return self._put(1, begin, end), "estimated"

    def _copy(self, row: Any, forward: Span) -> Span:
        if not self.asynchronous:
            return self._put(2, forward[1], forward[1] + max(row.cpu_readback, 0))
        end = row.t_ready if row.ready == _WAITED else forward[1] + self._d2h
        return self._put(2, forward[1], end)
