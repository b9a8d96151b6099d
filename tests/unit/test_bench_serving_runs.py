"""scripts/bench_serving.py: runs on a made-up server, what it goes on with and refuses, its child process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_bench_serving import record
from zos_sglang.testing.bench import serving_cli
from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.bench.serving import Lengths, Point, Target
from zos_sglang.testing.bench.serving_client import ForkedRuns, client_env
from zos_sglang.testing.bench.serving_run import Bench, Plan
from zos_sglang.testing.bench.serving_summary import summarise
from zos_sglang.testing.bench.store import ResumeError, Store
from zos_sglang.testing.bench.words import make_words
from zos_sglang.testing.bench.zos import Budget

MODES = ("stock", "overlap", "resident")
POINTS = (Point("random", 4.0, None, 3), Point("sharegpt", None, 2, 3))
PLAN = Plan(MODES, POINTS, repeats=2, lengths=Lengths())
HEAD = {
    "kind": serving_cli.KIND,
    "commit": "abc",
    "date": "today",
    "command": "bench_serving.py",
    "versions": {"sglang": "0.5.23"},
    "machine": {"cpu": "c", "gpu": None},
}
IDENTITY = {"model": "m", "modes": MODES, "exact": True}


class Stopped(Exception):
    """A run that was interrupted."""


class FakeServer:
    """The server's side of the switch, and SGLang's benchmark, which writes what it is told to.

    `stop_after` runs it is interrupted; `failing` is the number of requests that fail in each run.
    """

    def __init__(self, stop_after: int | None = None, failing: int = 0) -> None:
        self.mode, self.calls = "stock", list[str]()
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.stop_after, self.failing = stop_after, failing
        self.steps = 0

    def switch(self, mode: str) -> None:
        self.mode = mode
        self.calls.append(mode)

    def flush(self) -> None:
        self.calls.append("flush")

    def zos(self) -> dict[str, Any]:
        lane = {"steps": self.steps, "decode_steps": self.steps, "row_steps": 0, "wasted_row_steps": 0}
        return {"lane": lane, "paths": {}, "reasons": {}}

    def run(self, words: Sequence[str], log: Path, timeout_s: float) -> float:
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise Stopped
        asked = dict(pairwise(words))
        self.asked.append((self.mode, asked))
        self.calls.append("run")
        self.steps += 9 if self.mode == "resident" else 0
        count = int(asked["--num-prompts"])
        errors = [*["no"] * self.failing, *[""] * (count - self.failing)]
        line = json.dumps(record(count, completed=count - self.failing, errors=errors))
        Path(asked["--output-file"]).write_text(line + "\n")
        return 0.75


def opened(out: Path, *, resume: bool = False, **changed: Any) -> Store:
    return Store(
        out / serving_cli.NAME,
        {**HEAD, **changed},
        IDENTITY,
        lambda runs: summarise(runs, MODES, "stock"),
        resume=resume,
    )


def measure(
    out: Path, server: FakeServer, plan: Plan = PLAN, *, resume: bool = False, budget: Budget | None = None
) -> dict[str, Any]:
    target = Target("http://x", out, out / "conversations.json", 4096)
    bench = Bench(server, server, target, out, budget or Budget(None), say=lambda _line: None)  # type: ignore[arg-type]
    bench.measure(plan, opened(out, resume=resume))
    return serving_cli.load(out)


# ------------------------------------------------------------------ runs


def test_modes_alternate_and_meet_the_same_requests(tmp_path: Path) -> None:
    server = FakeServer()
    data = measure(tmp_path, server)
    order = [(run["repeat"], run["dataset"], run["mode"]) for run in data["runs"]]
    assert order == [
        *((0, dataset, mode) for dataset in ("random", "sharegpt") for mode in MODES),
        *((1, dataset, mode) for dataset in ("random", "sharegpt") for mode in MODES[::-1]),
    ]
    warm_ups, timed = server.asked[:3], server.asked[3:]
    assert [mode for mode, _ in warm_ups] == list(MODES)
    assert {asked["--seed"] for _, asked in timed} == {"0"} and warm_ups[0][1]["--seed"] != "0"
    assert data["complete"] and serving_cli.exit_code(data) == 0
    assert {row["client_share"] for row in data["summary"]["rows"]} == {0.5}
    assert [row["lane_share"] for row in data["summary"]["rows"]] == [None, None, 1.0] * 2


def test_each_run_starts_from_an_empty_cache_in_its_mode(tmp_path: Path) -> None:
    server = FakeServer()
    measure(tmp_path, server)
    assert [server.calls[place : place + 3] for place in range(0, len(server.calls), 3)] == [
        [mode, "flush", "run"] for mode, _ in server.asked
    ]


def test_failed_requests_are_the_exit_code(tmp_path: Path) -> None:
    measure(tmp_path, FakeServer())
    data = json.loads((tmp_path / serving_cli.NAME).read_text())
    data["runs"][0]["failed"] = 1
    assert serving_cli.exit_code(data) == 1


def test_a_warm_up_that_fails_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="warm-up, mode stock: 2 requests failed"):
        measure(tmp_path, FakeServer(failing=2))


def test_answers_that_differ_fail_only_where_they_must_be_equal(tmp_path: Path) -> None:
    data = measure(tmp_path, FakeServer())
    data["summary"]["rows"][1]["answers"]["differing"] = 1
    assert serving_cli.exit_code(data) == 1
    data["identity"]["exact"] = False
    assert serving_cli.exit_code(data) == 0


# ------------------------------------------------------------------ going on


def test_an_interrupted_measurement_goes_on_with_whole_groups(tmp_path: Path) -> None:
    """Three warm-ups, one whole group, and one mode of the next: that mode runs again with the others."""
    with pytest.raises(Stopped):
        measure(tmp_path, FakeServer(stop_after=7))
    kept = serving_cli.load(tmp_path)
    assert [run["dataset"] for run in kept["runs"]] == ["random"] * 3 and not kept["complete"]

    server = FakeServer()
    data = measure(tmp_path, server, resume=True)
    assert data["complete"] and len(server.asked) == 3 + 9
    assert data["runs"][:3] == kept["runs"]
    assert [(run["dataset"], run["repeat"], run["call"]) for run in data["runs"][::3]] == [
        *(("random", 0, 0), ("sharegpt", 0, 1), ("random", 1, 1), ("sharegpt", 1, 1)),
    ]


def test_the_time_limit_keeps_whole_groups(tmp_path: Path) -> None:
    ticks = iter(range(0, 1000, 30))
    data = measure(tmp_path, FakeServer(), budget=Budget(100, clock=lambda: float(next(ticks))))
    assert not data["complete"] and 0 < len(data["runs"]) < 12 and len(data["runs"]) % 3 == 0


def test_a_later_call_may_ask_for_more(tmp_path: Path) -> None:
    measure(tmp_path, FakeServer())
    more = Plan(MODES, (*POINTS, Point("random", 8.0, None, 3)), repeats=3, lengths=Lengths())
    server = FakeServer()
    data = measure(tmp_path, server, more, resume=True)
    assert len(server.asked) == 3 + 3 * (2 + 3) and data["complete"]


def test_runs_of_another_version_are_not_mixed_in(tmp_path: Path) -> None:
    measure(tmp_path, FakeServer())
    kept = (tmp_path / serving_cli.NAME).read_text()
    with pytest.raises(ResumeError, match=r"versions: .*0\.5\.23.* then, .*0\.5\.22.* now"):
        opened(tmp_path, resume=True, versions={"sglang": "0.5.22"})
    assert (tmp_path / serving_cli.NAME).read_text() == kept


# ------------------------------------------------------------------ flags


def test_bad_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (
        *(["--datasets", "random,other"], ["--modes", "stock"], ["--scale", "0"], ["--range-ratio", "2"]),
        *(["--concurrencies", "0"], ["--rates", "inf"], ["--client", "x"], []),
    ):
        with pytest.raises(SystemExit):
            serving_cli.main(flags)
        assert (flags or ["--out"])[0] in capsys.readouterr().err


def test_a_model_that_is_too_short_is_named_with_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_words(tmp_path / "model", 64)
    config = {"vocab_size": 64, "max_position_embeddings": 128}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    flags = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    assert serving_cli.main(flags) == 2
    assert "--in and --out-tokens need 392 positions, the model has 128" in capsys.readouterr().err
    assert serving_cli.main([*flags, "--datasets", "generated-shared-prefix"]) == 2
    assert "--prefix, --question and --out-tokens need 712" in capsys.readouterr().err


def test_a_result_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_words(tmp_path / "model", 64)
    config = {"vocab_size": 64, "max_position_embeddings": 4096}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / serving_cli.NAME).write_text("{}")
    flags = ["--model", str(tmp_path / "model"), "--out", str(tmp_path)]
    assert serving_cli.main(flags) == 2
    assert "--resume continues it, another --out keeps it" in capsys.readouterr().err
    assert serving_cli.main([*flags, "--resume"]) == 2
    assert "is not a result of bench_serving" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == [serving_cli.NAME, "model"]


# ------------------------------------------------------------------ the child process

CHILD = """
import os, sys, time
IMPORTED_BY = os.getpid()
if __name__ == "__main__":
    what = sys.argv[1]
    print("said", what)
    if what == "sleep":
        time.sleep(60)
    if what == "write":
        open(sys.argv[2], "w").write(f"{os.getppid()} {os.environ.get('ZOS_MODE')}")
    if what == "fail":
        raise ValueError("as told")
    sys.exit(3 if what == "exit" else None)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made_child.py").write_text(CHILD)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split()])
    )
    monkeypatch.setenv("ZOS_MODE", "overlap")
    return "made_child"


def test_one_process_forks_for_each_run_and_goes_on_after_a_failure(child: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    with ForkedRuns(tmp_path / "client.log", child) as runs:
        runs.ready()
        assert 0 <= runs.run(["write", str(tmp_path / "a")], log, 30) < 5
        with pytest.raises(BenchError, match=r"code 1; the end of run\.log:(.|\n)*ValueError: as told"):
            runs.run(["fail"], log, 30)
        with pytest.raises(BenchError, match="code 3"):
            runs.run(["exit"], log, 30)
        runs.run(["write", str(tmp_path / "b")], log, 30)
    assert log.read_text() == "said write\n"
    # The same parent both times, without the plugin's variables.
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert (tmp_path / "a").read_text().endswith(" None")


def test_a_run_that_does_not_end_is_given_up_and_leaves_no_process(child: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    with (
        pytest.raises(BenchError, match="did not end within 1 s"),
        ForkedRuns(tmp_path / "client.log", child) as runs,
    ):
        runs.ready()
        group = runs._process.pid if runs._process else 0
        runs.run(["sleep"], tmp_path / "run.log", 1)
    assert time.monotonic() - begin < 50
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(group, 0)
            time.sleep(0.1)


def test_a_benchmark_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match=r"(.|\n)*No module named 'not_there'"),
        ForkedRuns(tmp_path / "client.log", "not_there") as runs,
    ):
        runs.ready()


def test_the_benchmark_looks_nothing_up_in_the_network() -> None:
    env = client_env()
    assert (env["HF_HUB_OFFLINE"], env["TRANSFORMERS_OFFLINE"]) == ("1", "1")
    assert "127.0.0.1" in env["NO_PROXY"]
