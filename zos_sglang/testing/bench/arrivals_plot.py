"""The plot of scripts/bench_arrivals.py: latencies and throughput over the rate of arrivals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.plots import PlotError, grid, keep, lines_by_mode, pyplot_for, spread_lines

#: Figure, title and unit of each panel.
PANELS = (
    ("itl_ms.p50", "ITL, P50", "ms"),
    ("itl_ms.p99", "ITL, P99", "ms"),
    ("ttft_ms.p99", "TTFT, P99", "ms"),
    ("tokens_per_s", "output", "tokens/s"),
)
_PANEL_INCHES = (4.2, 3.4)


def draw(summary: Mapping[str, Any], title: str, path: Path) -> None:
    """Write the plot to `path` (PNG), medians with bars from the least to the largest repeat.

    Raises PlotError without matplotlib or without figures.
    """
    if not summary["rows"]:
        raise PlotError("there are no figures yet")
    pyplot = pyplot_for(path)
    figure, (axes,) = grid(pyplot, 1, len(PANELS), _PANEL_INCHES)
    for panel, (metric, name, unit) in zip(axes, PANELS, strict=True):
        spread_lines(panel, lines_by_mode(summary["rows"], "rate", metric))
        panel.set(title=name, ylabel=unit, xlabel="requests a second")
    axes[0].legend(fontsize="small")
    keep(pyplot, figure, title, path)
