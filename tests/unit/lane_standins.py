"""Scheduler, decode batch and lane port of a plain server, by upstream's names, as far as the lane goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from zos_sglang.overlap.isolation import PinRing
from zos_sglang.resident.account import LaneAccount
from zos_sglang.upstream.lane_port import SglangLanePort

OFF = (
    "require_mlp_sync",
    "enable_lora",
    "is_hybrid_swa",
    "is_hybrid_ssm",
    "enable_hisparse",
    "enable_unified_memory",
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_hicache_storage",
    "enable_unified_cache_external_linker",
    "enable_priority_preemption",
    "enable_fpm",
)
NONE = (
    "rust_server",
    "dllm_config",
    "prefill_delayer",
    "external_corpus_manager",
    "forward_sleep_time",
    "scripted_scheduler_hook",
    "chunked_req",
)
RUNNER_NONE = (
    "lora_manager",
    "sampling_observer",
    "watermark_state",
    "sliding_window_size",
    "msprobe_debugger",
    "eplb_manager",
)
REQUEST_NONE = (
    "to_finish",
    "finished_reason",
    "session",
    "session_id",
    "multimodal_inputs",
    "beam_group",
    "lora_id",
    "customized_info",
    "grammar",
)


def bare(kind: type) -> Any:
    """An object of exactly this type without its parts."""
    return object.__new__(kind)


def named(name: str) -> Any:
    """An object of a type of this name."""
    return type(name, (), {})()


def plain_scheduler(runner: Any = None) -> Any:
    """`runner` takes the place of the plain model runner."""
    table = ReqToTokenPool(6, 32, "cpu", False)
    runner = runner or SimpleNamespace(sampler=named("Sampler"), **dict.fromkeys(RUNNER_NONE))
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, model_is_mrope=False, self_opened_think_start_ids=None
        ),
        is_generation=True,
        enable_async_d2h_copy=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        disaggregation_mode=DisaggregationMode.NULL,
        req_to_token_pool=table,
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(64, None, "cpu", None, False),
        tree_cache=None,
        output_streamer=bare(SchedulerOutputStreamer),
        batch_result_processor=bare(SchedulerBatchResultProcessor),
        ngram_embedding_manager=SimpleNamespace(enabled=False),
        prefill_decode_interval=0,
        max_running_requests=5,
        grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
        waiting_queue=[],
        running_batch=None,
        **dict.fromkeys(OFF, False),
        **dict.fromkeys(NONE),
    )
    scheduler.running_batch = plain_batch()
    return scheduler


def port_over(scheduler: Any, **parts: Any) -> SglangLanePort:
    """The lane's port; a scheduler without memory gets a plain one's."""
    for name in ("token_to_kv_pool_allocator", "req_to_token_pool", "tree_cache"):
        if not hasattr(scheduler, name):
            setattr(scheduler, name, getattr(plain_scheduler(), name))
    given: dict[str, Any] = {"device": None, "streams": None, "pins": PinRing(), **parts}
    return SglangLanePort(scheduler, given["device"], given["streams"], given["pins"], LaneAccount())


def plain_request() -> Any:
    return SimpleNamespace(
        return_routed_experts=False, return_indexer_topk=False, **dict.fromkeys(REQUEST_NONE)
    )


def plain_batch() -> Any:
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_is_full=False,
        return_logprob=False,
        return_hidden_states=False,
        sampling_info=SimpleNamespace(
            penalizer_orchestrator=SimpleNamespace(is_required=False),
            has_custom_logit_processor=False,
            sampling_mask_batch_indices=None,
            has_watermark_candidates=False,
        ),
        reqs=[plain_request(), plain_request()],
    )


def put(subject: Any, path: str, value: Any) -> None:
    """Set an attribute of an attribute: `put(scheduler, "tp_worker.model_runner.sampler", ...)`."""
    *owners, name = path.split(".")
    for owner in owners:
        subject = getattr(subject, owner)
    assert hasattr(subject, name), f"the plain one has no {path}"
    setattr(subject, name, value)
