"""Command line of scripts/bench_arrivals.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zos_sglang.modes import MODES
from zos_sglang.testing.bench.arrivals import Load, count_of
from zos_sglang.testing.bench.arrivals_load import Clients
from zos_sglang.testing.bench.arrivals_plot import draw
from zos_sglang.testing.bench.arrivals_run import NAME, Bench, Plan, open_store
from zos_sglang.testing.bench.arrivals_table import print_summary
from zos_sglang.testing.bench.checkpoint import context, vocabulary
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.command import EXIT_CODES, Command, exit_of, result_flags, say
from zos_sglang.testing.bench.flags import (
    clients_of,
    graph_flag,
    is_exact,
    model_flags,
    modes_of,
    positive,
    rates,
    server_flags,
    server_options,
)
from zos_sglang.testing.bench.record import provenance
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.bench.zos import Budget
from zos_sglang.testing.server import cuda_available

#: Mode off is final until a restart, so it cannot take turns.
SWITCHABLE = tuple(mode for mode in MODES if mode != "off")
#: Positions that a request cannot use.
_KEPT_BACK = 2

DESCRIPTION = """\
Requests that arrive at random times (Poisson) at one server process, streamed over HTTP; every mode gets the
same prompts at the same times, switched live, from an empty prefix cache, in alternating order.

  tokens/s   output tokens over the time from the first request to the last token
  TTFT       from sending a request to its first token
  ITL        per token: the time since the arrival before, spread over the tokens that came at once
  gap        the same without spreading, one per arrival: a stall shows here whatever it brought
  E2E        from sending a request to its last token
  bursts     arrivals of more than one token (full_events in the file: events of more than one)
  lane       share of the decode steps that the resident lane ran
  client     share of a core that the busiest client process used, and P99 of how late its event loop was
  answers    requests whose token ids differ from stock's in the same repeat; stock's own row: from its first
             repeat. Batches depend on the clock here, and in bfloat16 a row's rounding depends on its batch.

--out holds bench_arrivals.json (rewritten after every rate of every repeat), bench_arrivals.png and the
server's log. An interrupted run keeps what it has; --resume goes on, with more repeats too, but not with
other code, versions, machine or settings."""


def parser() -> argparse.ArgumentParser:
    """The flags; the defaults are those of the measurement on a CUDA device."""
    found = argparse.ArgumentParser(
        prog="bench_arrivals.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=EXIT_CODES,
    )
    add = found.add_argument
    add("--modes", type=modes_of(SWITCHABLE, 2), default="stock,resident", help="(stock,resident)")
    add("--rates", type=rates, default=(4.0, 16.0, 64.0), help="requests a second (4,16,64)")
    add("--in", dest="prompt", type=positive, default=256, help="tokens of a prompt (256)")
    add("--out-tokens", dest="output", type=positive, default=256, help="tokens of an answer (256)")
    add("--requests", type=positive, default=200, help="requests of a run, at most (200)")
    add("--seconds", type=float, default=20, help="seconds of arrivals of a run, at most (20)")
    add("--repeats", type=positive, default=5, help="repeats, in alternating order (5)")
    add("--seed", type=int, default=0, help="of arrival times and prompts (0)")
    add("--pin", type=int, metavar="CORE", help="the core of the scheduler's thread (any)")
    add("--clients", type=positive, help="client processes (4, or 1 on fewer than 8 cores)")
    add("--timeout-s", type=float, default=120, help="for each request (120)")
    add(
        "--cumulative",
        action="store_true",
        help="events carry all token ids so far, as without --incremental-streaming-output",
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


def main(argv: list[str] | None = None) -> int:
    """Measure, or draw what was measured; returns the exit code."""
    command = Command("bench_arrivals", _measure, load, _draw, print_summary, exit_code)
    return command.run(parser(), argv)


def exit_code(data: dict[str, Any]) -> int:
    """See `exit_of`."""
    failed = any(run["failed"] for run in data["runs"])
    return exit_of(data["summary"]["rows"], failed=failed, exact=data["settings"]["exact"])


def load(out: Path) -> dict[str, Any]:
    """The result file in folder `out`. Raises ValueError if it is something else's, OSError if absent."""
    data = json.loads((out / NAME).read_text())
    if not isinstance(data, dict) or data.get("kind") != "bench_arrivals":
        raise ValueError(f"{out / NAME} is not a result of bench_arrivals")
    return data


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    budget = Budget(args.limit_s)
    model = find_model(args.model, args.cache)
    config, plan, cuda = _config(args, model), _plan(args, model), cuda_available()
    head = _head(args, config, plan, cuda)
    settings = {name: value for name, value in head["settings"].items() if name != "repeats"}
    identity = {**settings, "server": head["server"]}
    store = open_store(args.out / NAME, head, identity, plan, resume=args.resume)
    if not any(plan.missing(store, one) for one in plan.loads):
        store.finish()
        return store.data
    server = config.server(args.out / "server.log", args.start_timeout_s)
    with server, BenchClient(server.url) as client:
        info = client.info()
        clients = Clients(
            server.url,
            head["settings"]["clients"],
            incremental=bool(info["incremental_streaming_output"]),
            timeout_s=args.timeout_s,
        )
        with clients:
            Bench(client, clients, budget, say, pid=server.pid, pin=args.pin).measure(plan, store)
    return store.data


def _plan(args: argparse.Namespace, model: Path) -> Plan:
    """Raises ValueError if the model is too short for the requests."""
    needed, positions = args.prompt + args.output + _KEPT_BACK, context(model)
    if needed > positions:
        raise ValueError(f"--in and --out-tokens need {needed} positions, the model has {positions}")
    loads = tuple(
        Load(
            rate=rate,
            count=count_of(rate, args.requests, args.seconds),
            prompt=args.prompt,
            output=args.output,
            vocab=vocabulary(model),
            seed=args.seed,
        )
        for rate in args.rates
    )
    return Plan(args.modes, loads, args.repeats)


def _config(args: argparse.Namespace, model: Path) -> Config:
    shape = [] if args.cumulative else ["--incremental-streaming-output"]
    return Config(
        model=model,
        mode=args.modes[0],
        batches=args.graph_batches,
        tokens_a_request=args.prompt + args.output,
        **server_options(args, shape),
    )


def _head(args: argparse.Namespace, config: Config, plan: Plan, cuda: bool) -> dict[str, Any]:
    """Provenance and settings. The model's path is this machine's business, its flags are not."""
    return {
        **provenance("bench_arrivals"),
        "server": {"args": config.command_args(cuda), "env": config.environment(cuda)},
        "settings": {
            "model": args.model,
            "modes": list(plan.modes),
            "rates": [load.rate for load in plan.loads],
            "requests": [load.count for load in plan.loads],
            "prompt": args.prompt,
            "output": args.output,
            "repeats": plan.repeats,
            "seed": args.seed,
            "clients": clients_of(args),
            "pin": args.pin,
            "exact": is_exact(args, cuda),
        },
    }


def _draw(data: Mapping[str, Any], path: Path) -> None:
    settings = data["settings"]
    title = f"{settings['model']}, {settings['prompt']} tokens in, {settings['output']} out"
    draw(data["summary"], title, path)
