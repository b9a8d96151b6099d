"""Masked lane steps on a CUDA device: masks from pinned memory, a captured sampler behind, nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.test_gpu_kernels import nothing_waits
from tests.unit.bit_grammar import BitGrammar
from tests.unit.test_graph_executor import DEPTH
from tests.unit.toy_decode import VOCABULARY, Rows, ToyDecode
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.graph_executor import GraphExecutor
from zos_sglang.testing.server import cuda_available
from zos_sglang.upstream.lane_grammar import GrammarMasks, MaskedSampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_available(), reason="no CUDA device"),
]
STEPS = 40
PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5], [8, 8], [3]]
#: Which rows have a grammar.
PLACES = {"some": (1, 3), "one": (4,), "all": (0, 1, 2, 3, 4)}


class MaskedToy(ToyDecode):
    """The toy model with grammars: masks are made as for upstream's graphs."""

    def __init__(self, grammars: list[Any], masks: GrammarMasks, *, greedy: bool) -> None:
        super().__init__("cuda")
        self.grammars, self.masks, self.greedy = grammars, masks, greedy

    def load(self, batch: Any) -> Any:
        loaded = super().load(batch)
        info = object.__new__(MaskedSampling)
        info.grammars, info.vocab_size, info.grammar_mask = self.grammars, VOCABULARY, None
        self.masks.attach(info)
        logits = self.logits(loaded.rows)

        def mask() -> None:
            info.update_regex_vocab_mask()
            assert info.grammar_mask is not None
            info.grammar_mask.apply(logits)
            info.grammar_mask = None

        def sample() -> Any:
            mask()
            return logits.argmax(-1).to(torch.int32)

        loaded.mask, loaded.sample = mask if self.greedy else None, sample
        return loaded


def masked(history: list[int], grammar: Any) -> int:
    """The reference: the largest logit that the grammar allows; all but one are equal, so else the first."""
    best = (sum(history) + len(history)) % VOCABULARY
    if grammar is None or grammar.allows(best):
        return best
    return next(token for token in range(VOCABULARY) if grammar.allows(token))


@pytest.mark.parametrize("greedy", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("places", PLACES)
def test_masked_steps_are_those_of_a_plain_reference(places: str, greedy: bool) -> None:
    grammars: list[Any] = [
        BitGrammar(VOCABULARY, row) if row in PLACES[places] else None for row in range(len(PROMPTS))
    ]
    account = LaneAccount()
    decode = MaskedToy(grammars, GrammarMasks(8, "cuda", account), greedy=greedy)
    executor = GraphExecutor(decode, depth=DEPTH)
    rows = Rows(decode, PROMPTS)
    batch = rows.batch()
    rows.reserve(batch, STEPS)
    executor.open(batch)
    assert executor.capture.failures == 0
    tokens: list[int] = []
    home = torch.zeros((2, len(PROMPTS)), dtype=torch.int64, pin_memory=True)
    for step in range(STEPS):
        with nothing_waits():
            executor.begin()
            # As the host does: the tokens of the step before, while the device is at the model.
            for grammar, token in zip(grammars, tokens, strict=False):
                if grammar is not None:
                    grammar.accept_token(token)
            executor.finish()
            home[step % 2].copy_(executor.last_tokens(), non_blocking=True)
        torch.cuda.synchronize()
        expected = [
            masked(history, grammar) for history, grammar in zip(rows.histories, grammars, strict=True)
        ]
        tokens = home[step % 2].tolist()
        assert tokens == expected == executor.ring[step % DEPTH, : len(expected)].tolist()
        for history, token in zip(rows.histories, expected, strict=True):
            history.append(token)
    assert (account.h2d_copies, account.faults) == (STEPS, 0), "one copy to the device a step"


def test_xgrammars_own_kernel_takes_the_masks_of_a_batch_with_plain_rows() -> None:
    """Upstream's Triton kernel, most rows unconstrained, logits as wide as a real model's."""
    ops = pytest.importorskip("sglang.kernels.ops.grammar.bitmask_ops")
    vocabulary, rows = 151936, 64
    masks = GrammarMasks(rows, "cuda", LaneAccount())
    info = object.__new__(MaskedSampling)
    info.grammars, info.vocab_size = [None] * (rows - 1) + [BitGrammar(vocabulary)], vocabulary
    masks.attach(info)
    found = torch.randn((rows, vocabulary), device="cuda")
    expected = found.clone()
    expected[-1, 1::2] = float("-inf")
    ops.apply_token_bitmask_inplace_triton(found, masks.fill(info.opened))
    assert torch.equal(found, expected)
