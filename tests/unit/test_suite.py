"""`python -m tests`: two parts that together are the whole suite, and one exit code."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from tests.__main__ import NONE_SELECTED, main

MARKS = ("alone", "soak", "gpu", "server")


class Commands(list[list[str]]):
    """What ran; `ends`: what the two parts end with."""

    ends: tuple[int, int] = (0, 0)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    ran = Commands()

    def run(command: list[str], **_: Any) -> Any:
        ran.append(command)
        return subprocess.CompletedProcess(command, ran.ends[(len(ran) - 1) % 2])

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def marks_of(command: list[str]) -> str:
    return command[len(command) - command[::-1].index("-m")]


@pytest.mark.parametrize("asked", [[], ["-m", "not gpu"], ["-m", "server or gpu"]])
def test_each_test_that_is_asked_for_is_in_one_part_and_only_there(
    commands: Commands, asked: list[str]
) -> None:
    main(asked)
    parts = [Expression.compile(marks_of(command)) for command in commands]
    wanted = Expression.compile(asked[-1] if asked else "not nothing")
    for number in range(2 ** len(MARKS)):
        has = {mark for bit, mark in enumerate(MARKS) if number >> bit & 1}

        def matches(name: str, /, has: set[str] = has, **_: Any) -> bool:
            return name in has

        assert sum(part.evaluate(matches) for part in parts) == wanted.evaluate(matches), has


def test_what_measures_runs_first_and_by_itself(commands: Commands) -> None:
    main(["tests/unit", "-x"])
    assert ["-n" in command for command in commands] == [False, True]
    assert all(command[3:5] == ["tests/unit", "-x"] for command in commands)


def test_coverage_is_of_both_parts_and_judged_at_the_end(commands: Commands) -> None:
    asked = ["--cov=zos_sglang", "--cov-report=term", "--cov-fail-under=90"]
    main(asked)
    first, last = commands
    assert [word for word in first if "cov" in word] == ["--cov=zos_sglang", "--cov-report="]
    assert [word for word in last if "cov" in word] == [*asked, "--cov-append"]
    main([])
    assert not any("cov" in word for command in commands[2:] for word in command)


@pytest.mark.parametrize(
    ("ends", "code"),
    [((0, 0), 0), ((1, 0), 1), ((0, 2), 2), ((5, 0), 0), ((0, 5), 0), ((5, 1), 1), ((5, 5), NONE_SELECTED)],
)
def test_a_part_without_tests_is_no_failure_and_one_that_failed_is(
    commands: Commands, ends: tuple[int, int], code: int
) -> None:
    commands.ends = ends
    assert main([]) == code
