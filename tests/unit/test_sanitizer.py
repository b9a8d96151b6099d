"""The runner of compute-sanitizer over a stand-in for the tool: what it reads, and what it makes of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from zos_sglang.testing.races import sanitizer
from zos_sglang.testing.races.sanitizer import NoSanitizer, find_sanitizer, main, run_under

LAUNCHED = "echo '{\"launches\": 40}'; "


def run(script: str, program: str = "kernels", limit_s: float = 20.0) -> sanitizer.Outcome:
    return run_under("memcheck", program, ["sh", "-c", script], limit_s)


def test_no_error_and_some_launches_are_what_is_wanted():
    outcome = run(LAUNCHED + "echo '========= ERROR SUMMARY: 0 errors'")
    assert outcome.ok and (outcome.launches, outcome.errors) == (40, 0)


@pytest.mark.parametrize(
    "script",
    [
        LAUNCHED + "echo '========= ERROR SUMMARY: 2 errors'",
        LAUNCHED + "echo '========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)'",
        LAUNCHED,  # no summary: the tool did not run
        "echo '========= ERROR SUMMARY: 0 errors'",  # nothing was launched
        LAUNCHED + "echo '========= ERROR SUMMARY: 0 errors'; exit 1",
    ],
)
def test_anything_else_is_a_failure(script):
    assert not run(script).ok


def test_of_a_kernel_that_is_wrong_on_purpose_an_error_is_wanted():
    assert run("echo '========= ERROR SUMMARY: 1 error'; exit 1", "wrong-memcheck").ok
    assert not run("echo '========= ERROR SUMMARY: 0 errors'", "wrong-memcheck").ok


def test_a_run_past_its_limit_is_ended_with_its_children():
    outcome = run("sleep 60 & wait", limit_s=0.3)
    assert outcome.timed_out and not outcome.ok and outcome.seconds < 20


def test_the_tool_is_found_in_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_sanitizer() == str(tool)


def test_a_missing_tool_is_one_message_that_says_what_to_do(tmp_path, monkeypatch, capsys):
    with pytest.raises(NoSanitizer, match="cuda-sanitizer"):
        find_sanitizer([tmp_path])
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: find_sanitizer([tmp_path]))
    assert main([]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert "CUDA_HOME" in json.loads(line)["error"]


def test_the_whole_run_prints_one_line_of_json(tmp_path, monkeypatch, capsys):
    """A tool that reports an error for the wrong kernels only."""
    tool = tmp_path / "tool"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *wrong*) n=1;; *) n=0; ' + LAUNCHED + "esac\n"
        'echo "========= ERROR SUMMARY: $n errors"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: str(tool))
    monkeypatch.setattr(sanitizer, "PROGRAM", "platform")  # any module that runs and ends well
    out = tmp_path / "out.json"
    assert main(["--out", str(out)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["ok"] and found["errors"] == {"memcheck": 0, "racecheck": 0}
    assert [run["program"] for run in found["runs"]] == [
        "wrong-memcheck",
        "kernels",
        "wrong-racecheck",
        "kernels",
    ]
    assert json.loads(out.read_text()) == found


def test_what_runs_under_the_tool_launches_every_kernel():
    """Here in Triton's interpreter, which needs no device."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(sanitizer.ROOT)}
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", sanitizer.PROGRAM, "kernels", "cpu"],
        cwd=sanitizer.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["launches"] > 30
