"""The overlap core's protocols over SGLang 0.5.23's `Scheduler`.

`SglangPort` is the host's side of an iteration, `SglangDevice` the forward's side of a launch. Both
hold the live scheduler: upstream rebinds its fields at will, so nothing is cached that can move.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.managers.utils import EmbeddingBatchResult
from sglang.srt.observability.scheduler_stage_metrics import SCHEDULER_STAGE_RUN_BATCH, scheduler_stage_method
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec
from sglang.srt.utils import is_hip

from zos_sglang.overlap.account import Account
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.launch import Launcher
from zos_sglang.upstream import hooks
from zos_sglang.upstream.future_map import FutureMap, waits_for_lengths
from zos_sglang.upstream.poll import event_maker
from zos_sglang.upstream.releases import copies_elsewhere


def needs_upstream_launch(scheduler: Any) -> str | None:
    """The configuration that only upstream's `run_batch` covers, or None if our launch does."""
    cases = {
        "another component wraps run_batch": "run_batch" in vars(scheduler)
        or hooks.rival_of(hooks.RUN_BATCH, tuple(HookType)) is not None,
        "unified memory pool": scheduler.enable_unified_memory,
        "external cache linker": scheduler.enable_unified_cache_external_linker,
        "elastic expert parallelism": get_exec().moe.elastic_ep_backend is not None,
        "confidence-budgeted speculation": scheduler._confidence_budget_prepare is not None,
        "diffusion LLM": scheduler.dllm_config is not None,
        "HIP": is_hip(),
    }
    return next((name for name, present in cases.items() if present), None)


class OnStream:
    """Makes a stream current, and another one again afterwards.

    `torch.cuda.StreamContext` asks for the current stream and device first; where both are known that costs
    more than the switch itself.
    """

    __slots__ = ("back", "stream")

    def __init__(self, stream: Any, back: Any) -> None:
        self.stream = stream
        self.back = back

    def __enter__(self) -> None:
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: Any) -> None:
        torch.cuda.set_stream(self.back)


def make_contexts(scheduler: Any) -> tuple[OnStream, OnStream] | None:
    """Contexts of the forward stream, entered from the schedule stream, and of the copy stream inside it.

    None where upstream's contexts must do: no CUDA streams, or another stream is current than the loop's.
    """
    schedule, forward, copy = scheduler.schedule_stream, scheduler.forward_stream, scheduler.copy_stream
    if not isinstance(schedule, torch.cuda.Stream) or torch.cuda.current_stream() != schedule:
        return None
    return OnStream(forward, schedule), OnStream(copy, forward)


class SglangLauncher(Launcher):
    """A launcher whose launches count as upstream's stage `run_batch` in metrics and profiles."""

    @property
    def scheduler_stage_metrics(self) -> Any:
        return self.device.scheduler.scheduler_stage_metrics  # type: ignore[attr-defined]

    launch = scheduler_stage_method(SCHEDULER_STAGE_RUN_BATCH)(Launcher.launch)


class SglangPort:
    """Upstream's duties around a launch, each called at upstream's place and cadence."""

    def __init__(self, scheduler: Any, pins: PinRing | None = None) -> None:
        self.scheduler = scheduler
        self.pins = pins if pins is not None else PinRing()
        #: Takes the lane's results; None without a lane.
        self.lane_results: Any = None
        self.waiting = 0
        self.strict_memory_check = bool(envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get())

    @property
    def last_batch(self) -> Any:
        return self.scheduler.last_batch

    @last_batch.setter
    def last_batch(self, batch: Any) -> None:
        self.scheduler.last_batch = batch

    def exiting(self) -> bool:
        return bool(self.scheduler.gracefully_exit)

    def paused(self) -> bool:
        return bool(self.scheduler._engine_paused)

    def intake(self) -> None:
        self.scheduler.ingest_requests()

    def note_paused(self) -> None:
        self.scheduler._record_scheduler_state_for_paused_engine()

    def select(self) -> Any | None:
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        self.waiting = len(scheduler.waiting_queue)
        scheduler.running_batch = plan.running_batch
        scheduler.cur_batch_for_debug = plan.batch_to_run
        return plan.batch_to_run

    def between(self) -> None:
        if self.scheduler.enable_unified_memory:
            # Best effort by contract: upstream ignores its failure too.
            try:
                self.scheduler.token_to_kv_pool_allocator.flush_opportunistic()
            except Exception:
                return

    def launch_upstream(self, batch: Any) -> Any:
        # Both launches pin into one ring; the slot of the launch in flight must not be the next.
        self.scheduler.batch_record_ct = self.pins.newest
        result = self.scheduler.run_batch(batch)
        self.pins.newest = self.scheduler.batch_record_ct
        return result

    def process(self, batch: Any, result: Any) -> None:
        if self.lane_results is not None and self.lane_results.owns(result):
            self.lane_results.process(batch, result)
        else:
            self.scheduler.process_batch_result(batch, result)

    def note_no_batch(self) -> None:
        self.scheduler._sched_idled = True

    def idle(self) -> None:
        self.scheduler.on_idle()

    def settled(self) -> None: ...

    def transfers(self) -> int:
        """KV transfers under way that an exit waits for, after looking at them once more."""
        return 0

    def end_of_step(self) -> None:
        if self.strict_memory_check:
            self.scheduler.invariant_checker.self_check_during_busy()


def _copy_of(batch: Any, result: Any) -> Callable[[], None]:
    """Upstream's copy of all that processing reads; what is on the host already stays as it is."""
    return partial(
        result.copy_to_cpu,
        return_logprob=batch.return_logprob,
        return_hidden_states=batch.return_hidden_states,
    )


class SglangDevice:
    """What `Scheduler.run_batch` does for one overlapped step, split at the waits.

    Args:
        scheduler: upstream's scheduler, with overlap on.
        pins: where a worker's `extra_keep_alive_refs` go.
        account: counts.
        wait: "block" makes the scheduler thread sleep until a result is there; "spin" lets the driver
            poll, which contends for its lock and slows other ranks; "poll" asks the driver from Python.
    """

    def __init__(self, scheduler: Any, pins: PinRing, account: Account, wait: str) -> None:
        self.scheduler = scheduler
        self.pins = pins
        self.account = account
        future_map = scheduler.future_map
        # A speculative algorithm from elsewhere may bring a map of its own.
        self.own_map = isinstance(future_map, FutureMap)
        self.resolve: Callable[[Any], None] = (
            future_map.resolve if self.own_map else partial(resolve_forward_inputs, future_map=future_map)
        )
        self.contexts = make_contexts(scheduler)
        self.new_event = event_maker(scheduler.device_module.Event, wait)

    def prepare(self, batch: Any) -> None:
        scheduler = self.scheduler
        # First what `undo_prepare` takes back: nothing here can fail halfway.
        scheduler.forward_ct += 1
        batch.after_idle_gap = scheduler._sched_idled
        scheduler._sched_idled = False
        if batch.extend_num_tokens:
            scheduler.processed_tokens_counter += batch.extend_num_tokens
        batch.forward_iter = scheduler.forward_ct
        batch.launch_ts = time.monotonic()
        scheduler.metrics_reporter.record_scheduler_active(time.monotonic_ns())
        if scheduler.scripted_scheduler_hook is not None:
            scheduler.scripted_scheduler_hook.on_run_batch(batch)
        scheduler.profiler_manager._profile_batch_predicate(batch)
        if scheduler.forward_sleep_time is not None:
            time.sleep(scheduler.forward_sleep_time)
        if not batch.spec_algorithm.is_none():
            self._resolve_lengths(batch)

    def undo_prepare(self, batch: Any) -> None:
        scheduler = self.scheduler
        scheduler.forward_ct -= 1
        scheduler._sched_idled = batch.after_idle_gap
        if batch.extend_num_tokens:
            scheduler.processed_tokens_counter -= batch.extend_num_tokens

    def resolve_inputs(self, batch: Any) -> None:
        self.resolve(batch)

    def forward(self, batch: Any, rows: Any) -> Any:
        scheduler = self.scheduler
        if not scheduler.is_generation:
            return self._forward_embedding(batch)
        spec = batch.spec_algorithm
        if spec.is_none():
            # The map's sequence lengths are read under speculation only, so a plain step does not
            # publish them: two device launches less.
            result = scheduler.model_worker.forward_batch_generation(batch)
        else:
            options = {"on_publish": partial(scheduler.future_map.publish, rows)}
            if spec.supports_grammar_overlap():
                options["grammar_barrier"] = scheduler._advance_pending_grammar
            result = scheduler.model_worker.forward_batch_generation(batch, **options)
        if result.extra_keep_alive_refs:
            self.pins.pin_more(result.extra_keep_alive_refs)
        result.copy_done = self.new_event()
        return result

    def delayed_sample(self, result: Any) -> Callable[[], Any] | None:
        return getattr(result, "delay_sample_func", None)

    def relay(self, batch: Any, rows: Any, result: Any) -> None:
        scheduler = self.scheduler
        if not scheduler.is_generation:
            return
        if not self.own_map or not batch.spec_algorithm.is_none() or batch.beam_tail is not None:
            scheduler._relay_forward_payload(batch, rows, result)
        elif result.has_sampled_token_ids:
            scheduler.future_map.stash_bonus_tokens(rows, result.next_token_ids)
            scheduler.beam_coordinator.maybe_select_and_relay(
                batch, result, chunked_req=scheduler.chunked_req
            )

    def relay_upstream(self, batch: Any, rows: Any, result: Any) -> None:
        if self.scheduler.is_generation:
            self.scheduler._relay_forward_payload(batch, rows, result)

    def readback_here(self, batch: Any, result: Any) -> None:
        if self.scheduler.is_generation:
            _copy_of(batch, result)()

    def readback(self, batch: Any, result: Any) -> None:
        scheduler = self.scheduler
        if not scheduler.is_generation:
            return  # copied by the forward itself, as upstream does
        copy = _copy_of(batch, result)
        # Views of graph buffers must be copied right behind this forward, not by the worker thread.
        views = batch.return_hidden_states or batch.spec_algorithm.is_dspark()
        if copies_elsewhere(scheduler) and not views:
            result.copy_done = scheduler.async_d2h_worker.submit(copy)
        else:
            copy()

    def hold_sample(self, rows: Any, result: Any) -> None:
        result.future_indices = rows

    def release_sample(self, result: Any) -> None:
        # The closure holds the forward batch with its mask; it must not live until the next launch.
        result.delay_sample_func = None
        if result.logits_output is not None:
            result.logits_output.next_token_logits = None

    def finish(self, batch: Any, rows: Any, result: Any) -> None:
        if not self.scheduler.is_generation:
            return
        batch.input_ids = None
        if not batch.spec_algorithm.is_none():
            draft = result.next_draft_input
            batch.spec_info = draft
            draft.future_dsa_topk_indices_available = draft.dsa_topk_indices is not None
            draft.future_indices = rows
        # The next step changes these fields of the batch; processing needs them as they are now.
        per_request = batch.return_logprob or batch.return_hidden_states
        extends = per_request and batch.forward_mode.is_extend()
        result.extend_input_len_per_req = list(batch.extend_lens) if extends else None
        result.extend_logprob_start_len_per_req = (
            batch.extend_logprob_start_lens if batch.return_logprob else None
        )

    def forward_context(self) -> AbstractContextManager[Any]:
        contexts = self.contexts
        return contexts[0] if contexts is not None else self.scheduler.forward_stream_ctx

    def copy_context(self) -> AbstractContextManager[Any]:
        contexts = self.contexts
        return contexts[1] if contexts is not None else self.scheduler.copy_stream_ctx

    def take_read_done(self) -> Any:
        if not self.scheduler._war_barrier_enabled:
            return None
        runner = self.scheduler.model_worker.last_shared_read_runner
        # Cleared, so that a phase that records none falls back to the coarse barrier.
        event, runner.shared_read_done_event = runner.shared_read_done_event, None
        return event

    def _resolve_lengths(self, batch: Any) -> None:
        future_map = self.scheduler.future_map
        if waits_for_lengths(future_map, batch):
            self.account.passed("blocked-host-lengths")
        future_map.resolve_seq_lens_cpu(batch)

    def _forward_embedding(self, batch: Any) -> EmbeddingBatchResult:
        self.account.passed("embedding")
        pooled, graph = self.scheduler.tp_worker.forward_batch_embedding(batch)
        result = EmbeddingBatchResult(
            embeddings=pooled.embeddings,
            pooled_hidden_states=pooled.pooled_hidden_states,
            can_run_cuda_graph=graph,
        )
        result.copy_to_cpu()
        return result
