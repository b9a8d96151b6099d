"""What the lane did, in numbers. Written by the scheduler thread only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zos_sglang.resident.eligibility import Departure, Refusal


@dataclass(slots=True)
class LaneAccount:
    """Counts since the start of the server.

    `decode_steps` are all of mode `resident`, inside the lane and outside. `row_steps` are lane steps times
    rows; `wasted_row_steps` of them sampled a token for a request that had ended already, `grammar_row_steps`
    were those of requests with a grammar. `rows_left` are rows that went while the others rode on.
    `masked_steps` had a row with a grammar, so their sampling waited for the result before; `mask_faults` of
    them were masked by upstream's code after ours had failed. `h2d_copies` are copies from the host to the
    device while the lane was open; what loading a batch copies is not among them. `faulted` are the faults by
    step. `floors` are measurements on request: batch size, mean length, microseconds. `refusal` and
    `departure` are the last ones that no launch has followed yet; who records launches takes them away, and
    leaves `last_refusal` and `last_departure`.
    """

    opened: int = 0
    decode_steps: int = 0
    steps: int = 0
    row_steps: int = 0
    wasted_row_steps: int = 0
    rows_left: int = 0
    grammar_row_steps: int = 0
    masked_steps: int = 0
    mask_faults: int = 0
    windows: int = 0
    faults: int = 0
    faulted: dict[str, int] = field(default_factory=dict)
    h2d_copies: int = 0
    device_bytes: int = 0
    pinned_bytes: int = 0
    refused: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))
    left: dict[Departure, int] = field(default_factory=lambda: dict.fromkeys(Departure, 0))
    floors: list[dict[str, float]] = field(default_factory=list)
    refusal: Refusal | None = None
    departure: Departure | None = None
    last_refusal: Refusal | None = None
    last_departure: Departure | None = None

    def fault(self, step: str, times: int = 1) -> None:
        """Count a fault of ours in this step."""
        self.faults += times
        self.faulted[step] = self.faulted.get(step, 0) + times

    def report(self) -> dict[str, Any]:
        """Plain numbers for `/server_info`; reasons that never occurred are left out."""
        return {
            "share": round(self.steps / self.decode_steps, 4) if self.decode_steps else None,
            "opened": self.opened,
            "decode_steps": self.decode_steps,
            "steps": self.steps,
            "row_steps": self.row_steps,
            "wasted_row_steps": self.wasted_row_steps,
            "rows_left": self.rows_left,
            "grammar_row_steps": self.grammar_row_steps,
            "masked_steps": self.masked_steps,
            "mask_faults": self.mask_faults,
            "windows": self.windows,
            "faults": self.faults,
            "h2d_copies": self.h2d_copies,
            "device_bytes": self.device_bytes,
            "pinned_bytes": self.pinned_bytes,
            "refused": {reason.value: n for reason, n in self.refused.items() if n},
            "left": {reason.value: n for reason, n in self.left.items() if n},
        }
