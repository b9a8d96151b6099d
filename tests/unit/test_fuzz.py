"""Hostile input, a little of it each time; `scripts/fuzz.py` does it at length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz import cli
from tests.fuzz.hostile import Choices
from tests.fuzz.runner import Target, run

INPUTS = 2000


@pytest.mark.parametrize("name", cli.TARGETS)
def test_hostile_input_is_taken_or_refused_in_order(name: str) -> None:
    outcome = run(cli.target(name), INPUTS, seed=7)
    assert outcome.failure is None, outcome.failure["input"] + "\n" + outcome.failure["traceback"]
    assert outcome.inputs >= INPUTS
    assert len(outcome.became) >= 3, "the inputs are too much alike to prove anything"


def _fails_on(value: bytes) -> str:
    if b"\x07" in value:
        raise KeyError("seven")
    return "fine"


FAILING = Target("failing", "fails on a byte", lambda choices: choices.take(64), _fails_on)


def test_a_failing_input_is_found_and_made_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "target", lambda name: FAILING)
    out = tmp_path / "fuzz.json"
    assert cli.main(["--target", "ranks", "--inputs", "4000", "--json", "--out", str(out)]) == 1
    shown = capsys.readouterr()
    failure = json.loads(shown.out)["targets"]["failing"]["failure"]
    assert failure["error"].startswith("KeyError: 'seven'")
    assert failure["input"].count("\\x07") == 1
    assert failure["input"].count("\\x00") >= 23, "all else is as simple as can be"
    assert "FAILED" in shown.err
    assert json.loads(out.read_text())["targets"]["failing"]["failures"] == 1


def test_runs_with_other_seeds_add_up_in_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fine = Target("fine", "takes all", lambda choices: choices.take(9), lambda value: "fine")
    monkeypatch.setattr(cli, "target", lambda name: fine)
    out = tmp_path / "fuzz.json"
    for seed in ("1", "2"):
        assert cli.main(["--target", "ranks", "--inputs", "50", "--seed", seed, "--out", str(out)]) == 0
    kept = json.loads(out.read_text())["targets"]["fine"]
    assert kept["inputs"] >= 100
    assert [one["seed"] for one in kept["runs"]] == [1, 2]


def test_a_target_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--target", "everything"])
    assert "--target everything: there are settings, control" in capsys.readouterr().err


def test_choices_end_with_the_simplest() -> None:
    choices = Choices(b"")
    assert (choices.below(9), choices.pick("abc"), choices.one_in(3), choices.take(2)) == (0, "a", False, b"")
    assert choices.cut(b"content") == b""
