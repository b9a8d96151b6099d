"""The file of a trace: whole after every write, bounded, and what is left of it after SIGKILL."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.unit.made_records import steady
from zos_sglang.observe.trace_file import RESERVE, TraceFile
from zos_sglang.observe.trace_reader import read
from zos_sglang.observe.trace_sink import TraceSink
from zos_sglang.settings import Settings

FACTS = {"asynchronous": True, "mode": "overlap"}


def test_the_file_is_whole_after_every_append(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(path, 1_000_000, ["0"])
    for number in range(1, 50):
        assert json.loads(path.read_text()) == list(range(number))
        assert file.append([str(number)])
    file.close()
    assert json.loads(path.read_text()) == list(range(50))


def test_a_file_of_the_name_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("an old trace, longer than the new one " * 100)
    TraceFile(path, 1_000_000, ["1", "2"]).close()
    assert json.loads(path.read_text()) == [1, 2]
    assert [one.name for one in tmp_path.iterdir()] == ["t.json"]


def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TraceFile(tmp_path / "missing" / "t.json", 1_000_000, ["1"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        TraceFile(tmp_path / "folder", 1_000_000, ["1"])
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_the_limit_holds_and_the_reserve_is_for_the_last(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(path, 4 * RESERVE, ["0"])
    count = 1
    while file.append(["1" * 100]):
        count += 1
    assert path.stat().st_size <= 4 * RESERVE  # with blanks
    assert 3 * RESERVE - 200 < len(path.read_bytes().rstrip()) <= 3 * RESERVE
    assert file.append(["2" * 500], last=True)
    assert not file.append(["2" * RESERVE], last=True)
    assert len(json.loads(path.read_text())) == count + 1
    file.close()
    assert path.stat().st_size == len(path.read_bytes().rstrip()) + 1 <= 4 * RESERVE


FULL_DISK = """
import resource, signal, sys
from zos_sglang.observe import trace_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
trace_file.BLANKS = 1000
file = trace_file.TraceFile(sys.argv[1], 10**9, ["0"])
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
for number in range(1, 100):
    try:
        file.append([str(number) * 200])
    except OSError as error:
        print(number, error.strerror)
        break
"""


def test_a_disk_that_takes_only_a_part_leaves_what_was_there(tmp_path: Path) -> None:
    """The kernel cuts a write at the process's file size limit as it does on a full disk."""
    path = tmp_path / "t.json"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    number, message = done.stdout.strip().split(" ", 1)
    assert message == "File too large"
    assert json.loads(path.read_text()) == [0, *(int(str(n) * 200) for n in range(1, int(number)))]
    assert int(number) > 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000


def write_until_killed(path: Path, begun: int) -> None:
    """In a child: steps without end and without a rest, in batches like the recorder's."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sink = TraceSink(path, 1_000_000_000, FACTS, "scheduler 0")
    batch = steady(16, gpu=2, cpu=1)
    for number in range(10**9):
        batch["step"] = np.arange(16) + 1 + 16 * number
        sink(batch)
        if number == 0:
            os.write(begun, b"x")


def killed_at(delay_s: float, path: Path) -> None:
    readable, writable = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(path, writable))
    child.start()
    try:
        assert os.read(readable, 1) == b"x"
        time.sleep(delay_s)
    finally:
        child.kill()
        child.join()
        os.close(readable)
        os.close(writable)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_hundred_kills_at_random_moments_lose_at_most_the_step_that_was_written(tmp_path: Path) -> None:
    moments = random.Random(7)
    whole = torn = 0
    for number in range(100):
        path = tmp_path / f"{number}.json"
        killed_at(moments.uniform(0, 0.02), path)
        found = read(path)
        try:
            json.loads(path.read_text())
            whole += 1
            assert found.notes == []
        except ValueError:
            torn += 1
            assert found.notes == ["the trace is cut off at its end; everything before was recovered"]
        assert not found.ended
        steps = len(found.records)
        assert steps >= 16
        assert np.array_equal(found.records["step"], np.arange(1, steps + 1))
        assert np.array_equal(found.records["gpu"], np.full(steps, 2_000_000))
        path.unlink()
    print(f"killed while writing: {whole} files whole, {torn} torn and recovered")
    assert whole + torn == 100
    # A write can be cut only between two pages of memory, and this writer does nothing else than write.
    assert whole >= 80


TERMINATED = """
import sys, time
from pathlib import Path
from tests.unit.made_records import steady
from zos_sglang.observe.trace_sink import TraceSink
sink = TraceSink(Path(sys.argv[1]), 10**8, {"asynchronous": True}, "scheduler 0")
records = steady(40, gpu=2, cpu=1)
sink(records[:16])
sink.before_end = lambda: sink(records[16:])
print("written", flush=True)
time.sleep(60)
"""


def test_sigterm_writes_what_was_held_back_and_ends_the_process_as_before(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    child = subprocess.Popen([sys.executable, "-c", TERMINATED, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout as out:
        assert out.readline() == "written\n"
    assert len(read(path).records) == 16
    child.terminate()
    assert child.wait(timeout=30) == -signal.SIGTERM
    found = read(path)
    assert (len(found.records), found.ended, found.notes) == (40, True, [])
    json.loads(path.read_text())


def test_sigterm_that_somebody_handles_is_left_to_them(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        sink = TraceSink(tmp_path / "t.json", 10**6, FACTS, "scheduler 0")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        sink.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sink = TraceSink(tmp_path / "t.json", 10**6, FACTS, "scheduler 0")
        assert signal.getsignal(signal.SIGTERM) == sink._last_word._handle
        sink.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_trace_ends_at_its_limit_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.json"
    limit = Settings(trace=str(path), trace_mb=1).trace_mb * 1_000_000
    sink = TraceSink(path, limit, FACTS, "scheduler 0")
    records = steady(4000, gpu=2, cpu=1)
    for begin in range(0, 4000, 16):
        sink(records[begin : begin + 16])
        assert path.stat().st_size <= limit
    sink.close()
    found = read(path)
    assert limit * 0.95 < path.stat().st_size <= limit
    assert 500 < len(found.records) < 4000
    assert np.array_equal(found.records, records[: len(found.records)])
    assert found.ended
    assert [note for note in found.notes if "ZOS_TRACE_MB" in note]
    assert caplog.text.count("ends at its limit, ZOS_TRACE_MB=1") == 1
    json.loads(path.read_text())
