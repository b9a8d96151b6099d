"""What SGLang's DP attention needs on the plain-CPU platform: three of upstream's switches, set by hand.

Upstream has branches for the CPU at these places, but takes them for its own CPU engine only, which an
out-of-tree platform is not. For tests: nothing here runs unless `SGLANG_PLATFORM=zos_cpu` is set.
"""

from __future__ import annotations


def allow_dp_attention() -> None:
    """Set the switches, in each worker before its first forward; harmless without DP attention."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    # Batches padded to the other rank's length: no pinned memory (there is no CUDA), and the fill length is
    # asked of the backend by the name `get_cpu_graph_seq_len_fill_value`, see `cpu_attention`.
    forward_batch_info._is_cpu = True
    # Gathering the ranks' rows: gloo directly, not the custom operators, which have no CPU kernel.
    parallel_state._is_cpu = True
    # This rank's place in the gathered rows: a slice copied by torch, not by a Triton kernel.
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
