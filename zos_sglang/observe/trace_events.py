"""Step records as Chrome trace events, which Perfetto opens.

One process; the four tracks are its threads. Times are microseconds since the trace began, exact to the
nanosecond. The schedule slice of a step carries the whole record (base64 of its 192 bytes), so that a reader
gets back the very records that were written.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from zos_sglang import __version__
from zos_sglang.observe.names import COLUMNS, LANE_OPENING, word
from zos_sglang.observe.record import STEP
from zos_sglang.observe.trace_tracks import TRACKS, Placed, Span, Tracks, rows_of

#: Of the layout below, in the event `META`; raised when a reader must know of a change.
FORMAT = 1
META = "zos_meta"

#: Reasons that hold for every step of a mode, or for none: no decision of a guard, so worth an instant only
#: when they begin.
_USUAL = {None, "overlapped", "nothing-pending", "mode-sync", "overlap-off"}


def opening(facts: Mapping[str, Any], pid: int, origin: int, unix_ns: int, process: str) -> list[str]:
    """The first events: names and order of the tracks, and all that a reader must know.

    Args:
        facts: versions, mode, whether the device is asynchronous; JSON.
        pid: of the scheduler.
        origin: the clock of the records (ns) at the trace's time 0; `unix_ns`: the calendar's time then.
        process: name for people.
    """
    meta = {
        "format": FORMAT,
        "version": __version__,
        "layout": STEP.descr,
        "columns": {name: [str(one) for one in words] for name, words in COLUMNS.items()},
        "origin_ns": origin,
        "unix_ns": unix_ns,
        "process": process,
        "facts": dict(facts),
    }
    events: list[dict[str, Any]] = [{"name": "process_name", "args": {"name": process}}]
    for track, name in enumerate(TRACKS, 1):
        events.append({"name": "thread_name", "tid": track, "args": {"name": name}})
        events.append({"name": "thread_sort_index", "tid": track, "args": {"sort_index": track}})
    made = [json.dumps({"ph": "M", "pid": pid, **event}) for event in events]
    begins = {"name": META, "ph": "i", "s": "p", "ts": 0, "pid": pid, "tid": 1, "args": meta}
    return [*made, json.dumps(begins, default=str)]


class Events:
    """Turns records into events; one object a trace.

    Args:
        pid: of the scheduler.
        origin: the clock of the records (ns) at the trace's time 0.
        asynchronous: whether the device works on its own.
    """

    def __init__(self, pid: int, origin: int, asynchronous: bool) -> None:
        self.pid, self.origin = pid, origin
        self._tracks = Tracks(asynchronous)
        #: mode, reason and refusal of the last step, in words.
        self._before: tuple[str | None, ...] = (None, None, None)

    def of(self, records: np.ndarray) -> list[str]:
        """Events of records of dtype `STEP`, in order; each is one line of JSON."""
        found: list[str] = []
        size, packed = STEP.itemsize, records.tobytes()
        for number, row in enumerate(rows_of(records)):
            record = b2a_base64(packed[number * size : (number + 1) * size], newline=False).decode()
            placed = self._tracks.place(row)
            found += self._slices(row, placed, record)
            found += self._instants(row, placed.schedule)
        return found

    def instant(self, name: str, at: int, scope: str = "t", **args: Any) -> str:
        """Something that happened at one moment; `scope` t: on the schedule track, p: in the process."""
        return json.dumps(
            {
                **{"name": name, "ph": "i", "s": scope, "ts": (at - self.origin) / 1000},
                **{"pid": self.pid, "tid": 1, "args": args},
            }
        )

    def _slices(self, row: Any, placed: Placed, record: str) -> list[str]:
        name = word("forward", row.forward) or "step"
        why = "".join(
            f',"{column}":"{word(column, value)}"'
            for column, value in (
                *(("mode", row.mode), ("path", row.path), ("reason", row.reason), ("barrier", row.barrier)),
                *(("refusal", row.refusal), ("departure", row.departure)),
            )
            if value
        )
        if row.block:
            why += f',"block":"{word("block", row.block)}","blocked_us":{_us(row.blocked)}'
        found = [
            self._slice(
                *(name, 1, placed.schedule),
                f'"step":{row.step},"rows":{row.rows},"tokens":{row.tokens},"waiting":{row.waiting}{why},'
                f'"cpu_us":{_us(row.cpu)},"prepare_us":{_us(row.cpu_prepare)},'
                f'"readback_us":{_us(row.cpu_readback)},"process_us":{_us(row.cpu_process)},'
                f'"depends_us":{_us(row.cpu_depends)},"record":"{record}"',
            )
        ]
        if placed.forward:
            estimated = ',"estimated":true' if placed.source == "estimated" else ""
            found.append(
                self._slice(name, 2, placed.forward, f'"step":{row.step},"from":"{placed.source}"{estimated}')
            )
        if placed.copy:
            found.append(self._slice("copy", 3, placed.copy, f'"step":{row.step}'))
        if placed.processing:
            found.append(
                self._slice(
                    *("process", 4, placed.processing),
                    f'"step":{row.step},"wait_us":{_us(row.wait)},"ready":"{word("ready", row.ready)}"',
                )
            )
            # An arrow binds to the slice around its end. The one it leaves must not have ended yet; the one
            # it enters stands before it in the file.
            found.append(self._arrow("s", row.step, 1, placed.schedule[1] - 1))
            found.append(self._arrow("f", row.step, 4, placed.processing[0]))
        return found

    def _slice(self, name: str, track: int, span: Span, args: str) -> str:
        begin, length = (span[0] - self.origin) / 1000, (span[1] - span[0]) / 1000
        return (
            f'{{"name":"{name}","ph":"X","ts":{begin:.3f},"dur":{length:.3f},"pid":{self.pid},"tid":{track},'
            f'"args":{{{args}}}}}'
        )

    def _arrow(self, phase: str, step: int, track: int, at: int) -> str:
        bind = ',"bp":"e"' if phase == "f" else ""
        return (
            f'{{"name":"result","cat":"result","ph":"{phase}"{bind},"id":{step},'
            f'"ts":{(at - self.origin) / 1000:.3f},"pid":{self.pid},"tid":{track}}}'
        )

    def _instants(self, row: Any, schedule: Span) -> list[str]:
        mode, reason, refusal = (
            word("mode", row.mode),
            word("reason", row.reason),
            word("refusal", row.refusal),
        )
        mode_before, reason_before, refusal_before = self._before
        self._before = (mode, reason, refusal)
        found = []
        if mode != mode_before:
            found.append(f"mode {mode}")
        if reason not in _USUAL:
            found.append(f"held back: {reason}")
        elif reason != reason_before and reason_before is not None:
            found.append(f"launch: {reason}")
        if row.departure:
            found.append(f"lane left: {word('departure', row.departure)}")
        if row.flags & LANE_OPENING:
            found.append("lane opens")
        if refusal and refusal != refusal_before:
            found.append(f"lane refused: {refusal}")
        return [self.instant(name, max(row.t_launch, schedule[0]), step=row.step) for name in found]


def _us(nanoseconds: int) -> str:
    """A duration as JSON; null if it is not known."""
    return f"{nanoseconds / 1000:.3f}" if nanoseconds >= 0 else "null"
