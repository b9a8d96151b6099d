"""What happened: one count per launch by reason, counts of paths, and the last decisions."""

from __future__ import annotations

from collections import deque
from typing import Any

from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.protocols import Batch

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

    __slots__ = ("decisions", "paths", "reasons")

    def __init__(self) -> None:
        # Dicts with all keys present: counting is one lookup by an interned key, and never allocates.
        self.reasons: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self.paths: dict[str, int] = dict.fromkeys(PATHS, 0)
        self.decisions: deque[tuple[int, Reason]] = deque(maxlen=REMEMBERED)

    def decided(self, launch: int, reason: Reason) -> None:
        self.reasons[reason] += 1
        self.decisions.append((launch, reason))

    def passed(self, path: str, times: int = 1) -> None:
        self.paths[path] += times

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
