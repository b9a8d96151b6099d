"""The plot of scripts/bench_serving.py: a row of panels for each dataset and kind of load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.plots import PlotError, keep, pyplot_for, spread_lines

#: Figure, title and unit of each panel.
PANELS = (
    ("tokens_per_s", "output", "tokens/s"),
    ("ttft_ms.p50", "TTFT, P50", "ms"),
    ("ttft_ms.p99", "TTFT, P99", "ms"),
    ("itl_ms.p50", "ITL, P50", "ms"),
    ("itl_ms.p99", "ITL, P99", "ms"),
    ("e2e_ms.p50", "E2E, P50", "ms"),
)
#: What a load is counted in, and the name of the axis.
AXES = {"rate": "requests a second", "concurrency": "requests at a time"}
_PANEL_INCHES = (3.6, 3.0)

Row = Mapping[str, Any]


def groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows of figures by dataset and axis, in the order of the rows."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        axis = "concurrency" if row["rate"] is None else "rate"
        found.setdefault((row["dataset"], axis), []).append(row)
    return found


def series(rows: Sequence[Row], axis: str, metric: str) -> dict[str, list[tuple[float, Mapping[str, float]]]]:
    """Pairs (place on the axis, spread over the repeats) by mode."""
    found: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
    for row in sorted(rows, key=lambda row: row[axis]):
        if row[metric] is not None:
            found.setdefault(row["mode"], []).append((row[axis], row[metric]))
    return found


def draw(summary: Mapping[str, Any], title: str, path: Path) -> None:
    """Write the plot to `path` (PNG), medians with bars from the least to the largest repeat.

    Raises PlotError without matplotlib or without figures.
    """
    found = groups(summary["rows"])
    if not found:
        raise PlotError("there are no figures yet")
    pyplot = pyplot_for(path)
    width, height = _PANEL_INCHES
    figure, panels = pyplot.subplots(
        len(found),
        len(PANELS),
        figsize=(width * len(PANELS), height * len(found)),
        squeeze=False,
        layout="constrained",
    )
    for line, ((dataset, axis), rows) in zip(panels, found.items(), strict=True):
        for panel, (metric, name, unit) in zip(line, PANELS, strict=True):
            spread_lines(panel, series(rows, axis, metric))
            panel.set(title=f"{dataset}: {name}", ylabel=unit, xlabel=AXES[axis])
    panels[0][0].legend(fontsize="small")
    keep(pyplot, figure, title, path)
