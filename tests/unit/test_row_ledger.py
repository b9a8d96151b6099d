"""A row is read once after each write, by the generation that wrote it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zos_sglang.overlap.row_ledger import RowLedger, RowLedgerError


def test_a_written_row_is_read_once():
    ledger = RowLedger()
    ledger.wrote([3, 4], [1, 1])
    ledger.read([4, 3], [1, 1])
    with pytest.raises(RowLedgerError, match="row 3 was read without a write since its last read"):
        ledger.read([3], [1])


def test_a_row_that_nobody_wrote_cannot_be_read():
    with pytest.raises(RowLedgerError, match="row 0 "):
        RowLedger().read([0], [0])


def test_another_owner_cannot_read_the_token_of_the_last_one():
    ledger = RowLedger()
    ledger.wrote([5], [7])
    with pytest.raises(RowLedgerError, match="row 5 holds a token of generation 7, read by 8"):
        ledger.read([5], [8])


def test_rows_that_sit_out_launches_stay_valid():
    ledger = RowLedger()
    ledger.wrote([1, 2], [1, 1])
    for _ in range(5):
        ledger.wrote([9], [1])  # prefills of others
    ledger.read([1, 2, 9], [1, 1, 1])


def test_an_unread_token_of_a_finished_request_is_dropped_by_the_next_owner():
    ledger = RowLedger()
    ledger.wrote([6], [1])
    ledger.wrote([6], [2])
    ledger.read([6], [2])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 2)), max_size=40))
def test_it_agrees_with_a_plain_model(calls):
    ledger, model = RowLedger(), {}
    for write, row, generation in calls:
        if write:
            ledger.wrote([row], [generation])
            model[row] = generation
        elif model.get(row) == generation:
            ledger.read([row], [generation])
            del model[row]
        else:
            model.pop(row, None)
            with pytest.raises(RowLedgerError):
                ledger.read([row], [generation])
