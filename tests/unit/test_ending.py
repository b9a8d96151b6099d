"""A measurement that SIGTERM ends: everything is cleaned up behind it, and nothing is printed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from zos_sglang.testing.bench.ending import exiting_on, run_until_ended
from zos_sglang.testing.soak import cli as soak_cli


def ask_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def busy(done: list[str], kill: bool = False) -> None:
    try:
        await asyncio.sleep(0)
        if kill:
            ask_to_end()
        await asyncio.sleep(60)
    finally:
        done.append("cleaned up")


async def several(done: list[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for kill in (False, True, False):
            group.create_task(busy(done, kill))


@pytest.fixture(autouse=True)
def handler_kept() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


def test_work_in_many_tasks_is_cleaned_up_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    with pytest.raises(SystemExit, match="2"), exiting_on(signal.SIGTERM):
        run_until_ended(several(done))
    gc.collect()  # asyncio complains of an exception that nobody took when its task goes
    assert done == ["cleaned up"] * 3
    assert not caplog.records and capsys.readouterr() == ("", "")


def test_work_that_takes_no_notice_ends_the_command_all_the_same() -> None:
    async def deaf() -> None:
        ask_to_end()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    with pytest.raises(SystemExit, match="2"):
        run_until_ended(deaf())


def test_work_that_nobody_ends_gives_its_result() -> None:
    async def answer() -> int:
        return 42

    assert run_until_ended(answer()) == 42


def test_what_the_work_raises_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_until_ended(fail())


def test_a_soak_ended_by_sigterm_stops_its_server_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    stopped: list[str] = []

    @contextmanager
    def server(*_: object) -> Iterator[None]:
        try:
            yield
        finally:
            stopped.append("server")

    config = SimpleNamespace(env={}, server=server, command_args=lambda cuda: [])
    monkeypatch.setattr(soak_cli, "config_of", lambda *_: config)
    monkeypatch.setattr(soak_cli, "Soak", lambda *_: SimpleNamespace(run=lambda: several([])))
    with pytest.raises(SystemExit, match="2"):
        soak_cli.main(["--out", str(tmp_path / "soak.json")])
    gc.collect()
    assert stopped == ["server"]
    assert not caplog.records and capsys.readouterr() == ("", "")
