"""The two servers of scripts/bench_zos.py, one after the other, and every point on each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from zos_sglang.testing.bench.checkpoint import context
from zos_sglang.testing.bench.client import BenchClient, BenchError
from zos_sglang.testing.bench.serve import Config
from zos_sglang.testing.bench.stats import TooFewSteps
from zos_sglang.testing.bench.summary import name_of
from zos_sglang.testing.bench.zos import Budget, Engine, OutOfTime, Plan, live_point, separate_point
from zos_sglang.testing.bench.zos_file import ResultFile
from zos_sglang.testing.server import ServerProcess

#: Stock's own interval of decode lines in its log, in steps; shorter answers need more lines.
_LOG_INTERVAL, _LINES_A_WAVE = 40, 6
#: Positions and KV slots that a request cannot use (SGLang keeps one of each back, and one for its check).
_KEPT_BACK = 2


@dataclass(frozen=True)
class Session:
    """One call of the script. `shapes` are pairs (prompt tokens, output tokens)."""

    config: Config
    plan: Plan
    attention: str
    shapes: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    separate: bool
    side_by_side: bool
    start_timeout_s: float
    say: Callable[[str], None] = print

    def server(self, config: Config, log: Path) -> ServerProcess:
        """A server of this session, not started yet."""
        return config.server(log, self.start_timeout_s)

    def points(self, result: ResultFile) -> list[dict[str, Any]]:
        """The entries of the points that this call is about."""
        return [
            result.point(self.attention, prompt, output, batch)
            for prompt, output in self.shapes
            for batch in self.batches
        ]


def run(session: Session, result: ResultFile, out: Path, budget: Budget) -> None:
    """Measure what the result file lacks.

    Stops early, with all kept, when the time is over; the file then says that it is not complete. Raises
    ServerFailed, BenchError.
    """
    result.data["complete"] = False
    try:
        _both_servers(session, result, out, budget)
        result.data["complete"] = True
    except OutOfTime:
        session.say("  --limit-s: stopping here; the same command with --resume goes on")
    finally:
        result.save()


def _both_servers(session: Session, result: ResultFile, out: Path, budget: Budget) -> None:
    points, plan = session.points(result), session.plan
    place = len(result.data["runs"]) - 1
    live = [point for point in points if not _complete(point["repeats"], plan)]
    start_s = 0.0
    first = session.server(session.config, out / f"live-{place}.log")
    second = session.server(true_sync(session.config), out / f"separate-{place}.log")
    try:
        if session.separate and session.side_by_side:
            second.launch()
        if any(not point["skipped"] for point in live):
            with _engine(session, first, budget, place) as (engine, start_s):
                for point in live:
                    _attempt(session, result, engine, point, live_point)
        apart = [point for point in points if not _complete(point["separate"]["repeats"], plan)]
        apart = [point for point in apart if point["repeats"]]
        if session.separate and apart:
            budget.spend(0 if session.side_by_side else start_s)
            with _engine(session, second, budget, place) as (engine, _):
                for point in apart:
                    _attempt(session, result, engine, point, _separate)
    finally:
        second.stop()


def _complete(repeats: list[dict[str, Any]], plan: Plan) -> bool:
    return {entry["repeat"] for entry in repeats} >= set(range(plan.repeats))


def _separate(
    engine: Engine, point: dict[str, Any], plan: Plan, _keep: Any, save: Callable[[], None]
) -> None:
    separate_point(engine, point, plan, save)


def _attempt(
    session: Session, result: ResultFile, engine: Engine, point: dict[str, Any], measure: Callable[..., None]
) -> None:
    """Measure one point if the server has room for it; a batch that did not decode together is noted."""
    needed = point["prompt"] + point["output"] + _KEPT_BACK
    positions = context(session.config.model)
    name, start = name_of(point), time.monotonic()
    point["error"] = None
    try:
        point["skipped"] = no_room(needed, point["batch"], engine.capacity(), positions)
        if point["skipped"]:
            session.say(f"  {name}: skipped: {point['skipped']}")
            return
        measure(engine, point, session.plan, result.keep_raw, result.save)
    except TooFewSteps as error:
        point["error"] = str(error)
        session.say(f"  {name}: {error}")
    except httpx.HTTPError as error:
        raise BenchError(
            f"the server stopped answering ({error!r}); its log is in the --out folder"
        ) from error
    else:
        session.say(f"  {name}: {time.monotonic() - start:.0f} s")


def no_room(needed: int, batch: int, capacity: int, positions: int) -> str | None:
    """Why `batch` requests of `needed` tokens each cannot run at once, or None."""
    if needed > positions:
        return f"{needed} positions a request, the model has {positions}"
    if needed * batch > capacity:
        return f"{needed * batch} KV slots, the server has {capacity}"
    return None


def true_sync(config: Config) -> Config:
    """The same server as stock SGLang runs it without overlap, the plugin's variables left out."""
    env = {name: value for name, value in config.env.items() if not name.startswith("ZOS_")}
    return replace(config, mode=None, env=env, args=[*config.args, "--disable-overlap-schedule"])


def log_interval(outputs: list[int]) -> list[str]:
    """The flags that make a server log enough decode lines for the shortest answers; none for long ones."""
    wanted = max(1, min(outputs) // _LINES_A_WAVE)
    return ["--decode-log-interval", str(wanted)] if wanted < _LOG_INTERVAL else []


@contextmanager
def _engine(
    session: Session, server: ServerProcess, budget: Budget, place: int
) -> Iterator[tuple[Engine, float]]:
    """A started server, and the seconds its start took."""
    begin = time.monotonic()
    with server, BenchClient(server.url) as client:
        start_s = time.monotonic() - begin
        session.say(f"  ready after {start_s:.0f} s: {server.log.name}")
        yield Engine(client, server.log, budget, place), start_s
