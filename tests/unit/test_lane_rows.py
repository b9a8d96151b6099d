"""Which rows of an opening result processing must look at, and after which step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.scheduler_components import output_streamer

from tests.unit.lane_fakes import LaneRequest, LaneSpec
from zos_sglang.resident.rows import FORCED_INTERVAL, RowTable


def request(had=0, limit=100, stream=False, vocabulary=1000):
    """A request with `had` output tokens."""
    req = LaneRequest(LaneSpec(0, (1, 2, 3), limit, stream, vocabulary=vocabulary))
    req.output_ids = list(range(had))
    return req


def table(*reqs, pending=None, stop_ids=(), watched=(), **more):
    return RowTable(reqs, pending or [0] * len(reqs), frozenset(stop_ids), watched, **more)


# ------------------------------------------------------------ due


def test_the_forced_interval_is_upstreams():
    assert output_streamer.DEFAULT_FORCE_STREAM_INTERVAL == FORCED_INTERVAL


def test_a_streaming_row_is_due_after_every_step():
    rows = table(request(stream=True), request(), request(stream=True))
    assert [rows.due(step) for step in (1, 2, 7)] == [(0, 2)] * 3


@pytest.mark.parametrize(("had", "pending"), [(0, 0), (1, 0), (0, 1), (49, 0), (50, 0), (49, 1), (123, 1)])
def test_another_row_is_due_when_its_own_output_reaches_a_multiple_of_fifty(had, pending):
    rows = table(request(had=had, limit=1000), pending=[pending])
    due = [step for step in range(1, 301) if rows.due(step)]
    assert due == [step for step in range(1, 301) if (had + pending + step) % 50 == 0]


def test_rows_of_different_age_are_due_after_different_steps():
    rows = table(request(had=3), request(had=1), request(had=3))
    assert (rows.due(47), rows.due(49), rows.due(48)) == ((0, 2), (1,), ())


def test_due_rows_are_in_batch_order_whether_they_stream_or_not():
    rows = table(request(had=3), request(stream=True), request(had=3))
    assert rows.due(47) == (0, 1, 2) and rows.due(46) == (1,)


def test_the_interval_is_an_argument():
    rows = table(request(had=1), forced_interval=4)
    assert [step for step in range(1, 9) if rows.due(step)] == [3, 7]


# ------------------------------------------------------------ rows that stay


def test_rows_that_stay_keep_their_limits_their_steps_and_what_is_looked_at():
    reqs = [request(had=3, limit=9), request(stream=True, limit=50), request(had=3, limit=12), request(had=1)]
    before = table(*reqs, stop_ids={7}, watched=(0, 2), constrained=(2,))
    rows = before.keep([1, 2, 3])
    assert rows.reqs == reqs[1:] and rows.limits == [50, 9, 99] and rows.first_limit == 9
    assert (rows.watched, rows.constrained, rows.streams) == ((1,), (1,), (0,))
    for step in (46, 47, 49):
        assert rows.due(step) == tuple(row - 1 for row in before.due(step) if row)
    assert rows.candidates(1, [7, 1, 1]) == {0, 1} and rows.candidates(9, [1, 1, 1]) == {1}


def test_a_token_goes_to_the_row_that_stays():
    reqs = [request(), request(), request()]
    rows = table(*reqs).keep([0, 2])
    rows.appends[1](5)
    assert [req.output_ids for req in reqs] == [[], [], [5]] and rows.times[1] is reqs[2].time_stats


# ------------------------------------------------------------ candidates


def test_a_step_in_which_nothing_happens_has_no_candidates():
    assert table(request(), request(), stop_ids={7}).candidates(1, [5, 6]) == set()


def test_a_stop_id_makes_its_row_a_candidate_and_no_other():
    assert table(request(), request(), request(), stop_ids={7, 8}).candidates(1, [7, 5, 8]) == {0, 2}


def test_a_row_that_reaches_its_limit_is_a_candidate_from_then_on():
    rows = table(request(had=2, limit=5), request(limit=9))
    assert rows.limits == [3, 9] and rows.first_limit == 3
    assert [rows.candidates(step, [1, 1]) for step in (2, 3, 4, 9)] == [set(), {0}, {0}, {0, 1}]


def test_a_pending_token_counts_against_the_limit():
    assert table(request(had=2, limit=5), pending=[1]).first_limit == 2


def test_a_watched_row_is_a_candidate_after_every_step():
    rows = table(request(), request(), watched=[1])
    assert [rows.candidates(step, [5, 5]) for step in (1, 2)] == [{1}, {1}]


@pytest.mark.parametrize("token", [-1, 50, 999])
def test_a_token_outside_the_smallest_vocabulary_makes_every_row_a_candidate(token):
    rows = table(request(vocabulary=50), request(vocabulary=80))
    assert rows.candidates(1, [3, token]) == {0, 1}


def test_the_last_token_of_the_vocabulary_is_inside_it():
    assert table(request(vocabulary=50)).candidates(1, [49]) == set()


def test_without_a_known_vocabulary_only_negative_tokens_are_outside():
    rows = table(request(vocabulary=None))
    assert rows.candidates(1, [10**9]) == set() and rows.candidates(1, [-1]) == {0}


def test_a_candidate_set_may_be_changed_by_its_reader():
    rows = table(request(), watched=[0])
    rows.candidates(1, [5]).clear()
    assert rows.candidates(2, [5]) == {0}


# ------------------------------------------------------------ what stays fixed


def test_rows_keep_their_order_and_append_to_their_own_requests():
    reqs = [request(), request()]
    rows = table(*reqs)
    for append, token in zip(rows.appends, (4, 5), strict=True):
        append(token)
    assert [r.output_ids for r in reqs] == [[4], [5]] and rows.reqs == reqs and len(rows) == 2


@pytest.mark.parametrize("which", ["metrics", "tracing"])
def test_time_stamps_are_upstreams_own_if_one_row_is_measured_or_traced(which):
    reqs = [request(), request()]
    assert not table(*reqs).timed
    stats = reqs[1].time_stats
    stats.enable_metrics, stats.trace_ctx = (
        which == "metrics",
        SimpleNamespace(tracing_enable=which == "tracing"),
    )
    assert table(*reqs).timed


def test_each_row_needs_its_number_of_pending_tokens():
    with pytest.raises(ValueError, match="zip"):
        table(request(), request(), pending=[0])
