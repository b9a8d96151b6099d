"""The plugin that makes ranks different: whom it holds up, and the one decision that it changes."""

from __future__ import annotations

import pytest

from zos_sglang.testing.rank_jitter import (
    COLLECTED,
    FAULT,
    HELD_UP,
    JITTER,
    MILLISECONDS,
    TOLD,
    Jitter,
    Plan,
    failing,
    otherwise,
)

BOTH = {JITTER: "0:3,1:7", MILLISECONDS: "4"}


def passing(environ: dict[str, str], rank: int, places: int = 500) -> tuple[list[float], int]:
    """Sleeps, and collections, of a rank that passes so many places."""
    slept: list[float] = []
    collected: list[int] = []
    jitter = Jitter(Plan.of(environ), lambda: rank, slept.append, lambda: collected.append(1))
    pass_by = jitter.place("somewhere")
    for _ in range(places):
        pass_by("any", argument=1)
    return slept, len(collected)


def test_a_rank_is_held_up_at_times_of_its_own_that_repeat():
    slept, collected = passing(BOTH, 1)
    assert 10 < len(slept) < 100 and collected > 0
    assert all(0 <= seconds <= 0.004 for seconds in slept)
    assert passing(BOTH, 1) == (slept, collected) != passing(BOTH, 0)


def test_what_befell_a_rank_is_told_once_for_each_place(caplog):
    jitter = Jitter(Plan.of(BOTH), lambda: 1, lambda _: None, lambda: None)
    places = ("intake", "forward")
    for pass_by in [jitter.place(place) for place in places] * 500:
        pass_by()
    said = [record.getMessage() for record in caplog.records]
    wanted = [
        TOLD.format(what=what, place=at) for what in (HELD_UP, COLLECTED) for at in ("intake", "forward")
    ]
    assert sorted(said) == sorted(wanted)


def test_a_rank_without_a_seed_is_left_alone():
    assert passing({JITTER: "1:7"}, 0) == ([], 0)
    assert passing({}, 1) == ([], 0)


def test_one_decision_of_one_rank_is_changed_from_the_given_call_on():
    plan = Plan.of({FAULT: "1:decision:3"})
    results = iter([None, 1, 1, 5, 1, 1])
    deciding = otherwise(lambda: next(results), lambda found: 9 if found == 1 else found, lambda: 1, plan)
    assert [deciding() for _ in range(6)] == [None, 1, 1, 5, 9, 1]


def test_another_rank_decides_as_ever():
    plan = Plan.of({FAULT: "1:decision:1"})
    deciding = otherwise(lambda: 1, lambda found: 9, lambda: 0, plan)
    assert [deciding() for _ in range(4)] == [1] * 4


def test_one_call_of_one_rank_fails():
    plan = Plan.of({FAULT: "1:lane:2"})
    mine, other = failing(lambda: 1, lambda: 1, plan), failing(lambda: 1, lambda: 0, plan)
    assert mine() == 1
    with pytest.raises(RuntimeError, match="planted"):
        mine()
    assert [mine(), other(), other(), other()] == [1] * 4


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="1:nap:3: nap is none of decision, selection, lane"):
        Plan.of({FAULT: "1:nap:3"})
