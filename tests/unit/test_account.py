"""Counts by reason and path, and the last decisions."""

from types import SimpleNamespace

import pytest

from tests.unit.fake_batch import Mode
from zos_sglang.overlap.account import PATHS, REMEMBERED, Account
from zos_sglang.overlap.guards import Reason


def batch(mode, chunked=None):
    return SimpleNamespace(forward_mode=mode, chunked_req=chunked)


def nonzero(account):
    return {path: n for path, n in account.paths.items() if n}


@pytest.mark.parametrize(
    ("launched", "paths"),
    [
        (batch(Mode.EXTEND), {"prefill": 1}),
        (batch(Mode.DECODE), {"decode": 1}),
        # A running batch that began as a prefill still names the chunked request of that day.
        (batch(Mode.DECODE, chunked="long prompt"), {"decode": 1}),
        (batch(Mode.MIXED), {"mixed": 1}),
        (batch(Mode.EXTEND, chunked="long prompt"), {"prefill": 1, "middle-chunk": 1}),
        (batch(Mode.MIXED, chunked="long prompt"), {"mixed": 1, "middle-chunk": 1}),
    ],
)
def test_a_launch_counts_by_its_kind(launched, paths):
    account = Account()
    account.launched(launched)
    assert nonzero(account) == paths


def test_a_batch_that_is_neither_counts_as_no_kind():
    account = Account()
    mode = SimpleNamespace(is_decode=lambda: False, is_mixed=lambda: False, is_extend=lambda: False)
    account.launched(batch(mode))
    assert nonzero(account) == {}


def test_the_report_has_every_reason_and_path_from_the_start():
    report = Account().report()
    assert report == {
        "reasons": {r.value: 0 for r in Reason},
        "paths": dict.fromkeys(PATHS, 0),
    }


def test_a_report_is_a_copy():
    account = Account()
    report = account.report()
    account.passed("stalls")
    assert report["paths"]["stalls"] == 0 and account.report()["paths"]["stalls"] == 1


def test_an_unknown_path_is_an_error_and_not_a_new_count():
    with pytest.raises(KeyError):
        Account().passed("other")


def test_the_last_decisions_are_remembered_with_their_launch():
    account = Account()
    for n in range(REMEMBERED + 5):
        account.decided(n, Reason.OVERLAPPED)
    assert [n for n, _ in account.decisions] == list(range(5, REMEMBERED + 5))
    assert account.reasons[Reason.OVERLAPPED] == REMEMBERED + 5
