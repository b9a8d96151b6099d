"""What /set_internal_state can change about step records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zos_sglang.observe.record import KEPT
from zos_sglang.upstream.whole_numbers import whole_number

#: Most decode steps over which `zos_record_cost` alternates.
MOST_STEPS = 1_000_000


def record_handlers(runtime: Any) -> dict[str, Any]:
    """Update handlers by key, for `SchedulerInternalStateController._update_handlers`."""

    def handler(
        least: int, most: int, apply: Callable[[int], None], needs: str = "can_record", why: str = ""
    ) -> Any:
        def why_not() -> str | None:
            if not runtime.observation.can_record:
                return "this server records no steps."
            return None if getattr(runtime.observation, needs) else why

        return whole_number(runtime, least, most, apply, why_not=why_not)

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
