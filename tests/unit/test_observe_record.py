"""Step records: their layout, the ring, the closed enumerations, and records as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit.made_records import records, steady
from zos_sglang.observe.columns import from_columns, to_columns
from zos_sglang.observe.names import CODES, COLUMNS, Forward, code, word
from zos_sglang.observe.record import COUNTS, DURATIONS, SMALL, STEP, TIMES, Ring


def one(step: int) -> np.ndarray:
    """A record whose fields all say which it is."""
    long = len(TIMES) + len(DURATIONS) + len(COUNTS)
    return np.array([(step, *[step] * long, *[step % 200] * len(SMALL))], STEP)


def test_a_record_is_small_and_comes_back_as_it_was_written() -> None:
    assert STEP.itemsize == 192
    ring = Ring(4)
    long = len(TIMES) + len(DURATIONS) + len(COUNTS)
    fields = (3, *range(100, 100 + long), *range(len(SMALL)))
    ring.write(np.array([fields], STEP))
    (found,) = ring.since(2)
    assert found.tolist() == fields


def test_a_ring_keeps_the_last_records_in_order() -> None:
    ring = Ring(8)
    for step in range(1, 20):
        ring.write(one(step))
    assert ring.since(0)["step"].tolist() == list(range(12, 20))
    assert ring.since(17)["step"].tolist() == [18, 19]
    assert ring.last(3)["step"].tolist() == [17, 18, 19]
    assert ring.since(19).size == 0


def test_of_more_records_than_a_ring_holds_the_last_ones_stay() -> None:
    ring = Ring(4)
    ring.write(np.concatenate([one(step) for step in range(1, 11)]))
    assert ring.since(0)["step"].tolist() == [7, 8, 9, 10] and ring.newest == 10


def test_a_step_that_was_not_written_is_missing_not_old() -> None:
    ring = Ring(4)
    for step in (1, 2, 3, 4, 5, 7):
        ring.write(one(step))
    assert ring.since(0)["step"].tolist() == [4, 5, 7]


def test_records_written_out_of_order_come_in_order() -> None:
    ring = Ring(8)
    for step in (1, 3, 2):
        ring.write(one(step))
    assert ring.since(0)["step"].tolist() == [1, 2, 3]


def test_only_the_step_that_is_meant_is_patched() -> None:
    ring = Ring(4)
    for step in range(1, 7):
        ring.write(one(step))
    assert ring.patch(5, "gpu", 77)
    assert not ring.patch(1, "gpu", 78)
    assert not ring.patch(0, "gpu", 79)
    assert ring.since(0)["gpu"].tolist() == [3, 4, 77, 6]


def test_what_was_read_does_not_change_under_the_reader() -> None:
    ring = Ring(4)
    ring.write(one(1))
    found = ring.since(0)
    ring.write(one(5))
    assert found["step"].tolist() == [1]


def test_a_cleared_ring_goes_on_numbering() -> None:
    ring = Ring(4)
    for step in (1, 2):
        ring.write(one(step))
    ring.clear()
    assert ring.since(0).size == 0
    ring.write(one(3))
    assert ring.since(0)["step"].tolist() == [3]


def test_every_word_has_a_number_that_fits_and_comes_back() -> None:
    for column, words in COLUMNS.items():
        assert len(set(words)) == len(words) < 256
        assert [word(column, code(column, one)) for one in words] == [str(one) for one in words]
        assert 0 not in CODES[column].values()
        assert "other" not in words
        assert word(column, 0) is None


def test_every_forward_mode_of_sglang_has_a_name() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    assert {mode.name.lower() for mode in ForwardMode} == {str(one) for one in Forward}


def test_columns_make_the_same_records_again() -> None:
    made = steady(5, gpu=2, cpu=1, departure=["intake", 0, 0, "finish", 0])
    again = from_columns(json.loads(json.dumps(to_columns(made))))
    assert np.array_equal(again, made)
    assert to_columns(made)["departure"] == ["intake", None, None, "finish", None]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gpu": None}, "without column 'gpu'"),
        ({"rows": [1]}, "different lengths"),
        ({"path": ["sideways"] * 3}, "unknown path 'sideways'"),
    ],
)
def test_bad_columns_are_named(change: dict[str, list[int] | None], complaint: str) -> None:
    columns = to_columns(records(3)) | change
    with pytest.raises(ValueError, match=complaint):
        from_columns({name: found for name, found in columns.items() if found is not None})


def test_no_records_are_columns_too() -> None:
    assert from_columns(to_columns(records(0))).size == 0
