"""One run of the core over the fake scheduler, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.unit.fake_batch import Spec, fold, reference
from tests.unit.fake_scheduler import Limits, Scheduler, Script
from tests.unit.fakes import FakeDevice, FakePort
from tests.unit.virtual_gpu import LATE, Gpu
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.event_loop import Ended, EventLoop
from zos_sglang.overlap.guards import PrefillRule, first_token_is_there, make_guard
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.launch import Launcher
from zos_sglang.overlap.result_queue import ResultQueue
from zos_sglang.overlap.streams import Streams
from zos_sglang.overlap.watch import OFF, Watch
from zos_sglang.upstream.runtime import Runtime

DEFAULT = Limits()


@dataclass(frozen=True)
class Scenario:
    """Clients, server, device and mode of one run. `script` is what happens at which tick."""

    script: Script
    limits: Limits = DEFAULT
    policy: str = LATE
    seed: int = 0
    rule: PrefillRule = PrefillRule.FIRST_TOKEN
    mode: str = "overlap"
    force_coarse: bool = False
    #: A first token that is there goes out before the next launch.
    early: bool = False

    def specs(self) -> dict[int, Spec]:
        actions = [a for actions in self.script.values() for a in actions]
        return {a[1].rid: a[1] for a in actions if a[0] == "submit"}

    def named(self, name: str) -> list[Any]:
        return [a for actions in self.script.values() for a in actions if a[0] == name]


class WatchedQueue(ResultQueue):
    deepest = 0

    def append(self, pair: tuple[Any, Any]) -> None:
        super().append(pair)
        self.deepest = max(self.deepest, len(self))


@dataclass
class World:
    """The parts of one run; a test may replace any of them before it starts."""

    scenario: Scenario
    gpu: Gpu
    scheduler: Scheduler
    port: FakePort
    device: FakeDevice
    launcher: Launcher
    account: Account
    guard: Callable[..., Any] | None = None
    queues: list[WatchedQueue] = field(default_factory=list)
    in_flight_at_switch: list[int] = field(default_factory=list)
    watch: Watch = OFF

    def run(self) -> World:
        mode, skip, scheduler = self.scenario.mode, False, self.scheduler
        ended = Ended.SWITCH
        while ended is Ended.SWITCH:
            queue = WatchedQueue()
            self.queues.append(queue)
            scheduler.result_queue, scheduler.enable_skip_finishing_decode = queue, True
            guard = self.guard or make_guard(self.scenario.rule, dp_attention=False, sync=mode == "sync")
            loop = EventLoop(self.port, self.launcher, queue, guard, self.account, sync=mode == "sync")
            if self.scenario.early and not (loop.sync or self.scenario.limits.speculative):
                loop.early = first_token_is_there
            loop.watch = self.launcher.watch = self.watch
            asked: list[str] = []

            def switch(to: str, loop: EventLoop = loop, asked: list[str] = asked) -> None:
                asked.append(to)
                loop.switch_requested = True

            scheduler.on_switch = switch
            ended = loop.run(skip)
            if ended is Ended.SWITCH:
                self.in_flight_at_switch.append(len(queue))
                mode, skip = asked[-1], True
        runtime = Runtime()
        runtime.scheduler, runtime._launcher = scheduler, self.launcher
        runtime.drain_for_exit()
        return self

    def answers(self) -> dict[int, list[int]]:
        return {rid: list(r.output) for rid, r in self.scheduler.requests.items()}

    def right_answers(self) -> dict[int, list[int]]:
        specs = self.scenario.specs()
        if self.scenario.limits.embedding:
            return {rid: [fold(0, s.prompt)] for rid, s in specs.items()}
        return {rid: reference(s) for rid, s in specs.items()}

    def check(self) -> None:
        """Everything that must hold after any run."""
        cut = {a[1] for a in self.scenario.named("abort")}
        early = bool(self.scenario.named("exit"))
        got, right = self.answers(), self.right_answers()
        for rid, tokens in got.items():
            if rid in cut or early:
                assert tokens == right[rid][: len(tokens)], f"request {rid}"
            else:
                assert tokens == right[rid], f"request {rid}"
        assert early or got.keys() == right.keys()
        assert self.gpu.hazards == []
        serials = self.scheduler.serials
        assert self.scheduler.processed == list(range(1, serials + 1))
        assert sum(q.launched for q in self.queues) == serials == sum(q.processed for q in self.queues)
        assert all(q.deepest <= 2 and not q for q in self.queues)
        assert self.scheduler.deepest_at_intake <= 1
        assert self.in_flight_at_switch == [0] * len(self.in_flight_at_switch)
        assert sum(self.account.reasons.values()) == serials


def build(scenario: Scenario, gpu: Gpu | None = None) -> World:
    gpu = gpu or Gpu(scenario.policy, scenario.seed)
    scheduler = Scheduler(gpu, scenario.limits, scenario.script)
    account, port = Account(), FakePort(scheduler)
    pins = PinRing(scheduler.batch_record_buf)
    device = FakeDevice(scheduler, pins, account)
    streams = Streams(
        gpu.schedule, gpu.forward, gpu.copy, barrier_enabled=True, force_coarse=scenario.force_coarse
    )
    launcher = Launcher(device, port, streams, pins, account)
    return World(scenario, gpu, scheduler, port, device, launcher, account)


def simulate(scenario: Scenario) -> World:
    return build(scenario).run()


def submit(*specs: Spec, at: int = 1) -> Script:
    return {at: [("submit", s) for s in specs]}
