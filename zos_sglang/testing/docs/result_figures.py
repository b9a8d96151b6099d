"""The figures of the README and of docs/benchmarks.md, drawn from bench/results/*.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.arrivals_plot import PANELS
from zos_sglang.testing.bench.plots import COLOURS, lines_by_mode
from zos_sglang.testing.docs.picture import Draw, plotter

#: Panels of the figures of the lane: title and file.
LANE = {
    "0.6B, Triton": "h200_lane_06b_triton.json",
    "0.6B, FA3": "h200_lane_06b_fa3.json",
    "1.7B, Triton": "h200_lane_17b_triton.json",
    "1.7B, FA3": "h200_lane_17b_fa3.json",
}
#: The shape that all four files have.
PROMPT, OUTPUT = 32, 256
#: Figures of arrivals: picture, file, and what the server ran with.
ARRIVALS = {
    "results-arrivals.png": ("h200_arrivals.json", "Triton, eager prefills"),
    "results-arrivals-fa3.png": ("h200_arrivals_fa3.json", "FA3, prefill graphs"),
}
PREFILL = "h200_prefill.json"
GRAMMAR = "h200_grammar.json"
MODES = ("stock", "resident")
#: Of the figure of prefills: place in a row of the file, and name.
PREFILL_METRICS = {
    "ttft_ms.p50": "TTFT P50",
    "ttft_ms.p99": "TTFT P99",
    "tokens_per_s": "tokens/s",
    "itl_ms.p99": "stream ITL P99",
}
#: Contenders of it that are held against the rule `never`, with their colours.
RULES = {"stock": COLOURS["stock"], "always": "#CC79A7", "first-token": COLOURS["resident"]}


def figures(results: Path) -> dict[str, tuple[Any, Draw]]:
    """File names of pictures, each with its data and what draws them."""
    lane = {title: rows_of(_load(results / name)) for title, name in LANE.items()}
    return {
        "results-step-over-floor.png": (
            {title: table(rows, "step_over_floor", MODES) for title, rows in lane.items()},
            draw_step_over_floor,
        ),
        "results-throughput.png": (
            {title: table(rows, "over_stock", ("resident",)) for title, rows in lane.items()},
            draw_throughput,
        ),
        "results-cpu.png": (
            {title: table(rows, "cpu_us", MODES) for title, rows in lane.items()},
            draw_cpu,
        ),
        **{
            picture: ({"server": server, "panels": arrivals(_load(results / name))}, draw_arrivals)
            for picture, (name, server) in ARRIVALS.items()
        },
        "results-prefill.png": (prefill(_load(results / PREFILL)), draw_prefill),
        "results-grammar.png": (grammar(_load(results / GRAMMAR)), draw_grammar),
    }


def _load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the summary of a bench_zos file with short prompts, by batch."""
    rows = [r for r in result["summary"]["rows"] if (r["prompt"], r["output"]) == (PROMPT, OUTPUT)]
    return sorted(rows, key=lambda row: row["batch"])


def table(rows: Sequence[Mapping[str, Any]], what: str, modes: Sequence[str]) -> dict[str, list[Any]]:
    """`batches`, and for each mode one value a batch: a number, or median, least and most."""
    found: dict[str, list[Any]] = {"batches": sorted({row["batch"] for row in rows})}
    for mode in modes:
        values = [row[what] for row in rows if row["mode"] == mode]
        found[mode] = [value if isinstance(value, float) else _spread(value) for value in values]
    return found


def arrivals(result: Mapping[str, Any]) -> dict[str, Any]:
    """For each panel of the plot of arrivals and each mode: rates, medians, least, most."""
    return {
        name: {
            "unit": unit,
            "modes": {
                mode: [[rate, found["median"], found["min"], found["max"]] for rate, found in points]
                for mode, points in lines_by_mode(result["summary"]["rows"], "rate", metric).items()
            },
        }
        for metric, name, unit in PANELS
    }


def prefill(result: Mapping[str, Any]) -> dict[str, Any]:
    """For each load and contender of a bench_prefill file: metrics over `never` as median, least, most."""
    found: dict[str, Any] = {}
    for row in result["summary"]["rows"]:
        if row["rule"] in RULES:
            ratios = row["over_never"]
            found.setdefault(row["load"], {})[row["rule"]] = [_spread(ratios[one]) for one in PREFILL_METRICS]
    return found


def grammar(result: Mapping[str, Any]) -> dict[str, Any]:
    """For each mode of a bench_grammar file: per cent of rows, step in ms, step over none; with spreads."""
    found: dict[str, Any] = {}
    for row in sorted(result["summary"]["rows"], key=lambda row: row["share"]):
        step = [value / 1000 for value in _spread(row["step_us"])]
        found.setdefault(row["mode"], []).append([row["share"], step, _spread(row["over_none"])])
    return found


def _spread(value: Mapping[str, float]) -> list[float]:
    return [value[name] for name in ("median", "min", "max")]


# ------------------------------------------------------------------ drawing


def draw_step_over_floor(data: Mapping[str, Any]) -> Any:
    """Bars of stock and resident over the floor, a panel for each model and attention."""
    figure, axes = plotter().subplots(1, len(data), figsize=(9.2, 2.7), sharey=True, layout="constrained")
    for axis, (title, found) in zip(axes, data.items(), strict=True):
        _bars(axis, found, {mode: found[mode] for mode in MODES})
        axis.axhline(1, color="black", linewidth=1, linestyle="--")
        axis.set_title(title)
        axis.set_ylim(0, 2)
    axes[0].set_ylabel("step / floor")
    axes[-1].legend(loc="upper right", fontsize=8)
    figure.suptitle("Decode step over the GPU's floor, one H200, 32 tokens in, 256 out", fontsize=10)
    return figure


def draw_throughput(data: Mapping[str, Any]) -> Any:
    """Throughput of resident over stock with the spread over the repeats."""
    figure, axes = plotter().subplots(1, len(data), figsize=(9.2, 2.7), sharey=True, layout="constrained")
    for axis, (title, found) in zip(axes, data.items(), strict=True):
        points = found["resident"]
        middle = [point[0] for point in points]
        bars = [[m - p[1] for m, p in zip(middle, points, strict=True)], [p[2] - p[0] for p in points]]
        style = {"fmt": "o", "capsize": 4, "color": COLOURS["resident"], "label": "resident"}
        axis.errorbar(range(len(points)), middle, yerr=bars, **style)
        axis.axhline(1, color=COLOURS["stock"], linewidth=1, label="stock")
        axis.set_xticks(range(len(points)), [str(batch) for batch in found["batches"]])
        axis.set_xlabel("batch")
        axis.set_title(title)
        axis.grid(alpha=0.3, axis="y")
    axes[0].set_ylabel("tokens/s over stock")
    axes[-1].legend(loc="upper right", fontsize=8)
    figure.suptitle("Throughput over stock, median and spread of the repeats, one H200", fontsize=10)
    return figure


def draw_cpu(data: Mapping[str, Any]) -> Any:
    """CPU time of the scheduler's thread a decode step."""
    figure, axes = plotter().subplots(1, len(data), figsize=(9.2, 2.7), sharey=True, layout="constrained")
    for axis, (title, found) in zip(axes, data.items(), strict=True):
        _bars(axis, found, {mode: [point[0] / 1000 for point in found[mode]] for mode in MODES})
        axis.set_title(title)
    axes[0].set_ylabel("ms")
    axes[0].legend(loc="upper left", fontsize=8)
    figure.suptitle("CPU of the scheduler's thread for a decode step, one H200", fontsize=10)
    return figure


def draw_arrivals(data: Mapping[str, Any]) -> Any:
    """Latencies and throughput over the rate of arrivals."""
    panels = data["panels"]
    figure, axes = plotter().subplots(1, len(panels), figsize=(9.2, 2.7), layout="constrained")
    for axis, (name, found) in zip(axes, panels.items(), strict=True):
        for mode, points in found["modes"].items():
            bars = [[p[1] - p[2] for p in points], [p[3] - p[1] for p in points]]
            rates = [str(round(p[0])) for p in points]
            style = {"marker": "o", "capsize": 3, "color": COLOURS[mode], "label": mode}
            axis.errorbar(rates, [p[1] for p in points], yerr=bars, **style)
        axis.set(title=f"{name}, {found['unit']}", xlabel="requests/s")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    title = f"Poisson arrivals, 256 tokens in, 256 out, one H200, Qwen3-0.6B shape, {data['server']}"
    figure.suptitle(title, fontsize=10)
    return figure


def draw_prefill(data: Mapping[str, Any]) -> Any:
    """Rules of consecutive prefills over `never`, a panel for each load; logarithmic if they differ much."""
    figure, axes = plotter().subplots(1, len(data), figsize=(9.2, 2.9), layout="constrained")
    names = list(PREFILL_METRICS.values())
    for axis, (load, rules) in zip(axes, data.items(), strict=True):
        for number, (rule, points) in enumerate(rules.items()):
            places = [place + 0.2 * (number - 1) for place in range(len(names))]
            _points(axis, places, points, fmt="o", color=RULES[rule], label=rule)
        axis.axhline(1, color="black", linewidth=1, linestyle="--", label="never")
        axis.set_xticks(range(len(names)), names)
        axis.set_title(load)
        axis.grid(alpha=0.3, axis="y")
        if max(point[2] for points in rules.values() for point in points) > 3:
            axis.set(yscale="log", ylim=(1 / 12, 12))
            axis.set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
            axis.minorticks_off()
    axes[0].set_ylabel("over never")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="outside right center")
    figure.suptitle("Prefill after prefill, one H200, Qwen3-0.6B shape, FA3, prefill graphs", fontsize=10)
    return figure


def draw_grammar(data: Mapping[str, Any]) -> Any:
    """The decode step by share of rows with a grammar, as it is and over the same mode without such rows."""
    figure, axes = plotter().subplots(1, 2, figsize=(9.2, 2.9), layout="constrained")
    for number, (mode, rows) in enumerate(data.items()):
        places = [place + 0.12 * (number - 1) for place in range(len(rows))]
        for axis, what in zip(axes, (1, 2), strict=True):
            _points(axis, places, [row[what] for row in rows], fmt="o-", color=COLOURS[mode], label=mode)
            axis.set_xticks(range(len(rows)), [f"{row[0]:g} %" for row in rows])
            axis.set_xlabel("rows with a grammar")
            axis.grid(alpha=0.3, axis="y")
    axes[0].set(title="step, ms", ylim=(0, None))
    axes[1].set(title="step over the same mode without", ylim=(0, None))
    axes[0].legend(fontsize=8, loc="upper left")
    figure.suptitle("Structured output, 64 rows, one H200, Qwen3-0.6B shape, FA3, xgrammar", fontsize=10)
    return figure


def _points(axis: Any, places: Sequence[float], spreads: Sequence[Sequence[float]], **style: Any) -> None:
    """Medians with whiskers from least to most."""
    middle = [point[0] for point in spreads]
    bars = [[p[0] - p[1] for p in spreads], [p[2] - p[0] for p in spreads]]
    axis.errorbar(places, middle, yerr=bars, capsize=3, **style)


def _bars(axis: Any, found: Mapping[str, Any], values: Mapping[str, Sequence[float]]) -> None:
    """Bars side by side, a group for each batch."""
    places, width = range(len(found["batches"])), 0.8 / len(values)
    for number, (mode, heights) in enumerate(values.items()):
        shifted = [place + (number - (len(values) - 1) / 2) * width for place in places]
        axis.bar(shifted, heights, width, color=COLOURS[mode], label=mode)
    axis.set_xticks(places, [str(batch) for batch in found["batches"]])
    axis.set_xlabel("batch")
    axis.grid(alpha=0.3, axis="y")
