"""The grammar guard over upstream's own algorithms and its own question of a batch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from zos_sglang.overlap.guards import PrefillRule, Reason, make_guard

SPECULATIVE = [algorithm for algorithm in SpeculativeAlgorithm if algorithm.is_some()]


def batch(algorithm, grammar=True, mode=ForwardMode.DECODE):
    made = SimpleNamespace(spec_algorithm=algorithm, has_grammar=grammar, forward_mode=mode, reqs=[])
    made.grammar_needs_sync = partial(ScheduleBatch.grammar_needs_sync, made)
    return made


def reason(made):
    decide = make_guard(PrefillRule.NEVER, dp_attention=False)
    return decide(made, batch(made.spec_algorithm)).reason


@pytest.mark.parametrize("algorithm", SPECULATIVE)
def test_a_grammar_waits_exactly_where_verify_cannot_advance_it(algorithm):
    waits = not algorithm.supports_grammar_overlap()
    assert reason(batch(algorithm)) is (Reason.GRAMMAR_SYNC if waits else Reason.OVERLAPPED)


def test_there_are_algorithms_of_both_kinds():
    assert {algorithm.supports_grammar_overlap() for algorithm in SPECULATIVE} == {True, False}


@pytest.mark.parametrize("algorithm", SPECULATIVE)
def test_without_a_grammar_and_in_prefill_nothing_waits(algorithm):
    assert reason(batch(algorithm, grammar=False)) is Reason.OVERLAPPED
    assert reason(batch(algorithm, mode=ForwardMode.EXTEND)) is Reason.OVERLAPPED


def test_without_speculation_a_grammar_delays_the_sampling_instead():
    assert reason(batch(SpeculativeAlgorithm.NONE)) is Reason.OVERLAPPED
