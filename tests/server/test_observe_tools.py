"""`top` and `doctor` against real servers, and the forecast of flags against what the started server does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from zos_sglang.testing.server import ServerProcess, cpu_args, cpu_env

pytestmark = pytest.mark.server

RESIDENT = "resident"
#: Name, mode, flags.
CASES = {
    "plain": (RESIDENT, ()),
    "paged": (RESIDENT, ("--page-size", "16")),
    "no-overlap": (RESIDENT, ("--disable-overlap-schedule",)),
    "no-lane": ("overlap", ()),
    "refused": (RESIDENT, ("--prefill-decode-interval", "2")),
}


def tool(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m zos_sglang WORDS`, as a user has it, without a mode in the environment."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("ZOS_")}
    return subprocess.run(
        [sys.executable, "-m", "zos_sglang", *words],
        env={**inherited, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def answer(*words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """A tool's JSON."""
    done = tool(*words, "--json", env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(
    request: pytest.FixtureRequest, tiny_model: Path, client_of: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any]]:
    """One server at a time, which has answered a wave of requests."""
    mode, flags = CASES[request.param]
    log = tmp_path_factory.mktemp("server") / "server.log"
    with ServerProcess(tiny_model, mode=mode, args=flags, log=log) as server:
        client = client_of(server)
        for _ in range(2):
            client.wave()
        yield request.param, client


@cache
def forecast(name: str, model: Path) -> dict[str, Any]:
    mode, flags = CASES[name]
    return answer(
        "doctor", "--model-path", str(model), "--zos-mode", mode, *cpu_args(), *flags, env=cpu_env()
    )


def test_what_is_forecast_from_flags_is_what_the_server_does(case: Any, tiny_model: Path) -> None:
    name, client = case
    said, did = forecast(name, tiny_model), client.zos()
    paths = did["steps"]["totals"]["path"]
    # A step that found a result pending and overlapped, however it went on.
    overlapped = sum(count for path, count in paths.items() if path != "sync")
    assert said["overlap"]["on"] is (overlapped > 0), paths
    assert (said["lane"]["state"] == "open") is (did["lane"]["opened"] > 0)
    assert (said["loop"] == "the loop of zos-sglang") is (did["steps"]["loop"] == "ours")
    refused = {word for word, count in did["lane"]["refused"].items() if count}
    if name == "refused":
        assert {rule["code"] for rule in said["lane"]["rules"]} == {"selection"} <= refused
    log = client.server.log_text()
    off = [rule["words"] for rule in said["overlap"]["rules"] if rule["code"] != "mode-sync"]
    assert ("overlap off because of" in log) is bool(off)
    assert not off or f"overlap off because of {' and '.join(off)};" in log


def test_doctor_says_of_the_running_server_what_it_said_of_its_flags(case: Any, tiny_model: Path) -> None:
    name, client = case
    found, said = answer("doctor", client.server.url), forecast(name, tiny_model)
    assert found["overlap"]["on"] is said["overlap"]["on"]
    assert found["lane"]["state"] == said["lane"]["state"]
    codes = [rule["code"] for rule in found["overlap"]["rules"]]
    assert codes == [rule["code"] for rule in said["overlap"]["rules"]]
    flags = {rule["flag"] for rule in found["lane"]["rules"]}
    assert flags <= {rule["flag"] for rule in said["lane"]["rules"]}


def test_doctor_says_what_happened(case: Any) -> None:
    name, client = case
    found = answer("doctor", client.server.url)
    assert found["steps"] > 40 and found["window"]["steps"] > 40
    assert sum(one["share"] for one in found["paths"].values()) == pytest.approx(1, abs=0.001)
    assert not found["asynchronous"] and "no time is saved" in found["advice"][0]
    reasons = {one["reason"]: one for one in found["reasons"]}
    if name == "no-overlap":
        assert found["paths"].keys() == {"sync"} and reasons["overlap-off"]["share"] == 1.0
    elif name in ("plain", "paged"):
        assert found["paths"]["resident"]["share"] > 0.3 and found["lane"]["share"] == 1.0
    else:
        assert found["paths"]["overlap"]["share"] > 0.3
    assert found["times"]["interval"]["p50"] > 0 and found["cpu"]["total"]["p50"] > 0
    assert len(found["signs"]) == 4 and any(key.startswith("decode ") for key in found["what_if"])


def test_top_shows_a_frame(case: Any) -> None:
    _, client = case
    frame = answer("top", client.server.url, "--once")
    assert frame["steps"] > 40 and frame["tokens"] > frame["steps"]
    assert frame["throughput"]["steps_per_s"] > 0
    assert len(frame["last"]) == 40 and frame["last"][-1]["step"] > frame["last"][0]["step"]
    for track in ("schedule", "forward", "processing"):
        spans = [step[track] for step in frame["last"] if step[track]]
        assert len(spans) > 20 and all(begin <= end for begin, end in spans), track
    shown = tool("top", client.server.url, "--once")
    assert shown.returncode == 0 and "throughput" in shown.stdout and "schedule" in shown.stdout
    shown = tool("doctor", client.server.url)
    assert shown.returncode == 0 and "time per output token" in shown.stdout


def test_a_stock_server_is_told_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    with ServerProcess(tiny_model, mode=None, log=tmp_path / "server.log") as server:
        for words in (("top", server.url, "--once"), ("doctor", server.url)):
            done = tool(*words)
            assert done.returncode == 2 and "no zos-sglang in the server at" in done.stderr
