"""Predictions against measurement, and why they miss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zos_sglang.observe.model import Step, predict
from zos_sglang.testing.model_check.case import Case

#: The share of the measured step by which a prediction may miss it.
LIMIT = 0.05


def line(case: Case) -> dict[str, Any] | None:
    """One case, judged: ready for JSON, microseconds. None where an input is missing."""
    predicted = _low(case.step, case.mode)
    if predicted is None:
        return None
    own = None if case.own is None else _low(case.own, case.mode)
    error = predicted / case.measured - 1
    own_error = None if own is None else own / case.measured - 1
    return {
        **case.setting._asdict(),
        "mode": case.mode,
        "measured_us": round(case.measured, 1),
        "predicted_us": round(predicted, 1),
        "error": round(error, 4),
        "within": abs(error) <= LIMIT,
        "own_cpu_predicted_us": None if own is None else round(own, 1),
        "own_cpu_error": None if own_error is None else round(own_error, 4),
        "own_cpu_within": None if own_error is None else abs(own_error) <= LIMIT,
        "cpu_ratio": None if case.cpu_ratio is None else round(case.cpu_ratio, 3),
        "gpu_ratio": None if case.gpu_ratio is None else round(case.gpu_ratio, 3),
        "cause": cause(error, own_error, case.cpu_ratio, case.gpu_ratio),
        "inputs_us": _parts(case.step),
        "own_cpu_inputs_us": None if case.own is None else _parts(case.own),
        "sources": case.sources,
    }


def cause(
    error: float, own_error: float | None, cpu_ratio: float | None, gpu_ratio: float | None = None
) -> str | None:
    """Why a prediction misses by more than the limit, as far as the mode's own input tells; None if it holds.

    That is the thread's CPU, for the lane the device's time: it explains a miss if the prediction with it
    holds, with half the error.
    """
    if abs(error) <= LIMIT:
        return None
    if own_error is None or (cpu_ratio is None and gpu_ratio is None) or abs(own_error) > LIMIT:
        return "not explained by the mode's own CPU or device time"
    if gpu_ratio is not None:
        text = f"a step took the device {gpu_ratio:.2f} times as long in the loops: gaps of their launches"
    else:
        text = f"the thread took {cpu_ratio:.2f} times the CPU for the same work as in the mode it is from"
    return text if abs(own_error) <= abs(error) / 2 else f"in part: {text}"


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By mode: how many settings, how many within the limit, the worst error; the same with the own CPU."""
    found = {}
    for mode in dict.fromkeys(one["mode"] for one in lines):
        mine = [one for one in lines if one["mode"] == mode]
        own = [one for one in mine if one["own_cpu_error"] is not None]
        found[mode] = {
            "settings": len(mine),
            "within": sum(one["within"] for one in mine),
            "worst": max((one["error"] for one in mine), key=abs),
            "own_cpu_settings": len(own),
            "own_cpu_within": sum(one["own_cpu_within"] for one in own),
            "own_cpu_worst": max((one["own_cpu_error"] for one in own), key=abs, default=None),
        }
    return found


def _low(step: Step, mode: str) -> float | None:
    found = predict(step, mode)
    return None if found is None else found.low


def _parts(step: Step) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 1) for name, value in asdict(step).items()}
