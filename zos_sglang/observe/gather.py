"""Fewer and larger pieces for a sink that has work by the call, where another one wants records soon."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns as now

import numpy as np

from zos_sglang.observe.keeper import DUE, DUE_NS, name_of


class Gather:
    """A sink that hands records on to another one, as often as a recorder does by itself.

    Args:
        sink: gets every record once and in order; once a second also none.
    """

    def __init__(self, sink: Callable[[np.ndarray], None]) -> None:
        self.sink = sink
        self.__name__ = name_of(sink)
        self._held: list[np.ndarray] = []
        self._count = 0
        self._due_at = now() + DUE_NS

    def __call__(self, records: np.ndarray) -> None:
        self._held.append(records)
        self._count += len(records)
        if self._count >= DUE or now() >= self._due_at:
            self.flush()

    def flush(self) -> None:
        """Hand on what is held."""
        held, self._held, self._count = self._held, [], 0
        self._due_at = now() + DUE_NS
        if held:
            self.sink(held[0] if len(held) == 1 else np.concatenate(held))
