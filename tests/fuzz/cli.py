"""`scripts/fuzz.py`: so many inputs for each target; exit code 1 with the smallest input that fails."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.fuzz.runner import Outcome, Target, run
from zos_sglang.testing.bench import record

TARGETS = ("settings", "control", "trace", "patches", "ranks")


def target(name: str) -> Target:
    """A target by name; one that needs SGLang imports it only now."""
    found: Target = importlib.import_module(f"tests.fuzz.{name}").TARGET
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Hostile input for everything that reads what others wrote. Exit code 1: an input that "
        "was not taken as promised, made as small as hypothesis can."
    )
    parser.add_argument("--target", default=",".join(TARGETS), help="names with commas (default: all)")
    parser.add_argument("--inputs", type=int, default=2000, help="of each target, at least (default 2000)")
    help_ = "of each target, at most (a batch is ended); a later run with another seed goes on"
    parser.add_argument("--seconds", type=float, default=math.inf, help=help_)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the result there; targets add up")
    args = parser.parse_args(argv)
    names = args.target.split(",")
    if unknown := set(names) - set(TARGETS):
        parser.error(f"--target {', '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
    outcomes = []
    for name in names:
        one = run(target(name), args.inputs, args.seed, _progress(args.inputs), args.seconds)
        outcomes.append(one)
        _tell(one)
        if args.out is not None:
            _keep(args.out, _result([one]))
    if args.json:
        print(json.dumps(_result(outcomes), indent=2))
    return 1 if any(one.failure for one in outcomes) else 0


def _result(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {**record.provenance("fuzz"), "targets": {one.target: asdict(one) for one in outcomes}}


def _progress(inputs: int) -> Callable[[Outcome], None]:
    def report(one: Outcome) -> None:
        rate = one.inputs / max(one.seconds, 0.001)
        print(f"\r{one.target}: {one.inputs} of {inputs}, {rate:.0f} a second  ", end="", file=sys.stderr)

    return report


def _tell(one: Outcome) -> None:
    became = ", ".join(f"{word} {count}" for word, count in sorted(one.became.items()))
    print(f"\n{one.target}: {one.inputs} inputs in {one.seconds} s ({became})", file=sys.stderr)
    if one.failure:
        print(f"FAILED: {one.failure['error']}\ninput: {one.failure['input']}", file=sys.stderr)
        print(one.failure["traceback"], file=sys.stderr)


def _keep(path: Path, result: dict[str, Any]) -> None:
    """Add to what earlier runs have kept, so that a long run may be done in parts, each with its own seed."""
    before = json.loads(path.read_text())["targets"] if path.exists() else {}
    for name, now in result["targets"].items():
        runs = [*before.get(name, {}).get("runs", []), now]
        inputs = sum(run["inputs"] for run in runs)
        before[name] = {
            "inputs": inputs,
            "failures": sum(run["failure"] is not None for run in runs),
            "runs": runs,
        }
    record.write_json(path, {**result, "targets": before})
