"""SIGTERM with something to finish: finished if the main thread can be reached, and the end in any case."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from zos_sglang.observe.last_word import LastWord

#: `argv[1]`: run before the wait. That is Python's, or one in a C library that nothing interrupts, as in a
#: call into a device's driver: a lock taken twice.
PROGRAM = """
import ctypes, os, signal, sys, time
from zos_sglang.observe.last_word import LastWord

word = LastWord(lambda: os.write(1, b"finished\\n"), patience_s=float(sys.argv[3]))
exec(sys.argv[1])
os.write(1, b"ready\\n")
if sys.argv[2] == "python":
    while True:
        time.sleep(60)
lock = ctypes.create_string_buffer(64)
library = ctypes.CDLL(None)
library.pthread_mutex_lock(lock)
library.pthread_mutex_lock(lock)
"""


def ended(setup: str, where: str, patience_s: float) -> tuple[int, str, float]:
    """Exit code, what it wrote, and seconds from SIGTERM to its end; it is killed after ten."""
    command = [sys.executable, "-c", PROGRAM, setup, where, str(patience_s)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(1.0)  # into the wait: nothing tells that it has begun
    begun = time.monotonic()
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
    return child.wait(), child.stdout.read(), time.monotonic() - begun


def test_the_process_finishes_and_ends_by_the_signal() -> None:
    code, wrote, took = ended("word.install()", "python", patience_s=5)
    assert (code, wrote) == (-signal.SIGTERM, "finished\n")
    assert took < 5


def test_a_process_that_sits_in_a_driver_ends_too_a_little_later() -> None:
    code, wrote, took = ended("word.install()", "driver", patience_s=0.5)
    assert (code, wrote) == (-signal.SIGKILL, "")
    assert 0.5 <= took < 9


def test_such_a_process_with_a_plain_handler_would_not_end() -> None:
    """Else the test above would prove nothing."""
    code, _, took = ended("signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))", "driver", 0.5)
    assert (code, took > 9) == (-signal.SIGKILL, True)


def test_a_fault_in_what_is_to_be_finished_ends_the_process_all_the_same() -> None:
    code, _, _ = ended("word.finish = lambda: 1 / 0; word.install()", "python", patience_s=5)
    assert code == -signal.SIGTERM


@pytest.fixture
def handlers():
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_removed_it_leaves_nothing(handlers: None) -> None:
    gc.collect()  # what earlier tests left open must not go meanwhile
    opened = set(os.listdir("/proc/self/fd"))
    word = LastWord(lambda: None)
    word.install()
    assert signal.getsignal(signal.SIGTERM) == word._handle
    word.remove()
    word.remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    deadline = time.monotonic() + 5
    while set(os.listdir("/proc/self/fd")) - opened and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(os.listdir("/proc/self/fd")) - opened == set()


def test_somebody_elses_handler_and_wakeup_stay(handlers: None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    word = LastWord(lambda: None)
    word.install()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    word.remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        word.install()
        word.remove()
        assert signal.set_wakeup_fd(-1) == write
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)
