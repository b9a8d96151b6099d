"""Traces for tests, and what a viewer relies on."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from zos_sglang.observe.trace_events import META
from zos_sglang.observe.trace_sink import TraceSink
from zos_sglang.observe.trace_tracks import TRACKS

Event = dict[str, Any]


def traced(path: Path, found: np.ndarray, asynchronous: bool = True) -> list[Event]:
    """Events of a trace of these records, as any JSON reader sees them."""
    sink = TraceSink(path, 10**8, {"asynchronous": asynchronous, "mode": "overlap"}, "scheduler 0")
    sink(found)
    sink.close()
    events: list[Event] = json.loads(path.read_text())
    return events


def on(events: list[Event], track: str) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and TRACKS[e["tid"] - 1] == track]


def instants(events: list[Event]) -> list[str]:
    return [e["name"] for e in events if e["ph"] == "i" and e["name"] not in (META, "trace ends")]


def check_well_formed(events: list[Event]) -> None:
    """What a viewer relies on."""
    by_track = defaultdict(list)
    arrows: dict[str, dict[int, Event]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] == "X":
            by_track[event["tid"]].append(event)
        elif event["ph"] in arrows:
            assert event["id"] not in arrows[event["ph"]], "an arrow has one begin and one end"
            arrows[event["ph"]][event["id"]] = event
    for slices in by_track.values():
        for one, following in pairwise(slices):
            assert one["dur"] > 0
            # Microseconds with three decimals: compare as whole nanoseconds.
            assert round((one["ts"] + one["dur"]) * 1000) <= round(following["ts"] * 1000)
    processed = {e["args"]["step"]: e for e in by_track[4]}
    launched = {e["args"]["step"]: e for e in by_track[1]}
    assert arrows["s"].keys() == arrows["f"].keys() == processed.keys()
    for step, end in arrows["f"].items():
        begin = arrows["s"][step]
        assert end["bp"] == "e"
        for arrow, around in ((begin, launched[step]), (end, processed[step])):
            assert arrow["tid"] == around["tid"]
            assert around["ts"] <= arrow["ts"] < around["ts"] + around["dur"]
