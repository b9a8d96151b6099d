"""Tokens on their way home: one pinned slot and one event for each step that may be under way.

The device ring is written by the step itself, so a graph's static output is never read while the next
replay overwrites it. A slot comes round again after `depth` steps. By then the host has waited for its event:
the lane processes step N before it launches step N + 2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

#: Two steps are under way at most; one slot more keeps a late reader apart from the next writer.
SMALLEST_DEPTH = 3


class Readback:
    """Owns the host's side of the ring.

    Args:
        ring: the executor's ring, int64 [depth, capacity], on the device.
        copy_waits: makes the copy stream wait for the forward stream.
        copy_context: makes the copy stream current.
        new_event: an event that the host can wait for.
        offload: issues a copy from a thread of its own, once what the current stream holds so far is done,
            and returns what the host waits for. For devices where issuing a copy blocks the thread until the
            copy is done (confidential computing); they have no pinned memory either.
    """

    def __init__(
        self,
        ring: torch.Tensor,
        copy_waits: Callable[[], None],
        copy_context: Callable[[], AbstractContextManager[Any]],
        new_event: Callable[[], Any],
        offload: Callable[[Callable[[], None]], Any] | None = None,
    ) -> None:
        self.depth = ring.shape[0]
        self._count = 0
        if self.depth < SMALLEST_DEPTH:
            raise ValueError(f"a ring of {self.depth} slots cannot hold two steps under way")
        self.ring = ring
        self.copy_waits = copy_waits
        self.copy_context = copy_context
        self.offload = offload
        self.host = torch.empty_like(ring, device="cpu", pin_memory=ring.is_cuda and offload is None)
        self.events = [new_event() for _ in range(self.depth)]

    @staticmethod
    def fetch(tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of the current stream's last work on the host, int64 [rows]; waits for them."""
        return tokens.to("cpu", copy=True)

    def queue(self, rows: int) -> tuple[torch.Tensor, Any]:
        """Queue the copy of the newest step; returns the host's int64 [rows] and the event of its arrival."""
        slot = self._count % self.depth
        self._count += 1
        home, event = self.host[slot, :rows], self.events[slot]
        self.copy_waits()
        with self.copy_context():
            if self.offload is not None:
                # No later step writes this slot before the host has waited for what this returns.
                return home, self.offload(partial(home.copy_, self.ring[slot, :rows]))
            home.copy_(self.ring[slot, :rows], non_blocking=True)
            event.record()
        return home, event
