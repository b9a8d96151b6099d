"""`LanePort` over SGLang 0.5.23: intake in two halves, the duties of a launch, and the way back.

State that stock's next step relies on, all of it written here: lengths of `ReqKvInfo` and `ScheduleBatch`,
the future map, `decode_batch_idx`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.scheduler_components.output_streamer import DEFAULT_FORCE_STREAM_INTERVAL
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.observability.req_time_stats import set_schedule_time_batch
from sglang.srt.observability.scheduler_stage_metrics import SCHEDULER_STAGE_RUN_BATCH, scheduler_stage_method
from sglang.srt.runtime_context import get_parallel

from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.streams import Streams
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.resident.lane import Lane
from zos_sglang.resident.rows import RowTable
from zos_sglang.resident.window import Window, has_room
from zos_sglang.upstream.lane_eligibility import batch_refusal
from zos_sglang.upstream.lane_pool import SglangKvPool
from zos_sglang.upstream.port import SglangDevice
from zos_sglang.upstream.releases import opens_thinking_itself


class LaneResult(GenerationBatchResult):
    """A step's result: upstream's type, so that upstream's own processing takes it too.

    `table` are the rows it belongs to, `step` its number since the lane opened on them (from 1). `unsampled`:
    its sampling waits for the result before.
    """

    table: RowTable
    step: int
    unsampled = False


class SglangLanePort:
    """The scheduler's and the device's side of the lane."""

    def __init__(
        self, scheduler: Any, device: SglangDevice, streams: Streams, pins: PinRing, account: LaneAccount
    ) -> None:
        self.scheduler = scheduler
        self.device = device
        self.streams = streams
        self.pins = pins
        self.account = account
        self.pool = SglangKvPool(scheduler, account)
        self.graphs = False
        self._receive_started = 0

    # ------------------------------------------------------------ intake

    def receive(self) -> bool:
        # Upstream's `ingest_requests` until it looks at what came. All ranks receive the same.
        scheduler = self.scheduler
        waiting = scheduler._deferred_input_requests
        parallel = get_parallel()
        timed_out = []
        if not waiting and parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0:
            timed_out = scheduler._poll_timeout_aborts()
        self._receive_started = time.monotonic_ns()
        waiting.extend(scheduler.request_receiver.recv_requests(local_reqs=timed_out))
        return bool(waiting)

    def dispatch(self) -> None:
        scheduler = self.scheduler
        received = scheduler._deferred_input_requests[:]
        scheduler._deferred_input_requests.clear()
        if received:
            scheduler.metrics_reporter.record_scheduler_active(self._receive_started)
        scheduler.process_input_requests(received)

    # ------------------------------------------------------------ opening

    def refuses(self, batch: Any) -> Refusal | None:
        return batch_refusal(self.scheduler, batch)

    def table(self, batch: Any, pending: Any) -> RowTable:
        unprocessed = set() if pending is None else {id(req) for req in pending.reqs}
        reqs = batch.reqs
        opened_think = opens_thinking_itself(self.scheduler.model_config)
        stop_ids: set[int] = set()
        watched, constrained = [], []
        for row, req in enumerate(reqs):
            params = req.sampling_params
            if not params.ignore_eos:
                stop_ids.update(_stop_ids(req))
            if req.grammar is not None:
                constrained.append(row)
            by_text = params.stop_strs or params.stop_regex_strs or req.require_reasoning or opened_think
            if by_text or req.grammar is not None:
                watched.append(row)
        pending_tokens = [int(id(req) in unprocessed) for req in reqs]
        fixed = frozenset(stop_ids), watched, DEFAULT_FORCE_STREAM_INTERVAL
        return RowTable(reqs, pending_tokens, *fixed, constrained=constrained)

    def resolve_inputs(self, batch: Any) -> None:
        self.device.resolve_inputs(batch)

    # ------------------------------------------------------------ a step

    def count_launch(self, batch: Any) -> None:
        self.device.prepare(batch)

    def uncount_launch(self, batch: Any) -> None:
        self.device.undo_prepare(batch)

    def forward_context(self) -> Any:
        return self.device.forward_context()

    def forward_waits_for_schedule(self) -> None:
        self.streams.forward_waits_for_schedule()

    def schedule_waits_for_forward(self) -> None:
        self.streams.war_barrier(None)

    def result(self, table: RowTable, step: int, tokens: Any, arrived: Any) -> LaneResult:
        result = LaneResult(next_token_ids=tokens, can_run_cuda_graph=self.graphs, copy_done=arrived)
        result.table, result.step, result.unsampled = table, step, tokens is None
        return result

    def sampled(self, result: LaneResult, tokens: Any, arrived: Any) -> None:
        result.next_token_ids, result.copy_done, result.unsampled = tokens, arrived, False

    def reserve(self, batch: Any, done: int, wanted: int) -> Window | None:
        return self.pool.reserve(batch, done, wanted)

    def selected_again(self) -> None:
        """What selection does for every decode step, besides selecting."""
        self.scheduler.new_token_ratio_tracker.decay_step()
        set_schedule_time_batch(self.scheduler.running_batch)  # returns at once unless requests are traced

    # ------------------------------------------------------------ leaving

    @property
    def skips_finishing(self) -> bool:
        return bool(self.scheduler.enable_skip_finishing_decode)

    def on_device(self, rows: Sequence[int]) -> torch.Tensor:
        return self.pool.on_device(rows)

    def has_room(self, batch: Any, rows: Sequence[int], done: int) -> bool:
        return has_room(self.pool, batch.seq_lens_cpu.numpy()[rows] + done)

    def rest_rides(self) -> bool:
        scheduler = self.scheduler
        return not (
            scheduler.waiting_queue
            or scheduler.chunked_req is not None
            or scheduler.grammar_manager.has_waiting_grammars()
        )

    def leave(self, batch: Any, table: RowTable, rows: Sequence[int], steps: int) -> None:
        # As upstream's `update_running_batch` does when rows have ended, or are about to.
        stays = set(rows)
        for row, req in enumerate(table.reqs):
            if row not in stays:
                req.decode_batch_idx += steps
        self.account.h2d_copies += 1  # the filter's
        batch.filter_batch(keep_indices=list(rows))
        batch.batch_is_full = False

    def relay(self, batch: Any, tokens: Any) -> None:
        self.scheduler.future_map.stash_bonus_tokens(batch.req_pool_indices, tokens)

    def pin(self, batch: Any, references: list[Any]) -> None:
        self.pins.pin(batch, {**batch.__dict__, "lane": references})

    def set_allocated(self, table: RowTable, launched: int, reserved: int) -> None:
        for req in table.reqs:
            kv = req.kv
            if kv.req_pool_idx is not None:
                kv.kv_committed_len += launched
                kv.kv_allocated_len = kv.kv_committed_len + reserved

    def write_back(self, batch: Any, table: RowTable, steps: int) -> None:
        batch.input_ids = None
        if not steps:
            return
        for req in table.reqs:
            req.decode_batch_idx += steps
        batch.seq_lens = batch.seq_lens + steps
        batch.seq_lens_cpu = batch.seq_lens_cpu + steps
        batch.orig_seq_lens = batch.orig_seq_lens + steps
        batch.seq_lens_sum = None
        batch.out_cache_loc = None


class SglangLane(Lane):
    """A lane whose launches count as upstream's stage `run_batch` in metrics and profiles."""

    @property
    def scheduler_stage_metrics(self) -> Any:
        return self.port.scheduler.scheduler_stage_metrics  # type: ignore[attr-defined]

    _open = scheduler_stage_method(SCHEDULER_STAGE_RUN_BATCH)(Lane._open)
    _advance = scheduler_stage_method(SCHEDULER_STAGE_RUN_BATCH)(Lane._advance)


def _stop_ids(req: Any) -> set[int]:
    """Every id that upstream's token check may end this request on."""
    found = set(req.eos_token_ids or ())
    found.update(req.sampling_params.stop_token_ids or ())
    if req.tokenizer is not None:
        if req.tokenizer.eos_token_id is not None:
            found.add(req.tokenizer.eos_token_id)
        found.update(req.tokenizer.additional_stop_token_ids or ())
    return found
