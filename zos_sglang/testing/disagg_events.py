"""A plugin for tests of disaggregation: what a CPU machine brings about in no other way.

By the id of a request, in the prefill role:

    LOADING...  each batch that it is in looks as if the host cache were still writing pages of a prefix.
                HiCache itself needs CUDA; what upstream asks is this one field of the batch.
    LEAVING...  the server exits in the iteration that launches its first batch. Upstream asks for an exit
                when no request is left, and then nothing is in flight.
"""

from __future__ import annotations

import sys
from typing import Any

#: `entry_points.txt` of a distribution that lets SGLang find the plugin.
ENTRY = "[sglang.srt.plugins]\ndisagg_events = zos_sglang.testing.disagg_events:register\n"
LOADING, LEAVING = "loading-", "leaving-"

_SELECT = "sglang.srt.managers.scheduler.Scheduler.get_next_disagg_prefill_batch_to_run"


def act(plan: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """Behind a selection."""
    batch = plan.batch_to_run
    if batch is None:
        return
    if any(req.rid.startswith(LOADING) for req in batch.reqs):
        batch.hicache_consumer_index = 0
    if any(req.rid.startswith(LEAVING) for req in batch.reqs):
        scheduler.gracefully_exit = True


def register() -> None:
    """Entry point of group `sglang.srt.plugins`; does nothing outside a scheduler's process."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SELECT, act, HookType.AFTER)
