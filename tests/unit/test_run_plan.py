"""Measurements started together and made in turns (`scripts/run_plan.py`)."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from zos_sglang.testing.bench.plan import Job, PlanError, Run, State, main, plan_of, run, steps
from zos_sglang.testing.server import tree

PLANS = Path(__file__).parents[2] / "bench" / "plans"

#: Does as a measurement does: gets ready, waits for its turn, and notes when it was at work.
MEASUREMENT = """\
import os, pathlib, sys, time
out, name, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
if turn := os.environ.get("BENCH_AFTER"):
    pathlib.Path(turn + ".ready").touch()
    while not pathlib.Path(turn).exists():
        time.sleep(0.01)
begun = time.monotonic()
time.sleep(seconds)
(out / f"{name}.times").write_text(f"{begun} {time.monotonic()}")
print("measured", name)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    found = tmp_path / "measurement.py"
    found.write_text(MEASUREMENT)
    return found


def job(script: Path, name: str, seconds: float = 0.2, **more: object) -> Job:
    return Job(name, f"{script} {{out}} {name} {seconds}", **more)  # type: ignore[arg-type]


def times(out: Path, name: str) -> tuple[float, float]:
    begun, ended = map(float, (out / f"{name}.times").read_text().split())
    return begun, ended


def until(runs: list[Run], wanted: State, which: int = 0) -> None:
    for _ in steps(runs):
        if runs[which].state == wanted:
            return
        time.sleep(0.02)
    raise AssertionError(f"never {wanted}")


@pytest.mark.parametrize("ahead", [True, False])
def test_jobs_of_one_queue_measure_one_after_the_other(script: Path, tmp_path: Path, ahead: bool) -> None:
    out = tmp_path / "out"
    assert run([job(script, name, ahead=ahead) for name in "abc"], out) == 0
    spans = [times(out, name) for name in "abc"]
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_nobody_measures_before_all_that_start_ahead_are_ready(script: Path, tmp_path: Path) -> None:
    script.write_text(MEASUREMENT.replace("if turn :=", "time.sleep(1.5 * (name == 'b'))\nif turn :="))
    out = tmp_path / "out"
    began = time.monotonic()
    assert run([job(script, "a"), job(script, "b", queue="other")], out) == 0
    assert times(out, "a")[0] - began > 1.5


def test_a_job_waits_for_those_of_other_queues_that_it_names(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run([job(script, "a", 1.5), job(script, "b", queue="other", after=["a"])], out) == 0
    assert times(out, "a")[1] <= times(out, "b")[0]


def test_a_server_that_never_gets_ready_keeps_the_others_waiting_for_so_long_only(
    script: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stuck = Job("stuck", "-c 'import time; time.sleep(77)'", start_s=1.5)
    assert run([stuck, job(script, "a", queue="other")], out) == 1
    assert times(out, "a")


def test_queues_run_beside_each_other(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert (
        run([job(script, "a", 1.5), job(script, "b", 1.5, gpu=1), job(script, "c", 1.5, queue="x")], out) == 0
    )
    spans = [times(out, name) for name in "abc"]
    assert max(begun for begun, _ in spans) < min(ended for _, ended in spans)


def soon(true: Callable[[], bool], within_s: float = 5) -> bool:
    end = time.monotonic() + within_s
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def test_who_is_ready_before_its_turn_is_stopped_and_goes_on_when_it_comes(
    script: Path, tmp_path: Path
) -> None:
    runs = [Run(job(script, "a", 30, limit_s=1.5), tmp_path), Run(job(script, "b"), tmp_path)]
    until(runs, State.READY, 1)
    assert runs[1]._process is not None
    ready = psutil.Process(runs[1]._process.pid)
    # A process that is stopped does not stop at once on a busy machine.
    assert soon(lambda: ready.status() == psutil.STATUS_STOPPED)
    until(runs, State.DONE, 1)
    assert runs[1].code == 0
    assert not (tmp_path / "a.times").exists()  # it ran past its limit


def test_a_job_past_its_limit_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(77)'])"
    started = Run(Job("a", f"-c {shlex.quote(parent)}", limit_s=1, ahead=False), tmp_path)
    children: list[psutil.Process] = []
    for _ in steps([started]):
        assert started._process is not None
        children = children or tree(started._process.pid)[1:]
        time.sleep(0.02)
    assert started.code == -9
    assert children
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() for child in children)


def test_a_failure_is_told_and_does_not_keep_the_others_from_their_turn(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    bad = Job("bad", "-c 'raise SystemExit(\"no such model\")'")
    assert run([bad, job(script, "good")], out) == 1
    assert "bad: done, exit code 1: no such model" in capsys.readouterr().err
    state = json.loads((out / "state.json").read_text())
    assert [(one["name"], one["state"], one["code"]) for one in state] == [
        ("bad", "done", 1),
        ("good", "done", 0),
    ]
    assert main(["--out", str(out), "--state"]) == 0
    assert re.search(r"^good +done 0 .* measured good$", capsys.readouterr().out, re.M)


def test_what_lies_there_from_an_earlier_run_gives_nobody_a_turn(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run([job(script, name, 0.7) for name in "ab"], out) == 0
    assert run([job(script, name, 0.7) for name in "ab"], out) == 0
    assert times(out, "a")[1] <= times(out, "b")[0]


def test_a_job_sees_its_gpu_and_its_variables_and_no_turn_unless_it_starts_ahead(tmp_path: Path) -> None:
    show = "import os; print(*(os.environ.get(k) for k in ('CUDA_VISIBLE_DEVICES', 'X', 'BENCH_AFTER')))"
    command = f"-c {shlex.quote(show)}"
    jobs = [Job("a", command, gpu=3, env={"X": "1"}, ahead=False), Job("b", command, queue="other")]
    assert run(jobs, tmp_path) == 0
    assert (tmp_path / "a.txt").read_text().split() == ["3", "1", "None"]
    assert (tmp_path / "b.txt").read_text().split() == ["0", "None", str(tmp_path / "b.turn")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job = [", "not TOML"),
        ('[[job]]\nname = "a"', "command"),
        ('[[job]]\nname = "a"\ncommand = "b"\ncoers = "1"', "coers.*a job has name, command, gpu"),
        ('[[job]]\nname = "a"\ncommand = "b"\n' * 2, "more than one job is called a"),
        ('[[job]]\nname = "a"\ncommand = "b"\nafter = ["c"]', "a: after: no job c stands before it"),
    ],
)
def test_what_is_no_plan_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(text)
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    assert main([str(plan), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("run_plan: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("argv", [[], ["missing.toml"], ["--state"]])
def test_a_plan_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main([*argv, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_job_that_the_plan_lacks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = PLANS / "h200.toml"
    assert main([str(plan), "--only", "soap", "--out", str(tmp_path)]) == 2
    assert "no job soap" in capsys.readouterr().err


#: Where the parser of a script's flags is.
PARSERS = {
    **{"soak": "soak.cli", "gpu_check": "bench.gpu_cli"},
    **{"bench_record": "bench.record_cost", "bench_wake": "bench.wake"},
}


@pytest.mark.parametrize(
    "planned",
    [one for plan in sorted(PLANS.glob("*.toml")) for one in plan_of(plan.read_text())],
    ids=lambda j: j.name,
)
def test_every_command_of_a_plan_is_one_that_its_script_takes(planned: Job, tmp_path: Path) -> None:
    words = planned.words(tmp_path)[planned.words(tmp_path).index(sys.executable) + 1 :]
    if words[0] == "-m":
        assert words[1] == "pytest"
        return
    name = Path(words[0]).stem
    assert (PLANS.parents[1] / words[0]).exists()
    module = PARSERS.get(name, f"bench.{name.removeprefix('bench_')}_cli")
    args = importlib.import_module(f"zos_sglang.testing.{module}").parser().parse_args(words[1:])
    assert tmp_path in args.out.parents
