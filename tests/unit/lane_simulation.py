"""One run of the event loop with the lane over the fake scheduler, and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.unit.fake_scheduler import Script
from tests.unit.fakes import FakeDevice, Fault
from tests.unit.lane_device import EagerLike, GraphLike
from tests.unit.lane_fakes import LaneSpec, right_answer
from tests.unit.lane_memory import LaneGpu
from tests.unit.lane_ports import LaneSchedulerPort, VirtualLanePort
from tests.unit.lane_scheduler import FORCED_INTERVAL, LaneLimits, LaneScheduler
from tests.unit.simulation import WatchedQueue
from tests.unit.virtual_gpu import LATE, Event
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.event_loop import Ended, EventLoop
from zos_sglang.overlap.guards import PrefillRule, first_token_is_there, make_guard
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.launch import Launcher
from zos_sglang.overlap.streams import Streams
from zos_sglang.overlap.watch import OFF, Watch
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.lane import Lane
from zos_sglang.resident.readback import Readback
from zos_sglang.resident.rows import RowTable
from zos_sglang.upstream import lane_results
from zos_sglang.upstream.runtime import Runtime

DEFAULT = LaneLimits()


@dataclass(frozen=True)
class LaneScenario:
    """Clients, server, device and mode of one run. `script` is what happens at which tick."""

    script: Script
    limits: LaneLimits = DEFAULT
    policy: str = LATE
    seed: int = 0
    rule: PrefillRule = PrefillRule.FIRST_TOKEN
    mode: str = "resident"
    #: A first token that is there goes out before the next launch.
    early: bool = False

    def specs(self) -> dict[int, LaneSpec]:
        actions = [a for actions in self.script.values() for a in actions]
        return {a[1].rid: a[1] for a in actions if a[0] == "submit"}

    def named(self, name: str) -> list[Any]:
        return [a for actions in self.script.values() for a in actions if a[0] == name]


class Faults:
    """Fails at the given call of the given name, once."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self.struck = 0

    def __call__(self, name: str) -> None:
        if name in self.at:
            self.at[name] -= 1
            if self.at[name] == 0:
                self.struck += 1
                raise Fault(name)


@dataclass
class LaneWorld:
    """The parts of one run; a test may replace any of them before it starts."""

    scenario: LaneScenario
    gpu: LaneGpu
    scheduler: LaneScheduler
    port: LaneSchedulerPort
    launcher: Launcher
    account: Account
    lane: Lane
    executor: Any
    pool: Any
    faults: Faults
    lane_account: LaneAccount
    queues: list[WatchedQueue] = field(default_factory=list)
    in_flight_at_switch: list[int] = field(default_factory=list)
    watch: Watch = OFF
    #: False as in the decode role, where selection makes one more step of a row at its limit.
    skips_finishing: bool = True

    def run(self) -> LaneWorld:
        mode, skip, scheduler = self.scenario.mode, False, self.scheduler
        ended = Ended.SWITCH
        while ended is Ended.SWITCH:
            queue = WatchedQueue()
            self.queues.append(queue)
            scheduler.result_queue, scheduler.enable_skip_finishing_decode = queue, self.skips_finishing
            guard = make_guard(self.scenario.rule, dp_attention=False, sync=mode == "sync")
            lane = self.lane if mode == "resident" else None
            loop = EventLoop(
                self.port, self.launcher, queue, guard, self.account, lane=lane, sync=mode == "sync"
            )
            loop.early = first_token_is_there if self.scenario.early and not loop.sync else None
            loop.watch = self.lane.watch = self.launcher.watch = self.port.lane_results.watch = self.watch
            asked: list[str] = []

            def switch(to: str, loop: EventLoop = loop, asked: list[str] = asked) -> None:
                asked.append(to)
                loop.switch_requested = True

            scheduler.on_switch = switch
            ended = loop.run(skip)
            assert not self.lane.is_open, "the loop ended with the lane open"
            if ended is Ended.SWITCH:
                self.in_flight_at_switch.append(len(queue))
                mode, skip = asked[-1], True
        runtime = Runtime()
        runtime.scheduler, runtime._launcher = scheduler, self.launcher
        runtime.drain_for_exit()
        return self

    def answers(self) -> dict[int, list[int]]:
        return {rid: list(r.output_ids) for rid, r in self.scheduler.requests.items()}  # type: ignore[attr-defined]

    def right_answers(self) -> dict[int, list[int]]:
        return {rid: right_answer(s) for rid, s in self.scenario.specs().items()}

    def check(self) -> LaneWorld:
        """Everything that must hold after any run."""
        self._check_answers()
        self._check_messages()
        assert self.gpu.hazards == []
        serials, lane = self.scheduler.serials, self.lane_account
        assert self.scheduler.processed == list(range(1, serials + 1))
        assert sum(q.launched for q in self.queues) == serials == sum(q.processed for q in self.queues)
        assert all(q.deepest <= 2 and not q for q in self.queues)
        assert self.scheduler.deepest_at_intake <= 1
        assert self.in_flight_at_switch == [0] * len(self.in_flight_at_switch)
        assert self.scheduler.forward_ct == serials == sum(self.account.reasons.values())
        assert lane.opened == sum(lane.left.values())
        assert lane.faults == self.faults.struck
        if not self.scenario.named("switch"):
            assert lane.decode_steps == self.account.paths["decode"]
        self.scheduler.memory.check(self.scheduler.live())
        assert not self.scheduler.messages.grouped
        if not self.scenario.named("exit"):
            assert self.scheduler.live() == [] and self.scheduler.memory.locks.total() == 0
        return self

    def _check_answers(self) -> None:
        cut = {a[1] for a in self.scenario.named("abort")}
        early = bool(self.scenario.named("exit"))
        got, right = self.answers(), self.right_answers()
        for rid, tokens in got.items():
            if rid in cut or early:
                assert tokens == right[rid][: len(tokens)], f"request {rid}"
            else:
                assert tokens == right[rid], f"request {rid}"
        assert early or got.keys() == right.keys()

    def _check_messages(self) -> None:
        """Everything is sent once and in order; streams token by token, the rest every so many."""
        for req in self.scheduler.requests.values():
            sent: list[list[int]] = req.messages  # type: ignore[attr-defined]
            assert [t for m in sent for t in m] == req.output_ids[: req.sent]  # type: ignore[attr-defined]
            if req.finished() and req.output_ids and req.finished_output:  # type: ignore[attr-defined]
                assert req.sent == len(req.output_ids)  # type: ignore[attr-defined]
            if req.stream:
                assert all(len(m) <= 1 for m in sent)
            else:
                assert all(len(m) == FORCED_INTERVAL for m in sent[:-1])


def build(scenario: LaneScenario, gpu: LaneGpu | None = None) -> LaneWorld:
    gpu, limits = gpu or LaneGpu(scenario.policy, scenario.seed), scenario.limits
    scheduler = LaneScheduler(gpu, limits, scenario.script)
    account, lane_account, port = Account(), LaneAccount(), LaneSchedulerPort(scheduler)
    pins = PinRing(scheduler.batch_record_buf)
    device: Any = FakeDevice(scheduler, pins, account)
    streams = Streams(gpu.schedule, gpu.forward, gpu.copy, barrier_enabled=True, force_coarse=False)
    launcher = Launcher(device, port, streams, pins, account)
    kind: Callable[..., Any] = GraphLike if limits.graphs else EagerLike
    executor = kind(gpu, limits.depth, limits.lane_rows)
    lane_port = VirtualLanePort(scheduler, device, streams, pins)
    readback = Readback(
        executor.ring, streams.copy_waits_for_forward, device.copy_context, lambda: Event(gpu)
    )
    lane = Lane(lane_port, executor, readback, lane_account, window=limits.window)
    bag = SimpleNamespace(enable_metrics=False)
    with mock.patch.object(lane_results, "get_observability", lambda: bag):
        port.lane_results = lane_results.LaneResults(
            scheduler,
            lane_account,
            undisturbed=lane.undisturbed,
            extra_steps=lane.extra_steps,
            row_ended=lane.row_ended,
            release_waits=lane_port.schedule_waits_for_forward,
            failed=lane.fail,
        )
    port.lane = lane
    faults = Faults()
    executor.faults = lane_port.pool.faults = faults  # type: ignore[attr-defined]
    readback.fetch = partial(_fetched, gpu, lane)  # type: ignore[method-assign]
    lane_port.table = _tables(faults, lane_port.table)  # type: ignore[method-assign]
    readback.queue = _failing(faults, "readback", readback.queue)  # type: ignore[method-assign]
    return LaneWorld(
        scenario,
        gpu,
        scheduler,
        port,
        launcher,
        account,
        lane,
        executor,
        lane_port.pool,
        faults,
        lane_account,
    )


def _failing(faults: Faults, word: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def failing(*args: Any) -> Any:
        faults(word)
        return call(*args)

    return failing


def _tables(faults: Faults, make: Callable[..., RowTable]) -> Callable[..., RowTable]:
    """`make`, whose tables may fail to come and to answer."""

    class Failing(RowTable):
        __slots__ = ()

        def candidates(self, step: int, tokens: Any) -> set[int]:
            faults("read")
            return super().candidates(step, tokens)

        def due(self, step: int) -> tuple[int, ...]:
            faults("due")
            return super().due(step)

    def table(batch: Any, pending: Any) -> RowTable:
        faults("table")
        made = make(batch, pending)
        made.__class__ = Failing
        return made

    return table


def _fetched(gpu: LaneGpu, lane: Lane, tokens: Any) -> Any:
    """What `Readback.fetch` does: a copy on the current stream, waited for."""
    gpu.current.run_until(gpu.current.queued)
    assert lane.table is not None
    values = list(gpu.load(tokens.address, len(lane.table), "newest tokens"))
    return SimpleNamespace(tolist=lambda: values)


def simulate(scenario: LaneScenario) -> LaneWorld:
    return build(scenario).run()


def submit(*specs: LaneSpec, at: int = 1) -> Script:
    return {at: [("submit", s) for s in specs]}
