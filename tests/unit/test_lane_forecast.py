"""The forecast of the lane against the running server: nothing is asked there that is not forecast."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

import pytest
from sglang.srt.server_args import ServerArgs

from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream import decode_coverage, lane_build, lane_eligibility, port, runtime
from zos_sglang.upstream.host_cache import has_host_cache
from zos_sglang.upstream.lane_conditions import CONDITIONS, NEEDS_SERVER, NEEDS_SERVER_REFUSALS

ASKED = (lane_eligibility.server_refusal, decode_coverage, lane_build, runtime)

#: Everything that `server_refusal` and its helpers look at, and the condition (its words) that stands for it,
#: or why there is none.
LOOKED_AT = {
    "is_generation": "the model generates nothing",
    "spec_algorithm": "speculative decoding",
    "pp_size": "pipeline parallelism",
    "require_mlp_sync": "DP attention",
    "dcp_enabled": "decode context parallelism",
    "disaggregation_mode": "the prefill role of disaggregation",
    "disaggregation_decode_enable_offload_kvcache": "KV of the decode role on the host",
    "disaggregation_decode_host_receive_threshold": "KV of the decode role on the host",
    "enable_lora": "LoRA",
    "lora_manager": "LoRA",
    "req_to_token_pool": "an extension makes another; needs the running server",
    "token_to_kv_pool_allocator": "layers with a sliding window",
    "is_hybrid_swa": "layers with a sliding window",
    "is_hybrid_ssm": "recurrent state (Mamba, linear attention)",
    "enable_hisparse": "hierarchical sparse attention",
    "enable_unified_memory": "unified memory pool",
    "enable_mamba_extra_buffer": "the extra buffer of the Mamba cache",
    "enable_hierarchical_cache": "a hierarchical cache",
    "enable_lmcache": "a hierarchical cache",
    "enable_hicache_storage": "a hierarchical cache",
    "enable_unified_cache_external_linker": "a hierarchical cache",
    "rust_server": "SGLang's Rust server",
    "output_streamer": "another plugin's; needs the running server",
    "batch_result_processor": "another plugin's; needs the running server",
    "sampler": "another plugin's; needs the running server",
    "sampling_observer": "another plugin's; needs the running server",
    "watermark_state": "watermarks",
    "is_encoder_decoder": "an encoder",
    "model_is_mrope": "multi-axis rotary positions",
    "dllm_config": "a diffusion language model",
    "enabled": "n-gram embeddings",
    "sliding_window_size": "a sliding window",
    "enable_priority_preemption": "preemption by priority (--disable-priority-preemption lets it ride)",
    "prefill_delayer": "a prefill delayer",
    "prefill_decode_interval": "--prefill-decode-interval",
    "external_corpus_manager": "an external corpus",
    "enable_two_batch_overlap": "two-batch overlap",
    "TEST_RETRACT": "a mode of SGLang's own tests",
    "forward_sleep_time": "set while the server runs",
    "enable_fpm": "forward-pass metrics wrap run_batch",
    "scripted_scheduler_hook": "a mode of SGLang's own tests",
    "SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS": "a mode of SGLang's own tests",
    "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "a mode of SGLang's own tests",
    "SGLANG_ENABLE_DELAY_SAMPLE": "a mode of SGLang's own tests",
    "may_enable": "tensors are dumped every forward",
    "msprobe_debugger": "a debugger around every forward",
    "eplb_manager": "experts are rebalanced between forwards",
    "get_global_experts_capturer": "experts are recorded every forward",
    "get_global_indexer_capturer": "experts are recorded every forward",
    "enable_mfu_metrics": "MFU metrics",
}
#: Entries of LOOKED_AT that no condition stands for.
NOT_FORECAST = {
    "req_to_token_pool",
    *("output_streamer", "batch_result_processor", "sampler", "sampling_observer"),
    "forward_sleep_time",
}
#: Names on the way to what is looked at.
WAYS = {
    *("tp_worker", "model_runner", "model_config", "is_none", "__name__", "get", "mamba", "overlap"),
    *("ngram_embedding_manager", "lane_rival", "value", "PREFILL"),
}


#: Said in words that are made up when it happens.
RIVAL = {f"Refusal.{refusal.name}" for refusal in NEEDS_SERVER_REFUSALS}


def tree(source: object) -> ast.AST:
    return ast.parse(inspect.getsource(source))  # type: ignore[arg-type]


def refusals_in(source: object) -> set[Refusal]:
    """Every `Refusal.X` that a source names."""
    return {
        Refusal[node.attr]
        for node in ast.walk(tree(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Refusal"
    }


def phrases_in(source: object) -> set[str]:
    """Every phrase that stands behind a `Refusal.X` in a tuple or a call."""
    found = set()
    for node in ast.walk(tree(source)):
        parts = node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        named = ast.unparse(parts[0]) if len(parts) >= 2 else ""
        if named.startswith("Refusal.") and named not in RIVAL:
            found.add(phrase(parts[1]))
    return found


def phrase(node: ast.expr) -> str:
    """A literal; of an f-string its fixed parts, with {} for the others."""
    if isinstance(node, ast.JoinedStr):
        return "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)  # type: ignore[misc]
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return str(node.value)


def covered() -> set[str]:
    return {phrase for condition in CONDITIONS for phrase in condition.phrases}


def test_every_refusal_of_the_server_is_forecast_or_needs_the_server() -> None:
    asked = set().union(*map(refusals_in, ASKED))
    forecast = {condition.refusal for condition in CONDITIONS}
    assert asked == forecast | set(NEEDS_SERVER_REFUSALS)
    assert not forecast & set(NEEDS_SERVER_REFUSALS)


@pytest.mark.parametrize("source", [lane_eligibility.server_refusal, decode_coverage, lane_build])
def test_every_phrase_of_the_server_is_forecast_or_needs_the_server(source: ModuleType) -> None:
    assert phrases_in(source)
    assert phrases_in(source) - covered() - set(NEEDS_SERVER) == set()


def test_every_case_of_upstreams_launch_is_forecast_or_needs_the_server() -> None:
    (cases,) = [node for node in ast.walk(tree(port.needs_upstream_launch)) if isinstance(node, ast.Dict)]
    names = {key.value for key in cases.keys if isinstance(key, ast.Constant)}
    assert names and names - covered() - set(NEEDS_SERVER) == set()


def test_nothing_is_forecast_that_the_server_would_not_say() -> None:
    said = set().union(*map(phrases_in, ASKED[:3]))
    (cases,) = [node for node in ast.walk(tree(port.needs_upstream_launch)) if isinstance(node, ast.Dict)]
    said |= {key.value for key in cases.keys if isinstance(key, ast.Constant)}  # type: ignore[misc]
    assert covered() - said == set()
    assert set(NEEDS_SERVER) - said == set()
    assert not covered() & set(NEEDS_SERVER)


def test_every_single_thing_that_the_server_looks_at_has_its_condition() -> None:
    parts = lane_eligibility._plain_pool, lane_eligibility._diagnosed, has_host_cache
    names = set()
    for source in (lane_eligibility.server_refusal, *parts):
        for node in ast.walk(tree(source)):
            if isinstance(node, ast.Attribute) and not ast.unparse(node).startswith("Refusal."):
                names.add(node.attr)
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_global_"):
                names.add(ast.unparse(node.func))
    assert names - WAYS == set(LOOKED_AT)
    words = {condition.words for condition in CONDITIONS}
    assert {name for name, text in LOOKED_AT.items() if text not in words} == NOT_FORECAST


def test_every_flag_and_variable_that_is_named_exists() -> None:
    import argparse

    from sglang.srt.environ import envs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    for condition in CONDITIONS:
        for name in (part.strip() for part in condition.flag.split(",")):
            if name.startswith("--"):
                assert name in known, name
            elif name.startswith("SGLANG_"):
                assert hasattr(envs, name), name
            else:
                assert name in ("DUMPER_ENABLE", "DUMPER_SERVER_PORT")
