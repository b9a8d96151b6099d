"""What /set_internal_state can change about step records.

Recording may have failed in one rank alone. All ranks must take or refuse a request alike, since another key
of it may be a switch: with several ranks, one that cannot do what is asked says so in its log, and takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zos_sglang.observe.record import KEPT

logger = logging.getLogger(__name__)

#: Most decode steps over which `zos_record_cost` alternates.
MOST_STEPS = 1_000_000


def record_handlers(runtime: Any) -> dict[str, Any]:
    """Update handlers by key, for `SchedulerInternalStateController._update_handlers`."""
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    def handler(
        least: int, most: int, apply: Callable[[int], None], needs: str = "can_record", why: str = ""
    ) -> _UpdateHandler:
        def why_not() -> str | None:
            if not runtime.observation.can_record:
                return "this server records no steps."
            return None if getattr(runtime.observation, needs) else why

        def validate(key: str, value: Any) -> None:
            if runtime.alone and (reason := why_not()) is not None:
                raise UpdateRejected(f"{key}: {reason}")
            if not least <= value <= most or value != int(value):
                raise UpdateRejected(f"{key}: a whole number from {least} to {most}.")

        def take(key: str, value: Any) -> None:
            if (reason := why_not()) is None:
                apply(int(value))
            else:
                logger.warning("zos-sglang: %s: %s", key, reason)

        return _UpdateHandler(validate, take)

    def shown(steps: int) -> None:
        runtime.observation.reported = steps

    def measure(steps: int) -> None:
        runtime.observation.measure_cost(steps)

    return {
        "zos_record": handler(0, 1, lambda on: runtime.observation.record(bool(on))),
        "zos_record_detail": handler(0, 1, lambda on: runtime.observation.detail(bool(on))),
        "zos_record_reset": handler(1, 1, lambda _: runtime.observation.reset()),
        "zos_report_steps": handler(0, KEPT, shown),
        "zos_record_cost": handler(
            1,
            MOST_STEPS,
            measure,
            "can_measure_cost",
            "needs mode sync, overlap or resident, with recording on.",
        ),
    }
