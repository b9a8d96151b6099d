"""The prefill role: upstream's duties of `event_loop_overlap_disagg_prefill`, each at its place.

A request passes the bootstrap queue (a handshake with its decode server), is prefilled, and stays in the
in-flight queue until its KV has arrived there. KV is sent when the result is processed, not when the chunk
is launched: only then it is certain to be written. How far the chunk went is remembered at the selection
in between (`process_prefill_chunk`).
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.disaggregation.utils import is_aborted
from sglang.srt.environ import envs

from zos_sglang.overlap.account import Account
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.upstream.port import SglangDevice, SglangPort
from zos_sglang.upstream.releases import can_hold_early_send

logger = logging.getLogger(__name__)

_POLLING = "SGLANG_ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING"


class PrefillPort(SglangPort):
    """The role's queues around selection and processing."""

    def __init__(self, scheduler: Any, pins: PinRing, account: Account) -> None:
        super().__init__(scheduler, pins)
        self.account = account
        # Upstream checks only the colocated loop: requests between two servers are in no batch.
        self.strict_memory_check = False
        if getattr(envs, _POLLING).get():
            logger.warning("zos-sglang: %s has no effect in our loop; --zos-mode stock has it", _POLLING)

    def note_paused(self) -> None:
        super().note_paused()
        self.scheduler._yield_gil_if_needed()

    def select(self) -> Any | None:
        scheduler = self.scheduler
        self._take_bootstrapped()
        if scheduler.gracefully_exit:
            return None  # nothing is launched whose KV would have to be sent during the exit
        plan = scheduler.get_next_disagg_prefill_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        self.waiting = len(scheduler.waiting_queue)
        scheduler.running_batch = plan.running_batch
        batch = scheduler.ngram_embedding_manager.prepare_for_forward(
            plan.batch_to_run, chunked_req=scheduler.chunked_req
        )
        scheduler.cur_batch_for_debug = batch
        if batch is not None and scheduler.enable_staging:
            scheduler.maybe_prefetch_staging_for_batch(batch)
        return batch

    def _take_bootstrapped(self) -> None:
        scheduler, queue = self.scheduler, self.scheduler.disagg_prefill_bootstrap_queue
        before = len(queue.queue)
        ready = queue.pop_bootstrapped()
        scheduler.waiting_queue.extend(ready)
        if abandoned := before - len(queue.queue) - len(ready):
            self.account.passed("bootstrap-abandoned", abandoned)

    def process(self, batch: Any, result: Any) -> None:
        self._remember_end()
        # (request, how far its KV is sent, whether this was a middle chunk), before upstream moves all three.
        before = [(req, req.start_send_idx, req.inflight_middle_chunks > 0) for req in batch.reqs]
        self._count_aborted(before)
        super().process(batch, result)
        for req, sent, middle in before:
            if req.start_send_idx > sent:
                self.account.passed("kv-sent-middle" if middle else "kv-sent-last")

    def _remember_end(self) -> None:
        """Processing before the next selection: do what that would have done, as upstream's pause does.

        Otherwise a middle chunk would be sent only up to the end of the chunk before it.
        """
        scheduler = self.scheduler
        last, req = scheduler.last_batch, scheduler.chunked_req
        if req is not None and last is not None and not last.prefill_chunk_processed:
            req.tmp_end_idx = min(req.extend_end, len(req.origin_input_ids))

    def _count_aborted(self, before: list[tuple[Any, int, bool]]) -> None:
        aborted = sum(is_aborted(req) for req, _, _ in before)
        if aborted:
            self.account.passed("aborted-after-launch", aborted)

    def settled(self) -> None:
        self.scheduler.process_disagg_prefill_inflight_queue()

    def transfers(self) -> int:
        self.settled()
        return len(self.scheduler.disagg_prefill_inflight_queue)


class PrefillDevice(SglangDevice):
    """A launch that first sends what the prefix cache holds already, while the suffix is computed."""

    def __init__(self, scheduler: Any, pins: PinRing, account: Account, wait: str) -> None:
        super().__init__(scheduler, pins, account, wait)
        self.may_hold = can_hold_early_send(scheduler)

    def prepare(self, batch: Any) -> None:
        super().prepare(batch)
        scheduler, account = self.scheduler, self.account
        # A load from the host cache may still write pages that a later request matched as its prefix.
        held = self.may_hold and batch.hicache_consumer_index >= 0
        options = {"allow_send": not held} if self.may_hold else {}
        for req in batch.reqs:
            sent = req.start_send_idx
            scheduler.maybe_send_cached_prefix_chunk(req, **options)
            if req.start_send_idx > sent:
                account.passed("kv-sent-early")
            elif held and req.prefix_len > sent:
                account.passed("early-send-held")
