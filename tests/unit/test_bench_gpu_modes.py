"""Parts of gpu_check.py that compare the modes' answers: what they start, and what must hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from zos_sglang.testing.bench import gpu_modes
from zos_sglang.testing.bench.check import Check
from zos_sglang.testing.bench.checkpoint import make_wide
from zos_sglang.testing.bench.checkpoint_latent import LatentShape
from zos_sglang.testing.bench.gpu import PARTS, Scale
from zos_sglang.testing.bench.gpu_cli import REHEARSAL, parser

NEW = ("speculation", "speculation-ngram", "moe-mla")
ANSWERS = [[row, row + 1] for row in range(4)]


def counters(**lane: Any) -> dict[str, Any]:
    return {
        "mode": "resident",
        "own_launch": True,
        "reasons": {"overlapped": 40},
        "paths": {
            **{"fallbacks": 0, "prefill": 3, "decode": 27 + lane.get("steps", 0)},
            **{"barrier-fine": 30, "barrier-coarse": 0, "barrier-off": 0},
        },
        "streams": {},
        "lane": {"refused": {}, "steps": 0, "faults": 0, **lane},
    }


def speculation(syncs: int) -> dict[str, Any]:
    """What a run found in which everything holds, with so many launches held back."""
    answers = {mode: copy.deepcopy(ANSWERS) for mode in gpu_modes.MODES}
    return {
        "plain": answers,
        "structured": copy.deepcopy(answers),
        "grammar_syncs": dict.fromkeys(gpu_modes.MODES, 0) | {"overlap": syncs},
        "accepted": dict.fromkeys(gpu_modes.MODES, 1.5),
        "zos": counters(refused={"speculation": 1}),
    }


def failed(checks: list[Check]) -> list[str]:
    return [check.what for check in checks if not check.ok]


@pytest.mark.parametrize(("waits", "syncs"), [(True, 9), (False, 0)])
def test_a_run_in_which_everything_holds_passes(waits: bool, syncs: int) -> None:
    assert failed(gpu_modes.judge_speculation(speculation(syncs), waits)) == []


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("plain", "overlap"), ANSWERS[::-1], "plain answers of mode overlap are those of stock"),
        (("structured", "resident"), ANSWERS[::-1], "structured answers of mode resident are those of stock"),
        (("plain", "stock"), [[1, 2]] * 4, "the answers differ from each other"),
        (("grammar_syncs", "overlap"), 0, "launches waited for the grammar"),
        (("accepted", "overlap"), None, "steps verify drafts"),
        (("zos", "lane"), counters()["lane"], "the lane refuses speculation by name"),
        (("zos", "own_launch"), False, "launches are ours and overlap"),
        (("zos", "paths"), {"fallbacks": 1}, "no launch fell back"),
    ],
)
def test_what_does_not_hold_is_named(path: tuple[str, str], value: Any, complaint: str) -> None:
    found = speculation(9)
    found[path[0]][path[1]] = value
    assert complaint in failed(gpu_modes.judge_speculation(found, True))


def test_a_launch_that_waits_though_the_grammar_advances_inside_verify_is_named() -> None:
    found = speculation(1)
    assert failed(gpu_modes.judge_speculation(found, False)) == ["no launch waited for the grammar"]


@pytest.mark.parametrize(
    ("lane", "holds"),
    [
        ({"refused": {"kv-pool": 1}}, True),
        ({"refused": {"attention-backend": 1}}, True),
        ({"refused": {}, "steps": 50}, True),
        ({"refused": {}, "steps": 0}, False),
        ({"refused": {"speculation": 1}}, False),
    ],
)
def test_the_lane_has_to_ride_or_to_say_why_not(lane: dict[str, Any], holds: bool) -> None:
    found = {"plain": speculation(0)["plain"], "zos": counters(**lane)}
    wrong = failed(gpu_modes.judge_latent(found))
    assert wrong == ([] if holds else ["the lane rides or says why not"])


@pytest.mark.parametrize(
    ("fine", "coarse", "off", "holds"),
    [(30, 0, 0, True), (27, 3, 0, True), (0, 30, 0, True), (28, 2, 0, False), (27, 2, 1, False)],
)
def test_prefills_have_one_kind_of_barrier_and_decode_steps_one(
    fine: int, coarse: int, off: int, holds: bool
) -> None:
    found = {"plain": speculation(0)["plain"], "zos": counters(refused={"kv-pool": 1})}
    found["zos"]["paths"] |= {"barrier-fine": fine, "barrier-coarse": coarse, "barrier-off": off}
    wrong = failed(gpu_modes.judge_latent(found))
    assert wrong == ([] if holds else ["prefills take one kind of barrier, decode steps one"])


# ---------------------------------------------------------------- servers and checkpoints


def test_the_parts_can_be_asked_for() -> None:
    args = parser().parse_args(["--out", "x", *(word for name in NEW for word in ("--part", name))])
    assert tuple(args.part) == NEW


@pytest.mark.parametrize(
    ("name", "cuda", "algorithm"),
    [
        ("speculation", True, "STANDALONE"),
        ("speculation-ngram", True, "NGRAM"),
        ("speculation", False, "NGRAM_BARRIER"),
        ("speculation-ngram", False, "NGRAM"),
    ],
)
def test_a_server_speculates_and_has_a_tokenizer(
    name: str, cuda: bool, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_modes, "cuda_available", lambda: cuda)
    monkeypatch.setattr(gpu_modes, "make_tiny", lambda arch, out: out)
    words = PARTS[name].config(tmp_path, Scale()).command_args(cuda)
    assert words[words.index("--speculative-algorithm") + 1] == algorithm
    assert "--skip-tokenizer-init" not in words
    assert words[words.index("--dtype") + 1] == ("bfloat16" if cuda else "float32")
    assert ("--speculative-draft-model-path" in words) is (algorithm == "STANDALONE")


def test_a_rehearsal_takes_the_small_model_of_deepseeks_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        gpu_modes, "make_wide", lambda out, shape, *, dtype: asked.append((shape, dtype)) or out
    )
    for scale in (REHEARSAL, Scale()):
        PARTS["moe-mla"].config(tmp_path, scale)
    assert asked == [(gpu_modes.SMALL, "float32"), (LatentShape(), "bfloat16")]


def test_the_checkpoint_has_the_weights_that_transformers_expects(tmp_path: Path) -> None:
    import torch
    import transformers
    from safetensors import safe_open

    folder = make_wide(tmp_path / "latent", gpu_modes.SMALL, dtype="float32")
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    fused = {name for name in expected if ".experts." in name}
    assert fused and {name: shapes.get(name) for name in expected.keys() - fused} == {
        name: expected[name] for name in expected.keys() - fused
    }
    # Transformers keeps all experts of a layer in one tensor; checkpoints have them one by one.
    (inner,) = {shape for name, shape in shapes.items() if ".experts." in name and "down_proj" in name}
    down = next(shape for name, shape in expected.items() if name.endswith("experts.down_proj"))
    assert down == (gpu_modes.SMALL.experts, *inner)
    assert len([n for n in shapes if ".experts." in n]) == 3 * gpu_modes.SMALL.experts
