"""What happened: one count per launch by reason, counts of paths, and the last decisions."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.protocols import Batch

logger = logging.getLogger(__name__)

#: Paths and events worth counting, in the order they are reported.
PATHS = (
    "prefill",
    "decode",
    "mixed",
    "middle-chunk",
    "delayed-sampling",
    "embedding",
    "upstream-launch",
    "blocked-host-lengths",
    "barrier-fine",
    "barrier-coarse",
    "barrier-off",
    "kv-arrived",
    "kv-sent-last",
    "kv-sent-middle",
    "kv-sent-early",
    "early-send-held",
    "aborted-after-launch",
    "bootstrap-abandoned",
    "drained",
    "mode-switches",
    "fallbacks",
    "stalls",
)

#: How many decisions the stall report shows.
REMEMBERED = 16


class Account:
    """Counts since the start of the server. Written by the scheduler thread only."""

    __slots__ = ("decisions", "faults", "paths", "reasons")

    def __init__(self) -> None:
        # Dicts with all keys present: counting is one lookup by an interned key, and never allocates.
        self.reasons: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.paths: dict[str, int] = dict.fromkeys(PATHS, 0)
        self.decisions: deque[tuple[int, Reason]] = deque(maxlen=REMEMBERED)
        #: Faults of ours that something else took over for, by the name of the step.
        self.faults: dict[str, int] = {}

    def decided(self, launch: int, reason: Reason) -> None:
        self.reasons[reason] += 1
        self.decisions.append((launch, reason))

    def passed(self, path: str, times: int = 1) -> None:
        self.paths[path] += times

    def fell_back(self, step: str, takes_over: str) -> None:
        """Count a fault of ours that costs no request, and log the first of each step. Where it is caught."""
        self.paths["fallbacks"] += 1
        self.faults[step] = self.faults.get(step, 0) + 1
        if self.faults[step] == 1:
            logger.exception("zos-sglang: %s failed; %s", step, takes_over)

    def launched(self, batch: Batch) -> None:
        """Count the kind of a launch."""
        mode = batch.forward_mode
        if mode.is_decode():
            self.paths["decode"] += 1
            return
        if mode.is_mixed():
            self.paths["mixed"] += 1
        elif mode.is_extend():
            self.paths["prefill"] += 1
        # A running batch that began as a prefill still names the chunked request of that day.
        if batch.chunked_req is not None:
            self.paths["middle-chunk"] += 1

    def report(self) -> dict[str, Any]:
        """Plain numbers for `/server_info`."""
        return {
            "reasons": {reason.value: n for reason, n in self.reasons.items()},
            "paths": dict(self.paths),
        }
