"""What all runs of scripts/bench_serving.py say: medians, ratios within each repeat, equal answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zos_sglang.testing.bench.paired import (
    Run,
    answers_of,
    lane_share,
    median_of,
    ratio_of,
    spread_of,
    whole_repeats,
)
from zos_sglang.testing.bench.serving import DATASETS
from zos_sglang.testing.bench.serving_result import LATENCIES, STATISTICS

#: Names of all compared figures.
METRICS = (
    "requests_per_s",
    "tokens_per_s",
    *(f"{what}.{which}" for what in LATENCIES for which in STATISTICS),
)
_LOAD = ("dataset", "rate", "concurrency", "requests")


def summarise(runs: Sequence[Run], modes: Sequence[str], base: str) -> dict[str, Any]:
    """`rows`, one per load and mode, over the repeats in which every mode ran.

    A row is flat: the load (`rate` or `concurrency` is None), the mode, a spread for each figure in
    `METRICS` under its name, and under `over_stock` the ratios to the base mode.
    """
    loads = {tuple(run[name] for name in _LOAD): None for run in runs}
    rows = []
    for load in sorted(loads, key=_order):
        repeats = whole_repeats([run for run in runs if tuple(run[name] for name in _LOAD) == load], modes)
        rows += [_row(load, mode, repeats, base) for mode in modes if repeats]
    return {"base": base, "rows": rows}


def _order(load: tuple[Any, ...]) -> tuple[Any, ...]:
    dataset, rate, concurrency, requests = load
    return DATASETS.index(dataset), rate is None, rate or 0, concurrency or 0, requests


def _row(load: tuple[Any, ...], mode: str, repeats: Sequence[Mapping[str, Run]], base: str) -> dict[str, Any]:
    mine, others = [by_mode[mode] for by_mode in repeats], [by_mode[base] for by_mode in repeats]
    return {
        **dict(zip(_LOAD, load, strict=True)),
        "mode": mode,
        "repeats": len(mine),
        "failed": sum(run["failed"] for run in mine),
        **{metric: spread_of(mine, metric) for metric in METRICS},
        "mean_in_flight": median_of(mine, "mean_in_flight"),
        **{name: median_of(mine, name) for name in ("input_tokens", "output_tokens", "cached_tokens")},
        "lane_share": lane_share(mine),
        # One thread that makes the prompts, sends them and reads all events: near 1 it is what is measured.
        "client_share": round(max(run["client_cpu_s"] / run["duration_s"] for run in mine), 3),
        "over_stock": {} if mode == base else {metric: ratio_of(mine, others, metric) for metric in METRICS},
        "answers": answers_of(mine, others, mode == base),
    }
