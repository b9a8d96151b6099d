"""Command line of scripts/bench_steps.py."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from zos_sglang.console import console
from zos_sglang.testing.bench.check import Check
from zos_sglang.testing.bench.checkpoint import vocabulary
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.command import measured
from zos_sglang.testing.bench.ending import COULD_NOT
from zos_sglang.testing.bench.flags import model_flags, modes_of, numbers
from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.bench.steps import Plan, check, record, row, told
from zos_sglang.testing.model_check.records import KIND
from zos_sglang.testing.server import cuda_available

MODES = ("sync", "stock", "overlap", "resident")

DESCRIPTION = """\
Starts one server and keeps the record of every step of a steady batch in each mode, switched live: input for
scripts/check_model.py, and a check of the records themselves: device times against the floor (the decode
graph replayed back to back), idle time of the device in the lane, and each of the four signs against the mode
that ran."""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        prog="bench_steps.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog="Exit code: 0 all checks hold, 1 one does not, 2 could not run.",
    )
    found.add_argument("--modes", type=modes_of(MODES), default=MODES, help=f"({','.join(MODES)})")
    found.add_argument("--batches", type=numbers, default=(1, 16, 64), help="requests at once (1,16,64)")
    found.add_argument("--prompt-tokens", type=int, default=32, help="(32)")
    found.add_argument("--output-tokens", type=int, default=512, help="(512)")
    model_flags(found)
    found.add_argument("--out", type=Path, metavar="FILE", help="write records and checks there")
    found.add_argument("--json", action="store_true", help="print the checks as JSON instead of a table")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Record and check; returns the exit code."""
    args = parser().parse_args(argv)
    checks: list[Check] = []
    result = measured("bench_steps", lambda: _result(args, checks))
    if result is None:
        return COULD_NOT
    if args.out:
        write_json(args.out, result)
    if args.json:
        print(json.dumps({key: value for key, value in result.items() if key != "waves"}))
    else:
        _print(result["waves"], checks)
    return 0 if all(one.ok for one in checks) else 1


def _result(args: argparse.Namespace, checks: list[Check]) -> dict[str, Any]:
    """What is written down; `checks` gets what was checked."""
    with tempfile.TemporaryDirectory() as work:
        waves = _run(args, Path(work), checks)
    found = {"waves": waves, "told": told(waves), "checks": [asdict(one) for one in checks]}
    return {**provenance("bench_steps"), "kind": KIND, **found}


def _run(args: argparse.Namespace, work: Path, checks: list[Check]) -> list[dict[str, Any]]:
    model = find_model(args.model, args.cache)
    tokens = args.prompt_tokens + args.output_tokens
    config = Config(model, args.modes[0], args.attention, batches=args.batches, tokens_a_request=tokens)
    attention = args.attention or ("triton" if cuda_available() else "torch_native")
    plan = Plan(
        *(model.name, attention, args.modes, args.batches),
        *(args.prompt_tokens, args.output_tokens, vocabulary(model)),
    )
    waves: list[dict[str, Any]] = []
    with (
        config.server(work / "server.log", args.start_timeout_s) as server,
        BenchClient(server.url) as client,
    ):
        asynchronous = client.zos()["steps"]["asynchronous"]
        for wave in record(client, plan):
            waves.append(wave)
            checks += check(wave, asynchronous=asynchronous)
            print(f"  batch {wave['batch']}, {wave['mode']}", file=sys.stderr, flush=True)
    return waves


def _print(waves: Sequence[dict[str, Any]], checks: Sequence[Check]) -> None:
    names = ("batch", "mode", "step us", "device", "idle", "copy", "device over floor")
    table = Table(*names, title="medians of a decode step")
    for wave in waves:
        table.add_row(*row(wave))
    out = console()
    out.print(table)
    for one in checks:
        if not one.ok:
            out.print(f"FAIL {one.what}: {one.found}", markup=False)
    out.print(f"{sum(one.ok for one in checks)} of {len(checks)} checks hold")
