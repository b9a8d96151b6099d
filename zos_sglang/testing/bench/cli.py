"""Command line of scripts/bench_overlap.py."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.checkpoint import vocabulary
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.command import measured
from zos_sglang.testing.bench.ending import COULD_NOT
from zos_sglang.testing.bench.flags import (
    json_flag,
    model_flags,
    modes_of,
    numbers,
    server_flags,
    server_options,
)
from zos_sglang.testing.bench.measure import Settings, equal_everywhere, measure
from zos_sglang.testing.bench.record import print_table, provenance, write_json
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.server import cuda_available

MODES = ("sync", "stock", "overlap")


def parser() -> argparse.ArgumentParser:
    """The flags; the defaults are the ones of the CPU measurement."""
    found = argparse.ArgumentParser(
        prog="bench_overlap.py",
        description="Modes against each other in one server process, switched live: CPU time of the "
        "scheduler thread per decode step outside the model's forward, wall time per step, and the answers.",
        epilog="Exit code: 0 all answers equal, 1 answers differ between modes, 2 could not run.",
    )
    modes = modes_of(MODES, least=2)
    found.add_argument("--modes", type=modes, default=("stock", "overlap"), help="stock,overlap[,sync]")
    found.add_argument("--batches", type=numbers, default=(1, 16, 64), help="batch sizes (1,16,64)")
    found.add_argument("--repeats", type=int, default=5, help="repeats, in alternating order (5)")
    found.add_argument("--prompt-tokens", type=int, default=32)
    found.add_argument("--output-tokens", type=int, default=240)
    found.add_argument(
        "--turns",
        type=int,
        default=6,
        help="turns of each mode within every wave, 0 for waves of their own (6)",
    )
    model_flags(found)
    server_flags(found)
    found.add_argument("--title", help="name of the measurement in table and file")
    found.add_argument("--log", type=Path, help="the server's log (default: a temporary file)")
    found.add_argument("--out", type=Path, help="write the result as JSON")
    json_flag(found)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure once; returns the exit code."""
    args = parser().parse_args(argv)
    result = measured("bench_overlap", lambda: _run(args))
    if result is None:
        return COULD_NOT
    if args.out:
        write_json(args.out, result)
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
        for batch, entry in result["digests"].items():
            if entry["verdict"] != "equal":
                print(f"batch {batch}: answers {entry['verdict']}: {entry['by_mode']}", file=sys.stderr)
    return 0 if equal_everywhere(result) else 1


def _run(args: argparse.Namespace) -> dict[str, Any]:
    model = find_model(args.model, args.cache)
    config = Config(
        model=model,
        mode=args.modes[0],
        batches=args.batches,
        tokens_a_request=args.prompt_tokens + args.output_tokens,
        **server_options(args),
    )
    settings = Settings(
        modes=args.modes,
        batches=args.batches,
        repeats=args.repeats,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        vocab=vocabulary(model),
        turns=args.turns,
    )
    with tempfile.TemporaryDirectory() as scratch:
        server = config.server(args.log or Path(scratch) / "server.log", args.start_timeout_s)
        with server, BenchClient(server.url) as client:
            found = measure(
                client, settings, args.title or args.model, say=lambda line: print(line, file=sys.stderr)
            )
    # The model's path and the log's are this machine's business; the flags are what was measured.
    head = provenance("bench_overlap")
    set_by_us = config.environment(cuda_available())
    return {**head, "server": {"model": args.model, "args": server.command[9:], "env": set_by_us}, **found}
