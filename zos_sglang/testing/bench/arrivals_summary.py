"""What all runs of scripts/bench_arrivals.py say: medians, ratios within each repeat, equal answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zos_sglang.testing.bench.arrivals import LATENCIES, PERCENTILES
from zos_sglang.testing.bench.paired import (
    Run,
    answers_of,
    lane_share,
    median_of,
    ratio_of,
    spread_of,
    whole_repeats,
)

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


def summarise(runs: Sequence[Run], modes: Sequence[str], base: str) -> dict[str, Any]:
    """`rows`, one per rate and mode, over the repeats in which every mode ran, and whether answers agree."""
    rates = sorted({run["rate"] for run in runs})
    rows = []
    for rate in rates:
        repeats = whole_repeats([run for run in runs if run["rate"] == rate], modes)
        rows += [_row(rate, mode, repeats, base) for mode in modes if repeats]
    return {"base": base, "rows": rows}


def _row(rate: float, mode: str, repeats: Sequence[Mapping[str, Run]], base: str) -> dict[str, Any]:
    mine, others = [by_mode[mode] for by_mode in repeats], [by_mode[base] for by_mode in repeats]
    ratios = {} if mode == base else {metric: ratio_of(mine, others, metric) for metric in METRICS}
    return {
        "rate": rate,
        "mode": mode,
        "repeats": len(mine),
        "requests": sum(run["requests"] for run in mine),
        "failed": sum(run["failed"] for run in mine),
        **{metric: spread_of(mine, metric) for metric in METRICS},
        "mean_in_flight": median_of(mine, "mean_in_flight"),
        **{name: sum(run[name] for run in mine) for name in ("events", "full_events", "arrivals", "bursts")},
        "largest_arrival": max(run["largest_arrival"] for run in mine),
        "lane_share": lane_share(mine),
        "client_busiest": max(run["client"]["busiest"] for run in mine),
        "client_lag_p99_ms": max((run["client"]["lag_ms"] or {}).get("p99", 0.0) for run in mine),
        "over_stock": ratios,
        "targets": targets(ratios) if mode == "resident" else {},
        "answers": answers_of(mine, others, mode == base),
    }


def targets(ratios: Mapping[str, Any]) -> dict[str, bool | None]:
    """Whether the median ratio over stock reaches each target; None where there is no ratio."""
    return {
        metric: None
        if ratios.get(metric) is None
        else (ratios[metric]["median"] >= bound if more else ratios[metric]["median"] <= bound)
        for metric, more, bound in TARGETS
    }
