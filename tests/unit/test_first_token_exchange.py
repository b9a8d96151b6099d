"""The rule first-token under DP attention: ranks in different states decide alike, by one exchange a step."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components import dp_attn

from tests.unit.dp_ranks import RANKS, Local, Rank, Waiting, run_ranks
from zos_sglang.overlap.guards import DUE_MARK, PrefillRule, Reason
from zos_sglang.upstream import first_token
from zos_sglang.upstream.first_token import COLUMN, DUE, FirstTokenExchange
from zos_sglang.upstream.snapshot import make_snapshot

FIRST_TOKEN, NEVER, ALWAYS = PrefillRule.FIRST_TOKEN, PrefillRule.NEVER, PrefillRule.ALWAYS


def rows(chunked, whole):
    """Requests of one batch: upstream chunks one prompt at a time."""
    return [Waiting(*one, middle=False) for one in whole] + [Waiting(*one, middle=True) for one in chunked]


request = st.tuples(st.booleans(), st.sampled_from([0, 1, 16]), st.booleans())
reqs = st.builds(rows, st.lists(request, max_size=1), st.lists(request, min_size=1, max_size=3))
busy = st.builds(Local, st.sampled_from(["prefill", "decode", "mixed"]), reqs)
steps = st.lists(st.tuples(*[st.one_of(st.just(Local("idle")), busy)] * RANKS), min_size=2, max_size=8)


def expected(rule, steps):
    """The reason of every step, from what all ranks know together."""
    reasons, pending = [], None
    for locals_ in steps:
        if all(local.kind == "idle" for local in locals_):
            reasons.append(None)
            pending = None
            continue
        consecutive = pending is not None and any(x.prefills for x in locals_) and pending[0]
        if pending is None:
            reasons.append(Reason.NOTHING_PENDING)
        elif consecutive and rule is ALWAYS:
            reasons.append(Reason.CONSECUTIVE_PREFILL)
        elif consecutive and rule is FIRST_TOKEN and pending[1]:
            reasons.append(Reason.FIRST_TOKEN)
        else:
            reasons.append(Reason.OVERLAPPED)
        pending = any(x.prefills for x in locals_), any(x.is_owed for x in locals_)
    return reasons


def reasons_of(decisions):
    return [[decision and decision.reason for decision in rank] for rank in decisions]


@pytest.mark.parametrize("rule", list(PrefillRule))
@given(steps=steps)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranks_in_any_states_decide_alike_and_as_all_of_them_together_would(monkeypatch, rule, steps):
    decisions = run_ranks(monkeypatch, [Rank(n, rule) for n in range(RANKS)], steps)
    assert reasons_of(decisions) == [expected(rule, steps)] * RANKS


def test_an_idle_rank_waits_for_the_other_ranks_first_token(monkeypatch):
    step = (Local("prefill", [Waiting(stream=True)]), Local("idle"))
    ranks = [Rank(n, FIRST_TOKEN) for n in range(RANKS)]
    wanted = [Reason.NOTHING_PENDING, Reason.FIRST_TOKEN]
    assert reasons_of(run_ranks(monkeypatch, ranks, [step, step])) == [wanted] * RANKS


def test_the_prefill_that_follows_may_be_another_ranks(monkeypatch):
    """The rank that owes the token has nothing to prefill when the decision falls."""
    owing, other = Local("prefill", [Waiting(stream=True)]), Local("prefill", [Waiting()])
    steps = [(owing, Local("idle")), (Local("decode", owing.reqs), other)]
    ranks = [Rank(n, FIRST_TOKEN) for n in range(RANKS)]
    wanted = [Reason.NOTHING_PENDING, Reason.FIRST_TOKEN]
    assert reasons_of(run_ranks(monkeypatch, ranks, steps)) == [wanted] * RANKS


def test_the_last_chunk_owes_a_token_while_the_chunk_before_it_is_in_flight(monkeypatch):
    """The request still counts a middle chunk then: its result is not processed yet."""
    last = Local("prefill", [Waiting(stream=True, inflight_middle_chunks=1)])
    ranks = [Rank(n, FIRST_TOKEN) for n in range(RANKS)]
    decisions = run_ranks(monkeypatch, ranks, [(last, Local("idle"))] * 2)
    assert decisions[0][1].reason is Reason.FIRST_TOKEN


@pytest.mark.parametrize("due", [False, True])
def test_a_rank_without_the_plugin_reads_upstreams_values_as_ever(monkeypatch, due):
    step = (Local("prefill", [Waiting(stream=due)]), Local("idle"))
    ours, stock = Rank(0, FIRST_TOKEN), Rank(1, FIRST_TOKEN, plugin=False)
    run_ranks(monkeypatch, [ours, stock], [step])
    assert stock.pending.is_extend_in_batch is ours.pending.is_extend_in_batch is True
    assert not hasattr(stock.pending, DUE_MARK)


def test_a_rank_without_the_plugin_owes_nothing_that_ours_would_wait_for(monkeypatch):
    step = (Local("idle"), Local("prefill", [Waiting(stream=True)]))
    ranks = [Rank(0, FIRST_TOKEN), Rank(1, FIRST_TOKEN, plugin=False)]
    decisions = run_ranks(monkeypatch, ranks, [step, step])
    assert reasons_of(decisions) == [[Reason.NOTHING_PENDING, Reason.OVERLAPPED]] * RANKS


def test_the_column_is_the_one_that_upstream_sends_is_extend_in_batch_in():
    def row(**values):
        names = ("num_dp_ranks", "tp_size", "cp_size", "num_tokens", "num_tokens_for_logprob")
        names += ("can_run_decode_cuda_graph", "can_run_draft_cuda_graph", "can_run_prefill_cuda_graph")
        names += ("is_extend_in_batch", "local_can_run_tbo", "local_forward_mode")
        info = dp_attn.MLPSyncBatchInfo(**(dict.fromkeys(names, 0) | values))
        return info._get_local_tensor("cpu").tolist()

    nothing, due = row(), row(is_extend_in_batch=DUE)
    assert due[COLUMN] == DUE > int(True)
    assert due[:COLUMN] + due[COLUMN + 1 :] == nothing[:COLUMN] + nothing[COLUMN + 1 :]


def through(exchange, batch):
    """`prepare` where upstream gathers nothing."""
    return exchange.prepare(lambda adapter, local: local, None, batch)


@pytest.mark.parametrize(("ranks", "agreed"), [(1, True), (2, False)])
def test_where_nothing_is_gathered_a_single_rank_speaks_for_itself_and_one_of_several_does_not(
    monkeypatch, ranks, agreed
):
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(num_dp_ranks=ranks)
    )
    exchange = FirstTokenExchange()
    exchange.active = True
    batch = through(exchange, Local("prefill", [Waiting(stream=True)]).batch())
    assert getattr(batch, DUE_MARK) is agreed


def test_a_value_is_not_left_over_for_the_next_exchange(monkeypatch):
    """A running batch is one object for many steps."""
    steps = [(Local("prefill", [Waiting(stream=True)]), Local("idle")), (Local("decode", []), Local("idle"))]
    steps[1][0].reqs.append(Waiting(stream=True))
    ranks = [Rank(n, FIRST_TOKEN) for n in range(RANKS)]
    run_ranks(monkeypatch, ranks, steps)
    assert [getattr(rank.pending, DUE_MARK) for rank in ranks] == [False, False]


def test_an_exchange_that_is_off_changes_and_marks_nothing(monkeypatch):
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(num_dp_ranks=1))
    exchange, local = FirstTokenExchange(), Local("prefill", [Waiting(stream=True)])
    exchange.active = True
    through(exchange, local.batch())
    exchange.active = False  # the mode was switched
    batch, info = local.batch(), SimpleNamespace(is_extend_in_batch=True)
    assert through(exchange, batch) is batch and not hasattr(batch, DUE_MARK)
    exchange.gather(lambda info: None, info)
    assert info.is_extend_in_batch is True


def test_a_fault_of_ours_is_told_to_every_rank_as_nothing_due(monkeypatch, caplog):
    broken = [True, False]
    real = first_token.someone_will_wait_for_first_token
    monkeypatch.setattr(
        first_token,
        "someone_will_wait_for_first_token",
        lambda batch: 1 / 0 if broken and broken.pop(0) else real(batch),
    )
    step = (Local("prefill", [Waiting(stream=True)]), Local("idle"))
    ranks = [Rank(n, FIRST_TOKEN) for n in range(RANKS)]
    decisions = run_ranks(monkeypatch, ranks, [step, step, step])
    assert reasons_of(decisions) == [[Reason.NOTHING_PENDING, Reason.OVERLAPPED, Reason.FIRST_TOKEN]] * RANKS
    assert caplog.text.count("who waits for a first token is unknown") == 1


@pytest.mark.parametrize("due", [None, False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_the_mark_belongs_to_the_launch_and_stays_on_its_snapshot(monkeypatch, due, hooked):
    if hooked:
        original = ScheduleBatch.copy

        @wraps(original)
        def copy(self):
            return original(self)

        monkeypatch.setattr(ScheduleBatch, "copy", copy)
    batch = ScheduleBatch(reqs=[])
    if due is not None:
        setattr(batch, DUE_MARK, due)
    kept = make_snapshot()(batch)
    setattr(batch, DUE_MARK, "of a later step")
    assert getattr(kept, DUE_MARK, None) is due
