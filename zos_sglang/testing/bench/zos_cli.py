"""Command line of scripts/bench_zos.py."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zos_sglang.modes import MODES
from zos_sglang.testing.bench.checkpoint import vocabulary
from zos_sglang.testing.bench.command import Command, result_flags, say
from zos_sglang.testing.bench.flags import (
    model_flags,
    modes_of,
    numbers,
    server_flags,
    server_options,
)
from zos_sglang.testing.bench.floor_steps import REACH
from zos_sglang.testing.bench.plot import draw
from zos_sglang.testing.bench.record import provenance
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.bench.zos import Budget, Plan
from zos_sglang.testing.bench.zos_file import ResultFile, up_to_date
from zos_sglang.testing.bench.zos_run import Session, log_interval, run, true_sync
from zos_sglang.testing.bench.zos_table import print_summary
from zos_sglang.testing.compare.prompts import ModelInfo
from zos_sglang.testing.server import cuda_available

#: Mode off is final until a restart, so it cannot take turns.
SWITCHABLE = tuple(mode for mode in MODES if mode != "off")

DESCRIPTION = f"""\
Decode steps of every mode in one server process, switched live, over prompt lengths, answer lengths and
batch sizes; then the same waves in a process of stock SGLang with --disable-overlap-schedule. A wave is
one batch, greedy, from an empty prefix cache. Its figures:

  step          wall time from decode step to decode step (step records'; the separate process: its log's)
  floor         stock's decode graph of that batch, replayed 200 times amid an untimed wave of mode
                resident, at the KV length of that moment; absent without CUDA graphs
  step/floor    the median step at the floor's own KV length (within {REACH} tokens), not of the whole
                wave, over the floor: longer sequences take longer steps; absent with --turns, where
                steps do not tell their length
  tokens/s      output tokens over the wall time of the decode part; ratios within each repeat, over stock
  CPU           CPU time of the scheduler's thread per iteration, without the model's forward
  lane          share of the wave's row-steps that the resident lane ran usefully; copies to the device per
                lane step; row-steps wasted
  answers       digests of all output tokens, every mode against stock, repeat by repeat

--out holds bench_zos.json (rewritten after every repeat), waves.jsonl (every sample), bench_zos.png and
the servers' logs. An interrupted run keeps all complete repeats; --resume goes on, with other batches,
lengths, repeats or another --attention too, but not with other code, versions, machine or settings.
--plot-only gives an older bench_zos.json the steps at the floor's length from its waves.jsonl."""


def parser() -> argparse.ArgumentParser:
    """The flags; the defaults are those of the measurement on a CUDA device."""
    found = argparse.ArgumentParser(
        prog="bench_zos.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog="Exit code: 0 all answers equal, 1 answers differ between modes, 2 could not run.",
    )
    found.add_argument(
        "--modes",
        type=modes_of(SWITCHABLE, least=2),
        default="sync,stock,overlap,resident",
        help="(sync,stock,overlap,resident)",
    )
    found.add_argument("--batches", type=numbers, default=(1, 16, 64, 256), help="(1,16,64,256)")
    found.add_argument("--prompt-lengths", type=numbers, default=(32, 4096), help="tokens (32,4096)")
    found.add_argument("--output-tokens", type=numbers, default=(256, 1024), help="tokens (256,1024)")
    found.add_argument(
        "--shapes",
        type=_shapes,
        metavar="IN:OUT,...",
        help="pairs of prompt and output tokens, instead of each length with each",
    )
    found.add_argument("--repeats", type=int, default=5, help="timed repeats, in alternating order (5)")
    found.add_argument("--warmup", type=int, default=2, help="untimed waves of each mode before them (2)")
    found.add_argument(
        "--turns", type=int, default=0, help="turns of each mode within every wave, 0 for whole waves (0)"
    )
    found.add_argument(
        "--floors", type=int, help="waves that ask for the floor (1 with CUDA graphs, 0 without)"
    )
    found.add_argument(
        "--separate-sync",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also start stock with --disable-overlap-schedule (on)",
    )
    found.add_argument(
        "--side-by-side",
        action="store_true",
        help="start that process together with the first one and let it idle until its turn: saves a"
        " start, both must fit",
    )
    found.add_argument(
        "--prompts",
        choices=("random", "english"),
        default="random",
        help="random token ids, or sentences in the tokens of the model's own tokenizer (random)",
    )
    model_flags(found)
    server_flags(found)
    result_flags(found)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, or draw what was measured; returns the exit code."""
    command = Command("bench_zos", _measure, up_to_date, _draw, print_summary, exit_code)
    return command.run(parser(), argv)


def exit_code(data: dict[str, Any]) -> int:
    """1 if any point's answers differ, else 2 if a point could not run or nothing was compared, else 0."""
    verdicts = {entry["verdict"] for entry in data["summary"]["answers"]}
    if verdicts & {"different", "unstable"}:
        return 1
    broken = any(point["error"] for point in data["points"])
    return 2 if broken or "equal" not in verdicts else 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    budget = Budget(args.limit_s)
    session = _session(args)
    head = provenance("bench_zos")
    identity = {
        "model": args.model,
        "modes": args.modes,
        "turns": args.turns,
        "graphs": args.graphs,
        "dtype": args.dtype,
        "env": args.env,
        "server_args": args.server_args,
        "prompts": args.prompts,
    }
    cuda, config = cuda_available(), session.config
    servers = {
        # The model's path is this machine's business; the flags are what was measured.
        "live": {"args": config.command_args(cuda), "env": config.environment(cuda)},
        "separate": {"args": true_sync(config).command_args(cuda)} if args.separate_sync else None,
    }
    result = ResultFile(args.out, head, identity, {"servers": servers}, args.resume)
    run(session, result, args.out, budget)
    return result.data


def _session(args: argparse.Namespace) -> Session:
    shapes = args.shapes or tuple((p, o) for p in args.prompt_lengths for o in args.output_tokens)
    model = find_model(args.model, args.cache)
    config = Config(
        model=model,
        mode=args.modes[0],
        batches=args.batches,
        tokens_a_request=max(prompt + output for prompt, output in shapes),
        **server_options(args, log_interval([output for _, output in shapes])),
    )
    floors = args.floors
    if floors is None:
        floors = 1 if cuda_available() and args.graphs == "on" else 0
    english = ModelInfo(model) if args.prompts == "english" else None
    return Session(
        config=config,
        plan=Plan(args.modes, args.repeats, args.warmup, args.turns, floors, vocabulary(model), english),
        attention=args.attention or ("triton" if cuda_available() else "torch_native"),
        shapes=shapes,
        batches=args.batches,
        separate=args.separate_sync,
        side_by_side=args.side_by_side,
        start_timeout_s=args.start_timeout_s,
        say=say,
    )


def _draw(data: Mapping[str, Any], path: Path) -> None:
    draw(data["summary"], data["identity"]["model"], path)


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    try:
        found = tuple((int(a), int(b)) for a, b in (word.split(":") for word in text.split(",")))
    except ValueError:
        found = ((0, 0),)
    if min(min(shape) for shape in found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of shapes such as 32:1024,4096:256")
    return found
