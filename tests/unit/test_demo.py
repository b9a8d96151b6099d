"""The demo's verdict and its mix of requests."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from zos_sglang.testing import demo
from zos_sglang.testing.demo import Answer, make_requests, report


def test_half_of_the_chats_and_half_of_the_completions_stream() -> None:
    requests = make_requests(16)
    kinds = [(request.chat, request.stream) for request in requests]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        (chat, stream): 4 for chat in (True, False) for stream in (True, False)
    }
    assert len({request.prompt for request in requests}) == 16


def test_more_requests_than_prompts_still_differ() -> None:
    assert len({request.prompt for request in make_requests(40)}) == 40


@pytest.mark.parametrize(
    ("ours", "equal"),
    [
        (Answer("Paris.", "stop", 3, [1.0, 2.0]), True),
        (Answer("Rome.", "stop", 3), False),
        (Answer("Paris.", "length", 3), False),
        (Answer("Paris.", "stop", 4), False),
    ],
)
def test_the_verdict_is_equal_only_if_every_answer_is(ours: Answer, equal: bool) -> None:
    console = Console(file=io.StringIO(), width=200)
    stock = [Answer("Paris.", "stop", 3, [9.0]) for _ in range(2)]
    answers = {"ours": [stock[0], ours], "stock": stock}
    assert report(console, make_requests(2), answers, "1 of 2 launches") is equal
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("differs:" in shown) is not equal
    assert f"{1 + equal} of 2" in shown


def test_json_is_all_that_stdout_gets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "CACHE", tmp_path)
    monkeypatch.setattr(demo, "run_side", lambda *_: ([Answer("Paris.", "stop", 3)], {"overlapped": 2}))
    assert demo.main(["--model", "any", "--requests", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["equal"] is True
    assert "1 of 1" in err
