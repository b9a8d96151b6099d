"""The plot of scripts/bench_prefill.py: a bar per contender, its quartiles, and every repeat as a dot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.paired import value_of
from zos_sglang.testing.bench.plots import COLOURS, PlotError, grid, keep, pyplot_for

#: Figure, title and unit of each panel.
PANELS = (
    ("ttft_ms.p50", "TTFT, P50", "ms"),
    ("ttft_ms.p99", "TTFT, P99", "ms"),
    ("tokens_per_s", "prompt and output", "tokens/s"),
    ("itl_ms.p99", "ITL of the streams, P99", "ms"),
)


def values(runs: Sequence[Mapping[str, Any]], load: str, metric: str) -> dict[str, list[float]]:
    """A figure of every repeat by contender."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run["load"] == load and (value := value_of(run, metric)) is not None:
            found.setdefault(run["rule"], []).append(value)
    return found


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the plot to `path` (PNG), a row of panels per load. Raises PlotError."""
    rows = data["summary"]["rows"]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    if not loads:
        raise PlotError("there are no figures yet")
    pyplot = pyplot_for(path)
    figure, axes = grid(pyplot, len(loads), len(PANELS))
    for line, load in zip(axes, loads, strict=True):
        of_load = {row["rule"]: row for row in rows if row["load"] == load}
        for panel, (metric, name, unit) in zip(line, PANELS, strict=True):
            _bars(panel, of_load, metric, values(data["runs"], load, metric))
            panel.set(title=f"{load}: {name}", ylabel=unit)
    keep(pyplot, figure, f"{data['identity']['model']}: consecutive prefills", path)


def _bars(
    panel: Any, rows: Mapping[str, Mapping[str, Any]], metric: str, repeats: Mapping[str, Sequence[float]]
) -> None:
    shown = {rule: row[metric] for rule, row in rows.items() if row[metric] is not None}
    for place, (rule, found) in enumerate(shown.items()):
        error = [[found["median"] - found["q1"]], [found["q3"] - found["median"]]]
        panel.bar(place, found["median"], yerr=error, capsize=4, color=COLOURS.get(rule), width=0.7)
        panel.plot([place] * len(repeats[rule]), repeats[rule], "k.", alpha=0.4, markersize=4)
    panel.set_xticks(range(len(shown)), list(shown), fontsize="small")
    panel.set_ylim(bottom=0)
    panel.grid(axis="y", alpha=0.3)
