"""The plot of scripts/bench_serving.py: a row of panels for each dataset and kind of load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.plots import PlotError, grid, keep, lines_by_mode, pyplot_for, spread_lines

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

Row = Mapping[str, Any]


def groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows of figures by dataset and axis, in the order of the rows."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        axis = "concurrency" if row["rate"] is None else "rate"
        found.setdefault((row["dataset"], axis), []).append(row)
    return found


def draw(summary: Mapping[str, Any], title: str, path: Path) -> None:
    """Write the plot to `path` (PNG), medians with bars from the least to the largest repeat.

    Raises PlotError without matplotlib or without figures.
    """
    found = groups(summary["rows"])
    if not found:
        raise PlotError("there are no figures yet")
    pyplot = pyplot_for(path)
    figure, panels = grid(pyplot, len(found), len(PANELS))
    for line, ((dataset, axis), rows) in zip(panels, found.items(), strict=True):
        for panel, (metric, name, unit) in zip(line, PANELS, strict=True):
            spread_lines(panel, lines_by_mode(rows, axis, metric))
            panel.set(title=f"{dataset}: {name}", ylabel=unit, xlabel=AXES[axis])
    panels[0][0].legend(fontsize="small")
    keep(pyplot, figure, title, path)
