"""The console of our tools: as wide as a terminal, and as wide as it takes elsewhere."""

import io
import re
from pathlib import Path

import pytest
from rich.table import Table

from zos_sglang import __main__ as cli
from zos_sglang.console import console

ROOT = Path(__file__).parents[2]
LONG = "a cell of many words " * 40


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(file: io.StringIO) -> list[str]:
    table = Table("what", "found")
    table.add_row("one", LONG.strip())
    console(file).print(table)
    return file.getvalue().splitlines()


def test_a_row_in_a_pipe_is_one_line_and_whole() -> None:
    assert len([line for line in printed(io.StringIO()) if LONG.strip() in line]) == 1


def test_a_table_in_a_pipe_is_no_wider_than_its_cells() -> None:
    assert max(map(len, printed(io.StringIO()))) < len(LONG) + 20


def test_a_terminal_keeps_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    assert console(Terminal()).width == 60


def test_a_table_of_a_command_has_a_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--requests", "2"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows and all(row.split("│")[1].strip() for row in rows)


def test_only_prose_wraps_in_the_table_of_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a/" + "long/" * 50 + "trace.json"
    monkeypatch.setenv("ZOS_TRACE", path)
    monkeypatch.setenv("ZOS_MODE", "overlap")
    assert cli.main(["settings"]) == 0
    assert path in capsys.readouterr().out


def test_nobody_makes_a_console_of_his_own() -> None:
    own = re.compile(r"\bConsole\((?!record=)")
    files = [*(ROOT / "zos_sglang").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    found = {file.name for file in files if own.search(file.read_text(encoding="utf-8"))}
    assert found == {"console.py"}
