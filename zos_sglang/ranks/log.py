"""What this rank decides, as the scheduler thread tells it: one row before each launch.

Before, because a launch that another rank does not make may never return; the row must be there by then.
Iterations without a launch leave a row only where they begin: an idle server leaves none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

from zos_sglang.ranks.row import Row
from zos_sglang.resident.account import LaneAccount

logger = logging.getLogger(__name__)

#: Rows that may wait for the exchange; a rank whose exchange stands still forgets the oldest.
MOST_WAITING = 1 << 16
#: Of the ids of a batch a row shows so many characters of the first ones.
_SHOWN_IDS, _SHOWN_CHARACTERS = 3, 12


class Beats(Protocol):
    """The event loop, as far as it counts its iterations."""

    beat: int


class DecisionLog:
    """One rank's rows. All methods but `take` belong to the scheduler thread; none raises.

    Args:
        lane: counts of the resident lane.
        free_slots: free slots of the KV pool; equal on all ranks.
        tokens_of: the sampled tokens of a processed result as bytes, or None where it has none.
    """

    def __init__(
        self,
        lane: LaneAccount,
        free_slots: Callable[[], int],
        tokens_of: Callable[[Any], Any],
    ) -> None:
        self.lane = lane
        self.free_slots = free_slots
        self.tokens_of = tokens_of
        #: Set by whoever runs the loop.
        self.loop: Beats | None = None
        self.rows = 0
        #: False after a fault here: nothing is logged any more.
        self.sound = True
        self._waiting: deque[Row] = deque(maxlen=MOST_WAITING)
        self._tokens = 0
        self._resting = ""
        self._reqs: Any = None
        self._size = 0
        self._ids = ""

    def launching(self, batch: Any, action: str, reason: str, reserved: int) -> None:
        """A launch is decided on, no more. `reserved`: steps that the lane has slots for."""
        if not self.sound:
            return
        try:
            mode, reqs = batch.forward_mode, batch.reqs
            new_tokens = batch.extend_num_tokens if mode.is_extend() else 0
            extends = bool(batch.is_extend_in_batch)
            self._note(
                action, mode.name, extends, len(reqs), self._digest(reqs), new_tokens, reason, reserved
            )
            self._resting = ""
        except Exception:
            self._break()

    def resting(self, action: str) -> None:
        """No launch in this iteration: `idle` or `paused`."""
        if action == self._resting or not self.sound:
            return
        self._resting = action
        try:
            self._note(action, "", False, 0, self._digest(()), 0, "", 0)
        except Exception:
            self._break()

    def processed(self, result: Any) -> None:
        """A result was processed; its tokens are on the host."""
        if not self.sound:
            return
        try:
            tokens = self.tokens_of(result)
            if tokens is not None:
                self._tokens = crc32(tokens, self._tokens)
        except Exception:
            self._break()

    def take(self) -> list[Row]:
        """Rows since the last call. The exchange's thread."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(len(waiting))]

    def _note(self, *decided: Any) -> None:
        """Add a row; `decided` are its fields from `action` on."""
        lane = self.lane
        since = (
            self._tokens,
            lane.opened,
            lane.windows,
            lane.last_refusal,
            lane.last_departure,
            self.free_slots(),
            self.loop.beat if self.loop is not None else 0,
        )
        self._waiting.append(Row(self.rows, *since, *decided))
        self.rows += 1
        self._tokens = 0

    def _digest(self, reqs: Any) -> str:
        """The ids of a batch in their order. A batch that goes on as it is costs nothing."""
        if reqs is not self._reqs or len(reqs) != self._size:
            ids = [req.rid for req in reqs]
            shown = " ".join(str(rid)[:_SHOWN_CHARACTERS] for rid in ids[:_SHOWN_IDS])
            more = " ..." if len(ids) > _SHOWN_IDS else ""
            self._reqs, self._size = reqs, len(ids)
            digest = crc32("\n".join(map(str, ids)).encode())
            self._ids = f"{digest:08x} ({shown}{more})" if ids else ""
        return self._ids

    def _break(self) -> None:
        """A fault of ours: the server goes on, unchecked."""
        self.sound = False
        logger.exception("zos-sglang: decisions cannot be logged here; ZOS_CHECK_RANKS is off")
