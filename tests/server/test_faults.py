"""Steps that fail on demand in a real server: answers, counts, log, pool; the table of docs/reliability.md.

One server for all of them: each fault is asked for over HTTP, on a server that is whole again.
WRITE_FAULT_TABLE=1 in the environment writes the table instead of comparing it.
"""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import STRICT
from zos_sglang.faults.plan import POINTS

pytestmark = pytest.mark.server

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- table of faults: made by tests/server/test_faults.py -->", "<!-- end of the table -->"
LAUNCHES, LANE = "launches are SGLang's until a restart", "the lane stays closed until a restart"


@dataclass(frozen=True)
class Case:
    """`point` fails at call `at` in `mode`. `then`: a mode asked for while all runs, or (`early`) before."""

    point: str
    mode: str
    at: int
    then: str = ""
    early: bool = False
    #: Whether it may be asked for once more, from that call on.
    again: bool = True

    @property
    def name(self) -> str:
        return f"{self.point}-{self.mode}"


CASES = [
    Case("guard", "overlap", 3),
    Case("launch", "overlap", 3),
    Case("relay", "overlap", 3),
    Case("readback", "overlap", 3),
    Case("barrier", "overlap", 3),
    Case("snapshot", "overlap", 3),
    Case("launch", "sync", 3),
    Case("readback", "sync", 3),
    # Once more, and the lane could not open either.
    Case("launch", "resident", 1, again=False),
    Case("judge", "resident", 2),
    Case("open", "resident", 2),
    Case("advance", "resident", 5),
    Case("reservation", "resident", 2),
    Case("lane-readback", "resident", 5),
    Case("mask", "resident", 3),
    Case("processing", "resident", 5),
    Case("stream-output", "resident", 3),
    Case("lane-build", "stock", 1, then="resident", early=True),
    Case("mode-switch", "overlap", 1, then="sync"),
    Case("mode-switch", "stock", 1, then="overlap"),
    Case("recording", "resident", 3),
    Case("recording", "stock", 3),
    Case("metrics", "resident", 1),
    Case("report", "resident", 1, again=False),
    # A trace that has ended does not begin again, and mode off is final.
    Case("trace", "resident", 1, again=False),
    Case("mode-off", "overlap", 1, then="off", again=False),
]
#: Not to be seen on a CPU: where it is tested instead.
ELSEWHERE = {
    "capture": ("resident, CUDA graphs", "`tests/unit/test_capture.py`", "that graph's work runs eagerly")
}


@pytest.fixture(scope="module")
def client(serve, client_of, tmp_path_factory):
    trace = tmp_path_factory.mktemp("trace") / "trace.json"
    env = {**STRICT, "ZOS_FAULT": "on", "ZOS_TRACE": str(trace)}
    return client_of(serve("resident", env, ("--enable-metrics", "--stream-interval", "1")))


def streamed(client: Any, number: int) -> str:
    """All that a client of a stream saw: the text after each message, and how it ended."""
    params = {"temperature": 0, "max_new_tokens": 20 + number, "ignore_eos": True}
    body = {"text": f"stream {number}", "stream": True, "sampling_params": params}
    with client.http.stream("POST", "/generate", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    texts = [json.loads(line)["text"] for line in lines]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    ended = [json.loads(line)["meta_info"]["finish_reason"] for line in lines]
    assert ended[:-1] == [None] * (len(lines) - 1), "one end, and it comes last"
    return f"{texts[-1]} {ended[-1]}"


def constrained(client: Any) -> str:
    """An answer under a grammar: its sampling waits for the result before."""
    params = {"temperature": 0, "max_new_tokens": 16, "regex": "[a-z]+"}
    answer = client.http.post("/generate", json={"text": "grammar", "sampling_params": params})
    answer.raise_for_status()
    text: str = answer.json()["text"]
    return text


def load(client: Any) -> list[str]:
    """Answers of a wave, with streams and a grammar beside it."""
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(streamed, client, number) for number in range(3)]
        others.append(pool.submit(constrained, client))
        return client.wave(8) + [other.result() for other in others]


@pytest.fixture(scope="module")
def answers(client):
    """Of the same server in mode stock."""
    assert client.set_state(zos_mode="stock").json() == [True]
    return load(client)


@pytest.fixture(scope="module")
def seen():
    """What each case was seen to do, by its name."""
    return {}


def used_tokens(client: Any) -> int:
    """KV slots in use once nothing runs and no prefix is kept."""
    assert client.http.post("/flush_cache", params={"timeout": 10}).status_code == 200
    return sum(one["num_used_tokens"] for one in client.http.get("/v1/loads").json()["loads"])


def afterwards(before: dict[str, Any], zos: dict[str, Any] | None, case: Case) -> str:
    """What is not as it was."""
    if zos is None:
        return "SGLang's own loop, for good"
    found = []
    if zos["mode"] != (case.then or case.mode):
        found.append(f"mode {zos['mode']} until the next switch")
    if not zos["own_launch"]:
        found.append(LAUNCHES)
    if case.point == "mask":
        found.append("masks of lane steps are SGLang's until a restart")
    if zos["lane"]["refused"].get("closed-for-good", 0) > before["lane"]["refused"].get("closed-for-good", 0):
        found.append(LANE)
    if case.point == "lane-build":
        found.append("mode resident is mode overlap until a restart")
    if case.point in ("recording", "metrics", "trace"):
        found.append(
            {"recording": "no records until asked for (`zos_record`)"}.get(
                case.point, f"no {case.point} until a restart"
            )
        )
    return "; ".join(found) or "as before"


def run(client: Any, case: Case, when: str) -> tuple[dict[str, int], str, list[str]]:
    """One fault: its counts by step, what is not as it was, and the answers."""
    assert client.set_state(zos_fault="on").json() == [True]
    assert client.set_state(zos_mode=case.mode).json() == [True]
    assert client.set_state(zos_fault=f"{case.point}:{when}").json() == [True]
    # Looking at the report would be the call that fails.
    before = client.zos() if case.point not in ("report", "metrics", "trace") else None
    if case.early:
        assert client.set_state(zos_mode=case.then).json() == [True]
    with ThreadPoolExecutor(1) as pool:
        loaded: Future[list[str]] = pool.submit(load, client)
        if case.then and not case.early:
            assert client.set_state(zos_mode=case.then).json() == [True]
        got = loaded.result()
    client.zos()
    zos = client.zos()
    counted = zos["faults"] if zos is not None else {}
    return counted, afterwards(before or zos or {}, zos, case), got


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_step_that_fails_costs_nobody_an_answer(client, answers, seen, case):
    outcomes = set()
    for when in (f"{case.at}", f"{case.at}+")[: 1 + case.again]:
        at = len(client.server.log_text())
        counted, after, got = run(client, case, when)
        assert got == answers
        log = client.server.log_text()[at:]
        assert len(re.findall(rf"ZOS_FAULT: {case.point}, call", log)) == 1, "said once"
        assert "Scheduler hit an exception" not in log
        if case.point != "mode-off":
            assert sum(counted.values()) == 1 or (when.endswith("+") and sum(counted.values()) > 1), counted
        assert used_tokens(client) == 0
        assert client.http.get("/health_generate").status_code == 200
        outcomes.add((", ".join(f"`{step}`" for step in counted), after))
    assert len(outcomes) == 1, "once or always: the same takes over"
    seen[case.name] = outcomes.pop()


def table(seen: dict[str, tuple[str, str]]) -> str:
    """The table as it stands on the page."""
    lines = [
        "| fault | what fails | in mode | answers | counted under `faults` as | afterwards |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        counted, after = seen[case.name]
        mode = f"{case.mode}, to {case.then}" if case.then else case.mode
        what = f"`{case.point}` | {POINTS[case.point]} | {mode}"
        lines.append(f"| {what} | equal to stock's | {counted or '-'} | {after} |")
    for point, (mode, where, after) in ELSEWHERE.items():
        lines.append(f"| `{point}` | {POINTS[point]} | {mode} | {where} | `lane {point}` | {after} |")
    return "\n".join(lines)


def test_every_point_has_a_case():
    assert {case.point for case in CASES} | ELSEWHERE.keys() == set(POINTS)


def test_the_page_holds_the_table_of_what_was_seen(seen):
    if len(seen) < len(CASES):
        pytest.skip("not all cases have run")
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    found, tail = rest.split(END)
    made = f"\n\n{table(seen)}\n\n"
    if os.environ.get("WRITE_FAULT_TABLE"):
        PAGE.write_text(f"{head}{BEGIN}{made}{END}{tail}", encoding="utf-8")
    else:
        assert found == made, "docs/reliability.md is not of this server; WRITE_FAULT_TABLE=1 writes it"
