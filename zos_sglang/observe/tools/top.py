"""`top URL`: a live view of a running server's scheduler."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live

from zos_sglang.console import console
from zos_sglang.observe.columns import from_columns, to_columns
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.names import AFTER_IDLE
from zos_sglang.observe.remote import Server, look
from zos_sglang.observe.tools.top_view import view

#: Steps in the timeline, and seconds between polls at the least: each is an arrival for the server.
TIMELINE = 40
LEAST_S = 0.2
#: Where the output is no terminal: bars and tracks fill any width.
COLUMNS = 150
#: Counts of the lane that are shown.
LANE = ("opened", "decode_steps", "steps", "faults", "left", "refused")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    text = "a live view of a server: throughput, paths, reasons, latencies, the lane, the last steps"
    parser = commands.add_parser(
        "top",
        help=text,
        description=f"{text}. Every poll is an arrival for the server and leaves the lane once. Ctrl-C ends.",
    )
    parser.add_argument("url", help="of the server, as http://127.0.0.1:30000")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help=f"seconds between polls, from {LEAST_S:g} (1)",
    )
    parser.add_argument("--once", action="store_true", help="one frame, then end")
    parser.add_argument("--json", action="store_true", help="as JSON, one line a poll")
    parser.add_argument("--api-key", help="of the server")
    parser.add_argument("--rank", type=int, default=0, help="data-parallel rank")
    parser.set_defaults(show=run)


def run(args: argparse.Namespace) -> int:
    """Poll until interrupted; one frame where the output is no terminal, or with --once."""
    if not args.interval >= LEAST_S:
        raise ToolError(f"--interval {args.interval:g}: not allowed. Allowed: a number from {LEAST_S:g}.")
    screen = console(columns=COLUMNS)
    frame = measure(look(args.url, args.api_key, args.rank))
    if args.once or not (args.json or sys.stdout.isatty()):
        _print(frame, args.json, screen)
        return 0
    if args.json:
        while True:
            _print(frame, True, screen)
            frame = _next(args, frame)
    with Live(view(frame, screen.width), console=screen, screen=True, auto_refresh=False) as live:
        while True:
            frame = _next(args, frame)
            live.update(view(frame, screen.width), refresh=True)


def _next(args: argparse.Namespace, before: Mapping[str, Any]) -> dict[str, Any]:
    time.sleep(args.interval)
    return measure(look(args.url, args.api_key, args.rank), before)


def _print(frame: Mapping[str, Any], as_json: bool, screen: Console) -> None:
    if as_json:
        print(json.dumps(frame), flush=True)
    else:
        screen.print(view(frame, screen.width))


def measure(server: Server, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One frame, ready for JSON; times in microseconds.

    Throughput and the lane's counts are of the time since the frame `before`. Without one, throughput is of
    the last steps, without the pauses in which there was nothing to do, and the counts since the start.

    Raises:
        ToolError: the step records cannot be read.
    """
    steps, lane = server.steps, server.zos["lane"]
    try:
        last = from_columns(steps["last"])
    except (ValueError, KeyError) as error:
        raise ToolError(f"the server at {server.url} has another release of zos-sglang: {error}") from error
    now, totals, summary = time.monotonic(), steps["totals"], steps["summary"]
    frame = {
        "url": server.url,
        "at": now,
        "mode": server.zos["mode"],
        "loop": steps["loop"],
        "asynchronous": steps["asynchronous"],
        "steps": totals["steps"],
        "tokens": totals["tokens"],
        "throughput": _busy(last),
        "rows": int(last["rows"][-1]) if last.size else 0,
        "waiting": int(last["waiting"][-1]) if last.size else 0,
        "depth": int(last["depth"][-1]) if last.size else 0,
        **{
            name: summary[name]
            for name in (
                "paths",
                "reasons",
                "blocks",
                "interval_us",
                "tpot_us",
                "wait_us",
                "gpu_us",
                "cpu_us",
            )
        },
        "lane": {"of": "the start", **{name: lane[name] for name in LANE}, "share": _share(lane)},
        "lane_since_start": {name: lane[name] for name in LANE},
        "last": timeline(last[-TIMELINE:]),
    }
    # Fewer steps than before: another server answers at this address now.
    if before is not None and totals["steps"] >= before["steps"] and now > before["at"]:
        frame["lane"] = _lane_since(lane, before["lane_since_start"])
        frame["throughput"] = {
            "of": "the last poll",
            "seconds": round(now - before["at"], 3),
            **{
                f"{name}_per_s": round((totals[name] - before[name]) / (now - before["at"]), 1)
                for name in ("steps", "tokens")
            },
        }
    return frame


def _lane_since(lane: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What the lane's counts gained; reasons that did not occur are left out, as in the report."""
    found: dict[str, Any] = {"of": "the last poll"}
    for name in LANE:
        now, then = lane[name], before[name]
        if isinstance(now, Mapping):
            gained = {reason: count - then.get(reason, 0) for reason, count in now.items()}
            found[name] = {reason: count for reason, count in gained.items() if count}
        else:
            found[name] = now - then
    return {**found, "share": _share(found)}


def _share(lane: Mapping[str, Any]) -> float | None:
    return round(lane["steps"] / lane["decode_steps"], 4) if lane["decode_steps"] else None


def _busy(last: Any) -> dict[str, Any]:
    """Throughput of records, pauses left out."""
    found: dict[str, Any] = {"of": "the last steps while busy", "steps_per_s": None, "tokens_per_s": None}
    if last.size < 2:
        return found | {"seconds": 0.0}
    gaps = last["t_launch"][1:] - last["t_launch"][:-1]
    # From launch to launch; a step behind a pause begins a new stretch.
    busy = (last["flags"][1:] & AFTER_IDLE) == 0
    seconds = float(gaps[busy].sum()) / 1e9
    if seconds <= 0:
        return found | {"seconds": 0.0}
    return found | {
        "seconds": round(seconds, 3),
        "steps_per_s": round(int(busy.sum()) / seconds, 1),
        "tokens_per_s": round(int(last["tokens"][:-1][busy].sum()) / seconds, 1),
    }


def timeline(last: Any) -> list[dict[str, Any]]:
    """Where the steps lie in time: begin and end of each track in microseconds since the first.

    `forward` begins when it was called and the one before was done, and ends when its result was known to be
    there (an upper bound where nobody waited for it); on a device that works on the scheduler's thread it is
    the call itself. A track of a step that nobody processed is None.
    """
    found: list[dict[str, Any]] = []
    if not last.size:
        return found
    start, done = int(last["t_intake"][0]), 0

    def span(begin: int, end: int) -> list[float] | None:
        if begin <= 0 or end < begin:
            return None
        return [round((begin - start) / 1000, 1), round((end - start) / 1000, 1)]

    for record, words in zip(last, _words(last), strict=True):
        begin, ready = int(record["t_forward"]), int(record["t_ready"])
        if record["cpu_forward"] > 0:
            forward = span(begin, begin + int(record["cpu_forward"]))
        else:
            forward = span(max(begin, done), ready)
            done = max(done, ready)
        found.append(
            {
                **words,
                "schedule": span(int(record["t_intake"]), int(record["t_launched"])),
                "forward": forward,
                "processing": span(int(record["t_process"]), int(record["t_output"])),
                "wait_us": round(max(0, int(record["wait"])) / 1000, 1),
            }
        )
    return found


def _words(last: Any) -> list[dict[str, Any]]:
    columns = to_columns(last)
    names = ("step", "path", "reason", "block", "forward", "rows", "tokens")
    renamed = {"forward": "kind"}
    return [
        {renamed.get(name, name): value for name, value in zip(names, values, strict=True)}
        for values in zip(*(columns[name] for name in names), strict=True)
    ]
