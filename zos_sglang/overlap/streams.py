"""The three streams and every wait between them.

- `forward_waits_for_schedule`: the forward stream waits for the schedule stream, where the batch's tensors
  were written (read after write).
- `copy_waits_for_forward`: the copy stream waits for the forward stream, whose samples it reads back.
- `war_barrier`: the schedule stream waits for the forward's last read of shared buffers, before the next
  batch overwrites them (write after read).

Nothing else ever waits for the copy stream on the device; the host waits for each result's own event. After
a fault of ours `forward_waits_for_copy` keeps a readback that begins anew behind what the failed one queued.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Barrier(StrEnum):
    """Which write-after-read barrier a step used."""

    FINE = "barrier-fine"
    COARSE = "barrier-coarse"
    OFF = "barrier-off"


class Streams:
    """Owns the handles and the waits.

    Args:
        schedule: stream on which the scheduler prepares batches.
        forward: stream of the model and of sampling.
        copy: stream of the readback; a leaf.
        barrier_enabled: False where kernels run in program order (CPU).
        force_coarse: never use the runner's own event (SGLANG_FORCE_COARSE_WAR_BARRIER).
    """

    __slots__ = ("barrier_enabled", "copy", "force_coarse", "forward", "schedule")

    def __init__(
        self, schedule: Any, forward: Any, copy: Any, *, barrier_enabled: bool, force_coarse: bool
    ) -> None:
        self.schedule = schedule
        self.forward = forward
        self.copy = copy
        self.barrier_enabled = barrier_enabled
        self.force_coarse = force_coarse

    def forward_waits_for_schedule(self) -> None:
        self.forward.wait_stream(self.schedule)

    def copy_waits_for_forward(self) -> None:
        self.copy.wait_stream(self.forward)

    def forward_waits_for_copy(self) -> None:
        self.forward.wait_stream(self.copy)

    def war_barrier(self, read_done: Any, *, defer_coarse: bool = False) -> Barrier:
        """Keep later writes of the schedule stream behind the forward's reads of shared buffers.

        Args:
            read_done: event after the runner's last such read, or None if it recorded none.
            defer_coarse: leave a coarse barrier to the caller, who calls `schedule_waits_for_forward`
                before anything that this forward reads is written.
        """
        if not self.barrier_enabled:
            return Barrier.OFF
        if read_done is not None and not self.force_coarse:
            self.schedule.wait_event(read_done)
            return Barrier.FINE
        if not defer_coarse:
            self.schedule_waits_for_forward()
        return Barrier.COARSE

    def schedule_waits_for_forward(self) -> None:
        self.schedule.wait_stream(self.forward)

    def aliases(self) -> list[str]:
        """Pairs of streams that share one device handle; empty where handles do not exist."""
        names = ("schedule", "forward", "copy")
        handle = {n: getattr(getattr(self, n), "cuda_stream", None) for n in names}
        pairs = [("schedule", "forward"), ("schedule", "copy"), ("forward", "copy")]
        return [f"{a} and {b}" for a, b in pairs if handle[a] is not None and handle[a] == handle[b]]
