"""What `top` shows of a frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from zos_sglang.observe.tools import text

#: Eighths of a cell that is covered.
BLOCKS = " ▁▂▃▄▅▆▇█"
#: Steps whose tracks are drawn; more would be too small to tell apart.
DRAWN = 8
TRACKS = ("schedule", "forward", "processing")
_ALTERNATING = ("cyan", "magenta")


def view(frame: Mapping[str, Any], width: int) -> RenderableType:
    """The whole screen, for a terminal of `width` columns."""
    inner = max(40, width - 14)
    parts: list[RenderableType] = [_head(frame), ""]
    if not frame["steps"]:
        return Group(*parts, "No steps yet.")
    shares = {name: one["share"] for name, one in frame["paths"].items()}
    parts += [
        Text("paths        ", "bold") + text.bar(shares, inner),
        Text("             ") + _legend(shares),
        "",
        _reasons(frame),
        "",
        _latencies(frame),
        "",
        _lane(frame["lane"]),
        "",
        *_timeline(frame["last"], inner),
        Text("Each poll is an arrival for the server and leaves the lane once.", "bright_black"),
    ]
    return Group(*parts)


def _head(frame: Mapping[str, Any]) -> Text:
    flow = frame["throughput"]
    numbers = [
        f"{flow[name]:,.0f} {unit}"
        for name, unit in (("steps_per_s", "steps/s"), ("tokens_per_s", "tokens/s"))
        if flow[name] is not None
    ]
    line = Text.from_markup(
        f"[bold]{escape(frame['url'])}[/bold]  mode [bold]{frame['mode']}[/bold]  loop {frame['loop']}  "
        f"{frame['steps']:,} steps\n"
    )
    line.append("throughput   ", "bold")
    line.append(f"{'  '.join(numbers) or '-'}  (of {flow['of']})   ")
    line.append(f"last step: {frame['rows']} requests, {frame['waiting']} waiting, {frame['depth']} pending")
    if not frame["asynchronous"]:
        line.append(
            "\nThe device works on the scheduler's thread: steps overlap in their order only.", "yellow"
        )
    return line


def _legend(shares: Mapping[str, float]) -> Text:
    line = Text()
    for name, value in shares.items():
        line.append(
            f"{text.LETTERS.get(name, '?')} {name} {text.share(value)}   ", text.COLOURS.get(name, "")
        )
    return line


def _reasons(frame: Mapping[str, Any]) -> Table:
    rows = [
        (one["reason"], str(one["steps"]), text.share(one["share"]), text.microseconds(one["cost_us"]))
        for one in frame["reasons"]
    ]
    rows += [
        (
            f"blocked: {one['block']}",
            str(one["steps"]),
            text.share(one["share"]),
            text.microseconds((one["blocked_us"] or {}).get("mean")),
        )
        for one in frame["blocks"]
    ]
    return text.table("not overlapped, or held up", "steps", "share", "costs such a step", rows=rows)


def _latencies(frame: Mapping[str, Any]) -> Table:
    names = {
        "interval_us": "launch to launch",
        "tpot_us": "time per output token",
        "wait_us": "waiting for a result",
        "gpu_us": "forward on the device",
    }
    rows = [(words, *text.quantiles(frame[name])) for name, words in names.items()]
    rows.append(("CPU of the scheduler", *text.quantiles(frame["cpu_us"]["total"])))
    return text.table("time", "P50", "P90", "P99", rows=rows)


def _lane(lane: Mapping[str, Any]) -> Text:
    line = Text("lane         ", "bold")
    line.append(
        f"{text.share(lane['share'])} of decode steps, {lane['opened']} openings, {lane['faults']} faults"
        if lane["opened"] or lane["steps"]
        else "not open"
    )
    line.append(f" since {lane['of']}", "bright_black")
    for title, counts in (("left", lane["left"]), ("refused", lane["refused"])):
        if counts:
            line.append(f"\n{title:13}" + "  ".join(f"{word} {count}" for word, count in counts.items()))
    return line


def _timeline(last: Sequence[Mapping[str, Any]], width: int) -> list[RenderableType]:
    if not last:
        return []
    strip = Text(f"{f'last {len(last)}':13}", "bold")
    for step in last:
        name = "nothing-pending" if step["reason"] == "nothing-pending" else step["path"]
        strip.append(text.LETTERS.get(name, "?"), text.COLOURS.get(name, ""))
    drawn = last[-DRAWN:]
    ends = [span for step in drawn for track in TRACKS if (span := step[track]) is not None]
    if not ends:
        return [strip, ""]
    begin, end = min(span[0] for span in ends), max(span[1] for span in ends)
    rows: list[RenderableType] = [
        strip,
        Text(f"{'':13}the last {len(drawn)} steps, {text.microseconds(end - begin)}", "bright_black"),
    ]
    for track in TRACKS:
        rows.append(Text(f"{track:13}", "bold") + _track([step[track] for step in drawn], begin, end, width))
    return [*rows, ""]


def _track(spans: Sequence[Sequence[float] | None], begin: float, end: float, width: int) -> Text:
    """One row: how much of each cell's time is covered, steps in alternating colours."""
    cell = (end - begin) / width or 1.0
    covered, owner = [0.0] * width, [0] * width
    for number, span in enumerate(spans):
        if span is None:
            continue
        first, last = (span[0] - begin) / cell, (span[1] - begin) / cell
        for place in range(int(first), min(width, int(last) + 1)):
            part = min(last, place + 1) - max(first, place)
            if part > covered[place] / 2:
                owner[place] = number
            covered[place] += max(0.0, part)
    line = Text()
    for part, number in zip(covered, owner, strict=True):
        eighths = min(len(BLOCKS) - 1, round(part * (len(BLOCKS) - 1)))
        # Whatever happened shows, however short.
        line.append(BLOCKS[max(eighths, 1 if part > 0 else 0)], _ALTERNATING[number % 2])
    return line
