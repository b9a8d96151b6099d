"""The tables that scripts/bench_arrivals.py prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zos_sglang.console import console
from zos_sglang.testing.bench.arrivals_summary import TARGETS
from zos_sglang.testing.bench.tables import median, medians, number, ranged, table

FIGURES = (
    *("rate", "mode", "requests", "in flight", "tokens/s", "TTFT ms P50/P90/P99", "ITL ms P50/P90/P99"),
    *("gap P99", "E2E ms P50/P99", "bursts", "lane", "client CPU", "client lag P99", "answers"),
)
#: Figure and heading of each column of ratios.
SHOWN = (
    ("tokens_per_s", "tokens/s"),
    ("ttft_ms.p50", "TTFT P50"),
    ("ttft_ms.p99", "TTFT P99"),
    ("itl_ms.p50", "ITL P50"),
    ("itl_ms.p99", "ITL P99"),
    ("itl_ms.mean", "ITL mean"),
    ("gap_ms.p99", "gap P99"),
    ("e2e_ms.p50", "E2E P50"),
    ("e2e_ms.p99", "E2E P99"),
)
_LEFT = ("mode", "answers")


def print_summary(data: Mapping[str, Any]) -> None:
    """Figures of every rate and mode, ratios over stock, and what went wrong."""
    summary, settings = data["summary"], data["settings"]
    out = console()
    rows, names = summary["rows"], dict(SHOWN)
    repeats = max((row["repeats"] for row in rows), default=0)
    title = f"{settings['model']}, {settings['prompt']} in, {settings['output']} out"
    out.print(table(f"{title}: medians over {repeats} repeats", FIGURES, map(row_cells, rows), _LEFT))
    bounds = ", ".join(
        f"{names[metric]} {'>=' if more else '<='} {bound:g}" for metric, more, bound in TARGETS
    )
    out.print(
        table(
            f"over {summary['base']} within each repeat: median (min to max)",
            ("rate", "mode", *names.values()),
            [ratio_cells(row) for row in rows if row["over_stock"]],
            _LEFT,
        )
    )
    out.print(f"* misses a target of mode resident: {bounds}")
    for run in data["runs"]:
        for error in run["errors"]:
            out.print(f"rate {run['rate']:g}, {run['mode']}, repeat {run['repeat']}: {error}")
    if any(run["client"]["in_the_way"] for run in data["runs"]):
        out.print("some clients were busy or late enough to have delayed what they measured: see `client`")


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of one row of figures; a dash where there is no figure.

    `bursts` is the share of arrivals that brought more than one token, and the most tokens one brought.
    """
    bursts = f"{row['bursts'] / row['arrivals']:.2%}, {row['largest_arrival']}" if row["arrivals"] else "-"
    answers = row["answers"]
    return [
        *(f"{row['rate']:g}", row["mode"], str(row["requests"]), number(row["mean_in_flight"], 1)),
        median(row["tokens_per_s"], 1),
        medians(row, "ttft_ms", "p50", "p90", "p99"),
        medians(row, "itl_ms", "p50", "p90", "p99"),
        median(row["gap_ms.p99"], 2),
        medians(row, "e2e_ms", "p50", "p99", digits=0),
        bursts,
        number(row["lane_share"], 3),
        f"{row['client_busiest']:.2f}",
        f"{row['client_lag_p99_ms']:.2f}",
        f"{answers['differing']} of {answers['compared']} differ" if answers["compared"] else "-",
    ]


def ratio_cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of one row of ratios; a star marks a target that is missed."""
    cells = [f"{row['rate']:g}", row["mode"]]
    for metric, _ in SHOWN:
        found = row["over_stock"][metric]
        cells.append(ranged(found, "*" if row["targets"].get(metric) is False else ""))
    return cells
