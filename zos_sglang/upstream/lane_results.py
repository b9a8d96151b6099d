"""Results of lane steps: the duties of SGLang 0.5.23's `process_batch_result`, row by row only where needed.

A row needs Python if it may end with this token, or if its output is due. What ends a row, how it is released
and what is sent is decided by upstream's own functions; this module decides for which rows they are called.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from time import perf_counter_ns as now
from typing import Any

from sglang.srt.observability.req_time_stats import flush_trace_batch
from sglang.srt.observability.scheduler_stage_metrics import (
    SCHEDULER_STAGE_PROCESS_BATCH_RESULT,
    scheduler_stage_method,
)
from sglang.srt.runtime_context import get_observability

from zos_sglang.overlap.watch import OFF, SAMPLED, WAIT_FROM, WAIT_TO, Watch
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.rows import RowTable
from zos_sglang.upstream.lane_port import LaneResult


class LaneResults:
    """Processes lane results, in order, one call each.

    Args:
        scheduler: upstream's.
        account: counts wasted row-steps.
        undisturbed: whether no row of a table can have ended or been aborted since the lane opened on it.
        extra_steps: launched steps of a table's row that its KV lengths do not count yet.
        row_ended: called with the table and the rows that ended.
        release_waits: orders what the schedule stream does next behind every launch so far.
        failed: called from an `except` with a step's name and what could not be done; upstream's
            way may be taken from there.
    """

    def __init__(
        self,
        scheduler: Any,
        account: LaneAccount,
        *,
        undisturbed: Callable[[RowTable], bool],
        extra_steps: Callable[[RowTable, int], int],
        row_ended: Callable[[RowTable, list[int]], None],
        release_waits: Callable[[], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self.scheduler = scheduler
        self.processor = scheduler.batch_result_processor
        self.account = account
        self.undisturbed = undisturbed
        self.extra_steps = extra_steps
        self.row_ended = row_ended
        self.release_waits = release_waits
        self.failed = failed
        #: Told of every wait.
        self.watch: Watch = OFF
        self.counts_graphs = bool(get_observability().enable_metrics)

    @property
    def scheduler_stage_metrics(self) -> Any:
        return self.scheduler.scheduler_stage_metrics

    @staticmethod
    def owns(result: Any) -> bool:
        """Whether a result is the lane's."""
        return type(result) is LaneResult

    @scheduler_stage_method(SCHEDULER_STAGE_PROCESS_BATCH_RESULT)
    def process(self, batch: Any, result: LaneResult) -> None:
        """`batch` is the snapshot taken at the launch; `result` one that no one has processed."""
        scheduler = self.scheduler
        flush_trace_batch(batch.reqs)
        snapshot = scheduler.publish_load_snapshot(force=False)
        scheduler.load_publisher.publish_load_stat(
            scheduler.load_inquirer.get_loads, force=False, snapshot=snapshot
        )
        self._process_tokens(batch, result)
        scheduler.tree_cache.flush_pending_backups()
        scheduler._record_step_counters(batch, result)
        metrics = scheduler.metrics_reporter
        metrics.log_batch_result_stats(batch, result)
        scheduler.maybe_send_health_check_signal()
        metrics.update_device_timer()

    def _process_tokens(self, batch: Any, result: LaneResult) -> None:
        table, step = result.table, result.step
        try:
            arrived = result.copy_done
            if arrived is not None:
                stamps = self.watch.stamps
                if stamps is None:
                    arrived.synchronize()
                elif stamps[SAMPLED]:
                    self.watch.waiting(arrived)
                else:
                    stamps[WAIT_FROM] = now()
                    arrived.synchronize()
                    stamps[WAIT_TO] = now()
            tokens: list[int] = result.next_token_ids.tolist()
            candidates = table.candidates(step, tokens)
        except Exception:
            # No row has its token yet; without slots ahead it is a step as upstream makes them.
            self.failed("processing", "could not read a result")
            self.processor.process_batch_result_decode(batch, result)
            return
        metrics = self.scheduler.metrics_reporter
        generated = len(tokens)
        metrics.num_generated_tokens += generated
        if self.counts_graphs:
            self.processor.metrics_collector.increment_decode_cuda_graph_pass(value=result.can_run_cuda_graph)
        absent = self._append(table, tokens, candidates)
        ended = self._finish(table, tokens, sorted(candidates), batch, result)
        if table.constrained:
            self._accept(table, tokens, absent)
        try:
            due = table.due(step)
            if ended:
                due = tuple(sorted({*due, *ended}))
            reqs = [table.reqs[row] for row in due if row not in absent]
        except Exception:
            self.failed("stream-output", "could not find what is to be sent")
            # All of them, as upstream calls it: what is due is for it to decide.
            reqs = batch.reqs
        if reqs:
            self.processor.output_streamer.stream_output(reqs, False)
        metrics.forward_ct_decode = (metrics.forward_ct_decode + 1) % (1 << 30)
        if metrics.forward_ct_decode % metrics.decode_log_interval == 0:
            # The batch keeps the lengths of the opening while the lane is open; the report sums this step's.
            batch.seq_lens_cpu = batch.seq_lens_cpu + (step - 1)
        metrics.report_decode_stats(
            result.can_run_cuda_graph, running_batch=batch, num_generated_tokens=generated
        )

    def _append(self, table: RowTable, tokens: list[int], candidates: set[int]) -> set[int]:
        """Give each row its token; returns the rows that ended or were retracted before this step."""
        absent: set[int] = set()
        finished = time.perf_counter()
        if not table.timed and self.undisturbed(table):
            for append, times, token in zip(table.appends, table.times, tokens, strict=True):
                append(token)
                times.last_decode_finish_time = finished
            return absent
        rows = zip(table.reqs, table.appends, table.times, tokens, strict=True)
        for row, (req, append, times, token) in enumerate(rows):
            if req.finished_reason is not None or req.is_retracted:
                absent.add(row)
            else:
                append(token)
                if table.timed:
                    times.set_last_decode_finish_time()
                else:
                    times.last_decode_finish_time = finished
                if req.to_finish is not None:
                    candidates.add(row)
        if absent:
            candidates -= absent
            self.account.wasted_row_steps += len(absent)
        return absent

    def _accept(self, table: RowTable, tokens: list[int], absent: set[int]) -> None:
        """Give the grammars their tokens, after the finish check as upstream does: a grammar that ends with
        this token ends its request with the next one."""
        accept = self.processor._accept_grammar_tokens
        for row in table.constrained:
            if row not in absent:
                req = table.reqs[row]
                accept(req, tokens[row])
                req.grammar.finished = req.finished()

    def _finish(
        self, table: RowTable, tokens: list[int], candidates: list[int], batch: Any, result: LaneResult
    ) -> list[int]:
        """Let upstream judge the candidates and release those that ended; returns these."""
        if not candidates:
            return []
        processor = self.processor
        allocator = processor.token_to_kv_pool_allocator
        ended: list[int] = []
        allocator.free_group_begin()
        for row in candidates:
            req = table.reqs[row]
            processor._maybe_update_reasoning_tokens(req, [tokens[row]])
            req.update_finish_state(1)
            if req.finished_reason is None:
                continue
            if not ended:
                # Releasing publishes the prefix, and that writes pages into the row's part of the request
                # table. The step in flight still reads it.
                self.release_waits()
            # The lane gives back the unused part of its window itself.
            req.kv.kv_committed_len += self.extra_steps(table, row)
            req.kv.kv_allocated_len = req.kv.kv_committed_len
            processor._handle_finish_state_updated_req(req, batch, result, row, None)
            ended.append(row)
        allocator.free_group_end()
        if ended:
            self.row_ended(table, ended)
        return ended
