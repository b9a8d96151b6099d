"""The plot of scripts/bench_zos.py: step time and throughput ratios over the batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.plots import COLOURS, GREY, PlotError, keep, pyplot_for
from zos_sglang.testing.bench.summary import SEPARATE

_COLOURS = {**COLOURS, SEPARATE: GREY}
_PANEL_INCHES = (7.0, 3.6)


def series(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Lines of one panel by mode: batches, step (us), over_stock, over_separate; None for what is not there.

    Where there is a floor it is a line under the name `floor`.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    floor: dict[int, float] = {}
    for row in sorted(rows, key=lambda row: row["batch"]):
        line = found.setdefault(
            row["mode"], {"batches": [], "step": [], "over_stock": [], "over_separate": []}
        )
        line["batches"].append(row["batch"])
        line["step"].append((row["step_us"] or row["step_mean_us"])["median"])
        for name in ("over_stock", "over_separate"):
            line[name].append(row[name] and row[name]["median"])
        if row["floor_us"]:
            floor[row["batch"]] = row["floor_us"]
    if floor:
        found["floor"] = {"batches": list(floor), "step": list(floor.values())}
    return found


def draw(summary: Mapping[str, Any], title: str, path: Path) -> None:
    """Write the plot to `path` (PNG), a row of two panels per attention, prompt and output length.

    Raises PlotError without matplotlib or without figures.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in summary["rows"]:
        groups.setdefault((row["attention"], row["prompt"], row["output"]), []).append(row)
    if not groups:
        raise PlotError("there are no figures yet")
    pyplot = pyplot_for(path)
    width, height = _PANEL_INCHES
    figure, axes = pyplot.subplots(
        len(groups), 2, figsize=(2 * width, height * len(groups)), squeeze=False, layout="constrained"
    )
    for (step, throughput), (key, rows) in zip(axes, groups.items(), strict=True):
        lines = series(rows)
        name = f"{key[0]}, {key[1]} tokens in, {key[2]} out"
        _steps(step, lines, f"step, {name}")
        _ratios(throughput, lines, summary["base"], f"throughput, {name}")
        for panel in (step, throughput):
            _batch_axis(panel, sorted({row["batch"] for row in rows}))
    keep(pyplot, figure, title, path)


def _steps(panel: Any, lines: Mapping[str, Mapping[str, list[Any]]], title: str) -> None:
    for mode, line in lines.items():
        if mode == "floor":
            panel.plot(line["batches"], line["step"], "k--", marker="_", label="floor (at its KV length)")
        else:
            panel.plot(line["batches"], line["step"], marker="o", color=_COLOURS.get(mode), label=mode)
    panel.set(title=title, ylabel="µs")
    panel.set_ylim(bottom=0)


def _ratios(panel: Any, lines: Mapping[str, Mapping[str, list[Any]]], base: str, title: str) -> None:
    panel.axhline(1, color=_COLOURS.get(base), linewidth=1, label=base)
    for mode, line in lines.items():
        if mode in ("floor", base):
            continue
        _line(panel, line, "over_stock", color=_COLOURS.get(mode), label=f"{mode} / {base}")
        if mode != SEPARATE:
            _line(
                panel,
                line,
                "over_separate",
                color=_COLOURS.get(mode),
                linestyle=":",
                label=f"{mode} / {SEPARATE}",
            )
    panel.set(title=title, ylabel="ratio")


def _line(panel: Any, line: Mapping[str, list[Any]], what: str, **style: Any) -> None:
    points = [(x, y) for x, y in zip(line["batches"], line[what], strict=True) if y is not None]
    if points:
        panel.plot(*zip(*points, strict=True), marker="o", **style)


def _batch_axis(panel: Any, batches: Sequence[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.minorticks_off()
    panel.set_xlabel("batch")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
