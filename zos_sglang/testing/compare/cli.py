"""Command line of the regression. Exit codes: 0 all equal, 1 a difference, 2 bad usage."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from rich.console import Console

from zos_sglang.console import console
from zos_sglang.modes import MODES
from zos_sglang.testing.bench.ending import exiting_on
from zos_sglang.testing.bench.flags import env_flag, pair
from zos_sglang.testing.bench.record import provenance
from zos_sglang.testing.compare import report, runner
from zos_sglang.testing.compare.lane import missing_from_suite
from zos_sglang.testing.compare.prompts import ModelInfo
from zos_sglang.testing.compare.scenario import Scenario
from zos_sglang.testing.compare.scenarios import ALL
from zos_sglang.testing.models import make_smollm2, make_tiny
from zos_sglang.testing.server import cuda_available

OUR_MODES = tuple(mode for mode in MODES if mode != "off")
#: Of a measurement's head, what `run` in the JSON does not say otherwise.
_HEAD = ("commit", "date", "command", "machine")
TINY = {"tiny": "qwen3", "tiny-qwen3": "qwen3", "tiny-llama": "llama"}


def main(argv: list[str] | None = None) -> int:
    """Run the regression; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    out = console(sys.stderr if args.json else None)
    scenarios = _chosen(parser, args)
    if args.list and args.json:
        print(json.dumps([_listed(scenario) for scenario in scenarios]))
        return 0
    if args.list:
        for scenario in scenarios:
            where = " (not on CPU)" if scenario.not_on_cpu else ""
            out.print(f"{scenario.name:20} {scenario.about} [{scenario.config.name}]{where}", markup=False)
        return 0
    cpu = not cuda_available()
    logs = Path(tempfile.mkdtemp(prefix="compare-stock-"))
    model, stock = ModelInfo(_model(parser, args)), {}  # type: ignore[var-annotated]
    failed = False
    for mode in args.mode:
        plan = runner.Plan(
            model=model,
            mode=None if args.ours == "stock-process" else mode,
            logs=logs / mode,
            cpu=cpu,
            limit_s=args.timeout,
            # A tiny model's operators are too short to share: on a busy machine, threads that wait for
            # one another make a step 40 times longer.
            env={"OMP_NUM_THREADS": "1"} if args.model in TINY else {},
            args=tuple(shlex.split(args.server_args)),
            our_env=dict(map(pair, args.env)),
            say=lambda text: out.print(text, markup=False, highlight=False, soft_wrap=True),
            stock=stock,
        )
        with exiting_on(signal.SIGTERM):
            failed |= not _run(out, args, plan, scenarios)
    if args.keep_logs or failed:
        out.print(f"server logs: {logs}")
    else:
        shutil.rmtree(logs, ignore_errors=True)
    return 1 if failed else 0


def _run(out: Console, args: argparse.Namespace, plan: runner.Plan, scenarios: list[Scenario]) -> bool:
    """Play in one mode, print and write what came of it; whether all is well."""
    begun = time.monotonic()
    results = runner.run(plan, scenarios)
    seconds = time.monotonic() - begun
    label = "a second stock process" if plan.mode is None else f"ours in mode {plan.mode}"
    title = f"stock against {label}, {args.model}, {seconds:.0f} s"
    resident = plan.mode == "resident"
    report.print_report(out, results, title, resident=resident)
    found = report.document(results, _describe(args, plan, seconds), resident=resident)
    unseen = _unseen(args, results) if resident else []
    found["unseen"] = unseen
    if args.json:
        print(report.as_text(found), flush=True)
    if args.out is not None:
        report.write_json(Path(args.out.replace("{mode}", plan.mode or "stock-process")), found)
    for sentence in unseen:
        out.print(sentence, markup=False, soft_wrap=True)
    return not unseen and all(result.passed for result in results)


def _listed(scenario: Scenario) -> dict[str, object]:
    """One line of --list, for scripts."""
    return {
        "name": scenario.name,
        "about": scenario.about,
        "config": scenario.config.name,
        "on_cpu": not scenario.not_on_cpu,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare_stock",
        description="Play the same requests on stock SGLang and on ours, and compare every answer.",
        epilog="Exit code: 0 all equal, 1 a difference, 2 bad usage.",
    )
    parser.add_argument("--suite", choices=("smoke", "full"), default="smoke", help="default: smoke")
    parser.add_argument(
        "--scenario", action="append", metavar="NAME", help="only this one, of any suite (repeatable)"
    )
    parser.add_argument("--model", default="tiny", help="tiny, tiny-llama, smollm2 or a folder")
    parser.add_argument(
        "--config", action="append", metavar="NAME", help="only scenarios of this server start (repeatable)"
    )
    parser.add_argument(
        "--mode",
        type=_modes,
        default="overlap",
        metavar="MODE[,MODE]",
        help=f"modes of ours, of {', '.join(OUR_MODES)}; stock is played once (overlap)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON, one line a mode; the rest on stderr"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the results there; with several modes {mode} stands for each"
    )
    parser.add_argument("--keep-logs", action="store_true", help="keep the servers' logs")
    parser.add_argument(
        "--server-args", default="", metavar="FLAGS", help="more flags for all servers, as one string"
    )
    env_flag(parser)
    parser.add_argument("--list", action="store_true", help="list the scenarios and stop")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache"), help="where demo models are made (.cache)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for one scenario on one server (300)"
    )
    # Stock against stock shows which scenarios repeat themselves at all; not for users.
    parser.add_argument(
        "--ours", choices=("plugin", "stock-process"), default="plugin", help=argparse.SUPPRESS
    )
    return parser


def _modes(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    if unknown := [word for word in words if word not in OUR_MODES]:
        raise argparse.ArgumentTypeError(f"invalid choice: {unknown[0]!r}, not one of {', '.join(OUR_MODES)}")
    return words


def _chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Scenario]:
    if len(args.mode) > 1 and args.out is not None and "{mode}" not in args.out:
        parser.error(f"--out {args.out}: with several modes, write {{mode}} where the name of each goes")
    for flag, names, known in (
        ("scenario", args.scenario, [scenario.name for scenario in ALL]),
        ("config", args.config, sorted({scenario.config.name for scenario in ALL})),
    ):
        for name in names or ():
            if name not in known:
                parser.error(f"--{flag} {name}: unknown; one of {', '.join(known)}")
    named = [s for s in ALL if args.scenario is None or s.name in args.scenario]
    here = [s for s in named if args.config is None or s.config.name in args.config]
    return [s for s in here if args.scenario is not None or s.smoke or args.suite == "full"]


def _model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Path:
    if args.model in TINY:
        return make_tiny(TINY[args.model], args.cache / f"tiny-{TINY[args.model]}")
    if args.model == "smollm2":
        return make_smollm2(args.cache / "smollm2")
    path = Path(args.model)
    if not (path / "config.json").is_file():
        parser.error(f"--model {args.model}: neither tiny, tiny-llama, smollm2 nor a folder with config.json")
    return path.resolve()


def _unseen(args: argparse.Namespace, results: list[runner.Result]) -> list[str]:
    """What the lane never did although the whole suite was played."""
    if args.suite != "full" or args.scenario is not None or args.config is not None:
        return []
    return missing_from_suite(report.lane_total(results))


def _describe(args: argparse.Namespace, plan: runner.Plan, seconds: float) -> dict[str, object]:
    return {
        "suite": args.scenario or args.suite,
        **({"configs": args.config} if args.config else {}),
        "model": args.model,
        "mode": plan.mode or "stock-process",
        "server_args": args.server_args,
        "env": dict(plan.our_env),
        "device": "cpu" if plan.cpu else "cuda",
        "seconds": round(seconds, 1),
        "versions": {name: metadata.version(name) for name in ("zos-sglang", "sglang", "torch")},
        **{name: value for name, value in provenance("compare_stock").items() if name in _HEAD},
    }
