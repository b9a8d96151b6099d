"""Which flags, variables and models keep the resident lane closed.

The conditions of `lane_eligibility`, of `decode_coverage` and of our own launch, read off resolved arguments
instead of a running scheduler. Each names the phrases of those modules that it stands for, and a test holds
both sides together. What only the running server knows is in `NEEDS_SERVER`.
"""

from __future__ import annotations

from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream.lane_facts import (
    COVERED_BACKENDS,
    DISABLED,
    FULL,
    Condition,
    Facts,
    of_model,
    unset,
    without,
)
from zos_sglang.upstream.releases import captured_decode_was_read
from zos_sglang.upstream.versions import SUPPORTED

POOL = "a KV pool of another kind"
KIND = "this kind of model"
DIAGNOSTIC = "a diagnostic mode"
NOT_MHA = "a KV pool that is not the plain one for MHA"
BACKEND = "attention backend {}"


def _mlp_sync(facts: Facts) -> bool:
    args = facts.args
    spread = args.moe_a2a_backend not in (None, "none") or args.moe_dense_tp_size is not None
    return (args.attn_dp_size or 1) > 1 or (spread and not args.disable_attn_tp_gather)


def _extra_buffer(facts: Facts) -> bool:
    strategy = str(facts.args.mamba_radix_cache_strategy)
    return strategy.startswith("extra_buffer") and not facts.args.disable_radix_cache


def _window(facts: Facts) -> bool:
    """As upstream finds it, except for models that name a window in their code."""
    model = facts.model
    return bool((model.is_hybrid_swa and model.sliding_window_size) or model.attention_chunk_size)


def _pool_of_flags(facts: Facts) -> bool:
    args = facts.args
    return facts.graphs == FULL and bool(
        any(kind in str(args.kv_cache_dtype) for kind in ("fp4", "mxfp8"))
        or args.enable_page_major_kv_layout
        or args.enable_kv_cache_sharding
        or args.prefill_only_disable_kv_cache
    )


def _mla(facts: Facts) -> bool:
    return facts.graphs == FULL and facts.model.attention_arch.name == "MLA"


def _hip(_: Facts) -> bool:
    from sglang.srt.utils import is_hip

    return bool(is_hip())


def _dumps(_: Facts) -> bool:
    from sglang.srt.debug_utils.dumper import dumper

    return bool(dumper.may_enable)


#: Asked before the lane is built: what only upstream's launch covers.
_LAUNCH = (
    without(
        Refusal.UPSTREAM_LAUNCH,
        "--enable-forward-pass-metrics",
        "forward-pass metrics wrap run_batch",
        "another component wraps run_batch",
        DIAGNOSTIC,
    ),
    without(Refusal.UPSTREAM_LAUNCH, "--enable-unified-memory", "unified memory pool"),
    without(Refusal.UPSTREAM_LAUNCH, "--enable-unified-cache-external-linker", "external cache linker"),
    without(
        Refusal.UPSTREAM_LAUNCH,
        "--elastic-ep-backend",
        "elastic expert parallelism",
        "elastic expert parallelism",
        "elastic experts",
    ),
    without(Refusal.UPSTREAM_LAUNCH, "--dllm-algorithm", "diffusion LLM"),
    Condition(Refusal.UPSTREAM_LAUNCH, "--device", "HIP", "nothing: AMD devices run upstream's launch", _hip),
)

_SERVER = (
    of_model(Refusal.MODEL, "the model generates nothing", lambda facts: not facts.model.is_generation),
    without(Refusal.SPECULATION, "--speculative-algorithm", "speculative decoding"),
    Condition(
        Refusal.PIPELINE_PARALLEL,
        "--pp-size",
        "pipeline parallelism",
        "use --pp-size 1 and spread the model with --tp-size",
        lambda facts: (facts.args.pp_size or 1) > 1,
    ),
    Condition(
        Refusal.DP_ATTENTION,
        "--attn-dp-size, --enable-dp-attention, --moe-a2a-backend, --moe-dense-tp-size",
        "DP attention",
        "leave DP attention and the all-to-all of experts out",
        _mlp_sync,
        ("DP attention", "batches padded to those of other ranks"),
    ),
    Condition(
        Refusal.KV_POOL,
        "--dcp-size",
        "decode context parallelism",
        "use --dcp-size 1",
        lambda facts: (facts.args.dcp_size or 1) > 1,
    ),
    Condition(
        Refusal.DISAGGREGATION,
        "--disaggregation-mode",
        "the prefill role of disaggregation",
        "nothing: the prefill role has no decode steps",
        lambda facts: facts.args.disaggregation_mode == "prefill",
    ),
    Condition(
        Refusal.DISAGGREGATION,
        "--disaggregation-decode-enable-offload-kvcache, --disaggregation-decode-host-receive-threshold",
        "KV of the decode role on the host",
        "leave both out: KV then arrives on the device and stays there",
        lambda facts: (
            facts.args.disaggregation_decode_enable_offload_kvcache
            or facts.args.disaggregation_decode_host_receive_threshold < 1
        ),
    ),
    without(
        Refusal.LORA_SERVER,
        "--enable-lora, --lora-paths",
        "LoRA",
        "LoRA",
        "LoRA adapters change what a graph runs",
    ),
    without(
        Refusal.KV_POOL,
        "--enable-hisparse",
        "hierarchical sparse attention",
        POOL,
        "hierarchical sparse attention",
    ),
    of_model(Refusal.KV_POOL, "layers with a sliding window", lambda facts: facts.model.is_hybrid_swa, POOL),
    of_model(
        Refusal.KV_POOL, "recurrent state (Mamba, linear attention)", lambda facts: facts.has_state, POOL
    ),
    Condition(
        Refusal.KV_POOL,
        "--mamba-radix-cache-strategy",
        "the extra buffer of the Mamba cache",
        "leave --mamba-radix-cache-strategy out where the model has no Mamba layers",
        _extra_buffer,
        (POOL,),
    ),
    without(
        Refusal.HOST_CACHE,
        "--enable-hierarchical-cache, --enable-lmcache, --hicache-storage-backend, "
        "--enable-unified-cache-external-linker",
        "a hierarchical cache",
    ),
    unset(Refusal.OUTPUT_PATH, "SGLANG_RUST_SERVER", "SGLang's Rust server", "another output path"),
    without(Refusal.SAMPLER, "--enable-watermark", "watermarks", "another sampler", "watermarks"),
    of_model(Refusal.MODEL, "an encoder", lambda facts: facts.model.is_encoder_decoder, KIND, "an encoder"),
    of_model(
        Refusal.MODEL,
        "multi-axis rotary positions",
        lambda facts: facts.model.model_is_mrope,
        KIND,
        "multi-axis rotary positions are computed on the host",
    ),
    of_model(
        Refusal.MODEL,
        "n-gram embeddings",
        lambda facts: facts.model.use_ngram_embedding,
        KIND,
        "n-gram embeddings",
    ),
    of_model(Refusal.MODEL, "a sliding window", _window, KIND, "a sliding window"),
    without(
        Refusal.MODEL, "--dllm-algorithm", "a diffusion language model", KIND, "a diffusion language model"
    ),
    Condition(
        Refusal.SELECTION,
        "--enable-priority-scheduling",
        "preemption by priority (--disable-priority-preemption lets it ride)",
        "add --disable-priority-preemption",
        lambda facts: facts.args.enable_priority_scheduling and not facts.args.disable_priority_preemption,
    ),
    without(Refusal.SELECTION, "--enable-prefill-delayer", "a prefill delayer"),
    without(Refusal.SELECTION, "--prefill-decode-interval", "--prefill-decode-interval"),
    Condition(
        Refusal.SELECTION,
        "--speculative-algorithm",
        "an external corpus",
        "leave --speculative-algorithm NGRAM out",
        lambda facts: str(facts.args.speculative_algorithm).upper() == "NGRAM",
    ),
    without(Refusal.MODEL, "--enable-two-batch-overlap", "two-batch overlap"),
)

_DIAGNOSTICS = (
    without(Refusal.DIAGNOSTICS, "--enable-mfu-metrics", "MFU metrics", DIAGNOSTIC),
    without(
        Refusal.DIAGNOSTICS,
        "--msprobe-dump-config",
        "a debugger around every forward",
        DIAGNOSTIC,
        "a debugger around every forward",
    ),
    without(
        Refusal.DIAGNOSTICS,
        "--enable-eplb",
        "experts are rebalanced between forwards",
        DIAGNOSTIC,
        "experts are rebalanced between forwards",
    ),
    without(
        Refusal.DIAGNOSTICS,
        "--enable-return-routed-experts, --enable-return-indexer-topk",
        "experts are recorded every forward",
        DIAGNOSTIC,
        "experts are recorded every forward",
    ),
    unset(
        Refusal.DIAGNOSTICS,
        "SGLANG_TEST_RETRACT, SGLANG_TEST_SCRIPTED_RUNTIME, SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS, "
        "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT, SGLANG_ENABLE_DELAY_SAMPLE",
        "a mode of SGLang's own tests",
        DIAGNOSTIC,
    ),
    Condition(
        Refusal.DIAGNOSTICS,
        "DUMPER_ENABLE, DUMPER_SERVER_PORT",
        "tensors are dumped every forward",
        "unset DUMPER_ENABLE, DUMPER_SERVER_PORT",
        _dumps,
        (DIAGNOSTIC, "tensors are dumped every forward"),
    ),
)

_GRAPHS = (
    Condition(
        Refusal.RELEASE,
        "--disable-cuda-graph",
        "decode graphs of a release that the lane was not tried with",
        f"sglang=={SUPPORTED[-1]}; or --disable-cuda-graph, with which the lane runs ordinary forwards",
        lambda facts: facts.graphs != DISABLED and not captured_decode_was_read(),
    ),
    Condition(
        Refusal.ATTENTION_BACKEND,
        "--attention-backend, --decode-attention-backend",
        "another attention backend than triton or fa3",
        "--attention-backend triton, or fa3 on Hopper",
        lambda facts: not facts.on_cpu and facts.backends[1] not in COVERED_BACKENDS,
        (BACKEND, "{} of another version than 3", "{} reads lengths on the host"),
    ),
    Condition(
        Refusal.ATTENTION_BACKEND,
        "--prefill-attention-backend, --decode-attention-backend",
        "different attention backends for prefill and decode",
        "one --attention-backend for both",
        lambda facts: not facts.on_cpu and len(set(facts.backends)) > 1,
        (BACKEND,),
    ),
    Condition(
        Refusal.ATTENTION_BACKEND,
        "--cuda-graph-config, --cuda-graph-backend-decode",
        "decode graphs of another kind than one full graph a batch size",
        "leave the backend of the decode graphs at full",
        lambda facts: facts.graphs not in (FULL, DISABLED),
    ),
    Condition(
        Refusal.KV_POOL,
        "--kv-cache-dtype, --enable-page-major-kv-layout, --enable-kv-cache-sharding, "
        "--prefill-only-disable-kv-cache",
        NOT_MHA,
        "leave these flags out",
        _pool_of_flags,
    ),
    of_model(Refusal.KV_POOL, "multi-head latent attention (MLA)", _mla, NOT_MHA, "{} with MLA"),
    unset(
        Refusal.MODEL, "SGLANG_ENABLE_GRAPH_POOL_BORROW", "graph memory is lent between replays", graphs=True
    ),
)

CONDITIONS: tuple[Condition, ...] = (*_LAUNCH, *_SERVER, *_DIAGNOSTICS, *_GRAPHS)

#: Phrases of the running server that flags do not tell (or that another condition implies), with the reason.
NEEDS_SERVER: dict[str, str] = {
    "confidence-budgeted speculation": "the draft model decides; --speculative-algorithm refuses already",
    "no decode graphs of upstream's own: {}": "found when the graphs are captured",
    "a request table that is not the plain one": "found when the pools are made",
    "virtual slot numbers": "found when the pools are made",
    "the model prepares each forward on the host": "in the model's code",
    "a separate backend for decode": "found when the backends are made",
    "graph variants": "found when the backends are made",
    "upstream's own metadata graphs": "found when the graphs are captured",
    "prefill and decode on shared streams": "PD multiplexing, whose loop zos-sglang leaves alone",
    "several tokens a row": "speculation or diffusion, which refuse already",
    "{} with a sliding window": "in the model's code, where the configuration does not say it",
    "{} with decode context parallelism": "--dcp-size refuses already",
    "{} with local attention": "in the model's code, where the configuration does not say it",
}
#: Refusals that no flag tells.
NEEDS_SERVER_REFUSALS = {
    Refusal.OTHER_PLUGIN: "which plugins are loaded; known where they are loaded here",
    Refusal.CLOSED_FOR_GOOD: "whether every rank could build its lane",
}
