"""From rows of the tape to records, many at a time.

In between they are rows of whole numbers, a column a field of `record.STEP`: numpy is several times faster on
these than on the fields of records.
"""

from __future__ import annotations

import numpy as np

from zos_sglang.observe import tape
from zos_sglang.observe.names import CODES, DETAIL, Block, Path, Ready, code
from zos_sglang.observe.record import COUNTS, SMALL, STEP
from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.watch import (
    FORWARD,
    FORWARDED,
    LAUNCH,
    LAUNCHED,
    PROCESS,
    PROCESSED,
    SAMPLED,
    SELECT,
)

WAITED, AT_PROCESS, UNSEEN = (code("ready", r) for r in (Ready.WAITED, Ready.AT_PROCESS, Ready.UNSEEN))
AT_BEGIN, AT_LAUNCH = code("ready", Ready.AT_BEGIN), code("ready", Ready.AT_LAUNCH)

_AT = {name: place for place, name in enumerate(STEP.names or ())}
FIELDS = len(_AT)
_STEP, _T_SELECT, _T_LAUNCH, _T_FORWARD, _T_PROCESS, _T_READY, _T_OUTPUT = (
    _AT[name] for name in ("step", "t_select", "t_launch", "t_forward", "t_process", "t_ready", "t_output")
)
_WALL, _CPU_FORWARD, _WAIT, _BLOCKED, _GPU, _D2H = (
    _AT[name] for name in ("wall", "cpu_forward", "wait", "blocked", "gpu", "d2h")
)
_PATH, _REASON, _BLOCK, _DEPTH, _READY, _FLAGS = (
    _AT[name] for name in ("path", "reason", "block", "depth", "ready", "flags")
)
#: Of what a launch says, which column of the tape is which field. The ride stands in for the path meanwhile.
_OF_LAUNCH = {
    **{"step": tape.STEP, "t_intake": tape.BEGIN, "t_select": SELECT, "t_launch": LAUNCH},
    **{"t_forward": FORWARD, "t_launched": LAUNCHED, "blocked": tape.BLOCKED},
    **{"rows": tape.ROWS, "tokens": tape.TOKENS, "waiting": tape.WAITING, "mode": tape.MODE},
    **{"path": tape.RIDE, "reason": tape.REASON, "block": tape.CAUSE, "forward": tape.KIND},
    **{"barrier": tape.BARRIER, "refusal": tape.REFUSAL, "departure": tape.DEPARTURE},
    **{"depth": tape.DEPTH, "flags": tape.FLAGS},
}
_TO, _FROM = [_AT[name] for name in _OF_LAUNCH], list(_OF_LAUNCH.values())

_CPU_BOUND = code("block", Block.CPU_BOUND)
_SYNC = code("path", Path.SYNC)
#: By whether it was a step of the lane, and whether it was blocked.
_PATHS = np.array(
    [
        [code("path", Path.OVERLAP), code("path", Path.OVERLAP_BLOCKED)],
        [code("path", Path.RESIDENT), code("path", Path.RESIDENT_BLOCKED)],
    ]
)
_OVERLAPPED, _NOTHING_PENDING = (
    CODES["reason"][reason] for reason in (Reason.OVERLAPPED, Reason.NOTHING_PENDING)
)

#: A record as three blocks of numbers.
_LONG = FIELDS - len(COUNTS) - len(SMALL)
_BLOCKS = np.dtype([("long", "<i8", _LONG), ("count", "<i4", len(COUNTS)), ("small", "u1", len(SMALL))])

#: No steps; and what stands in front of the first one.
NONE, NOTHING = np.zeros((0, FIELDS), np.int64), np.zeros((1, FIELDS), np.int64)


def launched(rows: np.ndarray, asynchronous: bool) -> np.ndarray:
    """Steps that rows of the tape launched, int64 [steps, FIELDS]; of results and CPU nothing is known."""
    rows = rows[rows[:, tape.STEP] > 0]
    steps = np.zeros((len(rows), FIELDS), np.int64)
    steps[:, _TO] = rows[:, _FROM]
    steps[:, _GPU : _D2H + 1] = -1
    steps[:, _FLAGS] |= np.where(rows[:, SAMPLED] & tape.BY_CLOCK, DETAIL, 0)
    # What the lane does not stamp begins with the forward. A lane's step that failed was launched once more.
    launch, forward = steps[:, _T_LAUNCH], steps[:, _T_FORWARD]
    np.copyto(launch, forward, where=launch == 0)
    np.maximum(forward, launch, out=forward)
    select = steps[:, _T_SELECT]
    np.copyto(select, launch, where=select == 0)
    if not asynchronous:
        # Nobody waits there: the result was there when the forward returned.
        steps[:, _READY] = WAITED
        done = rows[:, FORWARDED]
        steps[:, _T_READY] = np.where(done > 0, done, rows[:, LAUNCHED])
    return steps


def charged(steps: np.ndarray, rows: np.ndarray, parts: np.ndarray) -> None:
    """Add what iterations took (`split.charge`) to the launch of each, else to the result it processed."""
    launch = rows[:, tape.STEP]
    target = np.where(launch > 0, launch, rows[:, tape.RESULT])
    mine = target > 0
    if not mine.all():
        target, parts = target[mine], parts[mine]
    places, there = _places(steps, target)
    np.add.at(steps[:, _WALL : _CPU_FORWARD + 1], places, parts[there])


def processed(steps: np.ndarray, rows: np.ndarray, unseen: list[int], asynchronous: bool) -> np.ndarray:
    """Note results that were processed, or never will be; returns which steps are complete."""
    complete = np.zeros(len(steps), bool)
    rows = rows[rows[:, tape.RESULT] > 0]
    places, there = _places(steps, rows[:, tape.RESULT])
    rows = rows[there]
    complete[places] = True
    steps[places, _T_PROCESS] = rows[:, PROCESS]
    steps[places, _T_OUTPUT] = rows[:, PROCESSED]
    steps[places, _WAIT] = rows[:, tape.WAIT]
    if asynchronous:
        ready = rows[:, tape.READY]
        steps[places, _READY] = np.where(ready > 0, ready, AT_PROCESS)
        steps[places, _T_READY] = np.where(ready > 0, rows[:, tape.T_READY], rows[:, PROCESSED])
    if unseen:
        places, _ = _places(steps, np.array(unseen))
        complete[places] = True
        steps[places, _T_PROCESS] = steps[places, _T_READY] = steps[places, _T_OUTPUT] = 0
        steps[places, _WAIT], steps[places, _READY] = -1, UNSEEN
    return complete


def _places(steps: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where steps of these numbers are, and which numbers are there at all: a fault may have lost some."""
    places = np.searchsorted(steps[:, _STEP], numbers)
    there = places < len(steps)
    there[there] = steps[places[there], _STEP] == numbers[there]
    return places[there], there


def judged(steps: np.ndarray, before: np.ndarray) -> None:
    """Path and block of complete steps, in order, at least one; `before`: the one in front of them."""
    lane, reason, block = steps[:, _PATH] > 0, steps[:, _REASON], steps[:, _BLOCK]
    overlaps = lane | (reason == _OVERLAPPED) | (reason == _NOTHING_PENDING)
    last_ready = np.concatenate((before[:, _READY], steps[:-1, _READY]))
    seen = (last_ready == AT_BEGIN) | (last_ready == AT_LAUNCH)
    if seen.any():
        _find_cpu_bound(steps, before, seen & overlaps & (block == 0) & (steps[:, _DEPTH] > 0))
    steps[:, _PATH] = np.where(overlaps, _PATHS[lane.view(np.uint8), (block > 0).view(np.uint8)], _SYNC)
    if not overlaps.all():
        steps[~overlaps, _BLOCK], steps[~overlaps, _BLOCKED] = 0, -1


def _find_cpu_bound(steps: np.ndarray, before: np.ndarray, found: np.ndarray) -> None:
    """The device had nothing to do at least since the result before was seen there."""
    last = np.concatenate((before, steps[:-1]))
    found &= last[:, _STEP] == steps[:, _STEP] - 1
    idle = np.maximum(steps[:, _T_FORWARD] - last[:, _T_READY], 0)
    steps[found, _BLOCK], steps[found, _BLOCKED] = _CPU_BOUND, idle[found]


def records(steps: np.ndarray) -> np.ndarray:
    """The same as records of dtype `STEP`."""
    made = np.empty(len(steps), STEP)
    blocks = made.view(_BLOCKS)
    blocks["long"] = steps[:, :_LONG]
    blocks["count"] = steps[:, _LONG : -len(SMALL)]
    blocks["small"] = steps[:, -len(SMALL) :]
    return made
