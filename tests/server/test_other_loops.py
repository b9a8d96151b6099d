"""Servers whose event loop we do not replace: SGLang's own runs, answers, and one line says which and why."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.server

#: Two stages over gloo need a core each.
TWO_STAGES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def our_lines(server):
    """What the plugin says of the loop, without the logger's own prefix."""
    lines = [line for line in server.log_text().splitlines() if "zos-sglang" in line and "mode " in line]
    return [line.partition("] ")[2] for line in lines]


def test_pipeline_parallelism_runs_its_own_loop_on_both_stages(serve, client_of):
    server = serve("resident", TWO_STAGES, ("--pp-size", "2"))
    client = client_of(server)
    answers = client.wave(4)
    assert len(set(answers)) == 4 and client.wave(4) == answers
    (line,) = our_lines(server)
    assert "mode resident" in line
    assert "overlap off because of pipeline parallelism (--pp-size above 1)" in line
    assert "the pipeline-parallel loop (event_loop_pp: micro-batches pass from stage to stage) runs" in line
    assert line.endswith("zos-sglang leaves it alone")
    # Nothing of ours is in the way, and whoever asks is told.
    assert client.zos() is None
    refused = client.set_state(zos_mode="overlap")
    assert refused.status_code == 400
    asked = subprocess.run(
        [sys.executable, "-m", "zos_sglang", "doctor", server.url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 2 and "it runs the pipeline-parallel loop (event_loop_pp:" in asked.stderr


@pytest.fixture(scope="module")
def diffusion_model(tiny_model, tmp_path_factory):
    """A diffusion LLM that SGLang knows by its architecture; its mask token is far up in the vocabulary."""
    folder = tmp_path_factory.mktemp("sdar")
    for path in tiny_model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((tiny_model / "config.json").read_text())
    config |= {"architectures": ["SDARForCausalLM"], "vocab_size": 151936}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_diffusion_llm_runs_the_loop_without_overlap(serve, client_of, diffusion_model):
    args = ("--dllm-algorithm", "LowConfidence", "--load-format", "dummy")
    server = serve("resident", {}, args, diffusion_model)
    client = client_of(server)
    assert client.generate("a block at a time", 16)["meta_info"]["completion_tokens"] == 16
    (line,) = our_lines(server)
    assert "overlap off because of diffusion LLM (--dllm-algorithm)" in line
    assert line.endswith("SGLang's synchronous loop runs unchanged")
    zos = client.zos()
    assert zos["mode"] == "normal" and [rule["code"] for rule in zos["overlap_off"]] == ["diffusion-llm"]
    assert zos["steps"]["launches"] > 0
