"""Why overlap is off: asked of SGLang's own resolution, not of a copy of its conditions."""

import json
import os
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups import overrides, platform_hook
from sglang.srt.server_args import ServerArgs

from zos_sglang import __version__
from zos_sglang.settings import Settings
from zos_sglang.upstream.overlap_off import (
    RULES,
    UNKNOWN,
    loop_left_alone,
    loop_rule,
    startup_line,
    why_overlap_is_off,
)

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "vocab_size": 256,
    "n_positions": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MAMBA = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "vocab_size": 256,
}
#: A diffusion LLM by its architecture; `model_type` is one that transformers knows.
SDAR = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 151936,
}


@pytest.fixture(autouse=True)
def environment_restored(monkeypatch):
    """Resolution writes to os.environ; put it back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def resolve(tmp_path):
    """Server arguments of a CPU server, resolved by SGLang."""

    def run(config=GPT2, **flags) -> ServerArgs:
        (tmp_path / "config.json").write_text(json.dumps(config))
        args = ServerArgs(model_path=str(tmp_path), device="cpu", attention_backend="torch_native", **flags)
        args.resolve_once()
        return args

    return run


def test_overlap_is_on_by_default(resolve):
    args = resolve()
    assert why_overlap_is_off(args) is None
    assert loop_left_alone(args) is None


def test_the_users_own_flag_is_named(resolve):
    assert why_overlap_is_off(resolve(disable_overlap_schedule=True)) == ("--disable-overlap-schedule")


def test_pipeline_parallelism_is_named_and_its_loop_left_alone(resolve):
    args = resolve(pp_size=2)
    assert why_overlap_is_off(args) == "pipeline parallelism (--pp-size above 1)"
    assert "pipeline-parallel loop (event_loop_pp:" in loop_left_alone(args)


def test_every_rule_that_turned_overlap_off_is_named(resolve):
    assert why_overlap_is_off(resolve(pp_size=2, disable_overlap_schedule=True)) == (
        "--disable-overlap-schedule and pipeline parallelism (--pp-size above 1)"
    )


def test_a_sparse_embedding_head_is_named(resolve, monkeypatch):
    monkeypatch.setenv("SGLANG_EMBEDDINGS_SPARSE_HEAD", "head.pt")
    assert "SGLANG_EMBEDDINGS_SPARSE_HEAD" in why_overlap_is_off(resolve())


def test_speculation_on_cpu_is_named(resolve):
    args = resolve(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    assert why_overlap_is_off(args) == "speculation on CPU (--speculative-algorithm)"


def test_the_no_buffer_mamba_cache_is_named(resolve):
    args = resolve(MAMBA, linear_attn_backend="cutedsl")
    assert "no_buffer Mamba cache" in why_overlap_is_off(args)


def test_a_diffusion_llm_is_named_and_runs_the_loop_without_overlap():
    args = ServerArgs(model_path="dummy", dllm_algorithm="LowConfidence")
    overrides.run_post_process_pass(args, overrides._dllm_overlap_disable)
    assert why_overlap_is_off(args) == "diffusion LLM (--dllm-algorithm)"
    assert loop_left_alone(args) is None
    assert line(args, False).endswith("; SGLang's synchronous loop runs unchanged")


def test_mps_without_mlx_is_named():
    args = ServerArgs(model_path="dummy", device="mps")
    platform_hook.handle_mps_backends(args)
    assert why_overlap_is_off(args) == "the MPS device without MLX"


def test_a_rule_that_we_do_not_know_is_named_by_its_source():
    args = ServerArgs(model_path="dummy")
    overrides.declare_resolution(args, "_new_rule", disable_overlap_schedule=True)
    assert why_overlap_is_off(args) == f"{UNKNOWN} (_new_rule)"


def test_a_rule_that_turns_overlap_on_again_counts():
    args = ServerArgs(model_path="dummy", disable_overlap_schedule=True)
    overrides.declare_resolution(args, "_back_on", disable_overlap_schedule=False)
    assert why_overlap_is_off(args) is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_disaggregation_role_over_a_pipeline_is_left_alone_and_without_one_is_ours(role):
    args = ServerArgs(model_path="dummy", disaggregation_mode=role, pp_size=2)
    assert loop_left_alone(args) == f"the pipeline-parallel loop of the {role} role"
    assert loop_left_alone(ServerArgs(model_path="dummy", disaggregation_mode=role)) is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_startup_line_names_the_role(role):
    args = ServerArgs(model_path="dummy", disaggregation_mode=role)
    line = startup_line(Settings.load({"mode": "overlap"}), args, overlap_on=True)
    assert line.endswith(f"overlap on; {role} role of disaggregation")


def test_the_pd_multiplexing_loop_is_left_alone():
    args = ServerArgs(model_path="dummy", enable_pdmux=True)
    assert "PD-multiplexing loop (event_loop_pdmux:" in loop_left_alone(args)


def test_the_mlx_loop_is_left_alone(monkeypatch):
    monkeypatch.setattr("sglang.srt.hardware_backend.mlx.runtime.use_mlx", lambda: True)
    assert "MLX loop (event_loop_overlap_mlx:" in loop_left_alone(ServerArgs(model_path="dummy"))


def test_the_loop_of_a_running_server_is_found_in_its_arguments():
    rule = loop_rule({"disaggregation_mode": "null", "enable_pdmux": False, "pp_size": 2})
    assert rule.code == "pipeline-parallel"
    assert loop_rule({"disaggregation_mode": "null", "pp_size": 1, "dllm_algorithm": "LowConfidence"}) is None


def test_sources_of_all_rules_exist_upstream():
    """A renamed rule would turn a good reason into `an upstream rule we do not know`."""
    from pathlib import Path

    folder = Path(overrides.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    assert [rule for rule in RULES if rule not in text] == []


def line(args, overlap_on, mode="overlap"):
    return startup_line(Settings(mode=mode), args, overlap_on, "0.5.23")


def test_the_start_line_says_mode_version_and_that_overlap_is_on(resolve):
    assert line(resolve(), True) == (f"zos-sglang {__version__}: mode overlap, SGLang 0.5.23, overlap on")


def test_the_start_line_names_the_rule_that_turned_overlap_off(resolve):
    assert line(resolve(disable_overlap_schedule=True), False) == (
        f"zos-sglang {__version__}: mode overlap, SGLang 0.5.23, overlap off because of "
        "--disable-overlap-schedule; SGLang's synchronous loop runs unchanged"
    )


def test_the_start_line_names_a_loop_that_is_left_alone(resolve):
    text = line(resolve(pp_size=2), False)
    assert "overlap off because of pipeline parallelism" in text
    assert text.endswith(
        "the pipeline-parallel loop (event_loop_pp: micro-batches pass from stage to stage) runs as SGLang "
        "has it: zos-sglang leaves it alone"
    )
    assert "\n" not in text


def test_the_start_line_says_that_mode_sync_holds_overlap_back(resolve):
    assert "held to one step at a time by mode sync" in line(resolve(), True, "sync")


def test_the_start_line_admits_a_reason_that_it_cannot_find(resolve):
    assert f"overlap off because of {UNKNOWN};" in line(resolve(), False)


def test_the_start_line_takes_the_installed_version_by_default(resolve):
    from importlib.metadata import version

    text = startup_line(Settings(mode="stock"), resolve(), True)
    assert f"mode stock, SGLang {version('sglang')}, overlap on" in text


def test_a_record_without_a_history_falls_back_to_its_own_field():
    record = SimpleNamespace(disable_overlap_schedule=True)
    assert why_overlap_is_off(record) == "--disable-overlap-schedule"
