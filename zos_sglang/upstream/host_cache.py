"""Whether KV goes from the device to a cache behind it when a request ends."""

from __future__ import annotations

from typing import Any


def has_host_cache(scheduler: Any) -> bool:
    """Such a cache copies what a request owns behind the forward that was launched last.

    A row that ends with the pending result owns the slot that the next step was prepared to write. In
    SGLang's order that step is launched by then; where the result is processed first, it is not, and the copy
    would take what is not written yet (`cache_controller.py`, `start_writing`).
    """
    return bool(
        scheduler.enable_hierarchical_cache
        or scheduler.enable_lmcache
        or scheduler.enable_hicache_storage
        or scheduler.enable_unified_cache_external_linker
    )


def may_copy_behind(scheduler: Any) -> bool:
    """`has_host_cache`, or a prefix tree from elsewhere (FlexKV, `--radix-cache-backend`) that may do so."""
    args = getattr(scheduler, "server_args", None)
    elsewhere = getattr(args, "radix_cache_backend", None) is not None
    return elsewhere or bool(getattr(args, "enable_flexkv", False)) or has_host_cache(scheduler)
