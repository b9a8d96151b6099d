"""The recorder by itself, over clocks that the test moves."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.recording import Clocks, Event, columns, launch, new_recorder, process, result
from zos_sglang.observe import keeper
from zos_sglang.observe.adjacent import pairs
from zos_sglang.observe.keeper import SETTLED
from zos_sglang.observe.names import AFTER_IDLE, DELAYED_SAMPLING, PAUSED
from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.watch import FORWARD, OFF, Watch


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def steps(it: Any, clocks: Clocks, count: int) -> None:
    """So many overlapped iterations."""
    pending = None
    for _ in range(count):
        it.begin()
        it.selecting()
        new = launch(it, result(Event(clocks)), depth=int(pending is not None))
        if pending is not None:
            process(it, pending)
        pending = new
        it.end()


def test_the_recorder_and_the_null_object_are_watches() -> None:
    it: Watch = new_recorder()
    off: Watch = OFF
    names = [name for name in vars(Watch) if not name.startswith("_") and name != "stamps"]
    assert len(names) == 16
    assert all(getattr(one, name) in (None, False) for name in ("riding", "newest") for one in (it, off))
    assert all(callable(getattr(it, name)) and callable(getattr(off, name)) for name in names)


def test_every_place_of_a_step_is_stamped_in_order(clocks: Clocks) -> None:
    it = new_recorder()
    given: Any = result(Event(clocks, 30_000))
    it.begin()
    clocks.work(10)
    it.selecting()
    clocks.work(20)
    it.launching(None, Reason.NOTHING_PENDING, 0, None)
    clocks.work(30)
    it.forwarding()
    clocks.work(40)
    it.forwarded()
    it.barrier("barrier-coarse")
    clocks.work(50)
    it.launched(None, given, False)
    it.end()
    it.begin()
    clocks.work(60)
    process(it, given)
    it.end()
    found = {name: values[0] for name, values in columns(it).items()}
    start = 1_000_000
    times = [found[name] - start for name in ("t_intake", "t_select", "t_launch", "t_forward", "t_launched")]
    assert times == [0, 10, 30, 60, 150]
    times = [found[name] - start for name in ("t_process", "t_ready", "t_output")]
    assert times == [210, 30_210, 30_210]
    assert (found["wait"], found["ready"], found["barrier"]) == (30_000, "waited", "barrier-coarse")


@pytest.mark.parametrize(
    ("reason", "resident", "path"),
    [
        (Reason.OVERLAPPED, False, "overlap"),
        (Reason.NOTHING_PENDING, False, "overlap"),
        (Reason.MODE_SYNC, False, "sync"),
        (Reason.FIRST_TOKEN, False, "sync"),
        (Reason.CONSECUTIVE_PREFILL, False, "sync"),
        (Reason.GRAMMAR_SYNC, False, "sync"),
        (Reason.GUARD_FAILED, False, "sync"),
        (Reason.OVERLAP_OFF, False, "sync"),
        (Reason.OVERLAPPED, True, "resident"),
        (Reason.FIRST_TOKEN, True, "resident"),
    ],
)
def test_a_reason_has_its_path(clocks: Clocks, reason: Reason, resident: bool, path: str) -> None:
    it = new_recorder()
    it.begin()
    given = launch(it, result(), reason, 0, resident)
    process(it, given)
    it.end()
    assert columns(it)["path"] == [path] and columns(it)["reason"] == [str(reason)]


# ---------------------------------------------------------------- what holds a step up


class Asked(Event):
    """Counts how often the device was asked."""

    times = 0

    def query(self) -> bool:
        Asked.times += 1
        return super().query()


def overlapped(it: Any, clocks: Clocks, waits: list[int]) -> list[int]:
    """Iterations whose results take so long to wait for; how often each asked the device."""
    found, pending = [], None
    for wait in waits:
        before = Asked.times
        it.begin()
        new = launch(it, result(Asked(clocks, wait)), depth=int(pending is not None))
        if pending is not None:
            process(it, pending)
        pending = new
        it.end()
        found.append(Asked.times - before)
    return found


def test_a_device_that_is_waited_for_is_not_asked_whether_it_is_done(clocks: Clocks) -> None:
    assert overlapped(new_recorder(), clocks, [30_000] * 6) == [1, 1, 0, 0, 0, 0]


def test_it_is_asked_again_at_the_launch_once_a_result_was_there(clocks: Clocks) -> None:
    assert overlapped(new_recorder(), clocks, [30_000, 30_000, 0, 0, 30_000, 30_000]) == [1, 1, 0, 0, 1, 1]


def test_a_device_that_is_done_between_begin_and_launch_is_asked_at_the_begin_now_and_then(
    clocks: Clocks,
) -> None:
    found = overlapped(new_recorder(), clocks, [0] * 40)
    assert found[2:].count(1) >= 35 and sum(one == 2 for one in found[2:]) == 2, "once in 16 steps"


@pytest.mark.parametrize(("asked", "ready"), [("begin", "at-begin"), ("launch", "at-launch")])
def test_a_result_that_is_there_before_the_next_launch_makes_that_one_cpu_bound(
    clocks: Clocks, asked: str, ready: str
) -> None:
    it, event = new_recorder(), Event(clocks)
    it.begin()
    first = launch(it, result(event), Reason.NOTHING_PENDING, 0)
    event.ready = asked == "begin"
    it.end()  # and the next one begins
    clocks.work(100)
    event.ready = True
    it.launching(None, Reason.OVERLAPPED, 1, first)
    clocks.work(40)
    it.forwarding()
    second = result(Event(clocks))
    it.launched(None, second, False)
    process(it, first)
    it.end()
    process(it, second)
    it.end()
    found = columns(it)
    assert found["ready"][0] == ready and found["block"] == [None, "cpu-bound"]
    assert found["path"] == ["overlap", "overlap-blocked"]
    assert found["blocked"] == [-1, 140 if asked == "begin" else 40]


def test_on_a_synchronous_device_nothing_is_asked_and_nothing_is_cpu_bound(clocks: Clocks) -> None:
    it, event = new_recorder(asynchronous=False), Event(clocks)
    event.ready = True
    steps(it, clocks, 3)
    found = columns(it)
    assert found["block"] == [None] * 2 and found["ready"] == ["waited"] * 2 and found["wait"] == [0, 0]


def test_a_wait_for_lengths_is_its_own_block_and_depends_on_the_sample(clocks: Clocks) -> None:
    it = new_recorder()
    it.begin()
    it.launching(None, Reason.OVERLAPPED, 0, None)
    clocks.work(500)
    it.blocked("host-lengths", 500)
    given = result(Event(clocks))
    it.launched(None, given, False)
    process(it, given)
    it.end()
    found = columns(it)
    assert (found["block"], found["blocked"], found["path"]) == (
        *(["host-lengths"], [500]),
        ["overlap-blocked"],
    )
    assert found["cpu_depends"] == [500]


# ---------------------------------------------------------------- waiting


def test_waiting_is_told_from_processing(clocks: Clocks) -> None:
    it = new_recorder()
    it.begin()
    given = launch(it, result(Event(clocks, 70_000)), Reason.NOTHING_PENDING, 0)
    it.processing(given)
    clocks.work(300)
    it.processed()
    it.end()
    found = columns(it)
    assert (found["wait"], found["cpu_process"], found["cpu_readback"]) == ([70_000], [300], [0])
    assert found["t_output"][0] - found["t_process"][0] == 70_300


def test_a_wait_that_burns_the_processor_is_readback(clocks: Clocks) -> None:
    it = new_recorder()
    it.begin()
    given = launch(it, result(Event(clocks, 70_000, spins=True)), Reason.NOTHING_PENDING, 0)
    clocks.work(1_000)
    process(it, given)
    it.end()
    found = columns(it)
    assert (found["cpu"], found["cpu_readback"], found["cpu_prepare"]) == ([71_000], [70_000], [1_000])


def test_an_error_of_the_event_is_not_swallowed(clocks: Clocks) -> None:
    class Broken(Event):
        def synchronize(self) -> None:
            raise RuntimeError("device-side assert")

    it = new_recorder()
    it.begin()
    given = launch(it, result(Broken(clocks)))
    with pytest.raises(RuntimeError, match="device-side assert"):
        process(it, given)


# ---------------------------------------------------------------- four classes


KINDS = st.sampled_from(["work", "forward", "read", "process", "wait", "spin", "depend", "sleep"])


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.lists(st.tuples(KINDS, st.integers(0, 100_000)), max_size=8), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_the_classes_sum_to_the_cpu_of_the_iteration(
    iterations: list[list[tuple[str, int]]], asynchronous: bool, detail: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clocks = Clocks(patch)
        it = new_recorder(asynchronous=asynchronous)
        it.detail = detail
        began = clocks.cpu
        for parts in iterations:
            it.begin()
            given: Any = result()
            it.launching(None, Reason.NOTHING_PENDING, 0, None)
            for kind, time in parts:
                step(it, clocks, kind, time)
            it.launched(None, given, False)
            process(it, given)
            it.end()
        it.flush()
        records = it.ring.since(0)
        names = ("prepare", "readback", "process", "depends", "forward")
        assert (sum(records[f"cpu_{name}"] for name in names) == records["cpu"]).all()
        assert all((records[f"cpu_{name}"] >= 0).all() for name in names)
        # What a division leaves over may go to the iteration that is under way.
        assert abs(int(records["cpu"].sum()) - (clocks.cpu - began)) <= len(iterations)
        if asynchronous:
            assert not records["cpu_forward"].any()


def step(it: Any, clocks: Clocks, kind: str, time: int) -> None:
    """Something that happens between a launch's begin and its end."""
    if kind == "forward":
        it.forwarding()
        clocks.work(time)
        it.forwarded()
    elif kind == "read":
        it.reading_back()
        clocks.work(time)
        it.read_back()
    elif kind == "depend":
        it.depending()
        clocks.work(time)
        step(it, clocks, "read", time // 3)
        it.depended()
    elif kind == "process":
        it.processing(None)
        clocks.work(time)
        it.processed()
    elif kind in ("wait", "spin"):
        it.processing(result(Event(clocks, time, spins=kind == "spin")))
        it.processed()
    else:
        (clocks.work if kind == "work" else clocks.sleep)(time)


@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_forward_is_the_devices_own_work_only_where_it_runs_in_the_thread(
    clocks: Clocks, asynchronous: bool, detail: bool
) -> None:
    it = new_recorder(asynchronous=asynchronous)
    it.detail = detail
    it.begin()
    clocks.work(100)
    it.launching(None, Reason.NOTHING_PENDING, 0, None)
    step(it, clocks, "forward", 1_000)
    step(it, clocks, "read", 50)
    given = result()
    it.launched(None, given, False)
    process(it, given)
    it.end()
    found = columns(it)
    own = not asynchronous
    assert found["cpu_forward"] == [1_000 if own else 0]
    assert found["cpu_prepare"] == [100 if own else 1_100] and found["cpu_readback"] == [50]


def test_of_several_forwards_in_a_launch_the_first_is_the_forward(clocks: Clocks) -> None:
    it = new_recorder(asynchronous=False)
    it.begin()
    it.launching(None, Reason.NOTHING_PENDING, 0, None)
    step(it, clocks, "forward", 10)
    step(it, clocks, "forward", 10)
    given = result()
    it.launched(None, given, False)
    process(it, given)
    it.end()
    found = columns(it)
    assert found["t_forward"] == found["t_launch"] and found["cpu_forward"] == [20]


def test_a_launch_after_a_step_of_the_lane_that_failed_has_the_time_of_the_launch(clocks: Clocks) -> None:
    it = new_recorder()
    it.begin()
    it.stamps[FORWARD] = clocks.now()  # the lane's, which then closed
    clocks.work(10)
    given = launch(it, result(Event(clocks)), Reason.NOTHING_PENDING, 0)
    process(it, given)
    it.end()
    found = columns(it)
    assert found["t_forward"] == found["t_launch"] == [clocks.wall]


def test_an_iteration_without_a_launch_is_charged_to_the_result_that_it_processed(clocks: Clocks) -> None:
    it = new_recorder()
    it.begin()
    given = launch(it, result(Event(clocks)), Reason.NOTHING_PENDING, 0)
    clocks.work(100)
    it.end()
    it.begin()
    clocks.work(30)
    process(it, given)
    it.idle()
    it.end()
    found = columns(it)
    assert found["cpu"] == [130] and found["wall"] == [130]


def test_several_results_of_one_iteration_have_their_own_times(clocks: Clocks) -> None:
    it = new_recorder(asynchronous=False)
    first = launch(it, result(), Reason.NOTHING_PENDING, 0)
    it.end()
    second = launch(it, result(), Reason.OVERLAPPED, 1)
    it.end()
    start = clocks.wall
    for one, takes in ((first, 30), (second, 50)):
        it.processing(one)
        clocks.work(takes)
        it.processed()
    it.end()
    found = columns(it)
    assert [t - start for t in found["t_process"]] == [0, 30]
    assert [t - start for t in found["t_output"]] == [30, 80]
    assert found["cpu_process"] == [0, 80]  # of the last one, whose iteration it was


def test_a_pause_takes_no_memory_however_long_it_is(clocks: Clocks) -> None:
    it = new_recorder()
    steps(it, clocks, 3)
    for _ in range(10_000):
        it.paused()
        it.begin()
    assert it.rows <= SETTLED and len(it.readings) <= SETTLED
    steps(it, clocks, 3)
    it.close()
    assert it.ring.since(0)["step"].tolist() == [1, 2, 3, 4, 5, 6]


# ---------------------------------------------------------------- adjacency


@pytest.mark.parametrize(("gap", "flag"), [("idle", AFTER_IDLE), ("paused", PAUSED), ("restart", AFTER_IDLE)])
def test_what_lies_between_breaks_adjacency(clocks: Clocks, gap: str, flag: int) -> None:
    it = new_recorder()
    steps(it, clocks, 3)
    it.begin()
    getattr(it, gap)()
    if gap == "idle":
        it.end()
    steps(it, clocks, 4)
    it.close()
    records = it.ring.since(0)
    broken = records[(records["flags"] & flag) > 0]["step"].tolist()
    assert broken == ([1, 4] if flag == AFTER_IDLE else [4])
    before, _ = pairs(records)
    assert before["step"].tolist() == [1, 2, 4, 5, 6]


def test_time_spent_idle_or_paused_is_no_steps(clocks: Clocks) -> None:
    it = new_recorder()
    it.begin()
    clocks.sleep(1_000_000)
    it.idle()
    it.end()
    it.begin()
    it.paused()
    clocks.sleep(1_000_000)
    it.begin()
    clocks.work(100)
    given = launch(it, result(Event(clocks)), Reason.NOTHING_PENDING, 0)
    process(it, given)
    it.end()
    assert columns(it)["wall"] == [100]


# ---------------------------------------------------------------- results that go another way


def test_a_result_that_nobody_of_ours_processed_is_unseen(clocks: Clocks) -> None:
    it = new_recorder()
    it.begin()
    launch(it, result(Event(clocks)), Reason.NOTHING_PENDING, 0)  # processed behind our back
    it.end()
    steps(it, clocks, 6)
    found = columns(it)
    assert found["step"][:5] == [1, 2, 3, 4, 5]
    assert found["ready"][:2] == ["unseen", "at-process"]
    assert (found["t_process"][0], found["t_output"][0], found["wait"][0]) == (0, 0, -1)


def test_a_result_of_before_the_recorder_is_no_record_but_takes_time(clocks: Clocks) -> None:
    it = new_recorder()
    it.begin()
    given = launch(it, result(Event(clocks)), Reason.OVERLAPPED, 1)
    it.processing(object())
    clocks.work(40)
    it.processed()
    it.end()
    process(it, given)
    it.end()
    assert columns(it)["cpu_process"] == [40]


def test_a_delayed_sample_is_waited_for_from_when_it_is_queued(clocks: Clocks) -> None:
    it = new_recorder(facts=lambda *_: (4, 4, 0, 2, DELAYED_SAMPLING, 0, 0))
    first, second = Event(clocks), Event(clocks, 60_000)
    first.ready = True  # as CUDA says of an event that was never recorded
    given = result(first)
    it.begin()
    launch(it, given, Reason.NOTHING_PENDING, 0)
    assert given.copy_done is first
    it.depending()
    clocks.work(300)
    given.copy_done = second  # an asynchronous copy brings its own
    it.depended()
    it.end()
    it.begin()
    it.launching(None, Reason.OVERLAPPED, 1, given)
    process(it, given)
    it.end()
    found = columns(it)
    assert (found["ready"], found["wait"], found["cpu_depends"]) == (["waited"], [60_000], [300])


def test_a_result_without_an_event_gets_one_where_asked_for(clocks: Clocks) -> None:
    it, event = new_recorder(), Event(clocks, 80_000)
    given = launch(it, result(), Reason.OVERLAP_OFF, 0)
    assert given.copy_done is None
    it.end()
    it.new_event = lambda: event
    given = launch(it, result(), Reason.OVERLAP_OFF, 0)
    assert event.recorded == 1
    process(it, given)
    it.end()
    assert columns(it)["wait"][-1] == 80_000


# ---------------------------------------------------------------- handing on


def test_sinks_get_every_record_once_and_in_order(clocks: Clocks) -> None:
    it = new_recorder()
    it.due, it.due_at = 4, 1 << 62
    seen: list[int] = []
    it.sinks.append(lambda records: seen.extend(records["step"].tolist()))
    steps(it, clocks, 40)
    assert seen == list(range(1, len(seen) + 1)) and len(seen) >= 36
    it.close()
    assert seen == list(range(1, 41)) and it.totals.report()["steps"] == 40


def test_a_sink_is_called_once_a_second_also_without_records(clocks: Clocks) -> None:
    it = new_recorder()
    calls: list[int] = []
    it.sinks.append(lambda records: calls.append(len(records)))
    it.end()
    it.end()
    clocks.sleep(1_000_000_001)
    it.begin()
    it.end()
    assert calls == [0, 0]


def test_a_reset_forgets_records_and_keeps_totals(clocks: Clocks) -> None:
    it = new_recorder()
    steps(it, clocks, 5)
    it.reset()
    assert it.ring.since(0).size == 0 and it.totals.report()["steps"] == 4
    steps(it, clocks, 3)
    it.close()
    assert it.launches == 8 and it.totals.report()["steps"] == 8


def test_totals_say_what_the_records_say(clocks: Clocks) -> None:
    it = new_recorder()
    steps(it, clocks, 9)
    it.close()
    found, records = it.totals.report(), it.ring.since(0)
    assert found["rows"] == records["rows"].sum() and found["forward"] == {"decode": 9}
    assert found["reason"] == {"overlapped": 9} and found["ready"] == {"at-process": 8, "unseen": 1}
    assert sum(found["cpu_us"].values()) <= records["cpu"].sum() // 1000 + 5


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("where", ["facts", "gpu", "query"])
def test_a_fault_is_logged_once_and_never_costs_a_step(
    clocks: Clocks, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("broken")

    swapped: list[int] = []
    it = new_recorder(on_fault=lambda: swapped.append(1), **({"facts": fail} if where == "facts" else {}))
    event = Event(clocks)
    if where == "query":
        event.query = fail  # type: ignore[method-assign]
    if where == "gpu":
        it.gpu = Breaking()  # type: ignore[assignment]
    for _ in range(3):
        it.begin()
        given = launch(it, result(event))
        it.forwarding()
        it.forwarded()
        it.end()
        it.begin()
        process(it, given)
        clocks.sleep(2_000_000_000)
        it.end()
    assert swapped and it.faults == len(swapped)
    said = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(said) == 1 and "recording failed" in said[0].getMessage()


def test_a_sink_that_fails_gets_no_more_and_costs_neither_the_records_nor_the_other_sinks(
    clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    calls, seen, swapped = [], [], []

    def fail(records: Any) -> None:
        calls.append(len(records))
        raise ValueError("broken")

    it = new_recorder(on_fault=lambda: swapped.append(1))
    it.sinks += [fail, lambda records: seen.extend(records["step"].tolist())]
    for _ in range(3):
        steps(it, clocks, 4)
        clocks.sleep(2_000_000_000)
        it.flush()
    it.close()
    assert len(calls) == 1 and seen == list(range(1, 13)) and not swapped
    assert it.sink_faults == {"fail": 1} and it.faults == 0
    (said,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "not handed on any more to fail" in said.getMessage()


def lose_rows(it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "charge", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            it.flush()


def test_steps_that_a_fault_lost_are_not_taken_for_their_neighbours_when_recording_begins_again(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = new_recorder()
    steps(it, clocks, 3)
    lose_rows(it, monkeypatch)
    it.restart()  # gives up the third step, whose row is lost
    steps(it, clocks, 4)
    found = columns(it)
    assert found["step"] == [4, 5, 6] and set(found["ready"]) == {"at-process"}


def test_a_result_of_a_step_that_a_fault_lost_is_nobodys(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = new_recorder()
    it.begin()
    it.end()  # the first one is looked at at once
    lost = launch(it, result(Event(clocks)), Reason.NOTHING_PENDING, 0)
    it.end()
    lose_rows(it, monkeypatch)
    kept = launch(it, result(Event(clocks)))
    it.end()
    process(it, lost)
    clocks.work(40)
    it.end()
    assert columns(it)["step"] == []
    process(it, kept)
    clocks.work(2)
    it.end()
    found = columns(it)
    assert (found["step"], found["cpu"]) == ([2], [2])


class Breaking:
    under_way = ()

    def __getattr__(self, name: str) -> Any:
        raise ValueError("broken")


def test_an_unknown_reason_is_a_fault_and_no_other(clocks: Clocks) -> None:
    swapped: list[int] = []
    it = new_recorder(on_fault=lambda: swapped.append(1))
    it.due = 1
    given = launch(it, result(), "because", 0)  # type: ignore[arg-type]
    process(it, given)
    it.end()
    assert swapped == [1] and it.ring.since(0).size == 0


def test_records_are_of_the_ring_and_not_views(clocks: Clocks) -> None:
    it = new_recorder()
    kept: list[np.ndarray] = []
    it.sinks.append(kept.append)
    steps(it, clocks, 3)
    it.close()
    last, before = kept[-1], kept[-1].copy()
    steps(it, clocks, 70)
    assert len(last) and (last == before).all()
