"""Steps that fail on demand in a real server: answers, counts, log, pool; the table of docs/reliability.md.

One server for all of them: each fault is asked for over HTTP, on a server that is whole again.
WRITE_FAULT_TABLE=1 in the environment writes the table instead of comparing it.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from tests.server.conftest import STRICT
from tests.server.fault_cases import CASES, Case, asked, hold_page, load, under_load, used_tokens
from zos_sglang.faults.plan import POINTS

pytestmark = pytest.mark.server

BEGIN, END = "<!-- table of faults: made by tests/server/test_faults.py -->", "<!-- end of the table -->"
LOAD = partial(load, rows=8, streams=3)
LAUNCHES, LANE = "launches are SGLang's until a restart", "the lane stays closed until a restart"


#: Not to be seen on a CPU: where it is tested instead.
ELSEWHERE = {
    "capture": ("resident, CUDA graphs", "`tests/unit/test_capture.py`", "that graph's work runs eagerly")
}


@pytest.fixture(scope="module")
def client(serve, client_of, tmp_path_factory):
    trace = tmp_path_factory.mktemp("trace") / "trace.json"
    env = {**STRICT, "ZOS_FAULT": "on", "ZOS_TRACE": str(trace)}
    return client_of(serve("resident", env, ("--enable-metrics", "--stream-interval", "1")))


@pytest.fixture(scope="module")
def answers(client):
    """Of the same server in mode stock."""
    asked(client, zos_mode="stock")
    return LOAD(client)


@pytest.fixture(scope="module")
def seen():
    """What each case was seen to do, by its name."""
    return {}


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
    asked(client, zos_fault="on")
    asked(client, zos_mode=case.mode)
    asked(client, zos_fault=f"{case.point}:{when}")
    # Looking at the report would be the call that fails.
    before = client.zos() if case.point not in ("report", "metrics", "trace") else None
    got = under_load(client, case, partial(LOAD, client))
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
        what = f"`{case.point}` | {POINTS[case.point]} | {case.modes}"
        lines.append(f"| {what} | equal to stock's | {counted or '-'} | {after} |")
    for point, (mode, where, after) in ELSEWHERE.items():
        lines.append(f"| `{point}` | {POINTS[point]} | {mode} | {where} | `lane {point}` | {after} |")
    return "\n".join(lines)


def test_every_point_has_a_case():
    assert {case.point for case in CASES} | ELSEWHERE.keys() == set(POINTS)


def test_the_page_holds_the_table_of_what_was_seen(seen):
    if len(seen) < len(CASES):
        pytest.skip("not all cases have run")
    hold_page(BEGIN, END, table(seen))
