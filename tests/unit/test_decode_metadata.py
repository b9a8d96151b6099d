"""Which metadata writer a backend gets, and what ours writes into upstream's buffers (on the CPU)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.lane_standins import named
from zos_sglang.upstream import decode_metadata
from zos_sglang.upstream.decode_metadata import Fa3Metadata, TritonMetadata, own_metadata

CONTEXT = 64
PAGE = 16


def runner_with(backend: Any) -> Any:
    """Buffers of four rows, of which the last is padding."""
    buffers = SimpleNamespace(
        seq_lens=torch.tensor([3, 17, 33, 1]),
        req_pool_indices=torch.tensor([2, 4, 1, 0]),
        out_cache_loc=torch.tensor([16 * 7 + 2, 16 * 8, 16 * 9, 0]),
    )
    return SimpleNamespace(attn_backend=backend, buffers=buffers)


def test_a_backend_gets_its_own_writer_or_is_an_error() -> None:
    live = torch.tensor([3])
    assert type(own_metadata(runner_with(named("TritonAttnBackend")), live)) is TritonMetadata
    assert type(own_metadata(runner_with(named("FlashAttentionBackend")), live)) is Fa3Metadata
    with pytest.raises(ValueError, match="FlashInferAttnBackend"):
        own_metadata(runner_with(named("FlashInferAttnBackend")), live)


@pytest.mark.parametrize("bucket", [2, 4])
def test_triton_gets_all_slots_of_its_rows_and_upstreams_splits(bucket: int) -> None:
    table = torch.arange(5 * CONTEXT, dtype=torch.int32).view(5, CONTEXT)
    asked: list[Any] = []
    backend: Any = SimpleNamespace(
        req_to_token=table,
        kv_indptr=torch.zeros(10, dtype=torch.int32),
        cuda_graph_kv_indices=torch.full((200,), -1),
        cuda_graph_num_kv_splits=torch.zeros(9, dtype=torch.int32),
        cuda_graph_uneven_batch="uneven",
        get_num_kv_splits=lambda splits, lengths, uneven: (
            asked.append((lengths.tolist(), uneven)) or splits.fill_(5)
        ),
    )
    runner = runner_with(backend)
    TritonMetadata(runner).write(bucket)
    lengths, rows = runner.buffers.seq_lens[:bucket], runner.buffers.req_pool_indices[:bucket]
    slots = torch.cat([table[row, :n] for row, n in zip(rows, lengths.tolist(), strict=True)])
    assert backend.kv_indptr.tolist() == [0, *lengths.cumsum(0).tolist(), *[0] * (9 - bucket)]
    assert backend.cuda_graph_kv_indices.tolist() == [*slots.tolist(), *[-1] * (200 - len(slots))]
    assert asked == [(lengths.tolist(), "uneven")]
    assert backend.cuda_graph_num_kv_splits.tolist() == [5] * bucket + [0] * (9 - bucket)


@pytest.mark.parametrize("scheduled", [True, False])
def test_fa3_gets_lengths_the_newest_page_and_upstreams_schedule(scheduled: bool) -> None:
    asked: list[Any] = []
    metadata: Any = SimpleNamespace(
        cache_seqlens_int32=torch.zeros(4, dtype=torch.int32),
        page_table=torch.full((4, CONTEXT // PAGE), -1, dtype=torch.int32),
        cu_seqlens_q="cu",
        scheduler_metadata="there" if scheduled else None,
    )

    def schedule(bucket: int, longest: int, lengths: Any, cu_seqlens_q: Any) -> torch.Tensor:
        asked.append((bucket, longest, lengths.tolist(), cu_seqlens_q))
        return torch.tensor([6, 7, 8], dtype=torch.int32)

    backend = named("FlashAttentionBackend")
    backend.decode_cuda_graph_metadata = {4: metadata}
    backend.page_size, backend.max_context_len = PAGE, 4096
    backend._compute_scheduler_metadata = schedule
    backend._sched_meta_buf = torch.zeros(5, dtype=torch.int32)
    own_metadata(runner_with(backend), torch.tensor([3])).write(4)
    assert metadata.cache_seqlens_int32.tolist() == [3, 17, 33, 1]
    # Pages 0, 1 and 2 of the three rows; the padding row's table is left alone.
    assert metadata.page_table.tolist() == [[7, -1, -1, -1], [-1, 8, -1, -1], [-1, -1, 9, -1], [-1] * 4]
    # The context length, whatever the rows' lengths are: as stock's replays.
    assert asked == ([(4, 4096, [3, 17, 33, 1], "cu")] if scheduled else [])
    assert backend._sched_meta_buf.tolist() == ([6, 7, 8, 0, 0] if scheduled else [0] * 5)


def test_upstreams_writer_gives_one_view_a_bucket_over_the_static_buffers() -> None:
    views: list[Any] = []
    runner = runner_with(SimpleNamespace(init_forward_metadata_out_graph=views.append))
    for name in ("input_ids", "positions"):
        setattr(runner.buffers, name, torch.zeros(4, dtype=torch.int64))
    writer = decode_metadata.UpstreamMetadata(runner)
    for bucket in (2, 4, 2):
        writer.write(bucket)
    assert views[0] is views[2] is not views[1]
    runner.buffers.seq_lens += 1
    assert [v.seq_lens.tolist() for v in views[:2]] == [[4, 18], [4, 18, 34, 2]]
    assert [v.batch_size for v in views] == [2, 4, 2]
    assert all(v.seq_lens_cpu is None and v.seq_lens_sum is None for v in views)
