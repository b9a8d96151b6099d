"""What a running server does, what keeps it from overlapping, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from zos_sglang.observe.names import Path
from zos_sglang.observe.remote import Server
from zos_sglang.observe.tools import text
from zos_sglang.observe.tools.advice import advise
from zos_sglang.overlap.guards import Reason
from zos_sglang.resident.eligibility import Refusal

#: Refusals of the server, found once; the others are of a batch.
OF_SERVER = tuple(Refusal)[: tuple(Refusal).index(Refusal.NOT_DECODE)]
#: Modes, and which of the model's behaves alike.
MODES = {"normal": "sync", "sync": "sync", "stock": "overlap", "overlap": "overlap", "resident": "resident"}


def examine(server: Server) -> dict[str, Any]:
    """Everything that `show` prints, ready for JSON. Times in microseconds."""
    zos, steps = server.zos, server.steps
    summary, totals = steps["summary"], steps["totals"]
    found: dict[str, Any] = {
        "kind": "server",
        "url": server.url,
        "ranks": server.ranks,
        "sglang": zos.get("sglang"),
        "mode": zos["mode"],
        "loop": steps["loop"],
        "asynchronous": steps["asynchronous"],
        "own_launch": zos.get("own_launch"),
        "launches": steps["launches"],
        "steps": totals["steps"],
        "since_start": _since_start(totals),
        "window": {"steps": summary["steps"], "seconds": summary["seconds"]},
        "paths": summary["paths"],
        "reasons": [
            {**one, "us_a_step": _spread(one["cost_us"], one["share"])} for one in summary["reasons"]
        ],
        "blocks": [
            {**one, "us_a_step": _spread((one["blocked_us"] or {}).get("mean"), one["share"])}
            for one in summary["blocks"]
        ],
        "times": {name: summary[f"{name}_us"] for name in ("interval", "tpot", "wait", "gpu")},
        "cpu": summary["cpu_us"],
        "signs": steps["signs"],
        "what_if": steps["what_if"],
        "cost": steps.get("cost"),
        "faults": steps.get("faults", 0),
        "overlap": _overlap(server),
        "lane": _lane(server),
    }
    return found | {"advice": advise(found)}


def _overlap(server: Server) -> dict[str, Any]:
    from zos_sglang.upstream import overlap_off

    mode = server.zos["mode"]
    off = server.zos.get("overlap_off")
    if off is None:
        off = [rule.as_json() for rule in overlap_off.rules_of_running(server.arguments)]
    held = [rule.as_json() for rule in overlap_off.mode_rules(mode)] if mode == "sync" else []
    return {"on": not off and not held and server.steps["loop"] != "normal", "rules": [*off, *held]}


def _lane(server: Server) -> dict[str, Any]:
    from zos_sglang.upstream import lane_forecast, overlap_off

    lane, mode = server.zos["lane"], server.zos["mode"]
    refused = lane["refused"]
    closed = [rule.as_json() for rule in overlap_off.mode_rules(mode)]
    for word in OF_SERVER:
        if refused.get(word):
            closed += [rule.as_json() for rule in lane_forecast.explain(word, server.arguments)]
    return {
        "state": "closed" if closed or server.steps["loop"] != "ours" else "open",
        "rules": closed,
        **{name: lane[name] for name in ("share", "opened", "steps", "decode_steps", "faults")},
        "refused": {word: count for word, count in refused.items() if word not in OF_SERVER},
        "left": lane["left"],
    }


def _since_start(totals: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Paths of all steps. Those with nothing pending overlapped with nothing: apart, as in the summary."""
    alone = totals["reason"].get(Reason.NOTHING_PENDING, 0)
    counts = totals["path"] | {str(Reason.NOTHING_PENDING): alone}
    counts[str(Path.OVERLAP)] = max(0, counts.get(Path.OVERLAP, 0) - alone)
    return {
        word: {"steps": count, "share": round(count / totals["steps"], 4)}
        for word, count in counts.items()
        if count
    }


def _spread(each: float | None, part: float) -> float | None:
    """Microseconds of those steps that had it, spread over all steps."""
    return None if each is None else round(each * part, 1)


def show(found: dict[str, Any], console: Console) -> None:
    """Print what `examine` found."""
    window = found["window"]
    console.print(
        f"{escape(found['url'])}: SGLang {found['sglang']}, mode [bold]{found['mode']}[/bold], "
        f"loop {found['loop']}, {found['launches']} launches"
        + (f", data-parallel rank 1 of {found['ranks']}" if found["ranks"] > 1 else "")
    )
    console.print(
        f"Shares and times are of the last {window['steps']} steps ({window['seconds']:.1f} s).\n",
        highlight=False,
    )
    for name, state in (
        ("overlap", "on" if found["overlap"]["on"] else "off"),
        ("lane", found["lane"]["state"]),
    ):
        colour = "green" if state in ("on", "open") else "red"
        console.print(f"[bold]{name:8}[/bold] [{colour}]{state}[/{colour}]{_lane_counts(found, name)}")
        if found[name]["rules"]:
            console.print(text.rules(found[name]["rules"]))
    console.print()
    if not window["steps"]:
        console.print("No steps are recorded yet.\n")
    else:
        _happened(found, console)
    for line in found["advice"]:
        console.print(f"[bold]->[/bold] {escape(line)}")


def _lane_counts(found: Mapping[str, Any], name: str) -> str:
    lane = found["lane"]
    if name != "lane" or not lane["decode_steps"]:
        return ""
    return (
        f"   {text.share(lane['share'])} of {lane['decode_steps']} decode steps of mode resident rode, "
        f"{lane['opened']} openings, {lane['faults']} faults"
    )


def _happened(found: Mapping[str, Any], console: Console) -> None:
    since = found["since_start"]
    console.print(
        text.table(
            *("path", "steps", "share", "since the start"),
            rows=[
                (
                    name,
                    str(one["steps"]),
                    text.share(one["share"]),
                    text.share(since.get(name, {}).get("share")),
                )
                for name, one in found["paths"].items()
            ],
        ),
        "",
    )
    causes = [
        *((one["reason"], one, one["cost_us"]) for one in found["reasons"]),
        *(
            (f"blocked: {one['block']}", one, (one["blocked_us"] or {}).get("mean"))
            for one in found["blocks"]
        ),
    ]
    if causes:
        console.print(
            text.table(
                *("not overlapped, or held up", "steps", "share", "costs such a step", "us a step of all"),
                rows=[
                    (
                        name,
                        str(one["steps"]),
                        text.share(one["share"]),
                        text.microseconds(each),
                        text.microseconds(one["us_a_step"]),
                    )
                    for name, one, each in causes
                ],
            ),
            "",
        )
    lane = found["lane"]
    if counts := [(f"left: {word}", n) for word, n in lane["left"].items()] + [
        (f"refused: {word}", n) for word, n in lane["refused"].items()
    ]:
        console.print(text.table(*("lane", "times"), rows=[(word, str(count)) for word, count in counts]), "")
    _times(found, console)
    _signs(found, console)
    _what_if(found, console)


def _times(found: Mapping[str, Any], console: Console) -> None:
    names = {
        "interval": "launch to launch",
        "tpot": "time per output token",
        "wait": "waiting for a result",
        "gpu": "forward on the device",
    }
    rows = [(words, *text.quantiles(found["times"][name])) for name, words in names.items()]
    rows += [(f"CPU: {work}", *text.quantiles(one)) for work, one in found["cpu"].items() if one]
    console.print(text.table("time", "P50", "P90", "P99", rows=rows), "")


def _signs(found: Mapping[str, Any], console: Console) -> None:
    def shown(value: float | None, unit: str) -> str:
        if unit == "us" or value is None:
            return text.microseconds(value)
        return f"{value:.2f}"

    rows = [
        (
            one["sign"],
            *(shown(one[name], one["unit"]) for name in ("value", "expected_with", "expected_without")),
            one["verdict"],
            one["note"] or "",
        )
        for one in found["signs"]
    ]
    console.print(
        text.table(*("sign", "measured", "with overlap", "without", "verdict", "note"), rows=rows), ""
    )


def _what_if(found: Mapping[str, Any], console: Console) -> None:
    """Step times of each mode, as the model has them and as measured in this server."""
    rows: list[tuple[str, ...]] = []
    for name, one in found["what_if"].items():
        inputs = [text.microseconds(one["inputs"][part]) for part in ("gpu", "cpu", "cpu_lane", "d2h")]
        start = (name, str(one["steps"]), *inputs)
        for mode, like in MODES.items():
            predicted, measured = one["predicted"].get(like), one["measured"].get(mode)
            if measured is not None or (predicted and mode == like):
                shown = "-" if predicted is None else _range(*predicted)
                rows.append((*start, mode, shown, text.microseconds(measured)))
                start = ("",) * len(start)
    if rows:
        titles = ("step, rows up to", "steps", "device", "CPU", "CPU lane", "copy", "mode", "predicted")
        console.print(text.table(*titles, "measured", rows=rows), "")


def _range(low: float, high: float) -> str:
    shown = text.microseconds(low), text.microseconds(high)
    return shown[0] if shown[0] == shown[1] else f"{shown[0]} to {shown[1]}"
