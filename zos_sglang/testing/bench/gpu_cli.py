"""Command line of scripts/gpu_check.py: start the servers, examine them one by one, keep every result."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from zos_sglang.testing.bench import canary
from zos_sglang.testing.bench.check import Check
from zos_sglang.testing.bench.checkpoint import Shape
from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.bench.ending import exiting_on
from zos_sglang.testing.bench.flags import env_flag, pair
from zos_sglang.testing.bench.gpu import PARTS, Part, Scale
from zos_sglang.testing.bench.record import print_table, provenance, write_json
from zos_sglang.testing.bench.stats import TooFewSteps
from zos_sglang.testing.server import ServerFailed, ServerProcess, cuda_available, each_of_tree

#: Estimates of a start on an H200, seconds: the first one compiles kernels.
_FIRST_START_S, _START_S = 110, 60
_LOG_TAIL = 60
#: Half of what an H200 was seen to do.
_CANARY_TOKENS_A_SECOND = 2000
REHEARSAL = Scale(
    shape=Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=128, vocab=512, context=4096),
    dtype="float32",
    repeats=2,
    output_tokens=64,
    turns=0,
    canary=canary.Load(
        tokens=1500,
        limit_s=200,
        concurrency=24,
        prefix_length=(16, 32),
        tail_length=(4, 16),
        output_length=(16, 96),
    ),
    canary_pool=1000,
    small=True,
)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    parts = "\n".join(f"  {part.name:<20}{part.what}" for part in PARTS.values())
    found = argparse.ArgumentParser(
        prog="gpu_check.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="All checks on a CUDA device. One server per part.",
        epilog=f"parts:\n{parts}\n\nExit code: 0 all checks hold, 1 one does not, 2 a part could not run.",
    )
    found.add_argument("--part", action="append", choices=list(PARTS), help="repeatable; default: all")
    found.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json and the logs")
    found.add_argument("--models", type=Path, help="folder for the random models (default: temporary)")
    found.add_argument("--repeats", type=int, default=Scale.repeats, help=f"({Scale.repeats})")
    found.add_argument("--canary-tokens", type=int, default=canary.Load.tokens)
    env_flag(found)
    found.add_argument(
        "--one-by-one",
        action="store_true",
        help="start each server when its turn comes, not all but the first at once",
    )
    found.add_argument(
        "--rehearse",
        action="store_true",
        help="small sizes, also without CUDA: shows that the script runs, not that the checks hold",
    )
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the parts; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        env = dict(pair(text) for text in args.env)
    except ValueError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    if not args.rehearse and not cuda_available():
        print(
            "gpu_check: error: no CUDA device here; --rehearse tries the script on the CPU", file=sys.stderr
        )
        return 2
    limit_s = max(canary.Load.limit_s, args.canary_tokens / _CANARY_TOKENS_A_SECOND)
    full = Scale(repeats=args.repeats, canary=canary.Load(tokens=args.canary_tokens, limit_s=limit_s))
    scale = REHEARSAL if args.rehearse else full
    parts = [PARTS[name] for name in args.part or PARTS]
    together = not args.one_by_one and (os.cpu_count() or 1) >= 2 * len(parts)
    estimate = sum(part.seconds for part in parts) + _FIRST_START_S
    estimate += (_START_S if together else _START_S * (len(parts) - 1)) if len(parts) > 1 else 0
    print(
        f"{len(parts)} parts, about {estimate} s on an H200: {', '.join(p.name for p in parts)}", flush=True
    )
    with tempfile.TemporaryDirectory() as scratch:
        models = args.models or Path(scratch)
        report = Report(args.out, provenance("gpu_check"))
        with exiting_on(signal.SIGTERM), ExitStack() as stack:
            configs = [part.config(models, scale) for part in parts]
            servers = [
                replace(config, env={**config.env, **env}).server(args.out / f"{part.name}.log", 420)
                for part, config in zip(parts, configs, strict=True)
            ]
            for part, started in zip(parts, _started(servers, together, stack), strict=True):
                report.add(part, *_run(part, started, models, scale))
    return report.finish()


def run_part(name: str, out: Path, scale: Scale) -> list[Check]:
    """One part by itself, for the tests. Raises what the part raises."""
    part = PARTS[name]
    with part.config(out / "models", scale).server(out / f"{name}.log") as server:
        return part.examine(server, out / "models", scale)[1]


class Report:
    """gpu_check.json, rewritten after every part."""

    def __init__(self, out: Path, head: dict[str, Any]) -> None:
        self.path = out / "gpu_check.json"
        self.data: dict[str, Any] = {**head, "parts": {}}
        self.code = 0

    def add(self, part: Part, result: dict[str, Any], checks: Sequence[Check], error: str | None) -> None:
        """Keep a part's outcome and print it."""
        failed = [check for check in checks if not check.ok]
        self.code = max(self.code, 2 if error else 1 if failed else 0)
        self.data["parts"][part.name] = {
            "what": part.what,
            "passed": not failed and error is None,
            "error": error,
            "checks": [asdict(check) for check in checks],
            "result": result,
        }
        write_json(self.path, self.data)
        print(f"== {part.name}: {part.what}")
        if "cells" in result:
            print_table(result)
        for check in checks:
            print(f"  {'ok  ' if check.ok else 'FAIL'} {check.what}: {check.found}")
        if error:
            print(f"  ERROR {error}")
        sys.stdout.flush()

    def finish(self) -> int:
        """Print the verdict; returns the exit code."""
        passed = [name for name, part in self.data["parts"].items() if part["passed"]]
        print(f"{len(passed)} of {len(self.data['parts'])} parts passed; {self.path}")
        return self.code


def _started(
    servers: Sequence[ServerProcess], together: bool, stack: ExitStack
) -> Iterator[Future[ServerProcess]]:
    """Each server, started or failed, at its turn; it is stopped before the next one's turn.

    The first one starts alone and fills the kernel caches. With `together` all others then start at once
    and sleep (SIGSTOP) until it is their turn, so that they take no time from the one at work.
    """
    pool = stack.enter_context(ThreadPoolExecutor(len(servers)))
    for server in servers:
        stack.callback(server.stop)
    futures = [pool.submit(_start, servers[0])]
    futures[0].exception()
    if together:
        futures += [pool.submit(_start, server) for server in servers[1:]]
        for future in futures:
            future.exception()
    for index, server in enumerate(servers):
        if index >= len(futures):
            futures.append(pool.submit(_start, server))
        futures[index].exception()  # waits; the part reports it
        _each(server, psutil.Process.resume)
        yield futures[index]
        server.stop()


def _start(server: ServerProcess) -> ServerProcess:
    start = time.monotonic()
    server.start()
    print(f"  ready after {time.monotonic() - start:.0f} s: {server.log.name}", flush=True)
    _each(server, psutil.Process.suspend)
    return server


def _each(server: ServerProcess, action: Callable[[psutil.Process], None]) -> None:
    with suppress(ServerFailed):  # it has not started
        each_of_tree(server.pid, action)


def _run(
    part: Part, started: Future[ServerProcess], models: Path, scale: Scale
) -> tuple[dict[str, Any], list[Check], str | None]:
    begin = time.monotonic()
    server: ServerProcess | None = None
    try:
        server = started.result()
        result, checks = part.examine(server, models, scale)
        error = None
    except (ServerFailed, BenchError, TooFewSteps, httpx.HTTPError, OSError, ValueError) as problem:
        result, checks, error = {}, [], f"{type(problem).__name__}: {problem}"
        traceback.print_exc()
    result["part_seconds"] = round(time.monotonic() - begin, 1)
    if server is not None and error:
        print("\n".join(server.log_text().splitlines()[-_LOG_TAIL:]))
    return result, checks, error
