"""Statistics of the benchmark: robust against a noisy machine, and nothing else.

A machine that others use drifts, so a mode is compared with the other one inside one repeat, where
both ran within seconds; only these ratios are aggregated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Decode steps dropped at the start of a wave: prefill results and cold caches weigh on them.
DROPPED_STEPS = 8
#: Fewer steps than this have no quartiles worth reading.
FEWEST_STEPS = 16
#: Raw samples kept per list in the JSON file.
KEPT_RAW = 64


class TooFewSteps(ValueError):
    """A wave gave too few samples of its batch size; the message says what to change."""


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, quartiles, extremes and mean of `values` (not empty), in their own unit."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    )
    found = {
        "median": middle,
        "q1": low,
        "q3": high,
        "min": min(values),
        "max": max(values),
        "mean": statistics.fmean(values),
    }
    return {name: round(value, digits) for name, value in found.items()}


def steady(samples: Sequence[int], batch: int) -> list[int]:
    """The samples (ns) of a wave without its first steps. Raises TooFewSteps."""
    kept = list(samples[DROPPED_STEPS:])
    if len(kept) < FEWEST_STEPS:
        raise TooFewSteps(
            f"batch {batch}: {len(samples)} steps decoded with exactly this batch size, "
            f"{DROPPED_STEPS + FEWEST_STEPS} are needed; raise --output-tokens, lower "
            "--turns, or lower the batch to what the server runs at once"
        )
    return kept


def thinned(samples: Sequence[int], most: int = KEPT_RAW) -> list[int]:
    """At most `most` samples, evenly taken."""
    stride = -(-len(samples) // most) or 1
    return list(samples[::stride])


def microseconds(samples_ns: Iterable[int]) -> list[float]:
    return [ns / 1000 for ns in samples_ns]


def ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """`values` over `base`, repeat by repeat: each ratio, their median and extremes."""
    each = [value / other for value, other in zip(values, base, strict=True)]
    return {
        "per_repeat": [round(r, 4) for r in each],
        "median": round(statistics.median(each), 4),
        "min": round(min(each), 4),
        "max": round(max(each), 4),
    }


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values that are there, None where none is."""
    there = [value for value in values if value is not None]
    return round(statistics.geometric_mean(there), 4) if there else None


def base_of(modes: Sequence[str]) -> str:
    """The mode that ratios are taken over: stock where it runs."""
    return "stock" if "stock" in modes else modes[0]


def order_of(modes: Sequence[str], repeat: int) -> list[str]:
    """The modes in the order of one repeat: A B, then B A, so that a drift favours nobody."""
    return list(modes) if repeat % 2 == 0 else list(reversed(modes))


def rotated(names: Sequence[str], repeat: int) -> list[str]:
    """The names in the order of one repeat, each time another one first: everyone comes at every place.

    For more than two, of which reversing would keep those in the middle there.
    """
    return [names[(repeat + place) % len(names)] for place in range(len(names))]


def judge_digests(digests: Mapping[str, Sequence[str]], base: str) -> str:
    """What the output digests of all waves of one batch, by mode, say.

    `equal`: one digest everywhere. `unstable`: the base mode does not repeat itself, so the comparison
    says nothing. `different`: the base repeats itself and a mode disagrees with it.
    """
    if len(set(digests[base])) > 1:
        return "unstable"
    everything = {digest for found in digests.values() for digest in found}
    return "equal" if len(everything) == 1 else "different"
