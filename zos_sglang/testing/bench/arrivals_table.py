"""The tables that scripts/bench_arrivals.py prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from zos_sglang.testing.bench.arrivals_summary import TARGETS

#: Columns where the output is no terminal: a row then stays one line.
_WIDTH = 280
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
    from rich.console import Console

    summary, settings = data["summary"], data["settings"]
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    rows, names = summary["rows"], dict(SHOWN)
    repeats = max((row["repeats"] for row in rows), default=0)
    title = f"{settings['model']}, {settings['prompt']} in, {settings['output']} out"
    console.print(
        _table(f"{title}: medians over {repeats} repeats", FIGURES, [row_cells(row) for row in rows])
    )
    bounds = ", ".join(
        f"{names[metric]} {'>=' if more else '<='} {bound:g}" for metric, more, bound in TARGETS
    )
    console.print(
        _table(
            f"over {summary['base']} within each repeat: median (min to max)",
            ("rate", "mode", *names.values()),
            [ratio_cells(row) for row in rows if row["over_stock"]],
        )
    )
    console.print(f"* misses a target of mode resident: {bounds}")
    for run in data["runs"]:
        for error in run["errors"]:
            console.print(f"rate {run['rate']:g}, {run['mode']}, repeat {run['repeat']}: {error}")
    if any(run["client"]["in_the_way"] for run in data["runs"]):
        console.print(
            "some clients were busy or late enough to have delayed what they measured: see `client`"
        )


def _table(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of one row of figures; a dash where there is no figure.

    `bursts` is the share of arrivals that brought more than one token, and the most tokens one brought.
    """
    bursts = f"{row['bursts'] / row['arrivals']:.2%}, {row['largest_arrival']}" if row["arrivals"] else "-"
    answers = row["answers"]
    return [
        *(f"{row['rate']:g}", row["mode"], str(row["requests"]), _number(row["mean_in_flight"], 1)),
        _median(row["tokens_per_s"], 1),
        _medians(row, "ttft_ms", "p50", "p90", "p99"),
        _medians(row, "itl_ms", "p50", "p90", "p99"),
        _median(row["gap_ms.p99"], 2),
        _medians(row, "e2e_ms", "p50", "p99", digits=0),
        bursts,
        _number(row["lane_share"], 3),
        f"{row['client_busiest']:.2f}",
        f"{row['client_lag_p99_ms']:.2f}",
        f"{answers['differing']} of {answers['compared']} differ" if answers["compared"] else "-",
    ]


def ratio_cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of one row of ratios; a star marks a target that is missed."""
    cells = [f"{row['rate']:g}", row["mode"]]
    for metric, _ in SHOWN:
        found = row["over_stock"][metric]
        star = "*" if row["targets"].get(metric) is False else ""
        cells.append(
            f"{found['median']:.3f}{star} ({found['min']:.3f} to {found['max']:.3f})" if found else "-"
        )
    return cells


def _medians(row: Mapping[str, Any], what: str, *which: str, digits: int = 2) -> str:
    return " / ".join(_median(row[f"{what}.{name}"], digits) for name in which)


def _median(found: Mapping[str, float] | None, digits: int) -> str:
    return _number(found and found["median"], digits)


def _number(value: Any, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
