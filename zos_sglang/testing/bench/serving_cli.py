"""Command line of scripts/bench_serving.py."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from zos_sglang.modes import MODES
from zos_sglang.testing.bench import store
from zos_sglang.testing.bench.checkpoint import context
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.command import EXIT_CODES, Command, exit_of, result_flags, say
from zos_sglang.testing.bench.flags import (
    graph_flag,
    is_exact,
    model_flags,
    modes_of,
    numbers,
    positive,
    rates,
    server_flags,
    server_options,
)
from zos_sglang.testing.bench.record import provenance
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.bench.serving import DATASETS, Lengths, Target, points
from zos_sglang.testing.bench.serving_client import ForkedRuns, FreshRuns, Runs
from zos_sglang.testing.bench.serving_plot import draw
from zos_sglang.testing.bench.serving_run import Bench, Plan
from zos_sglang.testing.bench.serving_summary import summarise
from zos_sglang.testing.bench.serving_table import print_summary
from zos_sglang.testing.bench.sharegpt import conversations
from zos_sglang.testing.bench.stats import base_of
from zos_sglang.testing.bench.words import tokenizer_of
from zos_sglang.testing.bench.zos import Budget
from zos_sglang.testing.server import cuda_available

KIND, NAME = "bench_serving", "bench_serving.json"
#: How many a file of conversations has at least: a larger run changes the file, and so all prompts.
_CONVERSATIONS = 500
#: Mode off is final until a restart, so it cannot take turns.
SWITCHABLE = tuple(mode for mode in MODES if mode != "off")

DESCRIPTION = """\
SGLang's own serving benchmark (python -m sglang.bench_serving) against one server process, in every mode in
turn: switched live, from an empty prefix cache, the same requests, in alternating order. All figures are
SGLang's. Nothing is downloaded.

  random                   tokens of the file below, repeated or cut to random lengths
  sharegpt                 bench_serving's reader of ShareGPT, on a file made here with such lengths
  generated-shared-prefix  groups of prompts that share a prefix

  load       a rate (Poisson arrivals), or a number of requests at a time (the next when one is answered)
  TTFT       from sending a request to its first token
  ITL        per token: the time since the event before, spread over the tokens that came at once
  TPOT       per request: the time after the first token over the number of tokens after it
  E2E        from sending a request to its last token
  cached     prompt tokens that were in the prefix cache
  lane       share of the decode steps that the resident lane ran
  client     CPU time of SGLang's benchmark over the run's length, that of making the prompts too; near
             1 the client is what is measured
  answers    requests whose text differs from stock's in the same repeat; stock's own row: from its first
             repeat. Batches depend on the clock here, and in bfloat16 a row's rounding depends on its batch.

--out holds bench_serving.json (rewritten when a load was run in all modes), bench_serving.png, and the logs.
An interrupted run keeps what it has; --resume goes on, with more repeats, rates, concurrencies or datasets
too, but not with other code, versions, machine or settings."""


def parser() -> argparse.ArgumentParser:
    """The flags; the defaults are those of the measurement on a CUDA device."""
    found = argparse.ArgumentParser(
        prog="bench_serving.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=EXIT_CODES,
    )
    add = found.add_argument
    add(
        "--modes",
        type=modes_of(SWITCHABLE, 2),
        default="stock,overlap,resident",
        help="(stock,overlap,resident)",
    )
    add("--datasets", type=_datasets, default=DATASETS, help=f"({','.join(DATASETS)})")
    add("--rates", type=rates, default=(4.0, 16.0), help="requests a second (4,16)")
    add("--concurrencies", type=numbers, default=(8, 32), help="requests at a time (8,32)")
    add("--requests", type=positive, default=200, help="requests of a run, at most (200)")
    add("--seconds", type=float, default=10, help="seconds of arrivals of a run at a rate, at most (10)")
    add("--rounds", type=positive, default=4, help="requests for each place of a concurrency, at most (4)")
    add("--repeats", type=positive, default=3, help="repeats, in alternating order (3)")
    add("--seed", type=int, default=0, help="of prompts and arrival times (0)")
    _length_flags(found)
    add("--timeout-s", type=float, default=180, help="for each run (180)")
    add(
        "--client",
        choices=("forked", "fresh"),
        default="forked",
        help="import SGLang's benchmark once and fork for each run, or start it anew each time: ten seconds"
        " more a run (forked)",
    )
    add(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="differing answers are a failure (on a CPU in float32)",
    )
    model_flags(found)
    server_flags(found)
    graph_flag(found)
    result_flags(found)
    return found


def _length_flags(found: argparse.ArgumentParser) -> None:
    kept, add = Lengths(), found.add_argument
    for flag, name, what in (
        ("--in", "prompt", "tokens of a random prompt, at most"),
        ("--out-tokens", "output", "tokens of an answer to a random or shared prompt, at most"),
        ("--prefix", "prefix", "tokens of a shared prefix"),
        ("--question", "question", "tokens after it"),
        ("--groups", "groups", "shared prefixes"),
    ):
        default = getattr(kept, name)
        add(flag, dest=name, type=positive, default=default, help=f"{what} ({default})")
    add(
        "--range-ratio",
        type=_share,
        default=kept.range_ratio,
        help=f"random lengths go down to this share of the length ({kept.range_ratio})",
    )
    add("--scale", type=_share, default=kept.scale, help=f"ShareGPT's lengths times this ({kept.scale:g})")


def main(argv: list[str] | None = None) -> int:
    """Measure, or draw what was measured; returns the exit code."""
    return Command(KIND, _measure, load, _draw, print_summary, exit_code).run(parser(), argv)


def exit_code(data: dict[str, Any]) -> int:
    """See `exit_of`."""
    failed = any(run["failed"] for run in data["runs"])
    return exit_of(data["summary"]["rows"], failed=failed, exact=data["identity"]["exact"])


def load(out: Path) -> dict[str, Any]:
    """The result in folder `out`, with a summary as this version makes it. Raises ResumeError."""
    data = store.load(out / NAME, KIND)
    data["summary"] = _summary(data["identity"]["modes"])(data["runs"])
    return data


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    budget = Budget(args.limit_s)
    model = find_model(args.model, args.cache)
    tokenizer = tokenizer_of(model, args.cache)
    plan, config = _plan(args, model), _config(args, model, tokenizer)
    # Some are too long for the model, so twice as many as the largest run reads.
    count = max(_CONVERSATIONS, 2 * max(point.requests for point in plan.points))
    made = conversations(tokenizer, count, args.seed, args.scale)
    results = _results(args, config, [count, hashlib.sha256(made.encode()).hexdigest()[:16]])
    if not plan.missing(results):
        results.finish()
        return results.data
    out = args.out.resolve()
    file = out / "conversations.json"
    file.write_text(made)
    server = config.server(out / f"server-{len(results.data['calls']) - 1}.log", args.start_timeout_s)
    with _runs(args.client, out) as runs, server, BenchClient(server.url) as client:
        if isinstance(runs, ForkedRuns):
            runs.ready()
        target = Target(server.url, tokenizer.resolve(), file, context(model))
        whole = not client.info()["incremental_streaming_output"]
        Bench(client, runs, target, out, budget, whole, say).measure(plan, results)
    return results.data


def _results(args: argparse.Namespace, config: Config, made: list[Any]) -> store.Store:
    """The result file, new or to go on with. Raises ResumeError."""
    identity = {**_identity(args, config, cuda_available()), "conversations": made}
    # The load says whether the machine had other work.
    call = {"load_average": os.getloadavg()}
    path = args.out / NAME
    found = store.Store(path, provenance(KIND), identity, _summary(args.modes), call=call, resume=args.resume)
    path.parent.mkdir(parents=True, exist_ok=True)
    return found


@contextmanager
def _runs(kind: str, out: Path) -> Iterator[Runs]:
    if kind == "fresh":
        yield FreshRuns()
        return
    with ForkedRuns(out / "client.log") as runs:
        yield runs


def _summary(modes: Any) -> Any:
    return lambda runs: summarise(runs, modes, base_of(modes))


def _plan(args: argparse.Namespace, model: Path) -> Plan:
    """Raises ValueError if the model is too short for the requests."""
    lengths = _lengths(args)
    positions = context(model)
    for dataset in args.datasets:
        if (needed := lengths.longest(dataset)) > positions:
            flags = (
                "--in and --out-tokens" if dataset == "random" else "--prefix, --question and --out-tokens"
            )
            raise ValueError(f"{flags} need {needed} positions, the model has {positions}")
    found = points(
        args.datasets,
        args.rates,
        args.concurrencies,
        lengths,
        most=args.requests,
        seconds=args.seconds,
        rounds=args.rounds,
    )
    return Plan(args.modes, tuple(found), args.repeats, lengths, args.seed, args.timeout_s)


def _lengths(args: argparse.Namespace) -> Lengths:
    return Lengths(**{field.name: getattr(args, field.name) for field in fields(Lengths)})


def _config(args: argparse.Namespace, model: Path, tokenizer: Path) -> Config:
    own = [] if tokenizer == model else ["--tokenizer-path", str(tokenizer)]
    lengths = _lengths(args)
    return Config(
        model=model,
        mode=args.modes[0],
        batches=args.graph_batches,
        tokens_a_request=max(lengths.longest(dataset) for dataset in DATASETS),
        tokenizer=True,
        **server_options(args, own),
    )


def _identity(args: argparse.Namespace, config: Config, cuda: bool) -> dict[str, Any]:
    """What two calls must have in common. Paths are this machine's business, flags are not."""
    flags = config.command_args(cuda)
    if "--tokenizer-path" in flags:
        flags[flags.index("--tokenizer-path") + 1] = "words"
    return {
        "model": args.model,
        "modes": args.modes,
        "lengths": asdict(_lengths(args)),
        "seed": args.seed,
        "exact": is_exact(args, cuda),
        "client": args.client,
        "server_args": flags,
        "server_env": config.environment(cuda),
    }


def _draw(data: Mapping[str, Any], path: Path) -> None:
    draw(data["summary"], f"sglang.bench_serving, {data['identity']['model']}", path)


def _datasets(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    if unknown := [word for word in words if word not in DATASETS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(DATASETS)}")
    return tuple(dict.fromkeys(words))


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value
