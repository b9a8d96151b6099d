"""What hangs does not hang the suite: the limits of `tests/conftest.py`, in runs of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests import conftest
from tests.conftest import *

conftest.LAST_RESORT_S = 2
"""
DEAF = """
import time
import pytest

def deaf():
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def test_that_ends(): pass
@pytest.mark.timeout(1)
def test_that_does_not(): deaf()
def test_behind_it(): pass
"""
LEFT = """
import threading

def test_that_leaves_a_thread(): threading.Thread(target=threading.Event().wait).start()
"""


SLOW = """
import time
import pytest

@pytest.mark.server
def test_that_takes_its_time(): time.sleep(4)
"""
TORN = """
import time
import pytest

@pytest.fixture(scope="module")
def server():
    yield
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

@pytest.mark.timeout(1)
def test_that_fails(server): assert False
def test_behind_it(server): pass
"""


def run(folder: Path, tests: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-v", "-c", "/dev/null", "--rootdir", str(folder), *flags]
    return subprocess.run(
        [*command, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_test_that_its_time_out_does_not_end_ends_the_run_and_shows_where_it_was(tmp_path: Path) -> None:
    found = run(tmp_path, DEAF)
    assert found.returncode == 1
    assert "test_that_ends PASSED" in found.stdout and "test_behind_it" not in found.stdout
    assert "in deaf" in found.stderr


def test_a_thread_that_is_left_does_not_keep_the_run_from_ending(tmp_path: Path) -> None:
    found = run(tmp_path, LEFT)
    assert found.returncode == 1
    assert "1 passed" in found.stdout and "in _shutdown" in found.stderr


def test_who_asks_for_no_limit_has_none(tmp_path: Path) -> None:
    assert run(tmp_path, SLOW, "--timeout=0").returncode == 0
    assert run(tmp_path, SLOW, "--timeout=1").returncode == 1


def test_a_server_that_cannot_be_stopped_after_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    found = run(tmp_path, TORN, "-x")
    assert found.returncode == 1
    assert "test_that_fails FAILED" in found.stdout and "in server" in found.stderr
