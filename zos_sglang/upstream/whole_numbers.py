"""Whole numbers that /set_internal_state takes, on all ranks or on none.

What is asked for may have failed in one rank alone. All ranks must take or refuse a request alike, since
another key of it may be a switch: with several ranks, one that cannot do it says so in its log, and takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def whole_number(
    runtime: Any,
    least: int,
    most: int,
    apply: Callable[[int], None],
    *,
    why_not: Callable[[], str | None],
    why_nobody: Callable[[], str | None] = lambda: None,
    unit: str = "",
) -> Any:
    """The update handler of one key, for `SchedulerInternalStateController._update_handlers`.

    Args:
        least, most: the bounds.
        why_not: why this rank cannot do it now, or None.
        why_nobody: the same, of what all ranks know alike.
        unit: what is counted, for the message.
    """
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    def validate(key: str, value: Any) -> None:
        reason = why_nobody() or (why_not() if runtime.alone else None)
        if reason is not None:
            raise UpdateRejected(f"{key}: {reason}")
        if not least <= value <= most or value != int(value):
            raise UpdateRejected(f"{key}: a whole number{unit} from {least} to {most}.")

    def take(key: str, value: Any) -> None:
        if (reason := why_not()) is None:
            apply(int(value))
        else:
            logger.warning("zos-sglang: %s: %s", key, reason)

    return _UpdateHandler(validate, take)
