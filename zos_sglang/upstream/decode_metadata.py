"""Attention metadata of a decode step, refreshed on the device: upstream's own way, or ours.

Each class has one method, `write(bucket)`, which may be captured: it reads upstream's static buffers
(lengths, rows, slots) and writes what the captured model graphs read. Nothing in it depends on host values
that change.

`UpstreamMetadata` runs upstream's preparation as it is (`MetadataGlueGraph` captures the same call). The own
ones leave out what plain decode never reads or what is already there from the step before; the KV splits and
FA3's tile schedule always come from upstream's code, since they decide the rounding.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

from zos_sglang.resident import kernels
from zos_sglang.upstream.decode_coverage import FA3, TRITON


class Metadata(Protocol):
    """Writes one step's attention metadata."""

    def write(self, bucket: int) -> None:
        """Refresh the metadata of the first `bucket` rows of upstream's buffers, on the current stream."""


def own_metadata(runner: Any, live: Any) -> Metadata:
    """Our metadata writer for the runner's attention backend.

    Args:
        runner: upstream's `DecodeCudaGraphRunner`.
        live: int64 [1] on the device, the number of rows that are requests.

    Raises:
        ValueError: there is none for this backend.
    """
    name = type(runner.attn_backend).__name__
    if name == TRITON:
        return TritonMetadata(runner)
    if name == FA3:
        return Fa3Metadata(runner, live)
    raise ValueError(f"no metadata kernels for {name}")


class UpstreamMetadata:
    """`init_forward_metadata_out_graph` over upstream's static buffers.

    It is given no host lengths, so FA3 takes the context length for the longest row, as stock does.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._views: dict[int, Any] = {}

    def write(self, bucket: int) -> None:
        view = self._views.get(bucket)
        if view is None:
            view = self._views[bucket] = self._view(bucket)
        self._runner.attn_backend.init_forward_metadata_out_graph(view)

    def _view(self, bucket: int) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        buffers = self._runner.buffers
        return SimpleNamespace(
            batch_size=bucket,
            forward_mode=ForwardMode.DECODE,
            actual_forward_mode=ForwardMode.DECODE,
            input_ids=buffers.input_ids[:bucket],
            positions=buffers.positions[:bucket],
            req_pool_indices=buffers.req_pool_indices[:bucket],
            seq_lens=buffers.seq_lens[:bucket],
            seq_lens_cpu=None,
            seq_lens_sum=None,
            out_cache_loc=buffers.out_cache_loc[:bucket],
            encoder_lens=None,
            spec_info=None,
            # Only a pool with virtual slot numbers plans its reads.
            kv_loc_plan=None,
        )


class TritonMetadata:
    """Triton attention: our gather of all slots, upstream's choice of KV splits."""

    def __init__(self, runner: Any) -> None:
        self._backend = runner.attn_backend
        self._buffers = runner.buffers

    def write(self, bucket: int) -> None:
        backend, buffers = self._backend, self._buffers
        seq_lens = buffers.seq_lens[:bucket]
        kernels.gather_slots(
            seq_lens,
            buffers.req_pool_indices[:bucket],
            backend.req_to_token,
            backend.kv_indptr[: bucket + 1],
            backend.cuda_graph_kv_indices,
        )
        backend.get_num_kv_splits(
            backend.cuda_graph_num_kv_splits[:bucket], seq_lens, backend.cuda_graph_uneven_batch
        )


class Fa3Metadata:
    """FA3: lengths, the newest token's page, and upstream's tile schedule for them.

    The page tables below the newest page are those that loading the batch wrote.
    """

    def __init__(self, runner: Any, live: Any) -> None:
        self._backend = runner.attn_backend
        self._buffers = runner.buffers
        self._live = live

    def write(self, bucket: int) -> None:
        backend, buffers = self._backend, self._buffers
        metadata = backend.decode_cuda_graph_metadata[bucket]
        kernels.append_page(
            buffers.seq_lens[:bucket],
            buffers.out_cache_loc[:bucket],
            metadata.cache_seqlens_int32,
            metadata.page_table,
            self._live,
            page_size=backend.page_size,
        )
        if metadata.scheduler_metadata is None:
            return
        # The context length, as in stock's replays: a tighter bound changes the split choice.
        schedule = backend._compute_scheduler_metadata(
            bucket, backend.max_context_len, metadata.cache_seqlens_int32, metadata.cu_seqlens_q
        )
        backend._sched_meta_buf[: schedule.shape[0]].copy_(schedule)
