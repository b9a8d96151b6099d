"""Command line of scripts/bench_overload.py."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zos_sglang.modes import MODES
from zos_sglang.testing.bench.arrivals_load import Clients
from zos_sglang.testing.bench.checkpoint import vocabulary
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.command import measured, say
from zos_sglang.testing.bench.ending import COULD_NOT
from zos_sglang.testing.bench.flags import (
    clients_of,
    json_flag,
    model_flags,
    modes_of,
    server_flags,
    server_options,
)
from zos_sglang.testing.bench.overload import (
    STEP,
    THROUGHPUT,
    WAIT,
    Case,
    Overload,
    cases,
    checks_of,
    many_files,
)
from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.server import cuda_available

SWITCHABLE = tuple(mode for mode in MODES if mode != "off")
NAMES = tuple(case.name for case in cases())

DESCRIPTION = f"""\
Streams that come all at once at one server process, more than it can take; every mode gets the same ones,
switched live, in alternating order. One server a case:

  streams    --streams of them; all but --running wait
  exhausted  a KV pool for a quarter of the running requests: everyone is retracted, again and again
  refused    a queue with a limit: most are refused

Asked of each mode, as a ratio to stock in the same repeat, median: throughput at least {THROUGHPUT:g}, the
longest wait for a first token at most {WAIT:g}, P99 of a step at most {STEP:g}."""
EPILOG = "Exit code: 0 all of it holds, 1 something does not, 2 could not run."


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        prog="bench_overload.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = found.add_argument
    add("--modes", type=modes_of(SWITCHABLE, 2), default="stock,overlap,resident", help="(all three)")
    add("--case", action="append", choices=NAMES, help="repeatable; default: all")
    add("--streams", type=int, default=2000, help="(2000)")
    add("--running", type=int, default=64, help="requests the server runs at once (64)")
    add("--repeats", type=int, default=3, help="(3)")
    add("--clients", type=int, help="client processes (4, or 1 on fewer than 8 cores)")
    add("--timeout-s", type=float, default=240, help="for each request (240)")
    model_flags(found)
    server_flags(found)
    add("--out", type=Path, required=True, help="file for the results; the servers' logs go beside it")
    json_flag(found)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit code."""
    args = parser().parse_args(argv)
    data = measured("bench_overload", lambda: _measure(args))
    if data is None:
        return COULD_NOT
    if args.json:
        print(json.dumps(data))
    for check in data["checks"]:
        line = f"{'holds' if check['ok'] else 'DOES NOT HOLD'}: {check['what']}: {check['found']}"
        print(line, file=sys.stderr if args.json else sys.stdout)
    return 0 if all(check["ok"] for check in data["checks"]) else 1


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    many_files()
    data: dict[str, Any] = {
        **provenance("bench_overload"),
        "settings": {
            "model": args.model,
            "modes": list(args.modes),
            "streams": args.streams,
            "running": args.running,
            "repeats": args.repeats,
        },
        "cases": [],
        "checks": [],
    }
    for case in cases(args.streams, args.running):
        if not args.case or case.name in args.case:
            result = _case(args, case)
            data["cases"].append(result)
            data["checks"] += [asdict(check) for check in checks_of(case, result)]
            write_json(args.out, data)
    return data


def _case(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    model = find_model(args.model, args.cache)
    config = Config(
        model=model,
        mode=args.modes[0],
        batches=tuple(size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= args.running),
        tokens_a_request=case.prompt + case.output,
        **server_options(args, ("--incremental-streaming-output", *case.args)),
    )
    log = args.out.with_suffix(f".{case.name}.log")
    with config.server(log, args.start_timeout_s) as server, BenchClient(server.url) as client:
        options = {"incremental": True, "timeout_s": args.timeout_s, "sampling": endless(model)}
        clients = Clients(server.url, clients_of(args), **options)
        with clients:
            bench = Overload(server, client, clients, vocabulary(model), say)
            found = bench.measure(case, args.modes, args.repeats)
    return {**found, "server": {"args": config.command_args(cuda_available())}}


def endless(model: Path) -> dict[str, Any]:
    """Sampling parameters of answers that go on to their limit, although admission does not know it.

    Not ignore_eos: admission keeps room for such requests to their very end, and never retracts one.
    """
    eos = json.loads((model / "config.json").read_text())["eos_token_id"]
    return {"ignore_eos": False, "logit_bias": {str(eos): -100.0}}
