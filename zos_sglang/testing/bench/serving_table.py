"""The tables that scripts/bench_serving.py prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zos_sglang.console import console
from zos_sglang.testing.bench.serving import name_of
from zos_sglang.testing.bench.tables import median, medians, number, ranged, table

_LEFT = ("load", "mode", "answers")
FIGURES = (
    *("load", "mode", "requests", "in flight", "requests/s", "tokens/s", "TTFT ms P50/P90/P99"),
    *("ITL ms P50/P90/P99", "TPOT ms P50/P99", "E2E ms P50/P99", "cached", "lane", "client", "answers"),
)
#: Figure and heading of each column of ratios.
SHOWN = (
    ("requests_per_s", "requests/s"),
    ("tokens_per_s", "tokens/s"),
    ("ttft_ms.p50", "TTFT P50"),
    ("ttft_ms.p99", "TTFT P99"),
    ("itl_ms.p50", "ITL P50"),
    ("itl_ms.p99", "ITL P99"),
    ("tpot_ms.p50", "TPOT P50"),
    ("e2e_ms.p50", "E2E P50"),
    ("e2e_ms.p99", "E2E P99"),
)


def print_summary(data: Mapping[str, Any]) -> None:
    """Figures of every load and mode, ratios over stock, and what went wrong."""
    summary, out = data["summary"], console()
    rows = summary["rows"]
    repeats = max((row["repeats"] for row in rows), default=0)
    title = f"{data['identity']['model']}: medians over up to {repeats} repeats"
    out.print(table(title, FIGURES, map(row_cells, rows), _LEFT))
    out.print(
        table(
            f"over {summary['base']} within each repeat: median (min to max)",
            ("load", "mode", *(name for _, name in SHOWN)),
            [ratio_cells(row) for row in rows if row["over_stock"]],
            _LEFT,
        )
    )
    for run in data["runs"]:
        for error in run["errors"]:
            out.print(f"{name_of(run)}, {run['mode']}, repeat {run['repeat']}: {error}")
    if not data["complete"]:
        out.print("not complete: the same command with --resume goes on")


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of one row of figures; a dash where there is no figure."""
    answers = row["answers"]
    return [
        *(name_of(row), row["mode"], str(row["requests"]), number(row["mean_in_flight"], 1)),
        median(row["requests_per_s"], 2),
        median(row["tokens_per_s"], 1),
        medians(row, "ttft_ms", "p50", "p90", "p99"),
        medians(row, "itl_ms", "p50", "p90", "p99"),
        medians(row, "tpot_ms", "p50", "p99"),
        medians(row, "e2e_ms", "p50", "p99", digits=0),
        number(row["cached_tokens"], 0),
        number(row["lane_share"], 3),
        number(row["client_share"], 2),
        f"{answers['differing']} of {answers['compared']} differ" if answers["compared"] else "-",
    ]


def ratio_cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of one row of ratios."""
    return [name_of(row), row["mode"], *(ranged(row["over_stock"][metric]) for metric, _ in SHOWN)]
