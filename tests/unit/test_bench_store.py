"""The result file of a measurement that can stop and go on: what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zos_sglang.testing.bench.store import ResumeError, Store, check_same, code_digest, load

HEAD = {
    "kind": "bench_x",
    "commit": "abc",
    "date": "today",
    "command": "bench_x.py",
    "versions": {"sglang": "0.5.23"},
    "machine": {"cpu": "c", "gpu": None},
}
BOTH = ({"load": "a", "rule": "never"}, {"load": "a", "rule": "always"})


def opened(out: Path, *, resume: bool = False, seed: int = 0, version: int = 1, **changed: Any) -> Store:
    return Store(out / "x.json", {**HEAD, **changed}, {"seed": seed}, len, resume=resume, version=version)


def repeat_of(number: int) -> list[dict[str, Any]]:
    return [{**key, "repeat": number, "ms": 1.5} for key in BOTH]


def test_a_later_call_goes_on_with_the_repeats_that_are_missing(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert first.missing(3, BOTH) == [0, 1, 2]
    first.add(repeat_of(1))

    again = opened(tmp_path, resume=True, commit="def")
    assert again.missing(3, BOTH) == [0, 2]
    again.add(repeat_of(0))
    again.add(repeat_of(2))
    again.finish()
    assert again.missing(3, BOTH) == []
    data = load(tmp_path / "x.json", "bench_x")
    assert data["complete"] and data["summary"] == 6
    assert [(run["repeat"], run["call"]) for run in data["runs"][::2]] == [(1, 0), (0, 1), (2, 1)]
    assert [call["commit"] for call in data["calls"]] == ["abc", "def"]


def test_a_repeat_that_lacks_a_run_is_missing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(repeat_of(0)[:1])
    assert store.missing(1, BOTH) == [0]
    assert store.missing(1, BOTH[:1]) == []


def test_more_repeats_may_be_asked_for_and_the_file_is_then_not_complete(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(repeat_of(0))
    store.finish()
    again = opened(tmp_path, resume=True)
    again.save()
    assert again.missing(2, BOTH) == [1]
    assert not load(tmp_path / "x.json", "bench_x")["complete"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"versions": {"sglang": "0.5.24"}}, r"versions: .*0\.5\.23.* then, .*0\.5\.24.* now"),
        ({"machine": {"cpu": "c", "gpu": "H200"}}, "machine"),
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"version": 2}, "format: 1 then, 2 now"),
    ],
)
def test_what_differs_is_named_and_not_continued(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    opened(tmp_path).add(repeat_of(0))
    kept = (tmp_path / "x.json").read_text()
    with pytest.raises(ResumeError, match=named):
        opened(tmp_path, resume=True, **changed)
    assert (tmp_path / "x.json").read_text() == kept


def test_without_resume_a_result_is_not_overwritten(tmp_path: Path) -> None:
    opened(tmp_path).save()
    with pytest.raises(ResumeError, match="--resume continues it"):
        opened(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "bench_y", "identity": {}}', '{"kind": "bench_x"}'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ResumeError, match=r"x\.json"):
        opened(tmp_path, resume=True)


def test_tuples_and_lists_are_the_same_setting() -> None:
    check_same({"modes": ["x"]}, {"modes": ("x",)})
    with pytest.raises(ResumeError, match="turns: null then, 6 now"):
        check_same({}, {"turns": 6})


def test_what_is_kept_is_what_a_reader_gets_back(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add([{"load": "a", "rule": "never", "repeat": 0, "lengths": (1, 2)}])
    assert store.runs == json.loads((tmp_path / "x.json").read_text())["runs"]


def test_code_means_the_plugin_without_its_tests(tmp_path: Path) -> None:
    (tmp_path / "testing").mkdir()
    (tmp_path / "a.py").write_text("1")
    first = code_digest(tmp_path)
    (tmp_path / "testing" / "b.py").write_text("2")
    assert code_digest(tmp_path) == first
    (tmp_path / "a.py").write_text("3")
    assert code_digest(tmp_path) != first
