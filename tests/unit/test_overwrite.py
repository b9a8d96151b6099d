"""Nothing of ours writes over what is not ours: the trace, the file beside it, the report."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.unit.made_records import steady
from tests.unit.trace_case import traced
from zos_sglang.__main__ import main
from zos_sglang.observe.trace_file import TraceFile
from zos_sglang.observe.trace_place import not_replaceable
from zos_sglang.observe.trace_sink import make_trace
from zos_sglang.settings import Settings
from zos_sglang.upstream.preflight import PreflightError, check_trace


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file that is nobody's to overwrite."""
    path = tmp_path / "precious.json"
    path.write_text('[\n{"a": 1}\n]\n')
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    traced(tmp_path / "t.json", steady(4, gpu=2, cpu=1))
    return tmp_path / "t.json"


def made(path: Path) -> bool:
    """Whether a scheduler would write its trace there."""
    sink = make_trace(
        Settings.load({"ZOS_MODE": "overlap", "ZOS_TRACE": str(path)}), 0, {"asynchronous": True}
    )
    if sink is not None:
        sink.close()
    return sink is not None


def test_a_file_that_is_no_trace_stays_and_the_start_is_refused(precious: Path) -> None:
    with pytest.raises(PreflightError, match=r"ZOS_TRACE=.* no trace\. Remove it, or name another file"):
        check_trace(str(precious))
    assert precious.read_text() == '[\n{"a": 1}\n]\n'


def test_a_scheduler_leaves_such_a_file_alone_and_serves_without_a_trace(
    precious: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert not made(precious)
    assert "no trace: cannot write" in caplog.text
    assert precious.read_text() == '[\n{"a": 1}\n]\n'


def test_a_device_is_not_replaced() -> None:
    assert not_replaceable(Path("/dev/null")) == "this is no ordinary file"
    with pytest.raises(PreflightError, match="ordinary"):
        check_trace("/dev/null")


def test_an_older_trace_an_empty_file_and_a_fresh_name_may_be_written(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path in (trace, tmp_path / "empty", tmp_path / "fresh"):
        check_trace(str(path))
        assert made(path)
        assert not_replaceable(path) is None


def test_a_link_is_replaced_and_what_it_leads_to_stays(precious: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(precious)
    assert made(link)
    assert not link.is_symlink()
    assert precious.read_text() == '[\n{"a": 1}\n]\n'


def test_the_file_beside_is_new_even_if_somebody_left_a_link_there(precious: Path, tmp_path: Path) -> None:
    beside = tmp_path / f".t.json.{os.getpid()}"
    beside.symlink_to(precious)
    TraceFile(tmp_path / "t.json", 10_000, ["1"]).close()
    assert precious.read_text() == '[\n{"a": 1}\n]\n'
    assert not beside.exists()


def test_a_report_overwrites_no_other_file_unless_forced(
    trace: Path, precious: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(trace), "-o", str(precious)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"zos-sglang: error: {precious}: there is a file that is no report;")
    assert said.endswith("or give --force\n")
    assert precious.read_text() == '[\n{"a": 1}\n]\n'
    assert main(["report", str(trace), "-o", str(precious), "--force"]) == 0
    assert precious.read_text().startswith("<!doctype html>")


def test_a_report_overwrites_an_older_report(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    for _ in range(2):
        assert main(["report", str(trace), "-o", str(page)]) == 0


def test_a_report_never_overwrites_the_trace_itself(trace: Path) -> None:
    before = trace.read_bytes()
    assert main(["report", str(trace), "-o", str(trace), "--force"]) == 2
    assert trace.read_bytes() == before


def test_a_report_follows_no_link_to_a_file_that_is_not_there(trace: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "elsewhere")
    assert main(["report", str(trace), "-o", str(link)]) == 2
    assert not (tmp_path / "elsewhere").exists()


def test_a_report_goes_into_a_pipe(trace: Path) -> None:
    read, write = os.pipe()
    assert main(["report", str(trace), "-o", f"/dev/fd/{write}"]) == 0
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read(15) == b"<!doctype html>"
