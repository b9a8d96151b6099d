"""Command line of scripts/soak.py."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench import canary
from zos_sglang.testing.bench.command import measured, say
from zos_sglang.testing.bench.ending import COULD_NOT, run_until_ended
from zos_sglang.testing.bench.flags import json_flag, model_flags, server_flags, server_options
from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.bench.serve import WIDE, Config, find_model
from zos_sglang.testing.server import cuda_available
from zos_sglang.testing.soak.disturb import MODES
from zos_sglang.testing.soak.plan import GPU, Scale
from zos_sglang.testing.soak.report import print_report, report_of
from zos_sglang.testing.soak.run import Settings, Soak

#: SGLang's own checks: leaks on every step; on a CPU also that each token of the future map is read once,
#: which on a device would stop it every step.
LEAKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
STRICT = {**LEAKS, "SGLANG_IS_IN_CI": "1"}

DESCRIPTION = """\
Drives one real server for --minutes with a seeded mixture: prompts of many lengths, streams, aborts at random
times, clients that hang up, timeouts, priorities, a full queue, grammars, a pool too small, pauses, flushes,
weight reloads, and switches between the modes. Every answer is compared with what stock answered in the same
server before the soak began (a cut one with the start of it), or, with --canary, with the token oracle of
SGLang's KV canary. Every --idle-every-s seconds nobody asks: then the server must come to rest with an empty
pool, and its memory and descriptors are noted."""
EPILOG = """\
Exit code: 0 PASS, 1 FAIL (a wrong answer, a lost request, a leak, growth, a fault of ours, a dead server),
2 could not run. On a CUDA device the defaults are --model qwen3-0.6b-shape --canary."""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        prog="soak.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = found.add_argument
    add("--minutes", type=float, default=10, help="(10)")
    add("--seed", type=int, default=0, help="of everything that is drawn (0)")
    add("--users", type=int, help="clients at a time (40; 160 on CUDA)")
    add("--idle-every-s", type=float, default=45, help="seconds between two idle moments (45)")
    add("--canary", action=argparse.BooleanOptionalAction, help="KV canary and token oracle (on CUDA)")
    model_flags(found)
    server_flags(found)
    found.set_defaults(model=WIDE if cuda_available() else "tiny")
    add("--out", type=Path, help="file for the report; the server's log goes beside it")
    json_flag(found)
    return found


def main(argv: list[str] | None = None) -> int:
    """Soak one server; returns the exit code."""
    args = parser().parse_args(argv)
    found = measured("soak", lambda: soak(args))
    if found is None:
        return COULD_NOT
    if args.out:
        write_json(args.out, found)
    if args.json:
        print(json.dumps(found))
    else:
        print_report(found)
    return 0 if found["passed"] else 1


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """The report of one soak. Raises what `FAILURES` names."""
    scale = GPU if cuda_available() else Scale()
    oracle = args.canary if args.canary is not None else cuda_available()
    scale = replace(scale, oracle=oracle, users=args.users or scale.users)
    config = config_of(args, scale)
    settings = Settings(
        minutes=args.minutes,
        scale=scale,
        seed=args.seed,
        idle_every_s=args.idle_every_s,
        faults="ZOS_FAULT" in config.env,
    )
    head = {**provenance("soak"), "server": {"args": config.command_args(cuda_available())}}
    log = (args.out or Path(".cache/soak.json")).with_suffix(".server.log")
    with config.server(log, args.start_timeout_s) as server:
        run = Soak(server, settings, say)
        run_until_ended(run.run())
        report = report_of(run)
    return {**head, "model": args.model, **report}


def config_of(args: argparse.Namespace, scale: Scale) -> Config:
    """The server under test."""
    options = server_options(
        args,
        [
            *(canary.FLAGS if scale.oracle else ()),
            *("--max-total-tokens", str(scale.pool)),
            *("--max-running-requests", str(scale.running)),
            *("--max-queued-requests", str(scale.queued)),
            *("--chunked-prefill-size", str(scale.chunk)),
            *("--schedule-conservativeness", "0.1"),
            *("--enable-priority-scheduling", "--disable-priority-preemption"),
        ],
    )
    limits = dict.fromkeys(("SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_REQ_RUNNING_TIMEOUT"), str(scale.timeout_s))
    checks = LEAKS if cuda_available() else STRICT
    env = {**checks, **limits, **(canary.ENV if scale.oracle else {}), **options.pop("env")}
    return Config(
        model=find_model(args.model, args.cache).resolve(),
        mode=MODES[-1],
        batches=tuple(size for size in (1, 2, 4, 8, 16, 32, 64) if size <= scale.running),
        env=env,
        tokenizer=not scale.oracle,
        **options,
    )
