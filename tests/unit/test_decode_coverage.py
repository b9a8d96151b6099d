"""Each condition under which the graph executor would differ from upstream's own way, one at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.debug_utils import dumper as dumper_module
from sglang.srt.eplb import expert_distribution
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.state_capturer import indexer_topk, routed_experts

from tests.unit.lane_standins import named, put
from tests.unit.upstream_decode_case import TritonAttnBackend, model_runner
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream.decode_coverage import uncovered

pytestmark = pytest.mark.usefixtures("published")
SOMETHING = object()
GRAPHS = "decode_cuda_graph_runner"


class FlashAttentionBackend:
    needs_cpu_seq_lens = use_mla = use_sliding_window_kv_pool = is_prefill_aware_swa = False
    fa_impl_ver, local_attn_builder = 3, None


def on_fa3() -> Any:
    """A model runner as `model_runner()` makes it, with FA3 for its attention."""
    model = model_runner()
    model.attn_backend = model.decode_cuda_graph_runner.attn_backend = FlashAttentionBackend()
    return model


@pytest.mark.parametrize("make", [model_runner, on_fa3])
def test_plain_decode_is_covered(make: Any) -> None:
    assert uncovered(make()) is None


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (GRAPHS, None, Refusal.ATTENTION_BACKEND),
        (GRAPHS, named("EagerRunner"), Refusal.ATTENTION_BACKEND),
        ("spec_algorithm", SpeculativeAlgorithm.EAGLE, Refusal.SPECULATION),
        ("lora_manager", SOMETHING, Refusal.LORA_SERVER),
        ("req_to_token_pool", named("HybridReqToTokenPool"), Refusal.KV_POOL),
        ("token_to_kv_pool", named("MLATokenToKVPool"), Refusal.KV_POOL),
        ("kv_index_translator.is_translating", True, Refusal.KV_POOL),
        ("hisparse_coordinator", SOMETHING, Refusal.KV_POOL),
        ("model_config.model_is_mrope", True, Refusal.MODEL),
        ("ngram_embedding_manager.enabled", True, Refusal.MODEL),
        ("model", SimpleNamespace(prepare_for_forward=print), Refusal.MODEL),
        ("sliding_window_size", 128, Refusal.MODEL),
        ("sliding_window_size", 1, Refusal.MODEL),
        ("watermark_state", SOMETHING, Refusal.SAMPLER),
        (f"{GRAPHS}.pp_size", 2, Refusal.PIPELINE_PARALLEL),
        (f"{GRAPHS}.backend", named("PiecewiseBackend"), Refusal.ATTENTION_BACKEND),
        (f"{GRAPHS}.attn_backend", TritonAttnBackend(), Refusal.ATTENTION_BACKEND),
        (f"{GRAPHS}.attention_graph_variants", SOMETHING, Refusal.ATTENTION_BACKEND),
        (f"{GRAPHS}._metadata_glue", SOMETHING, Refusal.ATTENTION_BACKEND),
        (f"{GRAPHS}.enable_two_batch_overlap", True, Refusal.ATTENTION_BACKEND),
        (f"{GRAPHS}.enable_pdmux", True, Refusal.ATTENTION_BACKEND),
        (f"{GRAPHS}.require_mlp_sync", True, Refusal.DP_ATTENTION),
        (f"{GRAPHS}.is_encoder_decoder", True, Refusal.MODEL),
        (f"{GRAPHS}.is_dllm", True, Refusal.MODEL),
        (f"{GRAPHS}.captured_req_width", 4, Refusal.MODEL),
        ("attn_backend.needs_cpu_seq_lens", True, Refusal.ATTENTION_BACKEND),
        ("attn_backend.use_mla", True, Refusal.ATTENTION_BACKEND),
        ("attn_backend.use_sliding_window_kv_pool", True, Refusal.ATTENTION_BACKEND),
        ("attn_backend.dcp_size", 2, Refusal.ATTENTION_BACKEND),
        ("msprobe_debugger", SOMETHING, Refusal.DIAGNOSTICS),
        ("eplb_manager", SOMETHING, Refusal.DIAGNOSTICS),
        ("enable_elastic_ep", True, Refusal.DIAGNOSTICS),
    ],
)
def test_what_is_not_plain_is_not_covered(path: str, value: Any, reason: Refusal) -> None:
    model = model_runner()
    put(model, path, value)
    found = uncovered(model)
    assert found is not None and found.refusal is reason and found.why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("needs_cpu_seq_lens", True),
        ("use_mla", True),
        ("use_sliding_window_kv_pool", True),
        ("fa_impl_ver", 4),
        ("local_attn_builder", SOMETHING),
        ("is_prefill_aware_swa", True),
    ],
)
def test_fa3_that_is_not_plain_is_not_covered_and_named(name: str, value: Any) -> None:
    model = on_fa3()
    put(model.attn_backend, name, value)
    found = uncovered(model)
    assert found is not None and found.refusal is Refusal.ATTENTION_BACKEND
    assert found.why.startswith("FlashAttentionBackend")


@pytest.mark.parametrize("value", [None, -1])
def test_no_sliding_window_is_covered_however_upstream_says_it(value: Any) -> None:
    model = model_runner()
    model.sliding_window_size = value
    assert uncovered(model) is None


def test_another_attention_backend_is_named() -> None:
    model = model_runner()
    model.attn_backend = model.decode_cuda_graph_runner.attn_backend = named("FlashInferAttnBackend")
    found = uncovered(model)
    assert found == (Refusal.ATTENTION_BACKEND, "attention backend FlashInferAttnBackend")


def test_graph_memory_that_is_lent_is_not_covered(monkeypatch: Any) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_GRAPH_POOL_BORROW", "1")
    assert uncovered(model_runner()) == (Refusal.MODEL, "graph memory is lent between replays")


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (expert_distribution, "get_global_expert_distribution_recorder", lambda: named("_Recorder")),
        (routed_experts, "get_global_experts_capturer", lambda: SOMETHING),
        (indexer_topk, "get_global_indexer_capturer", lambda: SOMETHING),
        (dumper_module, "dumper", SimpleNamespace(may_enable=True)),
    ],
)
def test_what_records_every_forward_is_not_covered(
    owner: Any, name: str, value: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(owner, name, value)
    found = uncovered(model_runner())
    assert found is not None and found.refusal is Refusal.DIAGNOSTICS
