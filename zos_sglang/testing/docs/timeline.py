"""Timelines of docs/how-it-works.md, drawn from excerpts of real traces (`ZOS_TRACE`).

An excerpt is a whole trace file of a few steps: Perfetto and `python -m zos_sglang report` open it as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zos_sglang.observe.trace_events import META
from zos_sglang.testing.docs.picture import Draw, plotter

#: What each excerpt's panel is called, in the order of the pictures.
TITLES = {
    "sync": "mode sync: without overlap",
    "stock": "mode stock: SGLang's overlap loop",
    "overlap": "mode overlap: our loop",
    "resident": "mode resident: the lane",
}
#: Pictures and the modes that they show.
PICTURES = {
    "how-it-works.png": ("sync", "overlap", "resident"),
    "steps-sync.png": ("sync",),
    "steps-overlap.png": ("stock", "overlap"),
    "steps-resident.png": ("resident",),
}
#: Steps of an excerpt, and milliseconds of it that a picture shows.
STEPS, SHOWN_MS = 9, 72
_SCHEDULE, _FORWARD, _PROCESS = 1, 2, 4
#: Steps before the one that the picture begins with: their results are still under way then.
_BEFORE = 2
#: Steps by turns, so that one can be followed.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


# ------------------------------------------------------------------ excerpts


def excerpt(trace: Path, out: Path, steps: int = STEPS) -> None:
    """Write some steps of the last long run of decode steps. Raises ValueError without one.

    Of all such stretches the one of median length: neither the best nor one that another process disturbed.
    """
    lines = [line.strip().rstrip(",") for line in trace.read_text().splitlines()]
    events = [json.loads(line) for line in lines if line not in ("", "[", "]")]
    stretch = _median_stretch(events, _last_run(events, 3 * steps), steps)
    kept = [event for event in events if _belongs(event, set(stretch))]
    for event in kept:
        event["pid"] = 1
    out.parent.mkdir(parents=True, exist_ok=True)
    body = ",\n".join(json.dumps(event, separators=(",", ":")) for event in kept)
    out.write_text(f"[\n{body}\n]\n")


def _last_run(events: Sequence[Mapping[str, Any]], least: int) -> list[int]:
    """Numbers of consecutive decode steps of the same rows and path, as many as there are."""
    runs: list[list[int]] = []
    before: tuple[Any, ...] | None = None
    for event in events:
        if event.get("ph") != "X" or event["tid"] != _SCHEDULE:
            continue
        args = event["args"]
        like: tuple[Any, ...] | None = (event["name"], args["rows"], args.get("path"))
        if like != before or not runs or runs[-1][-1] + 1 != args["step"]:
            runs.append([])
        runs[-1].append(args["step"])
        if event["name"] != "decode":
            runs.pop()
            like = None
        before = like
    long = [run for run in runs if len(run) >= least]
    if not long:
        raise ValueError(f"no {least} decode steps of one batch in a row")
    return long[-1]


def _median_stretch(events: Sequence[Mapping[str, Any]], run: Sequence[int], steps: int) -> Sequence[int]:
    """Of the stretches of `steps` steps the one whose time is the median."""
    slices = [event for event in events if event.get("ph") == "X" and event["tid"] == _PROCESS]
    ends = {event["args"]["step"]: event["ts"] + event["dur"] for event in slices}
    stretches = [run[first : first + steps] for first in range(len(run) - steps)]
    stretches.sort(key=lambda found: float(ends[found[-1]] - ends[found[0]]))
    return stretches[len(stretches) // 2]


def _belongs(event: Mapping[str, Any], steps: set[int]) -> bool:
    if event["ph"] == "M" or event["name"] == META:
        return True
    return (event["id"] if "id" in event else event.get("args", {}).get("step")) in steps


# ------------------------------------------------------------------ data of a picture


def spans(trace: Path) -> list[dict[str, Any]]:
    """Steps of an excerpt: begin and end of schedule, forward, wait and processing, milliseconds.

    Time 0 is when the third step is selected; the two before it have negative numbers.
    """
    found: dict[int, dict[str, Any]] = {}
    for event in json.loads(trace.read_text()):
        if event["ph"] != "X":
            continue
        begin, end = event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000
        step = found.setdefault(event["args"]["step"], {"step": event["args"]["step"]})
        if event["tid"] == _SCHEDULE:
            step["schedule"] = (begin, end)
        elif event["tid"] == _FORWARD:
            step["forward"] = (begin, end)
        elif event["tid"] == _PROCESS:
            ready = begin + (event["args"].get("wait_us") or 0) / 1000
            step["wait"], step["process"] = (begin, min(ready, end)), (min(ready, end), end)
    whole = [step for _, step in sorted(found.items()) if "schedule" in step and "process" in step]
    origin = whole[_BEFORE]["schedule"][0]
    return [
        {
            name: [round(at - origin, 3) for at in value] if isinstance(value, tuple) else value
            for name, value in step.items()
        }
        for step in whole
    ]


def pictures(traces: Path) -> dict[str, tuple[Any, Draw]]:
    """File names of pictures, each with its data and what draws them."""
    found = {mode: spans(traces / f"{mode}.json") for mode in TITLES}
    return {
        name: ({TITLES[mode]: found[mode] for mode in modes}, draw_timelines)
        for name, modes in PICTURES.items()
    }


# ------------------------------------------------------------------ drawing


def draw_timelines(data: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """A panel for each mode on one scale: the scheduler's thread above, the device below."""
    figure, axes = plotter().subplots(
        len(data), 1, figsize=(9.2, 0.8 + 1.15 * len(data)), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, (title, steps) in zip(axes[:, 0], data.items(), strict=True):
        _panel(axis, steps)
        axis.set_title(title, loc="left")
    axes[-1, 0].set_xlabel("milliseconds")
    figure.legend(*_legend(), loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    return figure


def _panel(axis: Any, steps: Sequence[Mapping[str, Any]]) -> None:
    for number, step in enumerate(steps, -_BEFORE):
        colour = _COLOURS[number % len(_COLOURS)]
        for name, row, style in (
            ("schedule", 1, {}),
            ("wait", 1, {"alpha": 0.15}),
            ("process", 1, {"alpha": 0.45}),
            ("forward", 0, {}),
        ):
            if name in step:
                begin, end = step[name]
                bar = {"color": colour, "edgecolor": "white", "linewidth": 0.6, **style}
                axis.barh(row, end - begin, 0.62, begin, **bar)
        if "forward" in step:
            _name(axis, f"N{number:+d}" if number else "N", *step["forward"])
    axis.set_yticks([1, 0], ["scheduler", "device"])
    axis.set_ylim(-0.5, 1.5)
    axis.set_xlim(0, SHOWN_MS)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(left=False)


def _name(axis: Any, name: str, begin: float, end: float) -> None:
    """Write a step's name on what of its forward is shown, where that is wide enough."""
    begin, end = max(begin, 0), min(end, SHOWN_MS)
    if end - begin > 4:
        axis.text((begin + end) / 2, 0, name, color="white", ha="center", va="center", fontsize=8)


def _legend() -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    grey = "#444444"
    marks = [Patch(color=grey), Patch(color=grey, alpha=0.15), Patch(color=grey, alpha=0.45)]
    return marks, ["select and launch; forward", "waits for the result", "processes the result"]
