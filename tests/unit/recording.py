"""Recorders for tests: over clocks that a test sets, and over runs of the simulations."""

from __future__ import annotations

import sys
from time import perf_counter_ns as now
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.lane_simulation import LaneWorld
from zos_sglang.observe import keeper, ledger, recorder
from zos_sglang.observe.columns import to_columns
from zos_sglang.observe.names import Forward, code
from zos_sglang.observe.record import Ring
from zos_sglang.observe.recorder import Recorder
from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.watch import (
    ASKS,
    FORWARD,
    FORWARD_NS,
    FORWARDED,
    FURTHER,
    LAUNCH,
    OPENING,
    OUTSIDE,
    PROCESS,
    PROCESSED,
    READING_NS,
    SAMPLED,
    SELECT,
)
from zos_sglang.upstream.step_facts import make_facts

DECODE = code("forward", Forward.DECODE)


class Clocks:
    """Wall and thread time that stand still until a test moves them, ns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.cpu = 1_000_000
        for module, name, clock in (
            (sys.modules[__name__], "now", self.now),
            (recorder, "now", self.now),
            (ledger, "now", self.now),
            (ledger, "thread_time_ns", self.thread),
            (keeper, "now", self.now),
            (recorder, "thread_time_ns", self.thread),
        ):
            monkeypatch.setattr(module, name, clock)

    def now(self) -> int:
        return self.wall

    def thread(self) -> int:
        return self.cpu

    def work(self, nanoseconds: int) -> None:
        """The thread computes."""
        self.wall += nanoseconds
        self.cpu += nanoseconds

    def sleep(self, nanoseconds: int) -> None:
        self.wall += nanoseconds


class Event:
    """Done when told so; waiting for it sleeps, or spins."""

    def __init__(self, clocks: Clocks, takes: int = 0, *, spins: bool = False) -> None:
        self.clocks, self.takes, self.spins, self.recorded = clocks, takes, spins, 0
        self.ready = False

    def query(self) -> bool:
        return self.ready

    def synchronize(self) -> None:
        (self.clocks.work if self.spins else self.clocks.sleep)(self.takes)

    def record(self, *_: Any) -> None:
        self.recorded += 1


def result(event: Any = None) -> Any:
    return SimpleNamespace(copy_done=event)


class Driven(Recorder):
    """A recorder with a call for each place, which does what the loop does there."""

    _decided: tuple[Any, int, bool] = (Reason.OVERLAPPED, 0, False)
    _barrier: Any = None
    _begun = 0

    def selecting(self) -> None:
        self.stamps[SELECT] = now()

    def launching(  # type: ignore[override]
        self, batch: Any, reason: Any, depth: int, pending: Any
    ) -> None:
        """The lane knows what is pending, and does not say."""
        self._decided, self._barrier = (reason, depth, depth > 0 and pending is None), None
        if self.stamps[ASKS]:
            super().launching()
        self.stamps[LAUNCH] = now()

    def forwarding(self) -> None:
        if self.stamps[SAMPLED]:
            super().forwarding()
        self._begun = now()
        if not self.stamps[FORWARD]:
            self.stamps[FORWARD] = self._begun

    def forwarded(self) -> None:
        stamps = self.stamps
        ended = stamps[FORWARDED] = now()
        stamps[FORWARD_NS] += ended - self._begun
        if stamps[SAMPLED]:
            super().forwarded()

    def reading_back(self) -> None:
        if self.stamps[SAMPLED]:
            super().reading_back()
        self._begun = now()

    def read_back(self) -> None:
        self.stamps[READING_NS] += now() - self._begun
        if self.stamps[SAMPLED]:
            super().read_back()

    def barrier(self, kind: Any) -> None:
        self._barrier = kind

    def launched(self, batch: Any, result: Any, resident: bool) -> None:  # type: ignore[override]
        reason, depth, rides = self._decided
        ride = OUTSIDE if not resident else FURTHER if rides else OPENING
        super().launched(batch, result, ride, reason, depth, self._barrier)

    def processing(self, result: Any) -> None:
        if self.stamps[PROCESS]:
            self.again()
        self.stamps[PROCESS] = now()
        arrived = getattr(result, "copy_done", None)
        if arrived is not None and self.asynchronous:
            self.waiting(arrived)

    def processed(self) -> None:
        self.stamps[PROCESSED] = now()


def new_recorder(**options: Any) -> Driven:
    options = {"facts": lambda *_: (4, 4, 0, DECODE, 0, 0, 0), "asynchronous": True, **options}
    facts = options.pop("facts")
    return Driven(Ring(64), facts, **options)


def launch(
    it: Driven, given: Any, reason: Reason = Reason.OVERLAPPED, depth: int = 1, resident: bool = False
) -> Any:
    it.launching(None, reason, depth, None)
    it.launched(None, given, resident)
    return given


def process(it: Driven, given: Any) -> None:
    it.processing(given)
    it.processed()


def columns(it: Recorder) -> dict[str, list[Any]]:
    """Everything that is complete."""
    it.flush()
    return to_columns(it.ring.since(0))


def record_world(world: Any) -> Recorder:
    """Let a recorder watch a simulated run of the loop, with or without the lane."""
    made: Any = SimpleNamespace(refusal=None, departure=None)
    account = world.lane_account if isinstance(world, LaneWorld) else made

    def fault() -> None:
        raise AssertionError("recording failed")

    it = Recorder(Ring(4096), make_facts(world.scheduler, account), asynchronous=True, on_fault=fault)
    it.mode = code("mode", "overlap")
    return it


def complete(records: np.ndarray) -> None:
    """What must hold of any record."""
    parts = ("cpu_prepare", "cpu_readback", "cpu_process", "cpu_depends", "cpu_forward")
    assert (sum(records[name] for name in parts) == records["cpu"]).all()
    assert all((records[name] >= 0).all() for name in parts)
    assert (records["path"] > 0).all() and (records["reason"] > 0).all() and (records["ready"] > 0).all()
    assert (records["t_intake"] <= records["t_launch"]).all()
    assert (records["t_launch"] <= records["t_forward"]).all()
    assert (records["t_forward"] <= records["t_launched"]).all()
    seen = records[records["ready"] != code("ready", "unseen")]
    assert (seen["t_launched"] <= seen["t_output"]).all()
    assert (seen["t_process"] <= seen["t_output"]).all()
    assert (seen["t_ready"] <= seen["t_output"]).all()
