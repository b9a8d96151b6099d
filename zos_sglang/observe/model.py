"""What if: the time of a step in each mode, from what the device and the thread take.

    sync      max(C, G + D + S)                   to  G + D + C
    overlap   max(C, G, (C + G + D) / 2)          to  the same + D
    resident  max(L, G, (L + G + D) / 2)          to  the same + D

G is the device's time for a step, D that of the copy to the host, C the time that the scheduler's thread is
busy with a step in a loop, L in the lane. S is the part of C between a result and the end of the next launch:
without overlap only that part keeps the device waiting, the rest runs while the device works. The third term
is the round trip of a thread that may be one step ahead: it launches a step after it has read the result of
the last but one.

C, S and L are wall time without the wait for results, not CPU time: a call that blocks in the driver keeps
the thread from the next launch just as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from zos_sglang.observe.adjacent import difference, pairs, size_class
from zos_sglang.observe.names import Path, code, word

#: Modes that can be predicted; the others behave like one of them.
PREDICTED = ("sync", "overlap", "resident")
_LIKE = {"normal": "sync", "stock": "overlap"}

US = 1000
#: A gap on the device up to this long is no wait for the scheduler: graphs one after the other have one too.
GAP_NS = 5_000

_LANE = (code("path", Path.RESIDENT), code("path", Path.RESIDENT_BLOCKED))


class Range(NamedTuple):
    """A prediction, in the unit of its inputs. `low` is what the parts add up to; `high` hides nothing."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Step:
    """What one step takes, in any one unit (microseconds from `inputs`). None is unknown.

    `gpu` G, `cpu` C, `cpu_lane` L, `d2h` D, `cpu_serial` S (None: all of C).
    """

    gpu: float | None
    cpu: float | None = None
    cpu_lane: float | None = None
    d2h: float = 0.0
    cpu_serial: float | None = None


def predict(step: Step, mode: str, depth: int = 1) -> Range | None:
    """The time of a step in `mode`; None if an input for it is unknown.

    Args:
        step: its parts.
        mode: one of `names.MODES` but `off`.
        depth: results that may be pending when a step is launched, in modes that overlap.

    Raises:
        ValueError: no model of that mode.
    """
    mode = _LIKE.get(mode, mode)
    if mode not in PREDICTED:
        raise ValueError(f"no model of mode {mode!r}")
    busy = step.cpu_lane if mode == "resident" else step.cpu
    if step.gpu is None or busy is None:
        return None
    device = step.gpu + step.d2h
    if mode == "sync":
        serial = busy if step.cpu_serial is None else min(step.cpu_serial, busy)
        return Range(max(busy, device + serial), device + busy)
    pace = max(busy, step.gpu, (busy + device) / (depth + 1))
    return Range(pace, pace + step.d2h)


def in_lane(records: np.ndarray) -> np.ndarray:
    """Which records are steps of the lane; bool."""
    return np.isin(records["path"], _LANE)


def inputs(records: np.ndarray) -> dict[tuple[int, int], Step]:
    """Medians by (number of the forward mode, size class of the batch). Records in order of `step`."""
    return {key: step_of(group) for key, group in groups(records).items()}


def groups(records: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """The records by (number of the forward mode, size class of the batch)."""
    classes = size_class(records["rows"])
    keys = sorted(set(zip(records["forward"].tolist(), classes.tolist(), strict=True)))
    return {
        (forward, size): records[(records["forward"] == forward) & (classes == size)]
        for forward, size in keys
    }


def step_of(records: np.ndarray) -> Step:
    """The inputs of one group: C and S from the loops, L from the lane, G and D from device events."""
    lane = in_lane(records)
    return Step(
        gpu=gpu(records),
        cpu=busy(records[~lane]),
        cpu_lane=busy(records[lane]),
        d2h=median_us(records["d2h"][records["d2h"] >= 0]) or 0.0,
        cpu_serial=serial(records[~lane]),
    )


def gpu(records: np.ndarray) -> float | None:
    """The device's time for a step, from the best samples there are.

    While the device idles, an event at the start of a step is stamped at its submission, and the launch
    counts in. So samples of the lane come first, then those of steps that followed the one before without a
    gap, then all. Without any, it is the interval of lane steps whose thread waited for results.
    """
    lane, sampled = in_lane(records), records["gpu"] >= 0
    busy_device = (records["gpu_gap"] >= 0) & (records["gpu_gap"] <= GAP_NS)
    for good in (sampled & lane, sampled & busy_device, sampled):
        if good.any():
            return median_us(records["gpu"][good])
    before, after = pairs(records[lane])
    waited = before["wait"] > 0
    return median_us(difference(after["t_forward"][waited], before["t_forward"][waited]))


def busy(records: np.ndarray) -> float | None:
    """What the thread works a step, not waiting for a result nor being the device; None without records."""
    known = records[records["wall"] >= 0]
    if not known.size:
        return None
    # A wait belongs to the iteration that processed the result, not to the one that launched it: in a steady
    # stretch medians can be subtracted, single records cannot.
    waits = median_us(known["wait"][known["wait"] >= 0]) or 0.0
    return max(0.0, (median_us(known["wall"] - known["cpu_forward"].clip(0)) or 0.0) - waits)


def serial(records: np.ndarray, until: Literal["t_forward", "t_launched"] = "t_launched") -> float | None:
    """From a result to the next launch: its processing, selection, preparation, launch; None if unknown.

    A graph starts as its launch returns, hence `t_launched` without the readback that is queued after the
    forward. A forward that is launched kernel by kernel starts sooner: S is then too long by some of it.
    """
    before, after = pairs(records)
    known = (before["t_output"] > 0) & (before["t_process"] > 0)
    known &= (after["t_select"] > 0) & (after[until] > 0)
    before, after = before[known], after[known]
    processing = before["t_output"] - before["t_process"] - before["wait"].clip(0)
    launching = after[until] - after["t_select"]
    if until == "t_launched":
        launching -= after["cpu_readback"].clip(0)
    # A result that held the launch back was processed between selection and launch.
    inside = np.minimum(before["t_output"], after[until]) - np.maximum(before["t_process"], after["t_select"])
    return median_us(processing + launching - inside.clip(0))


def what_if(records: np.ndarray) -> dict[str, Any]:
    """`inputs` with their predictions and what was measured, in microseconds, ready for JSON.

    Keys are "{forward} {size class}"; `measured` is the median interval of adjacent steps by mode.
    """
    found: dict[str, Any] = {}
    for (forward, size), group in groups(records).items():
        step = step_of(group)
        parts = ("gpu", "cpu", "cpu_serial", "cpu_lane", "d2h")
        found[f"{word('forward', forward)} {size}"] = {
            "forward": word("forward", forward),
            "rows_at_most": size,
            "steps": int(group.size),
            "inputs": {name: _rounded(getattr(step, name)) for name in parts},
            "predicted": {mode: _range(predict(step, mode)) for mode in PREDICTED},
            "measured": measured(group),
        }
    return found


def measured(records: np.ndarray) -> dict[str, float]:
    """The median interval of adjacent steps by mode, in microseconds."""
    before, after = pairs(records)
    found = {}
    for mode in np.unique(after["mode"]).tolist():
        mine = after["mode"] == mode
        median = median_us(difference(after["t_forward"][mine], before["t_forward"][mine]))
        if median is not None:
            found[str(word("mode", mode))] = round(median, 1)
    return found


def median_us(nanoseconds: np.ndarray) -> float | None:
    """The median in microseconds; None of nothing."""
    return float(np.median(nanoseconds)) / US if nanoseconds.size else None


def _range(found: Range | None) -> list[float] | None:
    return None if found is None else [round(found.low, 1), round(found.high, 1)]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
