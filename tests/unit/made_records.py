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

    Of `cpu` an iteration takes 1/16 each for intake and selection, 1/8 to the forward, 1/4 for the rest of
    the launch, 1/2 for a result. With overlap it processes the result before the one that it launched, after
    that launch; without, the last one, before selection. The device starts as the launch returns.
    """
    g, c, d = (int(value * MS) for value in (gpu, cpu, d2h))
    found = records(count, **({} if overlap else {"path": "sync", "reason": "mode-sync", "mode": "sync"}))
    now, device, made = 1_000 * MS, 0, [_Made() for _ in range(_WARM + count + 1)]
    for i, step in enumerate(made):
        before = made[i - 1] if i else None
        step.t_intake = now
        now += c // 16
        if before and not overlap:
            now = before.process(now, c // 2)
        step.t_select, step.t_launch, step.t_forward = now, now + c // 16, now + c // 16 + c // 8
        now = step.t_launched = step.t_forward + c // 4
        start = max(step.t_launched, device)
        step.gpu_gap, device = start - device, start + g
        step.t_ready = device + d
        if before and overlap:
            now = before.process(now, c // 2)
        step.wall = now - step.t_intake
    for name in _Made.__slots__:
        found[name] = [getattr(step, name) for step in made[_WARM:-1]]
    found["cpu"], found["cpu_prepare"], found["cpu_process"] = c, c - c // 2, c // 2
    found["cpu_readback"] = found["cpu_depends"] = found["cpu_forward"] = 0
    found["gpu"], found["d2h"] = g, d
    if overlap:
        _mark_unwaited(found, made[_WARM + 1 :])
    for name, value in fields.items():
        found[name] = _numbers(name, value)
    return found


#: Steps before the first that is kept: by then the stretch is steady.
_WARM = 8


class _Made:
    """Times of one step, ns."""

    __slots__ = (
        *("t_intake", "t_select", "t_launch", "t_forward", "t_launched", "t_process", "t_ready", "t_output"),
        *("wait", "wall", "gpu_gap"),
    )

    def process(self, now: int, takes: int) -> int:
        """Process this step's result from `now`; the time when that is done."""
        self.t_process, self.wait = now, max(0, self.t_ready - now)
        self.t_output = now + self.wait + takes
        return self.t_output


def _mark_unwaited(found: np.ndarray, later: list[_Made]) -> None:
    """A result that nobody waited for is there when somebody asks: the thread is the slower one."""
    for row, after in zip(found, later, strict=True):
        if row["wait"]:
            continue
        for ready, asked in (("at-begin", after.t_intake), ("at-launch", after.t_launch)):
            if row["t_ready"] <= asked:
                row["ready"], row["t_ready"] = code("ready", ready), asked
                break
        else:
            row["ready"], row["t_ready"] = code("ready", "at-process"), row["t_process"]
    for row, before in zip(found[1:], found[:-1], strict=True):
        if before["ready"] in (code("ready", "at-begin"), code("ready", "at-launch")):
            row["path"], row["block"] = code("path", "overlap-blocked"), code("block", "cpu-bound")
            row["blocked"] = row["t_forward"] - before["t_ready"]


def _numbers(name: str, value: Any) -> Any:
    if name not in COLUMNS:
        return value
    if isinstance(value, str):
        return code(name, value)
    return [code(name, one) if isinstance(one, str) else one for one in value]
