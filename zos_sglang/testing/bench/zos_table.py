"""The tables that scripts/bench_zos.py prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zos_sglang.console import console
from zos_sglang.testing.bench.summary import name_of
from zos_sglang.testing.bench.tables import number, ranged, table

_COLUMNS = (
    "attention",
    "in:out",
    "batch",
    "mode",
    "floor µs",
    "at length",
    "step µs (quartiles)",
    "step/floor",
    "over stock",
    "over sync process",
    "CPU µs",
    "CPU/stock",
    "lane",
    "copies",
    "wasted",
    "answers",
)
_MEANS = (
    "attention",
    "in:out",
    "mode",
    "batches",
    "over stock",
    "over sync process",
    "step/floor",
    "CPU/stock",
)
_NOTE = "step/floor: not the median step of the whole wave, but the steps at the floor's own KV length"
_LEFT = ("attention", "mode", "answers")


def print_summary(data: Mapping[str, Any]) -> None:
    """Every point and mode, the geometric means, and what was skipped or went wrong."""
    summary = data["summary"]
    out = console()
    repeats = max((row["repeats"] for row in summary["rows"]), default=0)
    out.print(
        table(
            f"{data['identity']['model']}: medians over up to {repeats} repeats; ratios median (min to max)",
            _COLUMNS,
            [row_cells(row, summary["base"]) for row in summary["rows"]],
            _LEFT,
            _NOTE,
        )
    )
    out.print(
        table(
            "geometric means over the batch sizes",
            _MEANS,
            [mean_cells(mean) for mean in summary["geomeans"]],
            _LEFT,
        )
    )
    for point in data["points"]:
        name = name_of(point)
        for what in ("skipped", "error"):
            if point[what]:
                out.print(f"{name}: {what}: {point[what]}")
    for entry in summary["answers"]:
        if entry["differing"]:
            out.print(f"{name_of(entry)}: answers {entry['verdict']}: {entry['differing']}")


def row_cells(row: Mapping[str, Any], base: str) -> list[str]:
    """The texts of one row, in the order of the columns; a dash where there is no figure."""
    lane = row["lane"] or {}
    step = row["step_us"] or row["step_mean_us"]
    return [
        *(row["attention"], f"{row['prompt']}:{row['output']}", str(row["batch"]), row["mode"]),
        number(row["floor_us"], 0),
        number(row["floor_len"], 0),
        f"{step['median']:.0f} ({step['q1']:.0f} to {step['q3']:.0f})",
        number(row["step_over_floor"], 3),
        "1" if row["mode"] == base else ranged(row["over_stock"]),
        ranged(row["over_separate"]),
        number(row["cpu_us"] and row["cpu_us"]["median"], 0),
        number(row["cpu_over_stock"] and row["cpu_over_stock"]["median"], 3),
        number(lane.get("share"), 3),
        number(lane.get("h2d_per_step"), 2),
        number(lane.get("wasted_row_steps"), 0),
        str(row["answers"]),
    ]


def mean_cells(mean: Mapping[str, Any]) -> list[str]:
    """The texts of one row of geometric means."""
    return [
        *(mean["attention"], f"{mean['prompt']}:{mean['output']}", mean["mode"]),
        ",".join(map(str, mean["batches"])),
        *(
            number(mean[name], 3)
            for name in ("over_stock", "over_separate", "step_over_floor", "cpu_over_stock")
        ),
    ]
