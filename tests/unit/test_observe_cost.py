"""What watching costs a step by itself: a loop of nothing but its calls, in the order of an overlapped step.

In a server the calls find the caches filled by everything else, and take longer; `zos_record_cost` says how
long there. These limits hold whatever else the machine does: the best of many short runs counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from time import perf_counter_ns as now
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.recording import DECODE
from zos_sglang.observe.record import Ring
from zos_sglang.observe.recorder import Recorder
from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.streams import Barrier
from zos_sglang.overlap.timed_event import TimedEvent
from zos_sglang.overlap.watch import (
    AS_BEFORE,
    ASKS,
    FORWARD,
    FORWARD_NS,
    FORWARDED,
    FURTHER,
    LAUNCH,
    LAUNCHED,
    OFF,
    OUTSIDE,
    PROCESS,
    PROCESSED,
    READING_NS,
    SELECT,
    STEP,
    WAIT_FROM,
    WAIT_TO,
    Watch,
)

STEPS, RUNS = 500, 60


class Event:
    def query(self) -> bool:
        return False

    def synchronize(self) -> None: ...


class Result:
    copy_done: Any = None


def step(watch: Watch, pending: Result, event: Event, lane: bool, here: bool = False) -> Result:
    """What the loop, the launcher and the lane do at their places; `here`: the forward runs in the thread."""
    stamps = watch.stamps
    if stamps is not None:
        if not lane:
            stamps[SELECT] = now()
        if stamps[ASKS]:
            watch.launching()
        if not lane or here:
            stamps[LAUNCH] = now()
        begun = stamps[FORWARD] = now()
        if here:
            ended = stamps[FORWARDED] = now()
            stamps[FORWARD_NS] += ended - begun
        begun = now()
        ended = now()
        stamps[READING_NS] += ended - begun
        if lane:
            stamps[LAUNCHED] = ended
    new = Result()
    new.copy_done = event
    if stamps is not None:
        ride, barrier = (FURTHER, None) if lane else (OUTSIDE, Barrier.FINE)
        said = DECODE, 16, 0, barrier
        if watch.riding if lane else said == watch.said:
            if not stamps[LAUNCHED]:
                stamps[LAUNCHED] = now()
            stamps[STEP], watch.newest = AS_BEFORE, event
        else:
            watch.launched(None, new, ride, Reason.OVERLAPPED, 1, barrier, said)
        if watch.asynchronous and not lane:
            timed = TimedEvent()
            timed.event, timed.of = event, SimpleNamespace(watch=watch)
            new.copy_done = timed
        stamps[PROCESS] = now()
    if lane and stamps is not None:
        stamps[WAIT_FROM] = now()
        pending.copy_done.synchronize()
        stamps[WAIT_TO] = now()
    else:
        pending.copy_done.synchronize()
    if stamps is not None:
        stamps[PROCESSED] = now()
    watch.end()
    return new


def nothing(pending: Result, event: Event) -> Result:
    """What a step here does besides watching."""
    new = Result()
    new.copy_done = event
    pending.copy_done.synchronize()
    return new


def best(call: Any) -> float:
    """Microseconds of this thread's CPU a call."""
    found = float("inf")
    for _ in range(RUNS):
        begun = time.thread_time_ns()
        for _ in range(STEPS):
            call()
        found = min(found, (time.thread_time_ns() - begun) / STEPS / 1000)
    return found


def cost(watch: Watch, lane: bool, here: bool = False) -> float:
    event, last = Event(), [Result()]
    last[0].copy_done = event

    def watched() -> None:
        last[0] = step(watch, last[0], event, lane, here)

    def plain() -> None:
        last[0] = nothing(last[0], event)

    return best(watched) - best(plain)


def measure() -> dict[str, float]:
    """Microseconds a step by what is watched."""
    found = {}
    for name, lane in (("overlap", False), ("lane", True)):
        for device, asynchronous in (("cpu", False), ("gpu", True)):
            recorder = Recorder(Ring(), lambda *_: (16, 16, 0, DECODE, 0, 0, 0), asynchronous=asynchronous)
            found[f"{name}-{device}"] = cost(recorder, lane, not asynchronous)
            assert recorder.faults == 0 and recorder.launches == STEPS * RUNS
        found[f"{name}-off"] = cost(OFF, lane)
    return found


@pytest.fixture(scope="module")
def costs() -> dict[str, float]:
    """Measured in a process of its own, where no coverage counts lines."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    command = [sys.executable, "-m", "tests.unit.test_observe_cost"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("what", ["overlap-cpu", "overlap-gpu", "lane-cpu", "lane-gpu"])
def test_a_recorded_step_costs_less_than_ten_microseconds(what: str, costs: dict[str, float]) -> None:
    print(f"\n{costs[what]:.2f} us a step")
    assert costs[what] < 10


@pytest.mark.parametrize("what", ["overlap-off", "lane-off"])
def test_a_step_that_is_not_recorded_costs_less_than_a_microsecond(
    what: str, costs: dict[str, float]
) -> None:
    print(f"\n{costs[what]:.2f} us a step")
    assert costs[what] < 1


if __name__ == "__main__":
    print(json.dumps(measure()))
