"""Command line of scripts/bench_overlap.py."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.checkpoint import vocabulary
from zos_sglang.testing.bench.client import BenchClient, BenchError
from zos_sglang.testing.bench.measure import Settings, equal_everywhere, measure
from zos_sglang.testing.bench.record import print_table, provenance, write_json
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.bench.stats import TooFewSteps
from zos_sglang.testing.models import ModelError
from zos_sglang.testing.server import ServerFailed, cuda_available

MODES = ("sync", "stock", "overlap")


def parser() -> argparse.ArgumentParser:
    """The flags; the defaults are the ones of the CPU measurement."""
    found = argparse.ArgumentParser(
        prog="bench_overlap.py",
        description="Modes against each other in one server process, switched live: CPU time of the "
        "scheduler thread per decode step outside the model's forward, wall time per step, and the answers.",
        epilog="Exit code: 0 all answers equal, 1 answers differ between modes, 2 could not run.",
    )
    found.add_argument("--modes", type=_modes, default=("stock", "overlap"), help="stock,overlap[,sync]")
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
    found.add_argument("--model", default="tiny", help="tiny, qwen3-0.6b-shape or a folder")
    found.add_argument(
        "--graphs", choices=("on", "off"), default="on", help="CUDA graphs; no effect on the CPU"
    )
    found.add_argument("--attention", help="attention backend (triton on CUDA, torch_native on the CPU)")
    found.add_argument("--dtype", help="bfloat16 on CUDA, float32 on the CPU")
    found.add_argument("--env", action="append", default=[], metavar="K=V", help="for the server; repeatable")
    found.add_argument("--server-args", default="", help="more flags for the server, as one string")
    found.add_argument("--title", help="name of the measurement in table and file")
    found.add_argument("--cache", type=Path, default=Path(".cache"), help="where models are kept (.cache)")
    found.add_argument("--log", type=Path, help="the server's log (default: a temporary file)")
    found.add_argument("--out", type=Path, help="write the result as JSON")
    found.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure once; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        result = _run(args)
    except (ServerFailed, BenchError, TooFewSteps, ModelError, OSError, ValueError) as error:
        print(f"bench_overlap: error: {error}", file=sys.stderr)
        return 2
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
    env = dict(pair(text) for text in args.env)
    model = find_model(args.model, args.cache)
    config = Config(
        model=model,
        mode=args.modes[0],
        attention=args.attention,
        dtype=args.dtype,
        graphs=args.graphs == "on",
        batches=args.batches,
        tokens_a_request=args.prompt_tokens + args.output_tokens,
        env=env,
        args=shlex.split(args.server_args),
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
        server = config.server(args.log or Path(scratch) / "server.log")
        with server, BenchClient(server.url) as client:
            found = measure(
                client, settings, args.title or args.model, say=lambda line: print(line, file=sys.stderr)
            )
    # The model's path and the log's are this machine's business; the flags are what was measured.
    head = provenance("bench_overlap")
    set_by_us = config.environment(cuda_available())
    return {**head, "server": {"model": args.model, "args": server.command[9:], "env": set_by_us}, **found}


def _modes(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    if unknown := [word for word in words if word not in MODES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(MODES)}")
    if len(set(words)) < max(2, len(words)):
        raise argparse.ArgumentTypeError("name at least two different modes")
    return words


def numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        found = (0,)
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of batch sizes such as 1,16,64")
    return found


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"--env {text!r}: write NAME=VALUE")
    return name, value
