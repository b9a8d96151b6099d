"""What a recorded step may do at most, counted in the real loop and the real lane over the virtual GPU.

Who adds a stamp, a call or a question to the device fails here, and then either finds another that can go, or
writes the new number down, knowing that every step of every server pays for it.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from tests.unit.call_count import Counts, DeviceEvent, counting, recorded, world_of
from tests.unit.virtual_gpu import EARLY, LATE
from zos_sglang.observe import tape
from zos_sglang.observe.keeper import SETTLED
from zos_sglang.observe.record import Ring
from zos_sglang.observe.recorder import Recorder

STEPS = 150


@pytest.fixture(autouse=True)
def every_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a result was waited for must not depend on how fast this machine is."""
    monkeypatch.setattr(tape, "LEAST_NS", 0)


def run(mode: str, policy: str, *, asynchronous: bool = True, record: bool = True) -> tuple[Counts, Any]:
    # Graphs need a device that is asynchronous.
    world = world_of(mode, policy, STEPS, graphs=asynchronous)
    recorder = None
    if record:
        recorder, remove = recorded(world, asynchronous)
    with counting() as counts:
        world.run()
    if recorder is not None:
        remove()
        assert recorder.faults == 0 and recorder.launches == world.scheduler.serials
    assert world.lane_account.steps > 0.9 * STEPS or mode == "overlap"
    return counts, recorder


#: Whoever waits for a slower device asks it nothing; a faster one is asked once a step whether it is done.
BUDGET = {
    ("overlap", LATE): {"calls": 3, "clock": 11},
    ("overlap", EARLY): {"calls": 3, "clock": 12},
    ("resident", LATE): {"calls": 1, "clock": 8},
    ("resident", EARLY): {"calls": 1, "clock": 9},
}


@pytest.mark.parametrize(("mode", "policy"), BUDGET)
def test_a_step_on_an_asynchronous_device_keeps_its_budget(mode: str, policy: str) -> None:
    counts, _ = run(mode, policy)
    within(counts.ordinary, BUDGET[mode, policy])
    assert counts.ordinary["thread clock"] == 0


#: The forward is timed there, and nobody waits.
HERE = {"overlap": {"calls": 2, "clock": 10}, "resident": {"calls": 2, "clock": 10}}


@pytest.mark.parametrize("mode", HERE)
def test_a_step_on_a_device_in_this_thread_keeps_its_budget(mode: str) -> None:
    counts, _ = run(mode, LATE, asynchronous=False)
    within(counts.ordinary, HERE[mode])
    assert counts.ordinary["thread clock"] == 0


def within(found: Counter[str], budget: dict[str, int]) -> None:
    over = {what: found[what] for what, most in budget.items() if found[what] > most}
    assert not over, f"more than {budget}: {dict(found)}"


@pytest.mark.parametrize("mode", ["overlap", "resident"])
def test_the_threads_clock_is_a_system_call_and_read_once_in_many_steps(mode: str) -> None:
    counts, _ = run(mode, LATE)
    assert 0 < counts.mean("thread clock") <= 0.07


@pytest.mark.parametrize("mode", ["overlap", "resident"])
def test_a_slower_device_is_called_for_the_few_steps_that_are_timed(mode: str) -> None:
    """Two of 64 steps, with three events and three times between them each."""
    counts, recorder = run(mode, LATE)
    recorder.flush()
    found = {what: times / STEPS for what, times in DeviceEvent.calls.items()}
    assert 0.05 < found["record"] <= 0.1 and found["elapsed_time"] <= 0.2 and found["query"] <= 0.1
    # Whether the newest result is there already.
    assert counts.mean("Ledger._ask_at_launch") <= 0.1


@pytest.mark.parametrize("mode", ["overlap", "resident"])
def test_timing_some_steps_adds_little_to_all(mode: str) -> None:
    counts, _ = run(mode, LATE)
    assert counts.mean("calls") - counts.ordinary["calls"] <= 1


@pytest.mark.parametrize("mode", ["overlap", "resident"])
def test_a_step_that_is_not_recorded_looks_at_no_clock_and_calls_nothing_but_its_end(mode: str) -> None:
    counts, _ = run(mode, LATE, record=False)
    assert counts.ordinary == {"calls": 1, "Off.end": 1}
    assert counts.mean("clock") == 0


def test_making_records_takes_less_than_a_call_a_step() -> None:
    """Numpy's calls count, Python's and C's: what they cost hardly depends on the number of rows."""
    recorder = Recorder(Ring(), lambda *_: (2, 2, 0, 2, 0, 0, 0), asynchronous=False)
    calls = 0

    def saw(_frame: Any, event: str, _what: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    result = type("Result", (), {"copy_done": None})()
    recorder.end()
    while recorder.room > 1:
        recorder.launched(None, result, 0, "overlapped", 0)
        recorder.end()
    before, rows = sys.getprofile(), recorder.rows
    sys.setprofile(saw)
    try:
        recorder.end()
    finally:
        sys.setprofile(before)
    assert recorder.rows == 0 and rows == SETTLED - 1
    assert calls / SETTLED < 1
