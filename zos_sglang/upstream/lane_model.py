"""One eager decode step of SGLang 0.5.23: what its worker does around the model, for a batch that stays."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from zos_sglang.upstream.lane_grammar import GrammarMasks


class SglangModelStep:
    """`ModelStep` over `ModelRunner.forward` and `ModelRunner.sample`, as `TpModelWorker` calls them.

    Args:
        runner: upstream's model runner.
        masks: where grammars' masks are made; None: as upstream makes them.
    """

    def __init__(self, runner: Any, masks: GrammarMasks | None = None) -> None:
        self.runner = runner
        self.translator = runner.kv_index_translator
        self.masks = masks

    def build(self, batch: Any) -> ForwardBatch:
        made = build_forward_batch(batch, self.runner)
        if self.masks is not None:
            self.masks.attach(made.sampling_info)
        return made

    def forward(
        self,
        template: ForwardBatch,
        done: int,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
    ) -> Callable[[], torch.Tensor]:
        # A forward may mark and rebind fields of what it gets; the template must stay as it was.
        step = copy.copy(template)
        if done:
            step.input_ids = tokens
            step.seq_lens = lengths
            step.seq_lens_cpu = template.seq_lens_cpu + done
            step.seq_lens_sum = template.seq_lens_sum + done * len(tokens)
            step.orig_seq_lens = template.orig_seq_lens + done
            step.positions = (lengths - 1).to(template.positions.dtype)
            step.out_cache_loc = slots
            self.translator.own_plan(step).bind(step, self.translator)
        logits = self.runner.forward(step).logits_output
        return partial(self.runner.sample, logits, step)

    def floor_us(self, template: ForwardBatch, replays: int) -> float:
        begun = time.perf_counter()
        for _ in range(replays):
            self.runner.forward(copy.copy(template))
        if template.input_ids.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / replays * 1e6


def build_forward_batch(batch: Any, runner: Any) -> ForwardBatch:
    """The forward batch of a prepared decode batch, with its own read-only sampling parameters.

    The batch stays as upstream left it, though `init_new` fills in the sum of lengths.
    """
    live, seq_lens_sum = batch.sampling_info, batch.seq_lens_sum
    batch.sampling_info = live.copy_for_forward()
    try:
        return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    finally:
        batch.sampling_info, batch.seq_lens_sum = live, seq_lens_sum
