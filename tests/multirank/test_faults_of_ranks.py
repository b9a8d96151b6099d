"""Steps that fail in one rank of two, or in both: answers, the other rank, the table of docs/reliability.md.

One server for all of them, the last of which ends it. Its ranks are not compared (ZOS_CHECK_RANKS): their
ways differ after some of these faults, and their launches must not. WRITE_FAULT_TABLE=1 in the environment
writes the table instead of comparing it.
"""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import httpx
import pytest

from tests.server.conftest import STRICT, Client
from tests.server.fault_cases import CASES, Case, asked, hold_page, load, under_load, used_tokens

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

BEGIN = "<!-- table of ranks: made by tests/multirank/test_faults_of_ranks.py -->"
END = "<!-- end of the table of ranks -->"
LOAD = partial(load, rows=3, streams=1)
#: A request that takes so long hangs: the ranks wait for each other.
HANG_S = 60
#: A server whose rank failed must be gone within so many seconds.
BOUND_S = 30
#: SGLang's launcher takes its time for stacks and core dumps before it ends a server.
NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
#: Mode off is final, a lane step that has begun ends the server (below), and rank 1 has no metrics.
NOT_HERE = ("mode-off", "advance", "metrics")
SURVIVED = [case for case in CASES if case.point not in NOT_HERE]
#: Also in both ranks at once: what these close is closed for both.
ALSO_IN_BOTH = ("launch", "open", "reservation", "processing", "lane-build", "mode-switch")
STRUCK = [(case, "@1") for case in SURVIVED] + [(case, "") for case in SURVIVED if case.point in ALSO_IN_BOTH]


@pytest.fixture(scope="module")
def client(serve, tmp_path_factory):
    trace = tmp_path_factory.mktemp("trace") / "trace.json"
    env = {**STRICT, **NO_DUMPS, "ZOS_FAULT": "on", "ZOS_TRACE": str(trace)}
    found = Client(serve("resident", env, ("--tp", "2", "--enable-metrics", "--stream-interval", "1")))
    found.http.timeout = HANG_S
    return found


@pytest.fixture(scope="module")
def answers(client):
    """Of the same server in mode stock."""
    asked(client, zos_mode="stock")
    return LOAD(client)


@pytest.fixture(scope="module")
def seen():
    """By case: what rank 1 said when it failed alone, and what rank 0 then did."""
    return {}


def run(client: Client, case: Case, where: str) -> tuple[list[str], str, str]:
    """One fault; the answers, what is not as it was in rank 0, and the log."""
    at = len(client.server.log_text())
    asked(client, zos_fault="on")
    asked(client, zos_mode=case.mode)
    before = client.zos()
    asked(client, zos_fault=f"{case.point}{where}:{case.at}")
    got = under_load(client, case, partial(LOAD, client))
    client.zos()  # where the report fails, this is the call
    after = client.zos()
    assert before is not None and after is not None, "rank 0 tells of itself"
    return got, rank_0(before, after, case), client.server.log_text()[at:]


def rank_0(before: dict[str, Any], after: dict[str, Any], case: Case) -> str:
    """What it does otherwise than before."""
    found, wanted = [], case.then or case.mode
    if after["mode"] != wanted:
        found.append(f"mode {after['mode']} until the next switch")
    if not after["own_launch"]:
        found.append("launches are SGLang's")
    closed = [state["lane"]["refused"].get("closed-for-good", 0) for state in (before, after)]
    if closed[1] > closed[0]:
        found.append("its lane stays closed")
    elif after["mode"] == "resident" and after["lane"]["opened"] == before["lane"]["opened"]:
        found.append("it has no lane")
    return "; ".join(found) or "goes on as before"


def failures(log: str, point: str) -> dict[int, str]:
    """By rank, what it said of the step that failed, before the fault's own name."""
    one = rf"TP(\d)\] zos-sglang: ((?:(?!zos-sglang: ).)*?)ZOS_FAULT: {point}, call"
    found = {int(rank): text.splitlines()[0] for rank, text in re.findall(one, log, re.DOTALL)}
    return {rank: re.sub(r"^the trace \S+ ends: .*", "its trace ends", text) for rank, text in found.items()}


@pytest.mark.parametrize(
    ("case", "where"), STRUCK, ids=[f"{case.name}-{'rank-1' if where else 'both'}" for case, where in STRUCK]
)
def test_a_step_that_fails_in_one_rank_or_in_both_costs_nobody_an_answer(client, answers, seen, case, where):
    got, first, log = run(client, case, where)
    assert got == answers
    said = failures(log, case.point)
    assert set(said) == ({1} if where else {0, 1}) and "Scheduler hit an exception" not in log
    assert used_tokens(client) == 0
    if where:
        seen[case.name] = said[1], first


def table(seen: dict[str, tuple[str, str]]) -> str:
    """The table as it stands on the page."""
    lines = ["| fault | in mode | rank 1, where it failed | rank 0 |", "|---|---|---|---|"]
    for case in SURVIVED:
        second, first = seen[case.name]
        lines.append(f"| `{case.point}` | {case.modes} | {second} | {first} |")
    return "\n".join(lines)


def test_the_page_holds_the_table_of_what_was_seen(seen):
    if len(seen) < len(SURVIVED):
        pytest.skip("not all cases have run")
    hold_page(BEGIN, END, table(seen))


def test_a_lane_step_that_has_begun_in_one_rank_ends_the_server_in_time(client, answers):
    """The last one. The other rank waits for its collectives, and gets its end from SGLang's launcher."""
    asked(client, zos_fault="on")
    asked(client, zos_mode="resident")
    asked(client, zos_fault="advance@1:5")
    begun = time.monotonic()
    with pytest.raises(httpx.HTTPError):
        LOAD(client)
    while client.server.alive and time.monotonic() < begun + BOUND_S:
        time.sleep(0.2)
    assert not client.server.alive, client.server.log_text()[-4000:]
    assert re.search(r"TP1\] Scheduler hit an exception", client.server.log_text())
