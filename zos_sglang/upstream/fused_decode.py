"""One CUDA graph for a whole decode step: what comes before the model, the model, and what comes after it.

Upstream's own capture of a batch size runs once more with a stand-in for its graph backend, so every context,
hook and option of the model forward is upstream's, and so are the static buffers. The graph shares upstream's
memory pool: only one of them is replayed at a time, and what has to outlive a replay lies in static buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2


class _StandIn:
    """Takes the place of `FullCudaGraphBackend` for one capture; upstream's graphs stay as they are."""

    def __init__(self, backend: Any, stream: Any, before: Callable[[], None], after: Callable[[Any], None]):
        self._backend = backend
        self._stream = stream
        self._before = before
        self._after = after
        self.graph: Any = None

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        from sglang.srt.model_executor.runner_utils.pool import graph_pool_capture_scope

        def step() -> None:
            self._before()
            self._after(forward_fn())

        for _ in range(WARM_UPS):
            torch.cuda.synchronize()
            self._backend._tp_group.barrier()
            step()
            if post_warmup_hook is not None:
                post_warmup_hook()
        graph = torch.cuda.CUDAGraph()
        with (
            graph_pool_capture_scope(),
            torch.cuda.graph(
                graph, pool=self._backend._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            step()
        self.graph = graph


def fusable(runner: Any) -> str | None:
    """Why `runner` (upstream's `DecodeCudaGraphRunner`) has no fused graphs, or None."""
    if runner.model_runner.canary_manager is not None:
        return "the KV canary needs its operations around every model graph"
    if runner.enable_torch_compile:
        return "compiled models are captured by upstream only"
    if getattr(runner.backend._memory_saver_adapter, "enabled", False):
        return "graph memory is managed by the memory saver"
    return None


def capture_fused(runner: Any, bucket: int, before: Callable[[], None], after: Callable[[Any], None]) -> Any:
    """Capture a step of `bucket` rows; returns the `torch.cuda.CUDAGraph`. Synchronises; takes a while.

    Runs real forwards on upstream's input buffers, which it clears first: nothing that was loaded survives.
    All tensor-parallel ranks must call it at the same point.

    Args:
        before: advance and metadata, on upstream's buffers; must not touch a row while none is live.
        after: takes the model's output (`LogitsProcessorOutput` of `bucket` rows).
    """
    from sglang.srt.distributed.parallel_state import graph_capture
    from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
    from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_capture_stream

    buffers = runner.buffers
    buffers.seq_lens.fill_(runner.seq_len_fill_value)
    buffers.seq_lens_cpu.fill_(runner.seq_len_fill_value)
    buffers.reset_index_buffers()
    backend = runner.backend
    with (
        torch.no_grad(),
        model_capture_mode(),
        runner.model_context(),
        graph_capture(stream=get_or_create_global_graph_capture_stream()) as context,
        backend.capture_session(context.stream),
    ):
        stand_in = _StandIn(backend, context.stream, before, after)
        runner.backend = stand_in
        try:
            runner.capture_one_shape(bucket, runner.model_runner.model.forward)
        finally:
            runner.backend = backend
            # The warm-ups ran on the capture stream; whoever comes next must find them done.
            torch.cuda.synchronize()
    return stand_in.graph
