"""Cases from step records: one JSON file of waves, each with its setting, its mode and `to_columns`.

{"kind": "zos_steps", "commit", "date", "versions", "machine",
 "waves": [{"model", "attention", "prompt", "output", "batch", "mode", "records": {...}}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zos_sglang.observe.adjacent import pairs
from zos_sglang.observe.columns import from_columns
from zos_sglang.observe.model import Step, busy, gpu, in_lane, median_us, serial
from zos_sglang.observe.names import Forward, code
from zos_sglang.testing.model_check.case import Case, Setting

KIND = "zos_steps"
#: Where the thread's times for a mode come from: the first of these that was measured.
_DONORS = {"sync": ("overlap", "stock"), "overlap": ("sync", "stock"), "stock": ("overlap", "sync")}


def head(path: Path) -> dict[str, Any]:
    """Where the records in `path` come from. Raises OSError and ValueError for what is none."""
    data = _data(path)
    return {
        "name": path.name,
        **{key: data[key] for key in ("kind", "commit", "date", "versions", "machine")},
    }


def cases(path: Path) -> list[Case]:
    """A case for every mode of every setting that other modes say enough about."""
    found: dict[Setting, dict[str, list[np.ndarray]]] = {}
    for wave in _data(path)["waves"]:
        records = from_columns(wave["records"])
        setting = Setting(*(wave[name] for name in Setting._fields))
        decode = records[records["forward"] == code("forward", Forward.DECODE)]
        found.setdefault(setting, {}).setdefault(wave["mode"], []).append(decode)
    return [
        case
        for setting, modes in found.items()
        for case in _setting(setting, {mode: np.concatenate(waves) for mode, waves in modes.items()})
    ]


def _setting(setting: Setting, modes: dict[str, np.ndarray]) -> Iterator[Case]:
    for mode, records in modes.items():
        before, after = pairs(records, same_rows=True)
        measured = median_us(after["t_forward"] - before["t_forward"])
        others = {name: found for name, found in modes.items() if name != mode}
        if measured is None or not others:
            continue
        # Samples of the lane are the best, so all others are asked together.
        everything = np.concatenate(list(others.values()))
        copies = median_us(everything["d2h"][everything["d2h"] >= 0])
        device = Step(gpu(everything), d2h=copies or 0.0)
        sources = {"G": "events of other modes", "D": "events of other modes"}
        if mode == "resident":
            lane = replace(device, cpu_lane=busy(records[in_lane(records)]))
            bare = gpu(records)
            own = replace(lane, gpu=bare) if bare else None
            times = _ratio(device.gpu, bare)
            sources["L"] = "resident"
            yield Case(setting, mode, measured, lane, sources, own, gpu_ratio=times)
            continue
        donor = next((name for name in _DONORS.get(mode, ()) if name in others), None)
        if donor is not None:
            step = replace(device, cpu=busy(others[donor]), cpu_serial=serial(others[donor]))
            ratio = _ratio(_work(records), _work(others[donor]))
            own = None if ratio is None else _scaled(step, ratio)
            yield Case(setting, mode, measured, step, {**sources, "C": donor, "S": donor}, own, ratio)


def _work(records: np.ndarray) -> float | None:
    """The thread's CPU a step without what a wait burns."""
    cpu = median_us(records["cpu"][records["cpu"] >= 0])
    works = busy(records)
    return None if cpu is None or works is None else min(cpu, works)


def _ratio(own: float | None, other: float | None) -> float | None:
    return own / other if own and other else None


def _scaled(step: Step, ratio: float) -> Step:
    def times(part: float | None) -> float | None:
        return None if part is None else part * ratio

    return replace(step, cpu=times(step.cpu), cpu_serial=times(step.cpu_serial))


def _data(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ValueError(f"{path} holds no step records (kind {KIND})")
    return data
