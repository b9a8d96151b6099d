"""Runs of the modes held against the base mode's of the same repeat: spreads, ratios, equal answers.

A run is a flat dict; a figure is named `name`, or `name.part` where it has parts, such as `itl_ms.p50`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zos_sglang.testing.bench.stats import ratio, spread

Run = Mapping[str, Any]


def value_of(run: Run, metric: str) -> float | None:
    """One figure of a run by its name; None where the run has none."""
    what, _, which = metric.partition(".")
    found = run[what]
    if which and found is not None:
        found = found[which]
    return None if found is None else float(found)


def whole_repeats(runs: Iterable[Run], modes: Sequence[str]) -> list[dict[str, Run]]:
    """The runs of one load by mode, in the order of the repeats, without repeats that lack a mode."""
    found: dict[int, dict[str, Run]] = {}
    for run in runs:
        found.setdefault(run["repeat"], {})[run["mode"]] = run
    return [by_mode for _, by_mode in sorted(found.items()) if set(by_mode) >= set(modes)]


def spread_of(runs: Sequence[Run], metric: str) -> dict[str, float] | None:
    """Median, quartiles and extremes of a figure over the runs that have it."""
    values = [value for run in runs if (value := value_of(run, metric)) is not None]
    return spread(values) if values else None


def ratio_of(runs: Sequence[Run], others: Sequence[Run], metric: str) -> dict[str, Any] | None:
    """`runs` over `others`, pair by pair; None if a pair lacks the figure."""
    values = [value_of(run, metric) for run in runs]
    base = [value_of(run, metric) for run in others]
    if any(value is None for value in values) or not all(base):
        return None
    return ratio([float(v) for v in values if v is not None], [float(v) for v in base if v is not None])


def median_of(runs: Sequence[Run], name: str) -> float | None:
    """The median of a plain figure over the runs that have it."""
    there = [run[name] for run in runs if run[name] is not None]
    return round(statistics.median(there), 2) if there else None


def lane_share(runs: Sequence[Run]) -> float | None:
    """Lane steps over all decode steps, all runs together."""
    lanes = [run["lane"] for run in runs if run["lane"]]
    steps = sum(lane["decode_steps"] for lane in lanes)
    return round(sum(lane["steps"] for lane in lanes) / steps, 4) if steps else None


def answers_of(runs: Sequence[Run], others: Sequence[Run], is_base: bool) -> dict[str, Any]:
    """Pairs of answers to one request, and how many differ: a mode's against the base's of the same repeat.

    The base's are compared with its own of the first repeat: what differs there differs for other reasons.
    """
    pairs = (
        list(zip(runs[1:], [runs[0]] * (len(runs) - 1), strict=True))
        if is_base
        else list(zip(runs, others, strict=True))
    )
    compared = differing = 0
    first: list[int] = []
    for run, other in pairs:
        found = differing_requests(run["digests"], other["digests"])
        compared += sum(
            a is not None and b is not None for a, b in zip(run["digests"], other["digests"], strict=True)
        )
        differing += len(found)
        first = first or found[:10]
    return {"compared": compared, "differing": differing, "first_requests": first}


def differing_requests(mine: Sequence[str | None], other: Sequence[str | None]) -> list[int]:
    """Indices of requests that both runs answered, differently."""
    pairs = enumerate(zip(mine, other, strict=True))
    return [index for index, (a, b) in pairs if a is not None and b is not None and a != b]
