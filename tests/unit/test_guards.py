"""The decision of one launch, against a table written from the specification and not from the code."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest

from tests.unit.fake_batch import Mode, SpecAlgorithm
from zos_sglang.overlap.guards import (
    CONSECUTIVE_PREFILL,
    DUE_MARK,
    PrefillRule,
    RankEqual,
    Reason,
    dp_prefill_guard,
    first_token_is_there,
    make_guard,
)

KINDS = ("prefill", "decode", "mixed")
MODES = {"prefill": Mode.EXTEND, "decode": Mode.DECODE, "mixed": Mode.MIXED}


@dataclass
class Waiting:
    """The one request of the pending batch."""

    stream: bool = False
    inflight_middle_chunks: int = 0
    done: bool = False
    max_new: int = 16

    @property
    def sampling_params(self):
        return SimpleNamespace(max_new_tokens=self.max_new)

    def finished(self):
        return self.done


class OnlyRankEqual:
    """A batch of which a DP rule may read the rank-equal values; anything else explodes."""

    def __init__(self, is_extend_in_batch, due=False):
        self.is_extend_in_batch = is_extend_in_batch
        setattr(self, DUE_MARK, due)
        self.spec_algorithm = SpecAlgorithm(False)

    def __getattr__(self, name):
        raise AssertionError(f"a DP rule read {name}, which ranks do not share")


def batch(kind, *, spec=False, grammar=False, reqs=()):
    return SimpleNamespace(
        forward_mode=MODES[kind],
        is_extend_in_batch=MODES[kind].is_extend(),
        spec_algorithm=SpecAlgorithm(spec),
        grammar_needs_sync=lambda: grammar,
        reqs=list(reqs),
        sampling_info=SimpleNamespace(has_custom_logit_processor=False),
    )


def expected(rule, kind, pending, req, *, spec, grammar):
    """Overlap or not, and the reason, said once more in other words."""
    if pending is None:
        return True, "nothing-pending"
    if kind in ("prefill", "mixed") and pending in ("prefill", "mixed"):
        if rule == "always":
            return False, "consecutive-prefill"
        token_is_due = not req.done and req.inflight_middle_chunks == 0
        somebody_reads_it = req.stream or req.max_new == 1
        if rule == "first-token" and token_is_due and somebody_reads_it:
            return False, "first-token"
    if spec and grammar and kind == "decode":
        return False, "grammar-sync"
    return True, "overlapped"


REQUESTS = [
    Waiting(stream, middle, done, max_new)
    for stream, middle, done, max_new in product((False, True), (0, 1, 2), (False, True), (0, 1, 2, 16))
]


@pytest.mark.parametrize("rule", list(PrefillRule))
def test_guard_table_outside_dp_attention(rule):
    """Rule x batch x pending x streams x middle chunk x finished x length x speculation x grammar."""
    decide, seen = make_guard(rule, dp_attention=False), set()
    cases = product(KINDS, (None, *KINDS), REQUESTS, (False, True), (False, True))
    for kind, pending, req, spec, grammar in cases:
        held = batch(pending, reqs=[req]) if pending else None
        decision = decide(batch(kind, spec=spec, grammar=grammar), held)
        wanted = expected(rule.value, kind, pending, req, spec=spec, grammar=grammar)
        assert (decision.overlap, decision.reason.value) == wanted, (kind, pending, req, spec, grammar)
        seen.add(decision.reason)
    of_rule = {"never": set(), "always": {"consecutive-prefill"}, "first-token": {"first-token"}}
    assert seen == {"overlapped", "nothing-pending", "grammar-sync"} | of_rule[rule.value]


@pytest.mark.parametrize("there", [None, True, False])
def test_a_first_token_goes_out_before_a_decode_step_if_it_is_there_and_waited_for(there):
    """Batch x pending x request; `there`: what the device says of the pending result, None on a CPU."""
    done = None if there is None else SimpleNamespace(query=lambda: there)
    result, seen = SimpleNamespace(copy_done=done), set()
    for kind, pending, req in product(KINDS, KINDS, REQUESTS):
        found = first_token_is_there(batch(kind), batch(pending, reqs=[req]), result)
        is_due = not req.done and req.inflight_middle_chunks == 0 and (req.stream or req.max_new == 1)
        wanted = kind == "decode" and pending == "prefill" and is_due and there is not False
        assert found is wanted, (kind, pending, req)
        seen.add(found)
    assert seen == ({False} if there is False else {False, True})


def test_a_custom_logit_processor_sees_what_it_sees_in_stock():
    """It reads the tokens that its request has got, in stock without the one that is pending."""
    now, before = batch("decode"), batch("prefill", reqs=[Waiting(stream=True)])
    result = SimpleNamespace(copy_done=None)
    assert first_token_is_there(now, before, result)
    now.sampling_info.has_custom_logit_processor = True
    assert not first_token_is_there(now, before, result)


@pytest.mark.parametrize("rule", list(PrefillRule))
def test_with_a_cache_on_the_host_no_mixed_batch_waits(rule):
    decide = make_guard(rule, dp_attention=False, mixed_waits=False)
    for pending in ("prefill", "mixed"):
        before = batch(pending, reqs=[Waiting(stream=True)])
        assert decide(batch("mixed"), before).overlap
        assert decide(batch("prefill"), before).overlap is (rule is PrefillRule.NEVER)


@pytest.mark.parametrize("rule", list(PrefillRule))
@pytest.mark.parametrize(("now", "before", "due"), list(product((False, True), repeat=3)))
def test_guard_table_under_dp_attention(rule, now, before, due):
    decision = make_guard(rule, dp_attention=True)(OnlyRankEqual(now), OnlyRankEqual(before, due))
    reason = Reason.OVERLAPPED
    if now and before:
        if rule.value == "always":
            reason = Reason.CONSECUTIVE_PREFILL
        elif rule.value == "first-token" and due:
            reason = Reason.FIRST_TOKEN
    assert (decision.overlap, decision.reason) == (reason is Reason.OVERLAPPED, reason)


def test_a_batch_whose_value_nobody_gathered_owes_no_first_token():
    decide = make_guard(PrefillRule.FIRST_TOKEN, dp_attention=True)
    pending = batch("prefill", reqs=[Waiting(stream=True)])
    assert decide(batch("prefill"), pending).reason is Reason.OVERLAPPED


def test_grammar_sync_holds_under_dp_attention_too():
    decide = make_guard(PrefillRule.ALWAYS, dp_attention=True)
    assert decide(batch("decode", spec=True, grammar=True), batch("decode")).reason is Reason.GRAMMAR_SYNC


def test_the_prefill_rule_speaks_before_the_grammar():
    """A decode never is a prefill locally; under DP attention another rank's prefill makes it one."""
    decide = make_guard(PrefillRule.ALWAYS, dp_attention=True)
    now, before = batch("decode", spec=True, grammar=True), batch("decode")
    now.is_extend_in_batch = before.is_extend_in_batch = True
    assert decide(now, before).reason is Reason.CONSECUTIVE_PREFILL


def test_one_waiting_request_among_others_is_enough():
    decide = make_guard(PrefillRule.FIRST_TOKEN, dp_attention=False)
    pending = batch("prefill", reqs=[Waiting(), Waiting(stream=True, done=True), Waiting(stream=True)])
    assert decide(batch("prefill"), pending).reason is Reason.FIRST_TOKEN
    pending.reqs.pop()
    assert decide(batch("prefill"), pending).reason is Reason.OVERLAPPED


def test_a_prefill_that_is_launched_as_one_graph_holds_no_first_token_up():
    small = batch("prefill")
    decide = make_guard(PrefillRule.FIRST_TOKEN, dp_attention=False, quick=lambda one: one is small)
    pending = batch("prefill", reqs=[Waiting(stream=True)])
    assert decide(small, pending).reason is Reason.OVERLAPPED
    assert decide(batch("prefill"), pending).reason is Reason.FIRST_TOKEN


def test_under_always_even_a_prefill_of_one_graph_waits():
    decide = make_guard(PrefillRule.ALWAYS, dp_attention=False, quick=lambda one: True)
    assert decide(batch("prefill"), batch("prefill", reqs=[Waiting()])).reason is Reason.CONSECUTIVE_PREFILL


def test_mode_sync_never_overlaps_and_looks_at_nothing():
    decide = make_guard(PrefillRule.NEVER, dp_attention=False, sync=True)
    for pending in (None, object()):
        decision = decide(object(), pending)
        assert (decision.overlap, decision.reason) == (False, Reason.MODE_SYNC)


def test_a_dp_rule_gets_the_two_values_that_ranks_share():
    assert RankEqual._fields == ("is_extend_in_batch", "first_token_due")
    with pytest.raises(AttributeError):
        RankEqual(True).forward_mode
    assert dp_prefill_guard(PrefillRule.ALWAYS, RankEqual(True), RankEqual(True)) is CONSECUTIVE_PREFILL


@pytest.mark.parametrize("rule", list(PrefillRule))
def test_two_ranks_with_different_local_batches_decide_alike(rule):
    """What differs between ranks: kinds and requests. What does not: whether anybody prefills."""
    decide = make_guard(rule, dp_attention=True)
    for now, before in product((False, True), repeat=2):
        decisions = set()
        for kind, pending, req in product(KINDS, KINDS, REQUESTS):
            mine, held = batch(kind), batch(pending, reqs=[req])
            mine.is_extend_in_batch, held.is_extend_in_batch = now, before
            decisions.add(decide(mine, held))
        assert len(decisions) == 1


def test_reasons_are_closed():
    assert {r.value for r in Reason} == {
        "overlapped",
        "nothing-pending",
        "consecutive-prefill",
        "first-token",
        "grammar-sync",
        "mode-sync",
        "guard-failed",
        "overlap-off",
        "early-first-token",
    }
