"""Launched results that wait for processing: first in, first out, never deeper than two."""

from __future__ import annotations

from collections import deque
from typing import Any, NoReturn

#: One result between iterations, two between a launch and the processing of the one before.
MAX_DEPTH = 2


class QueueInvariantError(RuntimeError):
    """A result would be lost, processed twice, or processed out of order."""


class ResultQueue(deque[tuple[Any, Any]]):
    """FIFO of `(batch_snapshot, result)` that checks its own invariants.

    Upstream code holds it as `scheduler.result_queue` and uses it as a plain deque: `popleft`,
    iteration over pairs, `len`, truth and index 0 (pause, abort, grammar barrier, idle check). So it
    is one. Every other way to change it would break "exactly once, in order" and raises.

    Attributes:
        launched: results ever appended.
        processed: results ever taken out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched = 0
        self.processed = 0
        self._newest: Any = None

    def append(self, pair: tuple[Any, Any]) -> None:
        """Queue a launch.

        Raises:
            QueueInvariantError: two results are already waiting, or this one is the newest already.
        """
        if len(self) >= MAX_DEPTH:
            raise QueueInvariantError(
                f"{len(self)} results are waiting already; the oldest must be processed first"
            )
        result = pair[1]
        if result is self._newest:
            raise QueueInvariantError("the same result was queued twice")
        self._newest = result
        self.launched += 1
        super().append(pair)

    def popleft(self) -> tuple[Any, Any]:
        """Take the oldest pair out, for processing.

        Raises:
            QueueInvariantError: nothing is waiting, so a result would be processed twice.
        """
        if not self:
            raise QueueInvariantError("no result is waiting; it was processed already")
        pair: tuple[Any, Any] = super().popleft()
        self.processed += 1
        if not self:
            # A finished result must not stay referenced (it holds pinned and device tensors).
            self._newest = None
        return pair

    def _forbidden(self, *_: Any, **__: Any) -> NoReturn:
        raise QueueInvariantError("results are processed once and in order: append and popleft only")

    pop = appendleft = extend = extendleft = insert = remove = _forbidden
    rotate = reverse = clear = __delitem__ = __setitem__ = _forbidden
    __iadd__ = __imul__ = _forbidden
