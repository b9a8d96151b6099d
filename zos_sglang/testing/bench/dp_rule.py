"""A plugin for the benchmark of DP attention: the consecutive-prefill rule changes while the server runs.

The rule is read when a loop of ours starts, so the change takes effect with the next switch of the mode.
"""

from __future__ import annotations

import sys
from typing import Any

from zos_sglang.overlap.guards import PrefillRule

#: `entry_points.txt` of a distribution that lets SGLang find the plugin.
ENTRY = "[sglang.srt.plugins]\ndp_rule = zos_sglang.testing.bench.dp_rule:register\n"
#: The key for /set_internal_state, which takes numbers; the value is an index of `RULES`.
KEY = "bench_rule"
RULES = tuple(PrefillRule)

_STATE = "sglang.srt.managers.scheduler_components.internal_state"
_HANDLERS = f"{_STATE}.SchedulerInternalStateController._update_handlers"


def register() -> None:
    """Entry point of group `sglang.srt.plugins`; does nothing outside a scheduler's process."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers.scheduler_components.internal_state import _UpdateHandler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from zos_sglang.upstream.runtime import runtime

    def apply(key: str, value: Any) -> None:
        rule = RULES[int(value)].value
        runtime.settings = runtime.settings.model_copy(update={"consecutive_prefill": rule})

    def with_ours(handlers: dict[str, Any], *_: Any) -> dict[str, Any]:
        return {**handlers, KEY: _UpdateHandler(lambda key, value: None, apply)}

    HookRegistry.register(_HANDLERS, with_ours, HookType.AFTER)
