"""The wait for a result: timed where it is waited for, told from processing, counted once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.recording import Clocks, Driven, Event, columns, launch, new_recorder, result
from zos_sglang.observe.recorder import Recorder
from zos_sglang.overlap import timed_event
from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.timed_event import TimedEvent, time_wait
from zos_sglang.overlap.watch import AS_BEFORE, LAUNCHED, OFF, STEP


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks(monkeypatch)
    monkeypatch.setattr(timed_event, "now", clocks.now)
    return clocks


def timed(it: Recorder, given: Any) -> Any:
    time_wait(given, SimpleNamespace(watch=it))
    return given


def launched(it: Driven, event: Event) -> Any:
    it.begin()
    given = timed(it, launch(it, result(event), Reason.NOTHING_PENDING, 0))
    it.end()
    return given


@pytest.mark.parametrize("detail", [False, True])
def test_a_wait_amid_processing_is_no_processing(clocks: Clocks, detail: bool) -> None:
    it = new_recorder()
    it.detail = detail
    given = launched(it, Event(clocks, 70_000))
    it.processing(None)
    clocks.work(100)
    given.copy_done.synchronize()
    clocks.work(200)
    it.processed()
    it.end()
    found = columns(it)
    assert (found["wait"], found["cpu_process"], found["ready"]) == ([70_000], [300], ["waited"])


def test_a_wait_in_the_launch_belongs_to_the_result_and_to_no_work(clocks: Clocks) -> None:
    """As a grammar's barrier in a speculative step; processing then finds the result there."""
    it = new_recorder()
    given = launched(it, Event(clocks, 50_000))
    clocks.work(400)
    given.copy_done.synchronize()
    it.processing(None)
    given.copy_done.event.takes = 0
    given.copy_done.synchronize()
    clocks.work(300)
    it.processed()
    it.end()
    found = columns(it)
    assert (found["wait"], found["cpu_process"], found["ready"]) == ([50_000], [300], ["waited"])


def test_who_waits_twice_in_one_processing_waited_for_both(clocks: Clocks) -> None:
    it = new_recorder()
    given = launched(it, Event(clocks, 30_000))
    it.processing(None)
    for _ in range(2):
        given.copy_done.synchronize()
        clocks.work(100)
    it.processed()
    it.end()
    found = columns(it)
    assert (found["wait"], found["cpu_process"]) == ([60_000], [200])


def test_who_stopped_to_record_waits_all_the_same(clocks: Clocks) -> None:
    it, event = new_recorder(), Event(clocks, 30_000)
    given, before = launched(it, event), clocks.wall
    given.copy_done.of.watch = OFF
    given.copy_done.synchronize()
    assert clocks.wall == before + 30_000 and columns(it)["step"] == []


def test_everything_else_is_the_events_own(clocks: Clocks) -> None:
    event = Event(clocks)
    given = timed(new_recorder(), result(event))
    assert given.copy_done.query() is False
    given.copy_done.record("stream")
    assert event.recorded == 1
    with pytest.raises(AttributeError):
        given.copy_done.no_such_thing


def test_a_result_is_timed_once_and_only_where_somebody_waits(clocks: Clocks) -> None:
    it, event = new_recorder(), Event(clocks)
    given = timed(it, timed(it, result(event)))
    assert type(given.copy_done) is TimedEvent and given.copy_done.event is event
    assert timed(it, result()).copy_done is None
    assert timed(new_recorder(asynchronous=False), result(event)).copy_done is event


def test_a_silent_step_that_is_cut_short_leaves_the_result_before_it_pending(clocks: Clocks) -> None:
    it = new_recorder()
    it.begin()
    launch(it, result(Event(clocks)), Reason.NOTHING_PENDING, 0)
    it.end()
    it.stamps[LAUNCHED], it.stamps[STEP] = clocks.now(), AS_BEFORE
    it.close()
    assert it.ring.since(0)["step"].tolist() == [1, 2] and it.open == 0
    assert columns(it)["ready"] == ["unseen", "unseen"]
