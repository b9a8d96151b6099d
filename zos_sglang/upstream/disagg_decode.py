"""The decode role: upstream's duties of `event_loop_overlap_disagg_decode`, each at its place.

A request passes three queues before the loop can select it: pre-allocation (handshake, then rows and KV
slots), transfer (the KV is on its way), waiting (it has arrived). `process_decode_queue` moves requests on;
its polls are reduced over the ranks, so what is in the waiting queue is equal on all of them.
"""

from __future__ import annotations

from typing import Any

from zos_sglang.overlap.account import Account
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.upstream.port import SglangLauncher, SglangPort


class DecodePort(SglangPort):
    """Intake, the role's queues, selection."""

    def __init__(self, scheduler: Any, pins: PinRing, account: Account) -> None:
        super().__init__(scheduler, pins)
        self.account = account
        # Upstream checks only the colocated loop: requests between two servers are in no batch.
        self.strict_memory_check = False
        #: The lane has moved the queues on in this iteration already; the selection need not.
        self.queues_moved = False

    def intake(self) -> None:
        self.queues_moved = False
        self.ask_for_ranks()
        super().intake()

    def ask_for_ranks(self) -> None:
        """Begin the look-ups that the queues will want, so that they overlap intake and the forward."""
        scheduler = self.scheduler
        if not scheduler._engine_paused:
            scheduler.disagg_decode_prealloc_queue.prefetch_prefill_dp_rank_queries()

    def move_queues(self) -> None:
        scheduler = self.scheduler
        before = len(scheduler.waiting_queue)
        scheduler.process_decode_queue()
        arrived = len(scheduler.waiting_queue) - before
        if arrived > 0:
            self.account.passed("kv-arrived", arrived)

    def select(self) -> Any | None:
        scheduler = self.scheduler
        if not self.queues_moved:
            self.move_queues()
        self.queues_moved = False
        plan = scheduler.get_next_disagg_decode_batch_to_run(running_batch=scheduler.running_batch)
        self.waiting = len(scheduler.waiting_queue)
        scheduler.running_batch = plan.running_batch
        batch = scheduler.ngram_embedding_manager.prepare_for_forward(
            plan.batch_to_run, chunked_req=scheduler.chunked_req
        )
        scheduler.cur_batch_for_debug = batch
        return batch


class DecodeLauncher(SglangLauncher):
    """A launcher that leaves the placeholder of a prefill done elsewhere to upstream: it runs no forward."""

    def launch(self, batch: Any) -> Any:
        if batch.forward_mode.is_prebuilt():
            return self.port.launch_upstream(batch)
        return super().launch(batch)
