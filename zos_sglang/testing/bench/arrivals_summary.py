"""What all runs of scripts/bench_arrivals.py say: medians, ratios within each repeat, equal answers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from zos_sglang.testing.bench.arrivals import LATENCIES, PERCENTILES
from zos_sglang.testing.bench.stats import ratio, spread

Run = Mapping[str, Any]

_OF_EACH = (*(f"p{q}" for q in PERCENTILES), "mean")
#: Names of all compared figures: throughput, and percentiles and means of the latencies.
METRICS = ("tokens_per_s", *(f"{what}.{which}" for what in LATENCIES for which in _OF_EACH))
#: What the ratios over stock must reach: (figure, whether more is better, bound).
TARGETS = (
    ("tokens_per_s", True, 1.0),
    ("itl_ms.p50", False, 0.8),
    ("itl_ms.p99", False, 0.8),
    ("ttft_ms.p99", False, 1.05),
)


def value_of(run: Run, metric: str) -> float | None:
    """One figure of a run by its name in `METRICS`; None where the run has none."""
    what, _, which = metric.partition(".")
    found = run[what]
    if which and found is not None:
        found = found[which]
    return None if found is None else float(found)


def summarise(runs: Sequence[Run], modes: Sequence[str], base: str) -> dict[str, Any]:
    """`rows`, one per rate and mode, over the repeats in which every mode ran, and whether answers agree."""
    rates = sorted({run["rate"] for run in runs})
    rows = []
    for rate in rates:
        repeats = whole_repeats(runs, rate, modes)
        rows += [_row(rate, mode, repeats, base) for mode in modes if repeats]
    return {"base": base, "rows": rows}


def whole_repeats(runs: Sequence[Run], rate: float, modes: Sequence[str]) -> list[dict[str, Run]]:
    """The runs of one rate by mode, in the order of the repeats, without repeats that lack a mode."""
    found: dict[int, dict[str, Run]] = {}
    for run in runs:
        if run["rate"] == rate:
            found.setdefault(run["repeat"], {})[run["mode"]] = run
    return [by_mode for _, by_mode in sorted(found.items()) if set(by_mode) >= set(modes)]


def _row(rate: float, mode: str, repeats: Sequence[Mapping[str, Run]], base: str) -> dict[str, Any]:
    mine, others = [by_mode[mode] for by_mode in repeats], [by_mode[base] for by_mode in repeats]
    ratios = {} if mode == base else {metric: _ratio(mine, others, metric) for metric in METRICS}
    return {
        "rate": rate,
        "mode": mode,
        "repeats": len(mine),
        "requests": sum(run["requests"] for run in mine),
        "failed": sum(run["failed"] for run in mine),
        **{metric: _spread(mine, metric) for metric in METRICS},
        "mean_in_flight": _median(mine, "mean_in_flight"),
        **{name: sum(run[name] for run in mine) for name in ("events", "full_events", "arrivals", "bursts")},
        "largest_arrival": max(run["largest_arrival"] for run in mine),
        "lane_share": _lane_share(mine),
        "client_busiest": max(run["client"]["busiest"] for run in mine),
        "client_lag_p99_ms": max((run["client"]["lag_ms"] or {}).get("p99", 0.0) for run in mine),
        "over_stock": ratios,
        "targets": targets(ratios) if mode == "resident" else {},
        "answers": _answers(mine, others, mode == base),
    }


def _spread(runs: Sequence[Run], metric: str) -> dict[str, float] | None:
    values = [value for run in runs if (value := value_of(run, metric)) is not None]
    return spread(values) if values else None


def _ratio(runs: Sequence[Run], others: Sequence[Run], metric: str) -> dict[str, Any] | None:
    """`runs` over `others`, pair by pair; None if a pair lacks the figure."""
    values = [value_of(run, metric) for run in runs]
    base = [value_of(run, metric) for run in others]
    if any(value is None for value in values) or not all(base):
        return None
    return ratio([float(v) for v in values if v is not None], [float(v) for v in base if v is not None])


def _median(runs: Sequence[Run], name: str) -> float | None:
    there = [run[name] for run in runs if run[name] is not None]
    return round(statistics.median(there), 2) if there else None


def _lane_share(runs: Sequence[Run]) -> float | None:
    """Lane steps over all decode steps, all runs together."""
    lanes = [run["lane"] for run in runs if run["lane"]]
    steps = sum(lane["decode_steps"] for lane in lanes)
    return round(sum(lane["steps"] for lane in lanes) / steps, 4) if steps else None


def targets(ratios: Mapping[str, Any]) -> dict[str, bool | None]:
    """Whether the median ratio over stock reaches each target; None where there is no ratio."""
    return {
        metric: None
        if ratios.get(metric) is None
        else (ratios[metric]["median"] >= bound if more else ratios[metric]["median"] <= bound)
        for metric, more, bound in TARGETS
    }


def _answers(runs: Sequence[Run], others: Sequence[Run], is_base: bool) -> dict[str, Any]:
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
