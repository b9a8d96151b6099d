"""The report as one page: HTML with its style, script and data in it; nothing is loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

from zos_sglang.observe.tools import report_charts as charts
from zos_sglang.observe.tools import report_data as data
from zos_sglang.observe.tools import report_words as words
from zos_sglang.observe.tools.report_charts import microseconds
from zos_sglang.observe.tools.text import share
from zos_sglang.observe.trace_reader import Trace

#: Of the tracks, and of the classes of work that happen on them. Told apart by colour-blind readers too.
COLOURS = {"schedule": "#0072b2", "forward": "#009e73", "copy": "#e69f00", "processing": "#aa4499"}
WORK_COLOURS = {
    "prepare": COLOURS["schedule"],
    "readback": COLOURS["copy"],
    "process": COLOURS["processing"],
    "depends": "#d55e00",
    "forward": COLOURS["forward"],
}
#: Of the strip that shows all steps.
PATH_COLOURS = {
    "sync": "#d55e00",
    "overlap": "#56b4e9",
    "overlap-blocked": "#e69f00",
    "resident": "#009e73",
    "resident-blocked": "#b8a000",
}
#: By which a page of ours is known. File names may be as long as the system likes.
TITLE, _NAME = ": zos-sglang report</title>", 255
_CHART_COLOUR = "#6b7f95"


def page(name: str, trace: Trace, numbers: Mapping[str, Any]) -> str:
    """The page of a trace in file `name`; `numbers` are `report.figures`."""
    parts = [_head(name, trace, numbers)]
    if len(trace.records):
        parts += [
            *(_tiles(numbers), _timeline(trace), _signs(numbers), _reasons(trace, numbers)),
            *(_cpu(trace, numbers), _distributions(trace)),
        ]
    else:
        parts.append("<section><p>The trace holds no steps: the server has launched none.</p></section>")
    source = {
        kind: resources.files(__package__).joinpath(f"report.{kind}").read_text("utf-8")
        for kind in ("css", "js")
    }
    script = f"<script>{source['js']}</script>" if len(trace.records) else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Also a promise: a page that may load nothing cannot call home.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(name[:_NAME])}{TITLE}"
        f"<style>{source['css']}</style></head><body><main>{''.join(parts)}</main>{script}</body></html>\n"
    )


def _head(name: str, trace: Trace, numbers: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in trace.facts.items() if key != "asynchronous"}
    device = (
        "works beside the scheduler's thread"
        if trace.asynchronous
        else ("works on the scheduler's thread (CPU): nothing can overlap physically")
    )
    said = [
        f"zos-sglang {trace.meta.get('version')}",
        *(f"{key}: {_plain(value)}" for key, value in facts.items()),
        f"device: {device}",
    ]
    notes = list(trace.notes)
    if not trace.ended:
        notes.append("the trace was not closed: the process was killed, or still runs")
    shown = "".join(f'<p class="note">{escape(note[0].upper() + note[1:])}.</p>' for note in notes)
    return (
        f"<header><h1>What the scheduler did <small>{escape(name)}</small></h1>"
        f"<p class='facts'>{' &middot; '.join(escape(one) for one in said)}</p>{shown}</header>"
    )


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(one)}" for key, one in value.items())
    return str(value)


def _tiles(numbers: Mapping[str, Any]) -> str:
    found = numbers["summary"]
    shares = {name: one["share"] for name, one in found["paths"].items()}
    ahead = sum(shares.get(name, 0.0) for name in ("overlap", "overlap-blocked"))
    lane = sum(shares.get(name, 0.0) for name in ("resident", "resident-blocked"))
    held = sum(one["share"] for one in found["blocks"])
    tiles = [
        ("Steps", f"{found['steps']:,}", f"in {found['seconds']:.1f} s"),
        ("Overlapped", share(ahead), "of all steps, in the loop"),
        ("Resident lane", share(lane), "of all steps"),
        ("Without overlap", share(shares.get("sync", 0.0)), "the result before came first"),
        ("Held up", share(held), "overlapped, but blocked"),
        _timed("Launch interval", found["interval_us"]),
        _timed("Time per token", found["tpot_us"]),
    ]
    return (
        "<section class='tiles'>"
        + "".join(
            f"<div class='tile'><b>{value}</b><span>{title}</span><small>{about}</small></div>"
            for title, value, about in tiles
        )
        + "</section>"
    )


def _timed(title: str, found: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if found is None:
        return title, "-", "no adjacent decode steps"
    return title, microseconds(found["p50"]), f"P50; P99 {microseconds(found['p99'])}"


def _timeline(trace: Trace) -> str:
    drawn = data.timeline(trace) | {"colours": COLOURS, "paths": PATH_COLOURS}
    strip = _keys(PATH_COLOURS)
    legend = _keys(
        {
            "schedule": COLOURS["schedule"],
            "forward": COLOURS["forward"],
            "forward, estimated": "#99d8c7",
            "copy to the host": COLOURS["copy"],
            "processing": COLOURS["processing"],
            "waiting for the result": "#ddb4d6",
        }
    )
    cut = ""
    if (total := len(trace.records)) > data.SHOWN:
        cut = f"The timeline shows the last {data.SHOWN:,} of {total:,} steps; all numbers are of all."
        cut = f"<p class='note'>{cut}</p>"
    # Inside a script element only "<" could end it.
    embedded = json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"<section><h2>Timeline</h2><p>{words.TIMELINE}</p>{cut}<div class='tools'>"
        f"<span class='legend'>{legend}</span>"
        "<span class='buttons'><button id='closer' title='zoom in (+)'>+</button> "
        "<button id='farther' title='zoom out (-)'>&minus;</button> "
        "<button id='all' title='everything (0)'>all</button></span></div>"
        "<canvas id='overview' aria-label='all steps, coloured by path'></canvas>"
        "<canvas id='timeline' tabindex='0' aria-label='timeline with four tracks'></canvas>"
        f"<p class='hint'>{words.HANDLING} {strip}</p><div id='tip' hidden></div>"
        f"<script type='application/json' id='data'>{embedded}</script></section>"
    )


def _keys(colours: Mapping[str, str]) -> str:
    return "".join(
        f"<span class='named'><i class='key' style='background:{colour}'></i>{text}</span>"
        for text, colour in colours.items()
    )


def _signs(numbers: Mapping[str, Any]) -> str:
    rows = []
    for one in numbers["signs"]:
        title, about = words.SIGNS[one["sign"]]
        value, ahead, serial = (
            _valued(one[key], one["unit"]) for key in ("value", "expected_with", "expected_without")
        )
        note = f"<small>{escape(one['note'])}</small>" if one["note"] else ""
        verdict = f"<span class='verdict {one['verdict']}'>{words.VERDICTS[one['verdict']]}</span>{note}"
        rows.append([f"{title}<small>{about}</small>", value, ahead, serial, verdict])
    columns = ["Sign", "measured>", "expected with overlap>", "expected without>", "says"]
    return (
        f"<section><h2>Does overlap work? Four signs</h2><p>{words.JUDGED}</p>"
        f"{charts.table(columns, rows, 'signs')}<p>{words.DELIVERIES[numbers['delivery']]}</p></section>"
    )


def _valued(value: float | None, unit: str) -> str:
    if value is None:
        return "unknown"
    return microseconds(value) if unit == "us" else f"{value:.2f}"


def _reasons(trace: Trace, numbers: Mapping[str, Any]) -> str:
    found = numbers["summary"]
    counted = sum(one["steps"] for one in found["reasons"])
    rows = [_reason(one) for one in found["reasons"]]
    if free := found["steps"] - counted:
        rows.insert(
            0, _reason({"reason": "overlapped", "steps": free, "share": free / found["steps"], "cost_us": 0})
        )
    tables = [
        "<h2>Why a step did not overlap</h2>",
        charts.table(["Reason", "steps>", "share>", "µs a step>"], rows, "reasons"),
        f"<p class='hint'>{words.COST}</p>",
    ]
    paths = [
        [_named(name, words.PATHS), f"{one['steps']:,}", share(one["share"])]
        for name, one in found["paths"].items()
    ]
    tables += ["<h2>How the steps went</h2>", charts.table(["Path", "steps>", "share>"], paths, "paths")]
    if found["blocks"]:
        blocked = [
            [
                *(_named(one["block"], words.BLOCKS), f"{one['steps']:,}", share(one["share"])),
                microseconds(None if one["blocked_us"] is None else one["blocked_us"]["mean"]),
            ]
            for one in found["blocks"]
        ]
        tables += [
            "<h2>What held steps up that overlapped</h2>",
            charts.table(["Cause", "steps>", "share>", "µs a step>"], blocked, "blocks"),
        ]
    for title, name, meanings in (
        ("Why the lane was left", "departures", words.DEPARTURES),
        ("Why the lane was refused", "refusals", {}),
    ):
        if counts := found[name]:
            ordered = sorted(counts.items(), key=lambda pair: -pair[1])
            lane = [[_named(word, meanings), f"{n:,}", share(n / found["steps"])] for word, n in ordered]
            tables += [f"<h2>{title}</h2>", charts.table(["Reason", "steps>", "share>"], lane, name)]
    return f"<section>{''.join(tables)}</section>"


def _reason(one: Mapping[str, Any]) -> list[str]:
    cost = one["cost_us"]
    return [
        *(_named(one["reason"], words.REASONS), f"{one['steps']:,}", share(one["share"])),
        "-" if cost is None else f"{cost:+,.0f}" if cost else "0",
    ]


def _named(word: str, meanings: Mapping[str, str]) -> str:
    return f"{escape(word)}<small>{meanings.get(word, '')}</small>"


def _cpu(trace: Trace, numbers: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{_keys({work: WORK_COLOURS[work]})}<small>{words.WORKS[work]}</small>",
            *(microseconds(found[name]) for name in ("mean", "p50", "p90", "p99")),
        ]
        for work in WORK_COLOURS
        if (found := numbers["summary"]["cpu_us"][work]) is not None
    ]
    return (
        f"<section><h2>The scheduler's CPU by class of work</h2><p>{words.CPU}</p>"
        f"{charts.stacked(data.cpu_by_path(trace.records), WORK_COLOURS)}"
        f"{charts.table(['Class', 'mean>', 'P50>', 'P90>', 'P99>'], rows, 'cpu')}</section>"
    )


def _distributions(trace: Trace) -> str:
    found = data.samples(trace.records)
    figures = "".join(
        f"<figure><figcaption>{one.title}<small>{one.about}</small></figcaption>"
        f"{charts.histogram(one.values, one.weights, one.found, _CHART_COLOUR)}</figure>"
        for one in found
    )
    rows = [
        [
            one.title,
            f"{one.found['count']:,}",
            *(microseconds(one.found[k]) for k in ("mean", "p50", "p90", "p99")),
        ]
        for one in found
    ]
    columns = ["Distribution", "samples>", "mean>", "P50>", "P90>", "P99>"]
    return (
        f"<section><h2>Distributions</h2><div class='figures'>{figures}</div>"
        f"{charts.table(columns, rows, 'distributions')}</section>"
    )
