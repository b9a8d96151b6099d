"""Decode attention of the plain-CPU platform, for tests and the demo without a GPU.

Upstream's torch-native decode spends most of a step on bookkeeping that is the same in every
layer. One gather padded to the longest row is fast for many short rows, but slower for long
ones, and a row's rounding then depends on its neighbours, which would blur a comparison of two
servers whose batches differ. So: one row at a time, as upstream does, with the bookkeeping done
once a step. Two to six times upstream's speed, and a row never sees another one.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


class RowwiseAttention(TorchNativeAttnBackend):
    """Upstream's torch-native attention with a cheaper decode; extend is upstream's own."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._slots: list[torch.Tensor] = []  # per row: its KV slots, int64 [length]

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Length of a row that only pads the batch to another rank's (DP attention): the padding slot's."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Look up each row's KV slots once for all layers of this step."""
        super().init_forward_metadata(forward_batch)
        self._slots = []
        if forward_batch.forward_mode.is_decode():
            table = self.req_to_token_pool.req_to_token
            rows = forward_batch.req_pool_indices.tolist()
            lengths = forward_batch.seq_lens.tolist()
            self._slots = [table[r, :n].long() for r, n in zip(rows, lengths, strict=True)]

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """Fill and return `output` [rows, heads, d]; the caches are [slots, KV heads, d]."""
        special = options["is_cross_attn"] or options["sliding_window_size"] is not None
        if special or k_cache.dtype != query.dtype:
            return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *args, **options)
        rows, heads, width = query.shape
        kv_heads = k_cache.shape[1]
        # The query heads of one KV head become query positions: nothing has to be repeated.
        grouped = query.view(rows, kv_heads, heads // kv_heads, width)
        result = output.view(rows, kv_heads, heads // kv_heads, -1)
        for row, slots in enumerate(self._slots):
            result[row] = scaled_dot_product_attention(
                grouped[row : row + 1],
                k_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0),
                v_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0),
                scale=options["scaling"],
            )[0]
        return output
