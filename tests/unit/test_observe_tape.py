"""Rows of the tape that the loop stamped without telling anybody of the launch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.recording import Clocks, Event, columns, new_recorder, result
from zos_sglang.observe.names import AFTER_IDLE, LANE_OPENING, PAUSED
from zos_sglang.observe.recorder import Recorder
from zos_sglang.observe.tape import (
    FLAGS,
    LEAST_NS,
    MODE,
    READY,
    ROWS,
    T_READY,
    WAIT,
    WAITED,
    WAITED_THERE,
    WIDTH,
    blank,
    count_waits,
    describe,
)
from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.watch import (
    AS_BEFORE,
    FORWARD,
    FURTHER,
    LAUNCHED,
    OPENING,
    OUTSIDE,
    PROCESS,
    PROCESSED,
    STEP,
    WAIT_FROM,
    WAIT_TO,
)

WORDS = FLAGS + 1 - ROWS


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def rows_of(*launches: tuple[int, int | None]) -> np.ndarray:
    """Rows by number of their launch (0: none) and number of rows (None: nothing was said)."""
    rows = np.tile(blank(asks=False, detail=False), (len(launches), 1))
    for row, (step, count) in zip(rows, launches, strict=True):
        row[STEP] = step
        if count is not None:
            row[ROWS], row[MODE] = count, 3
    return rows


def test_a_silent_launch_has_the_words_of_the_one_before_it_whatever_lies_between() -> None:
    rows = rows_of((1, 7), (0, None), (2, None), (3, 5), (4, None), (5, None))
    last = describe(rows, np.zeros(WORDS, np.int64))
    assert rows[:, ROWS].tolist() == [7, -1, 7, 5, 5, 5] and rows[[2, 4, 5], MODE].tolist() == [3, 3, 3]
    assert last[0] == 5


def test_words_are_kept_from_one_look_to_the_next() -> None:
    last = describe(rows_of((1, 7)), np.zeros(WORDS, np.int64))
    rows = rows_of((2, None), (3, None))
    last = describe(rows, last)
    assert rows[:, ROWS].tolist() == [7, 7] and last[0] == 7
    assert describe(rows_of((0, None)), last) is last and describe(rows[:0], last) is last


def test_what_an_idle_server_or_a_pause_left_on_a_launch_is_not_its_followers() -> None:
    rows = rows_of((1, 7), (2, None))
    rows[0, FLAGS] = AFTER_IDLE | PAUSED | LANE_OPENING
    describe(rows, np.zeros(WORDS, np.int64))
    assert rows[:, FLAGS].tolist() == [AFTER_IDLE | PAUSED | LANE_OPENING, LANE_OPENING]


def test_a_wait_counts_where_it_was_long_and_an_answer_from_before_it_stays() -> None:
    rows = rows_of((1, 1), (2, 1), (3, 1), (4, 1))
    rows[:3, PROCESS] = 100
    rows[:3, WAIT_FROM], rows[:3, WAIT_TO] = 1_000, (1_000 + LEAST_NS, 1_010, 1_020)
    rows[2, READY], rows[2, T_READY] = 9, 500
    count_waits(rows, 6, 7)
    assert rows[:, WAIT].tolist() == rows[:, WAITED].tolist() == [LEAST_NS, 10, 20, 0]
    assert rows[:, WAITED_THERE].tolist() == [LEAST_NS, 10, 20, 0]
    assert rows[:, READY].tolist() == [6, 7, 9, 0]
    assert rows[:, T_READY].tolist() == [1_000 + LEAST_NS, 1_010, 500, 0]


def tell(it: Recorder, given: object, ride: int, depth: int = 1) -> None:
    Recorder.launched(it, None, given, ride, Reason.OVERLAPPED, depth)


def ride(it: Recorder, clocks: Clocks, event: Event, took: int) -> None:
    """One iteration in the lane, as the loop, the lane and its results stamp it."""
    stamps = it.stamps
    clocks.work(100)
    stamps[FORWARD] = clocks.now()
    clocks.work(50)
    stamps[LAUNCHED] = clocks.now()
    if it.riding:
        stamps[STEP], it.newest = AS_BEFORE, event
    else:
        tell(it, result(event), FURTHER)
    stamps[PROCESS] = clocks.now()
    stamps[WAIT_FROM] = clocks.now()
    clocks.sleep(took)
    stamps[WAIT_TO] = clocks.now()
    clocks.work(30)
    stamps[PROCESSED] = clocks.now()
    it.end()


def riding(clocks: Clocks, steps: int) -> Recorder:
    it = new_recorder()
    it.begin()
    tell(it, result(Event(clocks)), OPENING, 0)
    it.end()
    for _ in range(steps):
        ride(it, clocks, Event(clocks), 40_000)
    return it


def test_steps_that_nobody_was_told_of_are_numbered_and_their_waits_known(clocks: Clocks) -> None:
    it = riding(clocks, 5)
    assert it.riding and it.launches == 6
    found = columns(it)
    assert found["step"] == [1, 2, 3, 4, 5] and found["wait"] == [40_000] * 5
    assert found["ready"] == ["waited"] * 5 and found["rows"] == [4] * 5
    assert found["path"] == ["resident"] * 5 and found["cpu_process"][1:] == [30] * 4


def test_a_launch_outside_takes_over_from_steps_that_nobody_was_told_of(clocks: Clocks) -> None:
    it = riding(clocks, 4)
    given = result(Event(clocks))
    it.stamps[LAUNCHED] = clocks.now()
    tell(it, given, OUTSIDE)
    assert not it.riding
    it.stamps[PROCESS] = clocks.now()
    it.stamps[PROCESSED] = clocks.now()
    it.end()
    it.stamps[PROCESS] = clocks.now()
    it.stamps[PROCESSED] = clocks.now()
    it.end()
    found = columns(it)
    assert found["step"] == [1, 2, 3, 4, 5, 6] and found["path"][-1] == "overlap"


def test_steps_go_on_unsaid_when_records_are_made_in_between(clocks: Clocks) -> None:
    it = riding(clocks, 3)
    it.settle_now(all_of_it=True)
    for _ in range(3):
        ride(it, clocks, Event(clocks), 40_000)
    found = columns(it)
    assert found["step"] == list(range(1, 7)) and found["rows"] == [4] * 6
    assert len(it.stamps) == WIDTH
