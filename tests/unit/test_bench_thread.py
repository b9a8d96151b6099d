"""What the benchmarks know of the scheduler's thread, on processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.bench.thread import SchedulerThread

NAPS = "import time; [time.sleep(0.001) for _ in range(100_000)]  # sglang::scheduler"


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    """A process that takes naps and is called as SGLang's schedulers are."""
    with subprocess.Popen([sys.executable, "-c", NAPS]) as process:
        yield psutil.Process(process.pid)
        process.kill()


def test_the_naps_of_a_servers_scheduler_are_counted(sleeper: psutil.Process) -> None:
    thread = SchedulerThread.of_server(sleeper.pid)
    before, end = thread.seen(), time.monotonic() + 20
    while (found := thread.since(before) or {}).get("slept", 0) < 20 and time.monotonic() < end:
        time.sleep(0.05)
    assert found["slept"] >= 20 and "pushed_off" in found


def test_it_is_kept_to_one_core(sleeper: psutil.Process) -> None:
    core = max(os.sched_getaffinity(0))
    SchedulerThread.of_server(sleeper.pid).pin(core)
    assert sleeper.cpu_affinity() == [core]


def test_a_core_that_the_machine_lacks_is_named(sleeper: psutil.Process) -> None:
    with pytest.raises(BenchError, match="--pin 1000: Invalid argument"):
        SchedulerThread.of_server(sleeper.pid).pin(1000)


def test_a_server_without_a_scheduler_has_nothing_to_count_or_to_pin() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        for nobody in (SchedulerThread.of_server(None), SchedulerThread.of_server(other.pid)):
            assert nobody.seen() == {} and nobody.since({}) is None
            with pytest.raises(BenchError, match="no process of the server"):
                nobody.pin(0)
        other.kill()
