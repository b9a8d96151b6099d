"""Which servers the lane's CUDA-graph executor covers: SGLang 0.5.23, plain MHA decode on Triton or FA3.

Every check names the condition under which the executor's way of running a step would differ from upstream's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zos_sglang.resident.eligibility import Refusal

TRITON = "TritonAttnBackend"
FA3 = "FlashAttentionBackend"
_POOLS = ("MHATokenToKVPool",)


class Uncovered(NamedTuple):
    """Why a server's decode cannot be run by the executor."""

    refusal: Refusal
    why: str


class _Check(NamedTuple):
    refusal: Refusal
    why: str
    applies: Callable[[Any], bool]


def uncovered(model_runner: Any) -> Uncovered | None:
    """The first reason why `model_runner`'s decode steps are not covered, or None. Host values only."""
    runner = model_runner.decode_cuda_graph_runner
    if runner is None or type(runner).__name__ != "DecodeCudaGraphRunner":
        return Uncovered(Refusal.ATTENTION_BACKEND, f"no decode graphs of upstream's own: {_name(runner)}")
    for checks, subject in (
        (_MODEL_RUNNER, model_runner),
        (_RUNNER, runner),
        (_BACKENDS.get(_name(runner.attn_backend), _OTHER_BACKEND), runner.attn_backend),
        (_DIAGNOSTICS, model_runner),
    ):
        if found := _first(checks, subject):
            return found
    return None


def _first(checks: Iterable[_Check], subject: Any) -> Uncovered | None:
    for check in checks:
        if check.applies(subject):
            return Uncovered(check.refusal, check.why.format(_name(subject)))
    return None


def _name(value: Any) -> str:
    return type(value).__name__


def _set(attribute: str) -> Callable[[Any], bool]:
    return lambda subject: bool(getattr(subject, attribute))


def _given(attribute: str) -> Callable[[Any], bool]:
    return lambda subject: getattr(subject, attribute) is not None


_MODEL_RUNNER = (
    _Check(Refusal.SPECULATION, "speculative decoding", lambda m: not m.spec_algorithm.is_none()),
    _Check(Refusal.LORA_SERVER, "LoRA adapters change what a graph runs", _given("lora_manager")),
    _Check(
        Refusal.KV_POOL,
        "a request table that is not the plain one",
        lambda m: _name(m.req_to_token_pool) != "ReqToTokenPool",
    ),
    _Check(
        Refusal.KV_POOL,
        "a KV pool that is not the plain one for MHA",
        lambda m: _name(m.token_to_kv_pool) not in _POOLS,
    ),
    _Check(Refusal.KV_POOL, "virtual slot numbers", lambda m: m.kv_index_translator.is_translating),
    _Check(Refusal.KV_POOL, "hierarchical sparse attention", _given("hisparse_coordinator")),
    _Check(
        Refusal.MODEL,
        "multi-axis rotary positions are computed on the host",
        lambda m: m.model_config.model_is_mrope,
    ),
    _Check(Refusal.MODEL, "n-gram embeddings", lambda m: m.ngram_embedding_manager.enabled),
    _Check(
        Refusal.MODEL,
        "the model prepares each forward on the host",
        lambda m: getattr(m.model, "prepare_for_forward", None) is not None,
    ),
    _Check(Refusal.MODEL, "a sliding window", lambda m: (m.sliding_window_size or -1) > -1),
    _Check(Refusal.SAMPLER, "watermarks", _given("watermark_state")),
)
_RUNNER = (
    _Check(Refusal.PIPELINE_PARALLEL, "pipeline parallelism", lambda r: r.pp_size > 1),
    _Check(
        Refusal.ATTENTION_BACKEND,
        "decode graphs of another kind than one full graph a batch size",
        lambda r: _name(r.backend) != "FullCudaGraphBackend",
    ),
    _Check(
        Refusal.ATTENTION_BACKEND,
        "a separate backend for decode",
        lambda r: r.attn_backend is not r.model_runner.attn_backend,
    ),
    _Check(Refusal.ATTENTION_BACKEND, "graph variants", _given("attention_graph_variants")),
    _Check(Refusal.ATTENTION_BACKEND, "upstream's own metadata graphs", _given("_metadata_glue")),
    _Check(Refusal.ATTENTION_BACKEND, "two-batch overlap", _set("enable_two_batch_overlap")),
    _Check(Refusal.ATTENTION_BACKEND, "prefill and decode on shared streams", _set("enable_pdmux")),
    _Check(Refusal.DP_ATTENTION, "batches padded to those of other ranks", _set("require_mlp_sync")),
    _Check(Refusal.MODEL, "an encoder", _set("is_encoder_decoder")),
    _Check(Refusal.MODEL, "a diffusion language model", _set("is_dllm")),
    _Check(Refusal.MODEL, "several tokens a row", lambda r: r.captured_req_width != 1),
)
_OTHER_BACKEND = (_Check(Refusal.ATTENTION_BACKEND, "attention backend {}", lambda _: True),)
_ANY_BACKEND = (
    _Check(Refusal.ATTENTION_BACKEND, "{} reads lengths on the host", _set("needs_cpu_seq_lens")),
    _Check(Refusal.ATTENTION_BACKEND, "{} with MLA", _set("use_mla")),
    _Check(Refusal.ATTENTION_BACKEND, "{} with a sliding window", _set("use_sliding_window_kv_pool")),
)
_BACKENDS = {
    TRITON: (
        *_ANY_BACKEND,
        _Check(Refusal.ATTENTION_BACKEND, "{} with decode context parallelism", lambda b: b.dcp_size > 1),
    ),
    FA3: (
        *_ANY_BACKEND,
        _Check(Refusal.ATTENTION_BACKEND, "{} of another version than 3", lambda b: b.fa_impl_ver != 3),
        _Check(Refusal.ATTENTION_BACKEND, "{} with local attention", _given("local_attn_builder")),
        _Check(Refusal.ATTENTION_BACKEND, "{} with a sliding window", _set("is_prefill_aware_swa")),
    ),
}


def _lends_pool(_: Any) -> bool:
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_ENABLE_GRAPH_POOL_BORROW.get())


def _records_experts(_: Any) -> bool:
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    return (
        not _name(get_global_expert_distribution_recorder()).endswith("Noop")
        or get_global_experts_capturer() is not None
        or get_global_indexer_capturer() is not None
    )


def _dumps(_: Any) -> bool:
    from sglang.srt.debug_utils.dumper import dumper

    return bool(dumper.may_enable)


_DIAGNOSTICS = (
    _Check(Refusal.MODEL, "graph memory is lent between replays", _lends_pool),
    _Check(Refusal.DIAGNOSTICS, "a debugger around every forward", _given("msprobe_debugger")),
    _Check(Refusal.DIAGNOSTICS, "experts are rebalanced between forwards", _given("eplb_manager")),
    _Check(Refusal.DIAGNOSTICS, "elastic experts", _set("enable_elastic_ep")),
    _Check(Refusal.DIAGNOSTICS, "experts are recorded every forward", _records_experts),
    _Check(Refusal.DIAGNOSTICS, "tensors are dumped every forward", _dumps),
)
