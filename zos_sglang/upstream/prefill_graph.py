"""Which prefills SGLang launches as one CUDA graph (`PrefillCudaGraphRunner`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def launched_as_graph(scheduler: Any) -> Callable[[Any], bool]:
    """`quick(batch)`: whether a prefill of that size fits the captured ones.

    By the number of its tokens and the largest captured size, which are equal on all ranks of a
    tensor-parallel group. Upstream has more conditions (`can_replay_locally`), of batches that are rare; one
    that is launched eagerly after all comes out the same, some milliseconds later.
    """
    runner = getattr(getattr(scheduler.tp_worker, "model_runner", None), "prefill_cuda_graph_runner", None)
    most = getattr(runner, "max_num_tokens", 0) if hasattr(runner, "capture_num_tokens") else 0

    def quick(batch: Any) -> bool:
        return 0 < (batch.extend_num_tokens or 0) <= most

    return quick
