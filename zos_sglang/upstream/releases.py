"""Where the supported releases differ in what we use: every question to ask of a live SGLang stands here.

Each asks the object at hand, not the version: a name that is there is used, on any release. What is known
only from reading a release (`captured_decode_was_read`) goes by version.
"""

from __future__ import annotations

import inspect
from typing import Any

from zos_sglang.upstream.versions import installed

#: Scheduler's method that queues the readback. 0.5.22 does that work where 0.5.23 calls it.
READBACK = "_copy_result_to_cpu"
#: Releases whose captured decode steps the lane's CUDA-graph executor was written against and tried with.
_CAPTURED_DECODE = ("0.5.23",)


def has_readback_call(scheduler: Any) -> bool:
    """Whether the readback is a call of its own, which can be watched."""
    return hasattr(scheduler, READBACK)


def copies_elsewhere(scheduler: Any) -> bool:
    """Whether another thread queues the readback (0.5.23, confidential computing)."""
    return bool(getattr(scheduler, "enable_async_d2h_copy", False))


def opens_thinking_itself(model_config: Any) -> bool:
    """Whether a row may enter its reasoning by a token of its own, which upstream then looks for (0.5.23)."""
    return bool(getattr(model_config, "self_opened_think_start_ids", None))


def takes_app_path() -> bool:
    """Whether tokenizer workers can be given another HTTP app to serve (0.5.23)."""
    from sglang.srt.environ import envs

    return hasattr(envs, "SGLANG_HTTP_SERVER_APP_PATH")


def captured_decode_was_read() -> bool:
    """Whether the lane may use this release's decode graphs."""
    return installed() in _CAPTURED_DECODE


def defers_coarse_barrier(scheduler: Any) -> bool:
    """Whether the prefill role puts a coarse barrier off until the result before is processed (0.5.23)."""
    return hasattr(scheduler, "_war_barrier_is_coarse")


def can_hold_early_send(scheduler: Any) -> bool:
    """Whether the prefill role can hold a cached prefix back while the host cache still loads it (0.5.23)."""
    return "allow_send" in inspect.signature(scheduler.maybe_send_cached_prefix_chunk).parameters
