"""Command line of scripts/bench_prefill.py."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zos_sglang.testing import slow_device
from zos_sglang.testing.bench.arrivals_load import Clients
from zos_sglang.testing.bench.checkpoint import context, vocabulary
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.command import EXIT_CODES, Command, exit_of, result_flags, say
from zos_sglang.testing.bench.flags import (
    clients_of,
    is_exact,
    model_flags,
    modes_of,
    positive,
    server_flags,
    server_options,
)
from zos_sglang.testing.bench.prefill import Load, Streams
from zos_sglang.testing.bench.prefill_plot import draw
from zos_sglang.testing.bench.prefill_run import CONTENDERS, NAME, Bench, Plan
from zos_sglang.testing.bench.prefill_summary import summarise
from zos_sglang.testing.bench.prefill_table import print_summary
from zos_sglang.testing.bench.record import provenance
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.bench.store import Store, load, plain
from zos_sglang.testing.bench.zos import Budget
from zos_sglang.testing.distribution import distribution
from zos_sglang.testing.server import cuda_available
from zos_sglang.testing.slow_device import Pace

KIND = "bench_prefill"
BURST, CHUNKED = "burst", "chunked"
#: Positions that a request cannot use.
_KEPT_BACK = 2

DESCRIPTION = """\
Prefill after prefill while streams decode, under each rule for consecutive prefills (never, always,
first-token) and in SGLang's own loop. One server process; modes and rules are switched live, another
first in each repeat; every contender gets the same prompts, from an empty prefix cache.

  burst      many short prompts at once: several whole ones in a prefill
  chunked    long prompts at once, in chunks of --chunk tokens (--chunked-prefill-size)

All answers are streamed. Times are the clients', rates are of the time from the first of these prompts to
the last token of their answers.

  TTFT       from sending a prompt to its first token; E2E to its last
  tokens/s   output tokens of prompts and streams; `all` with the tokens of the prompts
  ITL        of the streams meanwhile, for each token; longest gap: the worst of a run
  waited     launches that let the prefill before them be processed first, of those with a prompt
  answers    requests whose token ids differ from those under never in the same repeat; never's own row: from
             its first repeat. Batches depend on the clock here, and in bfloat16 a row's rounding on its
             batch.

first-token has targets: TTFT at most 1.05 of always, rates at least 0.98 of never. Each is judged by the
median of the ratios within each repeat, and called noise where the quartiles lie on both sides of it.

--out holds bench_prefill.json (rewritten after every repeat), bench_prefill.png and the server's log. An
interrupted run keeps all whole repeats; --resume goes on, with more repeats too, but not with other code,
versions, machine or settings."""


def parser() -> argparse.ArgumentParser:
    """The flags; the defaults are those of the measurement on a CUDA device."""
    found = argparse.ArgumentParser(
        prog=f"{KIND}.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=EXIT_CODES,
    )
    add = found.add_argument
    names = ",".join(CONTENDERS)
    add("--rules", type=modes_of(CONTENDERS, 2), default=CONTENDERS, help=f"({names})")
    add("--loads", type=modes_of((BURST, CHUNKED)), default=(BURST, CHUNKED), help=f"({BURST},{CHUNKED})")
    add("--mode", choices=("overlap", "resident"), default="overlap", help="our loop for the rules (overlap)")
    add("--repeats", type=positive, default=5, help="repeats, another contender first in each (5)")
    add("--chunk", type=positive, default=4096, help="tokens of a prefill, --chunked-prefill-size (4096)")
    add("--burst", type=positive, default=48, help="prompts of a burst (48)")
    add("--burst-in", type=positive, default=1024, help="tokens of the longest; the shortest: half (1024)")
    add("--long", type=positive, default=4, help="long prompts (4)")
    add("--long-in", type=positive, default=16384, help="tokens of each (16384)")
    add("--out-tokens", type=positive, default=16, help="tokens of an answer to them (16)")
    add("--streams", type=positive, default=16, help="streams that decode meanwhile (16)")
    add("--stream-tokens", type=positive, default=512, help="tokens of each (512)")
    add("--settle-s", type=float, default=0.5, help="seconds that they decode before the prompts come (0.5)")
    add("--seed", type=int, default=0, help="of the prompts (0)")
    add("--clients", type=positive, help="client processes (4, or 1 on fewer than 8 cores)")
    add("--timeout-s", type=float, default=120, help="for each request (120)")
    add(
        "--exact",
        action=argparse.BooleanOptionalAction,
        help="differing answers are a failure (on a CPU in float32)",
    )
    add(
        "--virtual-gpu",
        type=_pace,
        metavar="US:US",
        help="on a CPU: results come as from a device that takes so many microseconds for a decode step and a"
        " prefill, beside the CPU (zos_sglang.testing.slow_device)",
    )
    add("--note", default="", help="words to keep with the results, such as what else the machine did")
    model_flags(found)
    server_flags(found)
    result_flags(found)
    return found


def main(argv: list[str] | None = None) -> int:
    """Measure, or draw what was measured; returns the exit code."""
    command = Command(KIND, _measure, _load, draw, print_summary, exit_code)
    return command.run(parser(), argv)


def exit_code(data: Mapping[str, Any]) -> int:
    """See `exit_of`."""
    rows = data["summary"]["rows"]
    return exit_of(rows, failed=any(row["failed"] for row in rows), exact=data["identity"]["exact"])


def _load(out: Path) -> dict[str, Any]:
    """The result with a summary as this version makes it."""
    data = load(out / NAME, KIND)
    data["summary"] = summarise(data["runs"])
    return data


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    budget = Budget(args.limit_s)
    model = find_model(args.model, args.cache)
    plan = _plan(args, model)
    config, cuda = _config(args, model, plan), cuda_available()
    store = Store(
        args.out / NAME,
        provenance(KIND),
        _identity(args, plan, config, cuda),
        summarise,
        call={"note": args.note} if args.note else None,
        resume=args.resume,
    )
    if not store.missing(plan.repeats, plan.keys):
        store.finish()
        return store.data
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, env={**config.env, **_device(args.virtual_gpu, Path(folder))})
        server = config.server(args.out / "server.log", args.start_timeout_s)
        with server, BenchClient(server.url) as client:
            incremental = bool(client.info()["incremental_streaming_output"])
            options = {"incremental": incremental, "timeout_s": args.timeout_s}
            with Clients(server.url, clients_of(args), **options) as clients:
                Bench(client, clients, budget, say).measure(plan, store)
    return store.data


def _device(pace: Pace | None, folder: Path) -> dict[str, str]:
    """The environment that gives a CPU server the virtual GPU; `folder` holds what SGLang finds it by."""
    if pace is None:
        return {}
    if cuda_available():
        raise ValueError("--virtual-gpu is for machines without a GPU")
    values = {slow_device.PREFIX + name.upper(): str(value) for name, value in asdict(pace).items()}
    return {**distribution(folder, "slow-device", "1.0", slow_device.ENTRY), **values}


def _pace(text: str) -> Pace:
    try:
        decode, prefill = (float(word) for word in text.split(":"))
        return Pace(us=decode, prefill_us=prefill)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of microseconds such as 4000:30000") from None


def _plan(args: argparse.Namespace, model: Path) -> Plan:
    """Raises ValueError if the model is too short for the prompts."""
    counts = {BURST: args.burst, CHUNKED: args.long}
    lengths = {BURST: (max(1, args.burst_in // 2), args.burst_in), CHUNKED: (args.long_in, args.long_in)}
    loads = tuple(
        Load(
            name,
            Streams(args.streams, output=args.stream_tokens),
            counts[name],
            *lengths[name],
            output=args.out_tokens,
            settle_s=args.settle_s,
            vocab=vocabulary(model),
            seed=args.seed,
        )
        for name in args.loads
    )
    positions = context(model)
    for one in loads:
        needed = max(one.longest + one.output, one.streams.prompt + one.streams.output) + _KEPT_BACK
        if needed > positions:
            raise ValueError(f"{one.name} needs {needed} positions, the model has {positions}")
    return Plan(args.rules, loads, args.repeats, args.mode)


def _config(args: argparse.Namespace, model: Path, plan: Plan) -> Config:
    """A server with room for all requests of a run, and a decode graph for every batch size of it."""
    most = max(one.streams.count + one.count for one in plan.loads)
    slots = max(one.tokens for one in plan.loads)
    return Config(
        model=model,
        mode=plan.mode,
        batches=tuple(sorted({1, 2, 4, *range(8, most, 8), most})),
        # The pool is twice the largest batch times this.
        tokens_a_request=-(-slots // most),
        **server_options(args, ["--incremental-streaming-output", "--chunked-prefill-size", str(args.chunk)]),
    )


def _identity(args: argparse.Namespace, plan: Plan, config: Config, cuda: bool) -> dict[str, Any]:
    """What was measured. The model's path is this machine's business, its flags are not."""
    return plain(
        {
            "model": args.model,
            "rules": plan.contenders,
            "mode": plan.mode,
            "loads": {
                one.name: {
                    "prompts": one.count,
                    "tokens": (one.shortest, one.longest),
                    "output": one.output,
                    "streams": (one.streams.count, one.streams.prompt, one.streams.output),
                    "settle_s": one.settle_s,
                }
                for one in plan.loads
            },
            "chunk": args.chunk,
            "seed": args.seed,
            "clients": clients_of(args),
            "virtual_gpu": asdict(args.virtual_gpu) if args.virtual_gpu else None,
            "exact": is_exact(args, cuda),
            "server": {"args": config.command_args(cuda), "env": config.environment(cuda)},
        }
    )
