"""Nobody watches; and how that becomes somebody."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zos_sglang.resident.account import LaneAccount
from zos_sglang.settings import Settings

if TYPE_CHECKING:
    from zos_sglang.upstream.runtime_observe import Observation

logger = logging.getLogger(__name__)


class Unobserved:
    """In place of an `Observation` before a scheduler is there, after mode off, or where none can be had."""

    can_record = can_measure_cost = False
    faults: Mapping[str, int] = MappingProxyType({})

    def place(self, name: str, owner: Any) -> None: ...

    def place_forward(self, name: str, owner: Any, attribute: str, *, stamped: bool = False) -> None: ...

    def enter(self, mode: str, loop: str) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...

    def reset(self) -> None: ...

    def detail(self, on: bool) -> None: ...

    def report(self) -> None:
        return None


def observe(scheduler: Any, settings: Settings, lane_account: LaneAccount) -> Observation | Unobserved:
    """What watches this scheduler. A fault in making it is logged; the server serves without."""
    try:
        from zos_sglang.upstream.runtime_observe import Observation

        return Observation(scheduler, settings, lane_account)
    except Exception:
        logger.exception("zos-sglang: steps cannot be recorded here")
        return Unobserved()
