"""Makes a callable fail at a given call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from zos_sglang.faults.plan import Fault


class InjectedFault(RuntimeError):
    """Asked for by `ZOS_FAULT`."""


class Injector:
    """Counts calls by point and fails where it is told to. Exists only where `ZOS_FAULT` is set.

    Args:
        faults: the first ones.
        rank: the rank that this is; asked only where a fault names one.
    """

    def __init__(self, faults: Iterable[Fault] = (), rank: Callable[[], int] = lambda: 0) -> None:
        self._rank = rank
        self.struck: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._armed: dict[str, Fault] = {}
        self.arm(faults)

    def arm(self, faults: Iterable[Fault]) -> None:
        """These instead of those before, as far as they are this rank's; calls are counted from here."""
        self._armed = {
            fault.point: fault for fault in faults if fault.rank is None or fault.rank == self._rank()
        }
        self._calls.clear()

    def passes(self, point: str) -> None:
        """A call of `point` begins.

        Raises:
            InjectedFault: this is a call that is to fail.
        """
        fault = self._armed.get(point)
        if fault is None:
            return
        self._calls[point] += 1
        call = self._calls[point]
        if call == fault.at or (fault.always and call > fault.at):
            self.struck[point] += 1
            raise InjectedFault(f"ZOS_FAULT: {point}, call {call}")

    def over(self, point: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, failing at its beginning where it is to fail."""

        @wraps(call)
        def failing(*args: Any, **kwargs: Any) -> Any:
            self.passes(point)
            return call(*args, **kwargs)

        failing.__zos_fault__ = call  # type: ignore[attr-defined]
        return failing

    def stand(self, point: str, owner: Any, name: str) -> None:
        """Put a failing one in the place of `owner`'s callable `name`; instead of one that stands there."""
        now = getattr(owner, name)
        setattr(owner, name, self.over(point, getattr(now, "__zos_fault__", now)))
