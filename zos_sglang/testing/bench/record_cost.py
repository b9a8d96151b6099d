"""Command line of scripts/bench_record.py: what recording every step costs in a real server."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

from rich.table import Table

from zos_sglang.console import console
from zos_sglang.testing.bench.client import BenchClient, BenchError, prompts
from zos_sglang.testing.bench.command import measured
from zos_sglang.testing.bench.ending import COULD_NOT
from zos_sglang.testing.bench.flags import json_flag, model_flags, modes_of
from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.bench.stats import spread
from zos_sglang.testing.server import cuda_available

MODES = ("sync", "overlap", "resident")
PROMPT, ANSWER = 16, 1000
#: What recording should cost at most: microseconds a step, share of the scheduler's CPU.
TARGET_US, TARGET_SHARE = 10.0, 0.02

DESCRIPTION = """\
Starts one server, sends it a steady batch, and lets it record and not record in turns of 40 steps, by live
switch (`zos_record_cost`). Then the same with a trace, in a second server.

  recording   median paired difference of the scheduler thread's CPU time a step, us, and what handing records
              on takes a step on top of it
  share       of the scheduler's CPU time a step without recording, the model's forward left out where it runs
              on the same thread"""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        prog="bench_record.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog="Exit code: 0 measured, 2 could not run. It does not judge; what we aim at is printed.",
    )
    found.add_argument(
        "--modes", type=modes_of(MODES), default=("overlap", "resident"), help="(overlap,resident)"
    )
    found.add_argument("--batch", type=int, default=16, help="requests at once (16)")
    found.add_argument("--steps", type=int, default=4000, help="steps of a measurement (4000)")
    found.add_argument("--repeats", type=int, default=5, help="measurements a mode (5)")
    found.add_argument(
        "--trace", action=argparse.BooleanOptionalAction, default=True, help="with a trace, too"
    )
    model_flags(found)
    found.add_argument("--out", type=Path, metavar="FILE", help="write the result there")
    json_flag(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    args = parser().parse_args(argv)
    result = measured("bench_record", lambda: _result(args))
    if result is None:
        return COULD_NOT
    if args.out:
        write_json(args.out, result)
    if args.json:
        print(json.dumps(result))
    else:
        _print(result["summary"])
    return 0


def _result(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {**provenance("bench_record"), "batch": args.batch, "steps": args.steps}
    result["clocks_ns"] = {clock.__name__: look(clock) for clock in (perf_counter_ns, thread_time_ns)}
    result["device_calls_ns"] = device_calls() if cuda_available() else {}
    with tempfile.TemporaryDirectory() as work:
        result["runs"] = list(_measure(args, Path(work)))
    result["summary"] = summarise(result["runs"])
    return result


def device_calls() -> dict[str, float]:
    """Nanoseconds of the calls to a CUDA device that a record makes, each by itself; see `look`.

    `query busy` asks about something that the device has still before it.
    """
    import torch

    event, timed = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)
    event.record()
    torch.cuda.synchronize()
    calls = {"query done": event.query, "synchronize done": event.synchronize}
    found = {name: look(call) for name, call in calls.items()}
    found |= {"record": look(event.record, 100), "record timed": look(timed.record, 100)}
    torch.cuda._sleep(2_000_000_000)  # about a second
    event.record()
    found["query busy"] = look(event.query, 100)
    torch.cuda.synchronize()
    return found


def look(clock: Callable[[], object], times: int = 1000) -> float:
    """Nanoseconds that one look at this clock takes, in a row: the least of some runs.

    Hosts differ most in this. The thread's clock is a system call everywhere, the other one on some.
    """
    found = []
    for _ in range(20):
        begun = perf_counter_ns()
        for _ in range(times):
            clock()
        found.append((perf_counter_ns() - begun) / times)
    return round(min(found), 1)


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a mode, with and without a trace: spreads over the measurements."""
    kinds = dict.fromkeys((run["trace"], run["mode"]) for run in runs)
    rows = []
    for trace, mode in kinds:
        costs = [run["cost"] for run in runs if (run["trace"], run["mode"]) == (trace, mode)]
        total = [one["cost_us"] + one["flush_us"] for one in costs]
        off = [one["off_us"] for one in costs]
        rows.append(
            {
                "mode": mode,
                "trace": trace,
                "total_us": spread(total),
                "cost_us": spread([one["cost_us"] for one in costs]),
                "flush_us": spread([one["flush_us"] for one in costs]),
                "off_us": spread(off),
                "share": spread([us / without for us, without in zip(total, off, strict=True)], 4),
            }
        )
    return rows


def _measure(args: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    model = find_model(args.model, args.cache)
    for trace in (False, True) if args.trace else (False,):
        env = {"ZOS_TRACE": str(work / "trace.json")} if trace else {}
        config = Config(model, args.modes[0], args.attention, batches=(args.batch,), env=env)
        with (
            config.server(work / "server.log", args.start_timeout_s) as server,
            BenchClient(server.url) as client,
        ):
            for repeat in range(args.repeats):
                for mode in args.modes:
                    client.switch(mode)
                    cost = _cost(client, args.batch, args.steps)
                    yield {"trace": trace, "repeat": repeat, "mode": mode, "cost": cost}
                    print(f"  trace {trace}, repeat {repeat}, {mode}", file=sys.stderr, flush=True)


def _cost(client: BenchClient, batch: int, steps: int) -> dict[str, Any]:
    asked = prompts(batch, PROMPT, vocab=384)
    client.wave(asked, 64)
    client.post("/set_internal_state", {"server_args": {"zos_record_cost": steps}})
    for _ in range(20 + 4 * steps // ANSWER):
        client.wave(asked, ANSWER)
        found = client.zos()["steps"]["cost"]
        if found is None:
            break
        if not found["running"]:
            return dict(found)
    raise BenchError("the server does not measure what recording costs; its log says why")


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("mode", "trace", "recording us", "of it handing on", "without us", "share", title="a step")
    for row in rows:
        cells = [_range(row[name], 1) for name in ("total_us", "flush_us", "off_us")]
        table.add_row(row["mode"], "yes" if row["trace"] else "no", *cells, _range(row["share"], 3))
    out = console()
    out.print(table)
    out.print(f"aimed at, without a trace: {TARGET_US:g} us and {TARGET_SHARE:.0%}")


def _range(found: dict[str, float], digits: int) -> str:
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f} to {found['max']:.{digits}f})"
