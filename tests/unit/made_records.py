"""Step records made up for tests: any field by name, words as words, the rest plausible."""

from __future__ import annotations

from typing import Any

import numpy as np

from zos_sglang.observe.names import COLUMNS, code
from zos_sglang.observe.record import DURATIONS, STEP

MS = 1_000_000


def records(count: int, **fields: Any) -> np.ndarray:
    """`count` decode records of mode overlap; a field is one value for all, or one a record."""
    found = np.zeros(count, STEP)
    found["step"] = np.arange(1, count + 1)
    for name in DURATIONS:
        found[name] = -1
    defaults = {
        "mode": "overlap",
        "path": "overlap",
        "reason": "overlapped",
        "forward": "decode",
        "barrier": "barrier-fine",
        "ready": "waited",
        "rows": 4,
        "tokens": 4,
        "depth": 1,
    }
    for name, value in (defaults | fields).items():
        found[name] = _numbers(name, value)
    return found


def steady(
    count: int, *, gpu: float, cpu: float, d2h: float = 0.05, overlap: bool = True, **fields: Any
) -> np.ndarray:
    """A steady stretch of decode steps whose times follow from milliseconds of `gpu`, `cpu` and `d2h`.

    Without overlap a step is launch, device, copy, processing, one after the other; with overlap the device
    and the thread each do their own, and the slower one sets the pace. The launch takes half of `cpu`.
    """
    g, c, d = (int(value * MS) for value in (gpu, cpu, d2h))
    step = max(g, c) if overlap else g + c + d
    launch = 1_000 * MS + step * np.arange(count, dtype=np.int64)
    found = records(count, **({} if overlap else {"path": "sync", "reason": "mode-sync", "mode": "sync"}))
    found["t_intake"] = launch
    found["t_select"] = launch + c // 16
    found["t_launch"] = launch + c // 8
    found["t_forward"] = launch + c // 4
    found["t_launched"] = launch + c // 2
    start = (
        np.maximum(found["t_forward"], found["t_forward"][0] + g * np.arange(count))
        if overlap
        else (found["t_forward"])
    )
    found["t_ready"] = start + g + d
    found["t_process"] = (
        np.append(found["t_launched"][1:], found["t_launched"][-1] + step)
        if overlap
        else (found["t_launched"])
    )
    found["t_ready"] = np.maximum(found["t_ready"], 0)
    done = np.maximum(found["t_process"], found["t_ready"])
    found["wait"] = done - found["t_process"]
    found["t_output"] = done + c // 2
    found["wall"], found["cpu"] = step, c
    found["cpu_prepare"], found["cpu_process"] = c // 2, c - c // 2
    found["cpu_readback"] = found["cpu_depends"] = found["cpu_forward"] = 0
    found["gpu"], found["d2h"] = g, d
    found["gpu_gap"] = step - g
    for name, value in fields.items():
        found[name] = _numbers(name, value)
    return found


def _numbers(name: str, value: Any) -> Any:
    if name not in COLUMNS:
        return value
    if isinstance(value, str):
        return code(name, value)
    return [code(name, one) if isinstance(one, str) else one for one in value]
