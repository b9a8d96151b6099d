"""Who may ride the lane: a plain server and a plain batch; each thing that is not plain has its reason."""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import schedule_batch
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_disagg, get_exec, get_observability, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.unit import lane_standins
from tests.unit.lane_standins import bare, named, plain_batch, plain_request, plain_scheduler, put
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream import hooks, lane_eligibility
from zos_sglang.upstream.lane_eligibility import batch_refusal, server_refusal

pytestmark = pytest.mark.usefixtures("published")
SOMETHING = object()
RUNNER = "tp_worker.model_runner"


def sources(*modules: ModuleType) -> str:
    """The source of modules and of the classes' bases elsewhere."""
    found = {inspect.getsource(module) for module in modules}
    for module in modules:
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == module.__name__:
                found |= {inspect.getsource(b) for b in kind.__mro__ if b.__module__.startswith("sglang.")}
    return "\n".join(found)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (scheduler_module, (*lane_standins.OFF, *lane_standins.NONE)),
        (model_runner, lane_standins.RUNNER_NONE),
        (schedule_batch, lane_standins.REQUEST_NONE),
    ],
)
def test_the_stand_ins_have_names_of_upstream(module: ModuleType, names: tuple[str, ...]) -> None:
    text = sources(module)
    assert [name for name in names if f"self.{name}" not in text and f"def {name}" not in text] == []


# ---------------------------------------------------------------- the server


def test_a_plain_server_is_accepted() -> None:
    assert server_refusal(plain_scheduler()) is None


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("token_to_kv_pool_allocator", bare(PagedTokenToKVPoolAllocator)),
        (f"{RUNNER}.sampler", named("_OracleSampler")),
        (f"{RUNNER}.sliding_window_size", 0),
        ("disaggregation_mode", DisaggregationMode.DECODE),
        ("req_to_token_pool", bare(DecodeReqToTokenPool)),
    ],
)
def test_what_differs_and_does_not_matter_is_accepted(path: str, value: Any) -> None:
    scheduler = plain_scheduler()
    put(scheduler, path, value)
    assert server_refusal(scheduler) is None


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("is_generation", False, Refusal.MODEL),
        ("spec_algorithm", SpeculativeAlgorithm.EAGLE, Refusal.SPECULATION),
        ("require_mlp_sync", True, Refusal.DP_ATTENTION),
        ("disaggregation_mode", DisaggregationMode.PREFILL, Refusal.DISAGGREGATION),
        ("enable_lora", True, Refusal.LORA_SERVER),
        (f"{RUNNER}.lora_manager", SOMETHING, Refusal.LORA_SERVER),
        ("req_to_token_pool", named("ReqToTokenPool"), Refusal.KV_POOL),
        ("token_to_kv_pool_allocator", named("SWATokenToKVPoolAllocator"), Refusal.KV_POOL),
        ("is_hybrid_swa", True, Refusal.KV_POOL),
        ("is_hybrid_ssm", True, Refusal.KV_POOL),
        ("enable_hisparse", True, Refusal.KV_POOL),
        ("enable_unified_memory", True, Refusal.KV_POOL),
        ("enable_hierarchical_cache", True, Refusal.HOST_CACHE),
        ("enable_lmcache", True, Refusal.HOST_CACHE),
        ("enable_hicache_storage", True, Refusal.HOST_CACHE),
        ("enable_unified_cache_external_linker", True, Refusal.HOST_CACHE),
        ("rust_server", SOMETHING, Refusal.OUTPUT_PATH),
        ("output_streamer", named("Other"), Refusal.OUTPUT_PATH),
        ("batch_result_processor", named("Other"), Refusal.OUTPUT_PATH),
        (f"{RUNNER}.sampler", named("Other"), Refusal.SAMPLER),
        (f"{RUNNER}.sampling_observer", SOMETHING, Refusal.SAMPLER),
        (f"{RUNNER}.watermark_state", SOMETHING, Refusal.SAMPLER),
        ("model_config.is_encoder_decoder", True, Refusal.MODEL),
        ("model_config.model_is_mrope", True, Refusal.MODEL),
        ("dllm_config", SOMETHING, Refusal.MODEL),
        ("ngram_embedding_manager.enabled", True, Refusal.MODEL),
        (f"{RUNNER}.sliding_window_size", 128, Refusal.MODEL),
        ("prefill_delayer", SOMETHING, Refusal.SELECTION),
        ("prefill_decode_interval", 2, Refusal.SELECTION),
        ("enable_priority_preemption", True, Refusal.SELECTION),
        ("external_corpus_manager", SOMETHING, Refusal.SELECTION),
        ("forward_sleep_time", 0.1, Refusal.DIAGNOSTICS),
        ("enable_fpm", True, Refusal.DIAGNOSTICS),
        ("scripted_scheduler_hook", SOMETHING, Refusal.DIAGNOSTICS),
        (f"{RUNNER}.msprobe_debugger", SOMETHING, Refusal.DIAGNOSTICS),
        (f"{RUNNER}.eplb_manager", SOMETHING, Refusal.DIAGNOSTICS),
    ],
)
def test_a_server_that_is_not_plain_is_refused(path: str, value: Any, reason: Refusal) -> None:
    scheduler = plain_scheduler()
    put(scheduler, path, value)
    found = server_refusal(scheduler)
    assert found is not None and found[0] is reason and found[1]


@pytest.mark.parametrize(
    ("where", "name", "value", "reason"),
    [
        (get_parallel, "pp_size", 2, Refusal.PIPELINE_PARALLEL),
        (get_parallel, "dcp_enabled", True, Refusal.KV_POOL),
        (get_disagg, "disaggregation_decode_enable_offload_kvcache", True, Refusal.DISAGGREGATION),
        (get_disagg, "disaggregation_decode_host_receive_threshold", 0.5, Refusal.DISAGGREGATION),
        (lambda: get_exec().mamba, "enable_mamba_extra_buffer", True, Refusal.KV_POOL),
        (lambda: get_exec().overlap, "enable_two_batch_overlap", True, Refusal.MODEL),
        (get_observability, "enable_mfu_metrics", True, Refusal.DIAGNOSTICS),
    ],
)
def test_a_configuration_that_is_not_plain_is_refused(
    where: Any, name: str, value: Any, reason: Refusal
) -> None:
    with where().override(**{name: value}):
        found = server_refusal(plain_scheduler())
    assert found is not None and found[0] is reason
    assert server_refusal(plain_scheduler()) is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS", "3"),
        ("SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT", "1"),
        ("SGLANG_ENABLE_DELAY_SAMPLE", "1"),
    ],
)
def test_a_diagnostic_variable_is_refused(variable: str, value: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(variable, value)
    found = server_refusal(plain_scheduler())
    assert found is not None and found[0] is Refusal.DIAGNOSTICS


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (scheduler_module, "TEST_RETRACT", True),
        (lane_eligibility, "dumper", SimpleNamespace(may_enable=True)),
        (lane_eligibility, "get_global_experts_capturer", lambda: SOMETHING),
        (lane_eligibility, "get_global_indexer_capturer", lambda: SOMETHING),
    ],
)
def test_a_diagnostic_of_the_process_is_refused(owner: Any, name: str, value: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(owner, name, value)
    found = server_refusal(plain_scheduler())
    assert found is not None and found[0] is Refusal.DIAGNOSTICS


def test_another_plugin_on_what_the_lane_does_is_refused_with_its_name(monkeypatch: Any) -> None:
    monkeypatch.setattr(hooks, "lane_rival", lambda: "plugin rival wraps something")
    assert server_refusal(plain_scheduler()) == (Refusal.OTHER_PLUGIN, "plugin rival wraps something")


# ---------------------------------------------------------------- the batch


def refusal_of(**changes: Any) -> Refusal | None:
    """What is said about the running batch after `changes`: paths on the batch, with `__` for a dot."""
    scheduler = plain_scheduler()
    for path, value in changes.items():
        put(scheduler.running_batch, path.replace("__", "."), value)
    return batch_refusal(scheduler, scheduler.running_batch)


def test_a_plain_batch_is_accepted() -> None:
    assert refusal_of() is None


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("forward_mode", ForwardMode.EXTEND, Refusal.NOT_DECODE),
        ("forward_mode", ForwardMode.MIXED, Refusal.NOT_DECODE),
        ("return_logprob", True, Refusal.LOGPROBS),
        ("return_hidden_states", True, Refusal.HIDDEN_STATES),
        ("sampling_info__penalizer_orchestrator__is_required", True, Refusal.PENALTIES),
        ("sampling_info__has_custom_logit_processor", True, Refusal.LOGIT_PROCESSOR),
        ("sampling_info__sampling_mask_batch_indices", SOMETHING, Refusal.SAMPLER),
        ("sampling_info__has_watermark_candidates", True, Refusal.SAMPLER),
    ],
)
def test_a_batch_that_is_not_plain_is_refused(path: str, value: Any, reason: Refusal) -> None:
    assert refusal_of(**{path: value}) is reason


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("to_finish", SOMETHING, Refusal.ABORT_PENDING),
        ("finished_reason", SOMETHING, Refusal.ROW_ENDED),
        ("session", SOMETHING, Refusal.SESSION),
        ("session_id", "s", Refusal.SESSION),
        ("multimodal_inputs", SOMETHING, Refusal.MULTIMODAL),
        ("beam_group", SOMETHING, Refusal.BEAM_SEARCH),
        ("lora_id", "a", Refusal.LORA),
        ("grammar", SOMETHING, Refusal.GRAMMAR_BACKEND),
        ("return_routed_experts", True, Refusal.REQUEST_OUTPUT),
        ("return_indexer_topk", True, Refusal.REQUEST_OUTPUT),
        ("customized_info", {}, Refusal.REQUEST_OUTPUT),
    ],
)
@pytest.mark.parametrize("row", [0, 1])
def test_one_request_that_is_not_plain_refuses_the_batch(
    row: int, name: str, value: Any, reason: Refusal
) -> None:
    reqs = [plain_request(), plain_request()]
    put(reqs[row], name, value)
    assert refusal_of(reqs=reqs) is reason


def test_only_the_running_batch_itself_may_ride() -> None:
    assert batch_refusal(plain_scheduler(), plain_batch()) is Refusal.NOT_DECODE


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("chunked_req", SOMETHING, Refusal.CHUNKED_PREFILL),
        ("grammar_manager.has_waiting_grammars", lambda: True, Refusal.GRAMMAR),
        ("waiting_queue", [SOMETHING], Refusal.ADMISSION_OPEN),
    ],
)
def test_a_scheduler_that_may_decide_otherwise_next_time_refuses(
    path: str, value: Any, reason: Refusal
) -> None:
    scheduler = plain_scheduler()
    put(scheduler, path, value)
    assert batch_refusal(scheduler, scheduler.running_batch) is reason


def test_requests_may_wait_while_the_batch_is_full() -> None:
    scheduler = plain_scheduler()
    scheduler.waiting_queue, scheduler.running_batch.batch_is_full = [SOMETHING], True
    assert batch_refusal(scheduler, scheduler.running_batch) is None


def test_a_recording_of_experts_refuses(monkeypatch: Any) -> None:
    recorder = SimpleNamespace(recording=True)
    monkeypatch.setattr(lane_eligibility, "get_global_expert_distribution_recorder", lambda: recorder)
    assert refusal_of() is Refusal.DIAGNOSTICS
    recorder.recording = False
    assert refusal_of() is None
