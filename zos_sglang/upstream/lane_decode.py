"""The lane in the decode role: requests shake hands, get their slots and their KV while it is open.

What the lane itself holds is not in their way: the queues allocate rows and slots of their own, and their
polls are reduced over the ranks. The lane is left, before the next step, as soon as a request can join the
batch, and once for each request that has shaken hands and got no slots: the lane's window takes slots ahead
of time, and the next selection judges without it.
"""

from __future__ import annotations

from typing import Any

from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream.disagg_decode import DecodePort
from zos_sglang.upstream.lane_eligibility import batch_refusal
from zos_sglang.upstream.lane_port import SglangLanePort


def can_join(scheduler: Any, batch: Any) -> bool:
    """Whether selection would take somebody from the waiting queue: rows are the only bound here."""
    if not scheduler.waiting_queue:
        return False
    room = min(scheduler.req_to_token_pool.size, scheduler.max_running_requests)
    return len(batch.reqs) < room


class DecodeLanePort(SglangLanePort):
    """Moves the role's queues on in every step, as the ordinary loop does. `role_port` is that loop's."""

    role_port: DecodePort
    _known_blocked = 0

    def receive(self) -> bool:
        port = self.role_port
        port.queues_moved = False
        port.ask_for_ranks()
        if super().receive():
            return True
        port.move_queues()
        # Whatever ends the lane in this iteration, on all ranks or by a fault on this one: the selection
        # that follows must not poll a second time, or this rank's polls meet the others' next ones.
        port.queues_moved = True
        blocked = self._blocked()
        if can_join(self.scheduler, self.scheduler.running_batch) or blocked > self._known_blocked:
            return True
        self._known_blocked = blocked
        return False

    def refuses(self, batch: Any) -> Refusal | None:
        self._known_blocked = self._blocked()
        return batch_refusal(self.scheduler, batch, can_join)

    def rest_rides(self) -> bool:
        return super().rest_rides() and not self._blocked()

    def _blocked(self) -> int:
        """Requests that have shaken hands and wait for rows or slots. Equal on all ranks."""
        queue = self.scheduler.disagg_decode_prealloc_queue.queue
        return sum(waiting.waiting_for_input for waiting in queue) if queue else 0
