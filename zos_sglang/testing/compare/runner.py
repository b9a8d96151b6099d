"""Plays scenarios on stock and on ours, one server at a time, and judges each pair."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from zos_sglang.testing.bench.ending import run_until_ended
from zos_sglang.testing.compare.client import Client
from zos_sglang.testing.compare.evidence import (
    Counters,
    Evidence,
    collect,
    counters,
    growth,
    missing,
)
from zos_sglang.testing.compare.lane import block as lane_block
from zos_sglang.testing.compare.lane import missing_from_lane, percent
from zos_sglang.testing.compare.prompts import ModelInfo
from zos_sglang.testing.compare.records import Records
from zos_sglang.testing.compare.scenario import Scenario, ServerConfig, Stage
from zos_sglang.testing.compare.verdict import Difference, burst_fault, compare_records
from zos_sglang.testing.server import ServerFailed, ServerProcess

# Modes whose decisions the evidence of the scenarios describes.
JUDGED_MODES = ("overlap", "resident")
# Upstream's own: the leak check and the owners of every page after each step, and the future map's asserts.
CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_IS_IN_CI": "1",
}
# Never right in a server that claims to be like stock.
FORBIDDEN = ("paths.fallbacks", "paths.stalls", "lane.faults", "ranks.differences")


@dataclass
class Played:
    """One scenario on one server. `broken` says why it did not run to its end; `before` are our server's
    counters when it began, `zos` their growth."""

    records: Records = field(default_factory=dict)
    seconds: float = 0.0
    before: Counters = field(default_factory=dict)
    zos: Counters = field(default_factory=dict)
    found: Counters = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    broken: str | None = None
    server_gone: bool = False

    @property
    def tokens(self) -> int:
        """Completion tokens of all answers."""
        return sum(record.tokens for record in self.records.values())


@dataclass
class Result:
    """One scenario on both servers, judged. Unplayable scenarios carry only `skipped`."""

    scenario: Scenario
    stock: Played = field(default_factory=Played)
    ours: Played = field(default_factory=Played)
    differences: list[Difference] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    skipped: str | None = None

    @property
    def passed(self) -> bool:
        """Whether all answers are equal and all evidence is there."""
        return not self.differences and not self.faults


@dataclass(frozen=True)
class Side:
    """Which server: stock, or ours in a mode (mode None: a second stock process, to see what
    stock itself does not repeat)."""

    name: str
    mode: str | None

    @property
    def counted(self) -> bool:
        """Whether the evidence counters of this side are judged."""
        return self.mode in JUDGED_MODES

    @property
    def has_lane(self) -> bool:
        """Whether what the lane did is judged."""
        return self.mode == "resident"


@dataclass(frozen=True)
class Plan:
    """Everything a run needs. limit_s bounds one scenario on one server, in seconds; `env` and `args` go
    to every server, `our_env` (ZOS_* variables) only to ours. `stock` keeps what stock answered, by server
    start: a run of the same scenarios that finds it there plays ours only."""

    model: ModelInfo
    mode: str | None
    logs: Path
    cpu: bool
    limit_s: float
    say: Callable[[str], None]
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    our_env: Mapping[str, str] = field(default_factory=dict)
    stock: dict[tuple[str, ...], list[Played]] = field(default_factory=dict)


def run(plan: Plan, scenarios: Iterable[Scenario]) -> list[Result]:
    """Play all scenarios, grouped by server start; results in the order of play."""
    groups: dict[ServerConfig, list[Result]] = {}
    results = []
    for scenario in scenarios:
        result = Result(scenario, skipped=scenario.not_on_cpu if plan.cpu else None)
        results.append(result)
        if result.skipped is None:
            groups.setdefault(scenario.config, []).append(result)
    for config, group in groups.items():
        names = [result.scenario for result in group]
        known = (config.name, *reference_args(plan.mode))
        if known not in plan.stock:
            plan.stock[known] = _play_group(plan, config, Side("stock", None), names)
        ours = _play_group(plan, config, Side("ours", plan.mode), names)
        for result, stock_played, our_played in zip(group, plan.stock[known], ours, strict=True):
            result.stock, result.ours = stock_played, our_played
        for result in group:
            judge(result, Side("ours", plan.mode))
            verdict = "equal" if result.passed else "DIFFERENT"
            lane = f"; lane {percent(lane_block(result.ours.zos))}" if plan.mode == "resident" else ""
            plan.say(f"  {result.scenario.name}: {verdict}; {decisions(result.ours.zos)}{lane}")
    return results


def judge(result: Result, ours: Side) -> None:
    """Fill in differences and faults of a result whose both sides were played."""
    evidence = result.scenario.evidence
    for name, played in (("stock", result.stock), ("ours", result.ours)):
        if played.broken:
            result.faults.append(f"{name}: {played.broken}")
        result.faults += [f"{name}: {fault}" for fault in played.faults]
    if result.stock.broken or result.ours.broken:
        return
    result.differences = compare_records(result.stock.records, result.ours.records)
    if (burst := burst_fault(result.stock.records, result.ours.records)) is not None:
        result.faults.append(burst)
    answers_only = Evidence(log=evidence.log, seen=evidence.seen, batch=evidence.batch)
    result.faults += missing(answers_only, result.stock.found, {}, side="stock", our_counters=False)
    result.faults += missing(
        evidence, result.ours.found, result.ours.zos, side="ours", our_counters=ours.counted
    )
    if ours.has_lane:
        result.faults += missing_from_lane(evidence.lane, result.ours.zos, result.ours.before)
    result.faults += [
        f"ours: {name} = {result.ours.zos[name]}, must be zero"
        for name in FORBIDDEN
        if result.ours.zos.get(name)
    ]


def decisions(zos: Counters) -> str:
    """One line on how many launches overlapped, how many did not, and why."""
    reasons = {k.removeprefix("reasons."): n for k, n in zos.items() if k.startswith("reasons.")}
    if not reasons:
        return "no decisions reported"
    overlapped = reasons.pop("overlapped", 0)
    rest = ", ".join(f"{name} {n}" for name, n in sorted(reasons.items(), key=lambda r: -r[1]))
    return f"{overlapped} launches overlapped, {sum(reasons.values())} not ({rest or 'none'})"


def reference_args(our_mode: str | None) -> tuple[str, ...]:
    """Flags that make stock the right reference for ours in `our_mode`.

    Under overlap stock counts penalties without the token in flight, without overlap it counts
    all of them, so penalised answers of mode sync are those of stock without overlap.
    """
    return ("--disable-overlap-schedule",) if our_mode == "sync" else ()


def _play_group(plan: Plan, config: ServerConfig, side: Side, scenarios: list[Scenario]) -> list[Played]:
    """Play on one server; a server that a scenario killed is started again for the next."""
    played: list[Played] = []
    start = 0
    while len(played) < len(scenarios):
        start += 1
        suffix = "" if start == 1 else f"-{start}"
        log = plan.logs / f"{config.name}-{side.name}{suffix}.log"
        env = {**plan.env, **config.env}
        if side.mode is not None:
            env |= {**config.our_env, **plan.our_env}
        env |= CHECKS
        args = (*config.args, *plan.args, *(reference_args(plan.mode) if side.name == "stock" else ()))
        server = ServerProcess(plan.model.path, mode=side.mode, args=args, env=env, log=log, cpu=plan.cpu)
        begun = time.monotonic()
        try:
            with server:
                plan.say(f"{config.name}: {side.name} up after {time.monotonic() - begun:.0f} s")
                for scenario in scenarios[len(played) :]:
                    played.append(run_until_ended(_play(plan, scenario, side, server)))
                    last = played[-1]
                    plan.say(
                        f"  {scenario.name} on {side.name}: {len(last.records)} requests, "
                        f"{last.tokens} tokens, {last.seconds:.1f} s"
                        + (f"; BROKEN: {last.broken.splitlines()[0]}" if last.broken else "")
                    )
                    if last.server_gone:
                        break
        except ServerFailed as failure:
            played.append(Played(broken=f"server failed: {failure}"))
            played += [Played(broken="not played: its server does not start")] * (
                len(scenarios) - len(played)
            )
    return played


async def _play(plan: Plan, scenario: Scenario, side: Side, server: ServerProcess) -> Played:
    client = Client(server.url, scenario=scenario.name, incremental=scenario.config.incremental)
    client.compare_cached = scenario.compare_cached
    played = Played(records=client.records)
    begun = time.monotonic()
    try:
        async with asyncio.timeout(plan.limit_s):
            await _play_and_collect(plan.model, scenario, side, server, client=client, played=played)
    except TimeoutError:
        played.broken, played.server_gone = f"not finished after {plan.limit_s:.0f} s", True
    except (httpx.HTTPError, OSError, RuntimeError, ValueError, ExceptionGroup) as error:
        played.broken = "; ".join(_leaves(error))
        played.server_gone = not await _answers(client)
    if played.server_gone:
        played.broken = f"{played.broken}\n--- {server.log} ---\n{_tail(server.log_text())}"
    played.seconds = time.monotonic() - begun
    await client.close()
    return played


async def _play_and_collect(
    model: ModelInfo,
    scenario: Scenario,
    side: Side,
    server: ServerProcess,
    *,
    client: Client,
    played: Played,
) -> None:
    if (dirty := await client.flush()) is not None:
        raise RuntimeError(f"before the scenario: {dirty}")
    state = await client.zos()
    if side.mode is not None and (state or {}).get("mode") != side.mode:
        raise RuntimeError(f"the server is not in mode {side.mode}: it reports {state!r}")
    played.before, logged = counters(state), len(server.log_text())
    await scenario.play(Stage(client, model, side.name == "ours", side.mode))
    if (dirty := await client.flush()) is not None:
        played.faults.append(f"after the scenario: {dirty}")
    played.zos = growth(played.before, counters(await client.zos()))
    played.found = collect(scenario.evidence, client.records, server.log_text()[logged:], played.zos)
    if scenario.check is not None:
        played.faults += scenario.check(client.records)


async def _answers(client: Client) -> bool:
    try:
        async with asyncio.timeout(20):
            await client.zos()
    except (TimeoutError, httpx.HTTPError):
        return False
    return True


def _leaves(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return sorted({text for inner in error.exceptions for text in _leaves(inner)})
    return [f"{type(error).__name__}: {error}"]


def _tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-lines:])
