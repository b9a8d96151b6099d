"""Masks of the lane's grammar rows: those of upstream, with one copy and nothing made anew."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from transformers import AutoTokenizer

from tests.unit.bit_grammar import BitGrammar
from tests.unit.upstream_decode_case import VOCABULARY, Batch, model_runner
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eager import EagerExecutor
from zos_sglang.resident.graph_executor import GraphExecutor
from zos_sglang.testing.models import make_tiny
from zos_sglang.upstream.decode_graph import DecodeGraphs
from zos_sglang.upstream.lane_grammar import GrammarMasks, is_packed
from zos_sglang.upstream.lane_model import SglangModelStep

ROWS = 6


def info_of(grammars: list[Any], vocabulary: int = VOCABULARY) -> SamplingBatchInfo:
    """Sampling parameters of a greedy batch with these grammars (None: a plain row)."""
    batch: Any = Batch(torch.zeros(10, 100, dtype=torch.int32), len(grammars), greedy=True)
    info: SamplingBatchInfo = batch.sampling_info
    info.vocab_size, info.device = vocabulary, "cpu"
    info.grammars = grammars if any(grammars) else None
    return info


def mask_of(info: SamplingBatchInfo) -> torch.Tensor:
    info.update_regex_vocab_mask()
    assert info.grammar_mask is not None
    return info.grammar_mask.vocab_mask.clone()


def masks(capacity: int = ROWS) -> GrammarMasks:
    return GrammarMasks(capacity, "cpu", LaneAccount())


# ---------------------------------------------------------------- real grammars

TEXTS = {"regex": (r"(red|green), [0-9]{2}", "green, 42"), "json": ('{"type": "integer"}', "-17")}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = make_tiny("qwen3", tmp_path_factory.mktemp("model") / "tiny")
    return AutoTokenizer.from_pretrained(folder)


def xgrammar(tokenizer: Any) -> Any:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    return XGrammarGrammarBackend(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def llguidance(tokenizer: Any) -> Any:
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend

    return GuidanceBackend(tokenizer, n_vocab=len(tokenizer), eos_token_ids=[tokenizer.eos_token_id])


def thinking(backend: Any, grammar: Any) -> ReasonerGrammarObject:
    """A wrapper that defers `grammar` until token 7, and allows only that after three tokens."""
    found = ReasonerGrammarObject(
        grammar,
        [7],
        max_think_tokens=3,
        enable_token_filter=backend.is_support_token_filter,
        token_filter_fn=getattr(backend, "set_token_filter", None),
        allocate_vocab_mask_fn=getattr(backend, "allocate_vocab_mask", None),
    )
    found.maybe_init_reasoning(True)
    return found


@pytest.mark.parametrize("make", [xgrammar, llguidance])
def test_masks_are_upstreams_token_by_token(make: Callable[[Any], Any], tokenizer: Any) -> None:
    """Plain rows between, an answer that ends early, a request that has ended, reasoning before an answer."""
    backend = make(tokenizer)
    found = {kind: getattr(backend, f"dispatch_{kind}")(text) for kind, (text, _) in TEXTS.items()}
    regex, integer = found["regex"], found["json"]
    ended = backend.dispatch_regex("a+")
    ended.finished = True
    wrapped = thinking(backend, backend.dispatch_regex("[0-9]+"))
    grammars = [None, regex, integer, None, ended, wrapped]
    assert all(is_packed(grammar) for grammar in grammars if grammar)
    ours, upstreams = info_of(grammars, len(tokenizer)), info_of(grammars, len(tokenizer))
    assert masks().attach(ours)
    answers = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for _, text in TEXTS.values()]
    seen = set()
    for step in range(max(map(len, answers)) + 1):
        ours_now = mask_of(ours)
        assert torch.equal(ours_now, mask_of(upstreams))
        assert (ours_now[[0, 3, 4]] == -1).all(), "no constraint without a grammar, and none after its end"
        seen.add(tuple(ours_now[[1, 2, 5]].flatten().tolist()))
        for grammar, tokens in zip((regex, integer), answers, strict=True):
            if step < len(tokens):
                grammar.accept_token(tokens[step])
        wrapped.accept_token(tokenizer("5").input_ids[0] if step > 3 else 7 if step == 3 else 20)
    assert len(seen) > 5 and regex.is_terminated()


def test_a_wrapper_without_a_grammar_bounds_the_reasoning_as_upstreams_does(tokenizer: Any) -> None:
    wrapped = thinking(xgrammar(tokenizer), None)
    assert is_packed(wrapped)
    ours, upstreams = info_of([wrapped, None], len(tokenizer)), info_of([wrapped, None], len(tokenizer))
    masks().attach(ours)
    for _ in range(5):
        assert torch.equal(mask_of(ours), mask_of(upstreams))
        wrapped.accept_token(20)
    assert not (mask_of(ours)[0] == -1).any(), "after its budget only the end of the reasoning is allowed"


def test_other_grammars_are_not_known() -> None:
    class XGrammarGrammar(BitGrammar):
        """Only its name is known."""

    assert not is_packed(BitGrammar(VOCABULARY)) and not is_packed(XGrammarGrammar(VOCABULARY))
    assert not is_packed(ReasonerGrammarObject(BitGrammar(VOCABULARY), [7]))
    assert not is_packed(ReasonerGrammarObject(None, [7]))


# ---------------------------------------------------------------- the memory of masks


def test_a_row_that_had_a_grammar_in_an_opening_before_is_free_again() -> None:
    shared = masks()
    first = info_of([BitGrammar(VOCABULARY), None, BitGrammar(VOCABULARY, 1)])
    shared.attach(first)
    mask_of(first)
    second = info_of([None, BitGrammar(VOCABULARY), None, None])
    shared.attach(second)
    found = mask_of(second)
    assert (found[[0, 2, 3]] == -1).all() and (found[1] != -1).any()


def test_openings_and_steps_write_the_same_memory() -> None:
    shared = masks()
    places = set()
    for opening in range(3):
        info = info_of([BitGrammar(VOCABULARY), *[None] * opening])
        shared.attach(info)
        for _ in range(4):
            info.update_regex_vocab_mask()
            assert info.grammar_mask is not None
            places.add(info.grammar_mask.vocab_mask.data_ptr())
    assert len(places) == 1
    assert shared.account.pinned_bytes == 2 * ROWS * -(-VOCABULARY // 32) * 4


def test_two_steps_in_a_row_are_filled_in_different_buffers() -> None:
    """The device may still copy the one while the host writes the other."""
    grammar = BitGrammar(VOCABULARY)
    where = []
    grammar.fill_vocab_mask = lambda mask, idx: where.append(mask.data_ptr())  # type: ignore[method-assign]
    info = info_of([grammar])
    masks().attach(info)
    for _ in range(4):
        info.update_regex_vocab_mask()
    assert where[0] != where[1] and where == where[:2] * 2


def test_a_batch_without_grammars_is_left_as_it_is() -> None:
    shared, info = masks(), info_of([None, None])
    assert not shared.attach(info)
    assert type(info) is SamplingBatchInfo and shared.account.pinned_bytes == 0


def test_after_a_fault_of_ours_masks_are_upstreams(caplog: pytest.LogCaptureFixture) -> None:
    shared, grammars = masks(), [None, BitGrammar(VOCABULARY)]
    info, upstreams = info_of(grammars), info_of(grammars)
    shared.attach(info)
    shared._mask = None
    for _ in range(3):
        assert torch.equal(mask_of(info), mask_of(upstreams))
    assert (shared.account.faults, shared.account.mask_faults) == (1, 3)
    assert len(caplog.records) == 1 and "upstream's own" in caplog.text


# ---------------------------------------------------------------- steps of both executors


@pytest.fixture
def one_rank(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a grammar upstream's sampler reduces tokens over the ranks, be there only one."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)


def batch_of(runner: Any, grammars: list[Any], *, greedy: bool = True) -> Any:
    table = runner.req_to_token_pool.req_to_token
    batch: Any = Batch(table, len(grammars), greedy=greedy)
    batch.orig_seq_lens = batch.seq_lens.clone()
    batch.sampling_info.device = "cpu"
    batch.has_grammar = any(grammars)
    for req, grammar in zip(batch.reqs, grammars, strict=True):
        req.grammar = grammar
    return batch


def executor_of(runner: Any, graphs: bool, own_masks: bool = True) -> Any:
    make = partial(GrammarMasks, account=LaneAccount()) if own_masks else None
    if graphs:
        slope_graphs(runner)
        return GraphExecutor(DecodeGraphs(runner, masks=make), depth=3)
    table = runner.req_to_token_pool.req_to_token
    runner.forward = forward_of(runner)
    return EagerExecutor(
        SglangModelStep(runner, make(4, "cpu") if make else None), table, depth=3, capacity=4
    )


#: Of several tokens that a mask leaves one is the largest, so that a cold sampler draws it too.
SLOPE = torch.arange(VOCABULARY) / 1000


def slope_graphs(runner: Any) -> None:
    found = runner.decode_cuda_graph_runner
    for key, graph in found.backend._graphs.items():
        logits = found.backend._outputs[key].next_token_logits

        def sloped(replay: Any = graph.replay, logits: torch.Tensor = logits) -> None:
            replay()
            logits.sub_(SLOPE)

        graph.replay = sloped


def forward_of(runner: Any) -> Callable[[Any], Any]:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from tests.unit.upstream_decode_case import token_after

    def forward(step: Any) -> Any:
        best = token_after(step.input_ids, step.positions, step.out_cache_loc)
        logits = torch.zeros(len(best), VOCABULARY).scatter_(1, best[:, None], 1.0) - SLOPE
        return SimpleNamespace(logits_output=LogitsProcessorOutput(next_token_logits=logits))

    return forward


def new_grammars() -> list[Any]:
    return [BitGrammar(VOCABULARY), None, BitGrammar(VOCABULARY, 1, last=3)]


def ride(runner: Any, graphs: bool, *, greedy: bool, own_masks: bool = True, steps: int = 8) -> list[Any]:
    """Tokens of each step; grammars get their tokens between `begin` and `finish` of the next one."""
    grammars, found = new_grammars(), []
    executor = executor_of(runner, graphs, own_masks)
    executor.open(batch_of(runner, grammars, greedy=greedy))
    for _ in range(steps):
        executor.begin()
        for grammar, token in zip(grammars, found[-1] if found else [0] * 3, strict=True):
            if grammar and found:
                grammar.accept_token(token)
        executor.finish()
        found.append(executor.last_tokens().tolist())
    return found


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("greedy", [True, False])
def test_masked_steps_sample_what_upstreams_masks_and_sampler_do(greedy: bool) -> None:
    expected = ride(model_runner(), graphs=False, greedy=greedy, own_masks=False)
    free = new_grammars()
    for n, row in enumerate(expected):
        assert free[0].allows(row[0]) and (n >= 3 or free[2].allows(row[2]))
        free[0].accept_token(row[0])
        free[2].accept_token(row[2])
    for graphs in (True, False):
        assert ride(model_runner(), graphs=graphs, greedy=greedy) == expected


@pytest.mark.usefixtures("one_rank")
def test_a_greedy_batch_with_grammars_keeps_its_captured_sampler_on_one_rank(monkeypatch: Any) -> None:
    """Several ranks agree on a token inside upstream's sampler, so there it must run."""
    from zos_sglang.upstream import decode_graph

    for ranks in (1, 2):
        monkeypatch.setattr(decode_graph, "get_parallel", lambda n=ranks: SimpleNamespace(tp_size=n))
        for grammars, greedy in ((new_grammars(), ranks == 1), ([None] * 3, True)):
            runner = model_runner()
            monkeypatch.setattr(decode_graph, "_plain_sampler", lambda _: True)
            graphs = DecodeGraphs(runner, masks=partial(GrammarMasks, account=LaneAccount()))
            assert graphs.load(batch_of(runner, grammars)).greedy is greedy


@pytest.mark.usefixtures("one_rank")
def test_nothing_of_a_step_outlives_its_sampling() -> None:
    """Neither its logits nor what samples them; over 10,000 steps no tensor is left behind."""
    runner = model_runner()
    executor = executor_of(runner, graphs=False)
    seen: list[Any] = []
    forward = runner.forward

    def watched(step: Any) -> Any:
        output = forward(step)
        seen.append(weakref.ref(output.logits_output.next_token_logits))
        seen.append(weakref.ref(output.logits_output))
        return output

    runner.forward = watched
    counted = []
    gc.disable()
    try:
        for opening in range(10_000 // STEPS):
            executor.open(batch_of(runner, new_grammars()))
            for _ in range(STEPS):
                executor.begin()
                draw = weakref.ref(executor._sample)
                assert draw() is not None and seen[-1]() is not None
                executor.finish()
                assert draw() is None and all(ref() is None for ref in seen)
                seen.clear()
            executor.close()
            if opening in (1, 10_000 // STEPS - 1):
                gc.collect()
                counted.append(live_tensors())
    finally:
        gc.enable()
    assert counted[0] == counted[1]


#: As far as the page table of the case reaches.
STEPS = 80


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.usefixtures("one_rank")
def test_closing_lets_the_grammars_go() -> None:
    runner = model_runner()
    for graphs in (True, False):
        executor = executor_of(runner, graphs)
        grammar = BitGrammar(VOCABULARY)
        executor.open(batch_of(runner, [grammar]))
        executor.begin()
        executor.finish()
        executor.close()
        ref = weakref.ref(grammar)
        del grammar
        gc.collect()
        assert ref() is None
