"""Which steps may be held against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.made_records import records
from zos_sglang.observe.adjacent import difference, pairs, size_class
from zos_sglang.observe.names import AFTER_IDLE, LANE_OPENING, PAUSED


def steps(**fields: Any) -> list[tuple[int, int]]:
    before, after = pairs(records(3, **fields))
    return list(zip(before["step"].tolist(), after["step"].tolist(), strict=True))


def test_consecutive_steps_of_one_kind_are_pairs() -> None:
    assert steps() == [(1, 2), (2, 3)]
    assert steps(flags=[0, LANE_OPENING, 0]) == [(1, 2), (2, 3)]


@pytest.mark.parametrize(
    "fields",
    [
        {"step": [1, 2, 4]},
        {"mode": ["overlap", "overlap", "sync"]},
        {"forward": ["decode", "decode", "extend"]},
        {"flags": [0, 0, AFTER_IDLE]},
        {"flags": [0, 0, PAUSED]},
        {"flags": [0, 0, AFTER_IDLE | LANE_OPENING]},
    ],
)
def test_a_gap_or_another_kind_breaks_adjacency(fields: dict[str, Any]) -> None:
    assert steps(**fields) == [(1, 2)]


def test_an_idle_gap_before_the_first_of_a_pair_is_no_gap_within_it() -> None:
    assert steps(flags=[AFTER_IDLE, 0, 0]) == [(1, 2), (2, 3)]


def test_same_rows_is_a_condition_only_where_asked_for() -> None:
    made = records(3, rows=[4, 4, 3])
    assert pairs(made)[0].size == 2
    assert pairs(made, same_rows=True)[1]["step"].tolist() == [2]


def test_one_step_and_none_have_no_pairs() -> None:
    for count in (0, 1):
        before, after = pairs(records(count))
        assert before.size == after.size == 0


def test_size_classes_are_powers_of_two_at_or_above() -> None:
    assert size_class(np.array([0, 1, 2, 3, 4, 5, 64, 65], np.int32)).tolist() == [1, 1, 2, 4, 4, 8, 64, 128]


def test_a_difference_needs_both_times() -> None:
    assert difference(np.array([5, 0, 9]), np.array([3, 1, 0])).tolist() == [2]
