"""The watchdog writes one report for each stall, and none for an idle or working server."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from zos_sglang.overlap import stall
from zos_sglang.overlap.stall import StallDetector, describe_batch, describe_event

TIMEOUT_S = 0.08


class Server:
    """A progress that a test moves by hand."""

    def __init__(self):
        self.value, self.busy = 0, True
        self.stalls = 0
        self.noticed = threading.Event()

    def on_stall(self):
        self.stalls += 1
        self.noticed.set()

    def watch(self, timeout_s=TIMEOUT_S, describe=lambda: ["pending: DECODE"], thread_id=None):
        return StallDetector(
            timeout_s,
            progress=lambda: self.value,
            busy=lambda: self.busy,
            describe=describe,
            on_stall=self.on_stall,
            thread_id=threading.get_ident() if thread_id is None else thread_id,
        )


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def watching(server):
    """Start a detector; it is stopped whatever happens."""
    started = []

    def start(**kwargs):
        started.append(server.watch(**kwargs))
        started[-1].start()
        return started[-1]

    yield start
    for detector in started:
        detector.stop()


def wait_here_for(event, seconds=10):
    assert event.wait(seconds), "no stall was noticed"


def test_a_stall_is_reported_once_with_what_is_in_flight_and_where_the_thread_is(server, watching, caplog):
    watching()
    wait_here_for(server.noticed)
    time.sleep(3 * TIMEOUT_S)
    assert server.stalls == 1
    assert "ZOS_STALL_TIMEOUT_S=0.08" in caplog.text
    assert "  pending: DECODE" in caplog.text
    assert "test_stall.py" in caplog.text


def test_another_stall_is_another_report(server, watching):
    watching()
    wait_here_for(server.noticed)
    server.noticed.clear()
    server.value += 1
    wait_here_for(server.noticed)
    assert server.stalls == 2


def test_an_idle_server_does_not_stall(server, watching):
    server.busy = False
    watching()
    time.sleep(5 * TIMEOUT_S)
    assert server.stalls == 0


def test_progress_is_no_stall():
    """On a clock of its own: a loaded machine must not turn sleeps into stalls."""
    server = Server()
    detector = server.watch()
    ticks = iter([False] * 40 + [True])

    def tick(_interval):
        server.value += 1
        return next(ticks)

    detector._stop = SimpleNamespace(wait=tick)
    detector._watch()
    assert server.stalls == 0


def test_less_than_the_timeout_is_no_stall_and_the_timeout_is_one():
    server = Server()
    checks = stall._CHECKS_PER_TIMEOUT

    def run(unchanged):
        server.stalls = 0
        detector, ticks = server.watch(), iter([False] * (1 + unchanged) + [True])
        detector._stop = SimpleNamespace(wait=lambda _: next(ticks))
        detector._watch()
        return server.stalls

    assert run(checks - 1) == 0
    assert run(checks) == 1
    assert run(4 * checks) == 1


def test_a_timeout_of_zero_starts_no_thread(server):
    before = threading.active_count()
    detector = server.watch(timeout_s=0)
    detector.start()
    assert threading.active_count() == before
    detector.stop()


def test_a_stopped_detector_leaves_no_thread(watching):
    detector = watching()
    detector.stop()
    assert not any(t.name == "zos-stall" and t.is_alive() for t in threading.enumerate())


def test_a_report_that_fails_still_counts(server, watching, caplog):
    def describe():
        raise RuntimeError("changed while it was read")

    watching(describe=describe)
    wait_here_for(server.noticed)
    assert "the stall report itself failed" in caplog.text


def test_a_thread_that_ended_is_said_to_have_ended(server, watching, caplog):
    watching(thread_id=-1)
    wait_here_for(server.noticed)
    assert "(thread ended)" in caplog.text


def test_a_batch_is_described_by_mode_size_and_first_requests():
    reqs = [SimpleNamespace(rid=f"r{n}") for n in range(10)]
    batch = SimpleNamespace(reqs=reqs, forward_mode=SimpleNamespace(name="DECODE"))
    assert describe_batch(batch) == "DECODE, 10 requests: r0, r1, r2, r3, r4, r5, r6, r7 and 2 more"
    batch.reqs = reqs[:1]
    assert describe_batch(batch) == "DECODE, 1 requests: r0"


def test_an_event_is_asked_and_never_waited_for():
    assert describe_event(None) == "no event"
    assert describe_event(SimpleNamespace(query=lambda: True)) == "done"
    assert describe_event(SimpleNamespace(query=lambda: False)) == "pending"
