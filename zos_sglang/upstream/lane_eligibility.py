"""Eligibility over SGLang 0.5.23: which server and which batch may ride the resident lane.

The server's configuration is judged once; the batch on every opening, from host values that are equal on
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.debug_utils.dumper import dumper
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import get_disagg, get_exec, get_observability, get_parallel
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream import hooks
from zos_sglang.upstream.host_cache import has_host_cache
from zos_sglang.upstream.lane_grammar import is_packed

#: Upstream's own, and the one of its KV canary. Others may keep state from step to step.
_SAMPLERS = ("Sampler", "_OracleSampler")


def server_refusal(scheduler: Any) -> tuple[Refusal, str] | None:
    """Why no batch of this server may ride, with one phrase for people, or None."""
    runner = scheduler.tp_worker.model_runner
    config = scheduler.model_config
    parallel = get_parallel()
    cases: tuple[tuple[Refusal, str, bool], ...] = (
        (Refusal.MODEL, "the model generates nothing", not scheduler.is_generation),
        (Refusal.SPECULATION, "speculative decoding", not scheduler.spec_algorithm.is_none()),
        (Refusal.PIPELINE_PARALLEL, "pipeline parallelism", parallel.pp_size > 1),
        (Refusal.DP_ATTENTION, "DP attention", bool(scheduler.require_mlp_sync)),
        (Refusal.KV_POOL, "decode context parallelism", bool(parallel.dcp_enabled)),
        (
            Refusal.DISAGGREGATION,
            "the prefill role of disaggregation",
            scheduler.disaggregation_mode == DisaggregationMode.PREFILL,
        ),
        (
            Refusal.DISAGGREGATION,
            "KV of the decode role on the host",
            bool(get_disagg().disaggregation_decode_enable_offload_kvcache)
            or get_disagg().disaggregation_decode_host_receive_threshold < 1,
        ),
        (Refusal.LORA_SERVER, "LoRA", bool(scheduler.enable_lora) or runner.lora_manager is not None),
        (Refusal.KV_POOL, "a KV pool of another kind", not _plain_pool(scheduler)),
        (Refusal.HOST_CACHE, "a hierarchical cache", has_host_cache(scheduler)),
        (
            Refusal.OUTPUT_PATH,
            "another output path",
            scheduler.rust_server is not None
            or type(scheduler.output_streamer) is not SchedulerOutputStreamer
            or type(scheduler.batch_result_processor) is not SchedulerBatchResultProcessor,
        ),
        (
            Refusal.SAMPLER,
            "another sampler",
            type(runner.sampler).__name__ not in _SAMPLERS
            or runner.sampling_observer is not None
            or runner.watermark_state is not None,
        ),
        (
            Refusal.MODEL,
            "this kind of model",
            bool(
                config.is_encoder_decoder
                or config.model_is_mrope
                or scheduler.dllm_config is not None
                or scheduler.ngram_embedding_manager.enabled
                or runner.sliding_window_size
            ),
        ),
        (
            Refusal.SELECTION,
            "preemption by priority (--disable-priority-preemption lets it ride)",
            bool(scheduler.enable_priority_preemption),
        ),
        (Refusal.SELECTION, "a prefill delayer", scheduler.prefill_delayer is not None),
        (Refusal.SELECTION, "--prefill-decode-interval", scheduler.prefill_decode_interval != 0),
        (Refusal.SELECTION, "an external corpus", scheduler.external_corpus_manager is not None),
        (Refusal.MODEL, "two-batch overlap", bool(get_exec().overlap.enable_two_batch_overlap)),
        (Refusal.DIAGNOSTICS, "a diagnostic mode", _diagnosed(scheduler, runner)),
    )
    if rival := hooks.lane_rival():
        return Refusal.OTHER_PLUGIN, rival
    return next(((reason, words) for reason, words, applies in cases if applies), None)


def _plain_pool(scheduler: Any) -> bool:
    return (
        type(scheduler.req_to_token_pool) in (ReqToTokenPool, DecodeReqToTokenPool)
        and type(scheduler.token_to_kv_pool_allocator)
        in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator)
        and not scheduler.is_hybrid_swa
        and not scheduler.is_hybrid_ssm
        and not scheduler.enable_hisparse
        and not scheduler.enable_unified_memory
        and not get_exec().mamba.enable_mamba_extra_buffer
    )


def _diagnosed(scheduler: Any, runner: Any) -> bool:
    """Modes that watch or disturb single steps from inside upstream's own path."""
    return bool(
        scheduler_module.TEST_RETRACT
        or scheduler.forward_sleep_time is not None
        or scheduler.enable_fpm
        or scheduler.scripted_scheduler_hook is not None
        or envs.SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS.get() > 0
        or envs.SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT.get()
        or envs.SGLANG_ENABLE_DELAY_SAMPLE.get()
        or dumper.may_enable
        or runner.msprobe_debugger is not None
        or runner.eplb_manager is not None
        or get_global_experts_capturer() is not None
        or get_global_indexer_capturer() is not None
        or get_observability().enable_mfu_metrics
    )


def admission_open(scheduler: Any, batch: Any) -> bool:
    """Whether selection left somebody waiting this time, and may decide otherwise the next time."""
    return bool(scheduler.waiting_queue) and not batch.batch_is_full


def batch_refusal(
    scheduler: Any, batch: Any, can_join: Callable[[Any, Any], bool] = admission_open
) -> Refusal | None:
    """Why this batch, which selection has just returned, may not ride; or None.

    `can_join(scheduler, batch)`: whether the next selection might take somebody who waits.
    """
    if not batch.forward_mode.is_decode() or batch is not scheduler.running_batch:
        return Refusal.NOT_DECODE
    if scheduler.chunked_req is not None:
        return Refusal.CHUNKED_PREFILL
    if scheduler.grammar_manager.has_waiting_grammars():
        return Refusal.GRAMMAR
    if can_join(scheduler, batch):
        return Refusal.ADMISSION_OPEN
    if get_global_expert_distribution_recorder().recording:
        return Refusal.DIAGNOSTICS
    return _sampling_refusal(batch) or _request_refusal(batch)


def _sampling_refusal(batch: Any) -> Refusal | None:
    info = batch.sampling_info
    cases = (
        (Refusal.LOGPROBS, batch.return_logprob),
        (Refusal.HIDDEN_STATES, batch.return_hidden_states),
        (Refusal.PENALTIES, info.penalizer_orchestrator.is_required),
        (Refusal.LOGIT_PROCESSOR, info.has_custom_logit_processor),
        (Refusal.SAMPLER, info.sampling_mask_batch_indices is not None or info.has_watermark_candidates),
    )
    return next((reason for reason, applies in cases if applies), None)


def _request_refusal(batch: Any) -> Refusal | None:
    return next((found for req in batch.reqs if (found := _refused_request(req))), None)


def _refused_request(req: Any) -> Refusal | None:
    # Asked of every row on every opening: a chain of tests builds nothing, a table of cases would.
    found = None
    if req.to_finish is not None:
        found = Refusal.ABORT_PENDING
    elif req.finished_reason is not None:
        found = Refusal.ROW_ENDED
    elif req.session is not None or req.session_id is not None:
        found = Refusal.SESSION
    elif req.multimodal_inputs is not None:
        found = Refusal.MULTIMODAL
    elif req.beam_group is not None:
        found = Refusal.BEAM_SEARCH
    elif req.lora_id is not None:
        found = Refusal.LORA
    elif req.grammar is not None and not is_packed(req.grammar):
        found = Refusal.GRAMMAR_BACKEND
    elif req.return_routed_experts or req.return_indexer_topk or req.customized_info is not None:
        found = Refusal.REQUEST_OUTPUT
    return found
