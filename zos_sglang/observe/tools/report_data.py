"""What the report's timeline and charts draw, from the records of a trace."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zos_sglang.observe.adjacent import difference, pairs
from zos_sglang.observe.names import (
    AFTER_IDLE,
    COLUMNS,
    LANE_OPENING,
    PAUSED,
    Forward,
    Path,
    Work,
    code,
    word,
)
from zos_sglang.observe.summary import distribution, tpot
from zos_sglang.observe.trace_reader import Trace
from zos_sglang.observe.trace_tracks import TRACKS, Tracks, rows_of

#: Steps on the timeline; of a longer trace the last ones.
SHOWN = 20_000
#: Steps in view at first.
IN_VIEW = 14


class Sample(NamedTuple):
    """Values of one distribution."""

    title: str
    about: str
    values: np.ndarray
    weights: np.ndarray | None
    found: dict[str, Any]


def samples(records: np.ndarray) -> list[Sample]:
    """The distributions that the records allow, as `summary` computes them."""
    before, after = pairs(records)
    decode = after["forward"] == code("forward", Forward.DECODE)
    first, second = before[decode], after[decode]
    intervals = difference(second["t_forward"], first["t_forward"])
    gaps, weights = token_gaps(first, second)
    found = [
        _sample("Launch interval", "from one decode forward to the next", intervals),
        Sample("Time per output token", "as clients see it", gaps, weights, tpot(first, second) or {}),
        _sample("Wait for the result", "the thread does nothing else", _known(records["wait"])),
        _sample("Scheduler CPU a step", "of its thread, all classes", _known(records["cpu"])),
        _sample("GPU time a step", "from device events, sampled", _known(records["gpu"])),
    ]
    return [one for one in found if one.found]


def _sample(title: str, about: str, values: np.ndarray) -> Sample:
    return Sample(title, about, values, None, distribution(values) or {})


def token_gaps(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances of outputs (ns) and how many tokens came with each: the values behind `summary.tpot`."""
    known = (after["t_output"] > 0) & (before["t_output"] > 0)
    rows = np.maximum(after["rows"][known], 1)
    tokens = np.maximum(after["tokens"][known], rows)
    return (after["t_output"][known] - before["t_output"][known]) * rows / tokens, tokens


def cpu_by_path(records: np.ndarray) -> dict[str, dict[str, float]]:
    """Mean microseconds a step: path to class of work; paths that occur."""
    works = [*map(str, Work), "forward"]
    found = {}
    for path in Path:
        mine = records[(records["path"] == code("path", path)) & (records["cpu"] >= 0)]
        if mine.size:
            found[str(path)] = {work: float(mine[f"cpu_{work}"].clip(0).mean()) / 1000 for work in works}
    return found


def timeline(trace: Trace) -> dict[str, Any]:
    """Slices of the last `SHOWN` steps for the page: times in microseconds since the first of them.

    Keys: `tracks` (name to [begin, end, place] lists), lists by step (`step`, `rows`, `wait`, `forward`,
    `path`, `reason`, `block`, `estimated`), `words` (of the numbers in `path`, `reason`, `block`, `forward`),
    `instants` ([time, words]), `view` ([begin, end]).
    """
    records = trace.records[-SHOWN:]
    tracks = Tracks(trace.asynchronous)
    rows = list(rows_of(records))
    placed = [tracks.place(row) for row in rows]
    origin = min((one.schedule[0] for one in placed), default=0)
    slices: dict[str, list[list[float]]] = {name: [] for name in TRACKS}
    for place, one in enumerate(placed):
        for name in TRACKS:
            if (span := getattr(one, name)) is not None:
                slices[name].append([_us(span[0] - origin), _us(span[1] - origin), place])
    begins = [_us(one.schedule[0] - origin) for one in placed]
    return {
        "tracks": slices,
        **{name: records[name].tolist() for name in ("step", "rows", "forward", "path", "reason", "block")},
        "wait": (records["wait"].clip(0) / 1000).round(1).tolist(),
        "estimated": [int(one.source == "estimated") for one in placed],
        "words": {
            name: ["", *map(str, COLUMNS[name])] for name in ("forward", "path", "reason", "block", "mode")
        },
        "instants": _instants(rows, begins),
        "view": _view(records, begins, slices),
    }


def _instants(rows: list[Any], begins: list[float]) -> list[list[Any]]:
    found: list[list[Any]] = []
    mode = reason = None
    for row, begin in zip(rows, begins, strict=True):
        texts = []
        if row.mode != mode:
            texts.append(f"mode {word('mode', row.mode)}")
        if row.reason != reason and reason is not None:
            texts.append(f"{word('reason', row.reason)}")
        if row.departure:
            texts.append(f"lane left: {word('departure', row.departure)}")
        if row.flags & LANE_OPENING:
            texts.append("lane opens")
        mode, reason = row.mode, row.reason
        if texts:
            found.append([begin, ", ".join(texts)])
    return found


def _view(records: np.ndarray, begins: list[float], slices: dict[str, list[list[float]]]) -> list[float]:
    """Begin and end of a few steps in the middle of the longest busy stretch."""
    if not begins:
        return [0, 1]
    breaks = np.flatnonzero((records["flags"] & (AFTER_IDLE | PAUSED)) > 0)
    edges = np.unique([0, *breaks, len(records)])
    longest = int(np.diff(edges).argmax())
    low, high = int(edges[longest]), int(edges[longest + 1])
    first = max(low, (low + high - IN_VIEW) // 2)
    last = min(high, first + IN_VIEW) - 1
    ends = [one[1] for name in TRACKS for one in slices[name] if first <= one[2] <= last]
    return [begins[first], max([*ends, begins[first] + 1])]


def _known(durations: np.ndarray) -> np.ndarray:
    return durations[durations >= 0]


def _us(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 1)
