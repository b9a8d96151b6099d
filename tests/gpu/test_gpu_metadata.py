"""Attention metadata of a decode step: ours and captured against what upstream computes, value by value.

Backends without a server: only the attributes that upstream's decode metadata reads are there, so a new one
shows as an AttributeError.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zos_sglang.resident import kernels
from zos_sglang.resident.capture import Capture
from zos_sglang.testing.server import cuda_available
from zos_sglang.upstream.decode_metadata import UpstreamMetadata, own_metadata

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
CONTEXT = 4096
BUCKET, LIVE = 8, 6
STEPS = 70
#: Short ones, a long one and one that crosses a page in the window.
LENGTHS = (3, 17, 64, 1500, 40, 2)


def translator(table: Any) -> Any:
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    made = KVIndexTranslator.__new__(KVIndexTranslator)
    made.req_to_token, made._spaces = table, {}
    return made


def triton_backend(table: Any, page: int) -> Any:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    made = TritonAttnBackend.__new__(TritonAttnBackend)
    made.req_to_token, made.kv_index_translator = table, translator(table)
    made.dcp_size, made.sliding_window_size, made.window_kv_indptr = 1, None, None
    made.use_sliding_window_kv_pool = False
    made.static_kv_splits = made.enable_deterministic = False
    made.device_core_count, made.split_tile_size = 132, None
    made.num_head, made.num_kv_head, made.max_kv_splits = 16, 8, 8
    made.kv_indptr = torch.zeros(65, dtype=torch.int32, device=DEVICE)
    made.cuda_graph_kv_indices = torch.zeros(BUCKET * CONTEXT, dtype=torch.int64, device=DEVICE)
    made.cuda_graph_num_kv_splits = torch.full((BUCKET,), 8, dtype=torch.int32, device=DEVICE)
    made.cuda_graph_uneven_batch = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return made


def triton_state(backend: Any, lengths: list[int]) -> list[Any]:
    return [
        backend.kv_indptr[: BUCKET + 1].tolist(),
        backend.cuda_graph_kv_indices[: sum(lengths)].tolist(),
        backend.cuda_graph_num_kv_splits.tolist(),
        backend.cuda_graph_uneven_batch.tolist(),
    ]


def fa3_backend(table: Any, page: int) -> Any:
    from sgl_kernel.flash_attn import get_scheduler_metadata
    from sglang.srt.layers.attention.flashattention_backend import (
        FlashAttentionBackend,
        FlashAttentionMetadata,
    )

    made = FlashAttentionBackend.__new__(FlashAttentionBackend)
    made.req_to_token, made.kv_index_translator = table, translator(table)
    made.page_size, made.max_context_len = page, CONTEXT
    made.max_num_pages = CONTEXT // page
    made.use_sliding_window_kv_pool = made.is_prefill_aware_swa = made.use_mla = False
    made.needs_cpu_seq_lens = made._disable_scheduler_metadata_precompute = made.has_softcap = False
    made.local_attn_builder, made.num_splits, made.fa_impl_ver = None, 0, 3
    made.num_attention_heads, made.num_kv_heads, made.head_dim = 16, 8, 128
    made.kv_cache_dtype, made._get_scheduler_metadata = torch.bfloat16, get_scheduler_metadata
    metadata = FlashAttentionMetadata()
    metadata.cache_seqlens_int32 = torch.ones(BUCKET, dtype=torch.int32, device=DEVICE)
    metadata.cu_seqlens_q = torch.arange(BUCKET + 1, dtype=torch.int32, device=DEVICE)
    metadata.cu_seqlens_k = torch.zeros(BUCKET + 1, dtype=torch.int32, device=DEVICE)
    metadata.page_table = torch.zeros(BUCKET, made.max_num_pages, dtype=torch.int32, device=DEVICE)
    made._sched_meta_buf = torch.zeros(1 + 4 * BUCKET, dtype=torch.int32, device=DEVICE)
    schedule = made._compute_scheduler_metadata(
        BUCKET, 1, metadata.cache_seqlens_int32, metadata.cu_seqlens_q
    )
    metadata.scheduler_metadata = made._sched_meta_buf[: schedule.shape[0]]
    made.decode_cuda_graph_metadata = {BUCKET: metadata}
    return made


def fa3_state(backend: Any, lengths: list[int]) -> list[Any]:
    metadata = backend.decode_cuda_graph_metadata[BUCKET]
    pages = [-(-length // backend.page_size) for length in lengths]
    return [
        metadata.cache_seqlens_int32.tolist(),
        [metadata.page_table[row, :n].tolist() for row, n in enumerate(pages)],
        backend._sched_meta_buf.tolist(),
    ]


def buffers(table: Any) -> Any:
    def int64(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int64, device=DEVICE)

    empty = BUCKET - LIVE
    rows = int64([*range(1, LIVE + 1), *[0] * empty])
    seq_lens = int64([*LENGTHS, *[1] * empty])
    slots = table[rows, seq_lens - 1].to(torch.int64)
    slots[LIVE:] = 0
    positions = seq_lens - 1
    return SimpleNamespace(
        input_ids=int64([5] * BUCKET),
        positions=positions,
        seq_lens=seq_lens,
        out_cache_loc=slots,
        req_pool_indices=rows,
    )


def paged_table(page: int) -> Any:
    """Every request's pages are scattered over the pool."""
    pages = torch.randperm(8 * CONTEXT // page, device=DEVICE).view(8, -1)
    slots = pages[:, :, None] * page + torch.arange(page, device=DEVICE)
    return slots.view(8, CONTEXT).to(torch.int32)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("make", "state", "page"),
    [
        (triton_backend, triton_state, 1),
        (fa3_backend, fa3_state, 1),
        (fa3_backend, fa3_state, 16),
        (fa3_backend, fa3_state, 64),
    ],
)
def test_metadata_is_upstreams(
    make: Callable[..., Any], state: Callable[..., Any], page: int, own: bool, captured: bool
) -> None:
    torch.manual_seed(random.Random(page).randrange(1000))
    table = paged_table(page)
    ours, stock = make(table, page), make(table, page)
    mine = SimpleNamespace(attn_backend=ours, buffers=buffers(table))
    theirs = SimpleNamespace(attn_backend=stock, buffers=mine.buffers)
    live = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    tokens = torch.zeros(BUCKET, dtype=torch.int64, device=DEVICE)
    # Loading the batch is upstream's work in either case.
    UpstreamMetadata(mine).write(BUCKET)
    metadata = own_metadata(mine, live) if own else UpstreamMetadata(mine)
    step = kernels.StepBuffers(*vars(mine.buffers).values(), table)

    def move() -> None:
        kernels.advance(step, tokens, live)
        metadata.write(BUCKET)

    capture = Capture(enabled=captured)
    move = capture("advance and metadata", move)
    assert capture.failures == 0
    live.fill_(LIVE)
    for number in range(1, STEPS):
        torch.cuda.set_sync_debug_mode("error")
        move()
        torch.cuda.set_sync_debug_mode("default")
        lengths = [*(length + number for length in LENGTHS), *[1] * (BUCKET - LIVE)]
        assert step.seq_lens.tolist() == lengths
        UpstreamMetadata(theirs).write(BUCKET)
        assert state(ours, lengths) == state(stock, lengths), f"step {number}"
