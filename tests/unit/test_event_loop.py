"""One iteration: its order, with and without a batch, paused, in mode sync and at a switch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.unit.fake_batch import Mode
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.event_loop import Ended, EventLoop
from zos_sglang.overlap.guards import FIRST_TOKEN, MODE_SYNC, OVERLAPPED, Reason
from zos_sglang.overlap.result_queue import ResultQueue
from zos_sglang.overlap.streams import Barrier


class Batch:
    forward_mode, chunked_req = Mode.DECODE, None

    def __init__(self, name):
        self.name = name

    def copy(self):
        return Batch(f"{self.name}'")


class Port:
    """Selects the given batches one after the other, then exits."""

    def __init__(self, log, batches, paused=()):
        self.log, self.batches, self.pauses = log, list(batches), set(paused)
        self.last_batch = None
        self.intakes = 0

    def exiting(self):
        return not self.batches

    def paused(self):
        return self.intakes in self.pauses

    def intake(self):
        self.intakes += 1
        self.log.append("intake")

    def note_paused(self):
        self.log.append("paused")

    def select(self):
        self.log.append("select")
        return self.batches.pop(0)

    def between(self):
        self.log.append("between")

    def process(self, batch, result):
        self.log.append(f"process {batch.name} {result.name}")

    def note_no_batch(self):
        self.log.append("no batch")

    def idle(self):
        self.log.append("idle")

    def settled(self):
        pass

    def end_of_step(self):
        self.log.append("end")


class Launches:
    """A launcher that writes down what it is asked for."""

    def __init__(self, log):
        self.log = log
        self.streams = SimpleNamespace(war_barrier=self._barrier)
        self.device = SimpleNamespace(take_read_done=lambda: "event")

    def _barrier(self, event, *, defer_coarse):
        assert event == "event" and not defer_coarse
        self.log.append("barrier")
        return Barrier.FINE

    def launch(self, batch):
        self.log.append(f"launch {batch.name}")
        return SimpleNamespace(name=batch.name.lower())

    def sample_delayed(self, batch, result):
        assert batch.name.lower() == result.name
        self.log.append(f"sample {batch.name}")


def loop_over(names, decisions=None, paused=(), sync=False):
    log = []
    batches = [Batch(n) if n else None for n in names]
    port, queue = Port(log, batches, paused), ResultQueue()
    given = iter(decisions or [])

    def decide(batch, pending):
        log.append(f"decide {batch.name}/{pending.name if pending else None}")
        return MODE_SYNC if sync else next(given, OVERLAPPED)

    loop = EventLoop(port, Launches(log), queue, decide, Account(), sync=sync)
    return loop, log


LAUNCH_A = ["decide A/None", "launch A", "barrier"]


def test_an_overlapped_iteration_launches_before_it_processes_and_samples_last():
    loop, log = loop_over("AB")
    assert loop.run() is Ended.EXIT
    first = ["intake", "select", *LAUNCH_A, "sample A", "end"]
    second = ["intake", "select", "decide B/A'", "launch B", "barrier", "process A' a", "sample B", "end"]
    assert log == first + second
    assert [b.name for b, _ in loop.queue] == ["B'"]


def test_a_launch_that_may_not_overlap_comes_after_the_pending_result():
    loop, log = loop_over("AB", [OVERLAPPED, FIRST_TOKEN])
    loop.run()
    tail = ["decide B/A'", "process A' a", "between", "launch B", "barrier", "sample B", "end"]
    assert log[-7:] == tail
    assert loop.account.reasons[Reason.FIRST_TOKEN] == 1


def test_a_result_that_is_there_early_is_processed_before_a_launch_that_would_overlap():
    loop, log = loop_over("ABC")
    asked = []
    loop.early = lambda batch, pending, result: (
        asked.append((batch.name, pending.name, result.name)) or (batch.name == "C")
    )
    loop.run()
    assert asked == [("B", "A'", "a"), ("C", "B'", "b")]
    assert log.index("launch B") < log.index("process A' a")
    assert log.index("process B' b") < log.index("launch C")
    assert loop.account.reasons[Reason.EARLY_FIRST_TOKEN] == 1


def test_whether_a_result_is_there_is_not_asked_where_the_launch_waits_for_another_reason():
    loop, _ = loop_over("AB", [OVERLAPPED, MODE_SYNC])
    loop.early = lambda *_: pytest.fail("asked")
    loop.run()
    assert loop.account.reasons[Reason.MODE_SYNC] == 1


def test_no_batch_after_a_batch_processes_and_is_not_idle():
    loop, log = loop_over(["A", None])
    loop.run()
    assert log[-5:] == ["intake", "select", "no batch", "process A' a", "end"]
    assert "idle" not in log and not loop.queue


def test_no_batch_after_no_batch_is_idle():
    loop, log = loop_over([None, None])
    loop.run()
    assert log.count("idle") == 2 and log[-4:] == ["select", "no batch", "idle", "end"]
    assert loop.phase == "idle"


def test_a_paused_iteration_only_takes_in_and_keeps_the_result_in_flight():
    loop, log = loop_over("AB", paused=(2, 3))
    loop.run()
    at = log.index("paused")
    assert log[at - 1 : at + 3] == ["intake", "paused", "intake", "paused"]
    assert log.index("process A' a") > at


def test_mode_sync_processes_right_after_the_next_intake():
    loop, log = loop_over("AB", sync=True)
    loop.run()
    second = ["intake", "process A' a", "select", "decide B/None", "between", "launch B"]
    assert log[log.index("end") + 1 :][:6] == second


@pytest.mark.parametrize("sync", [False, True])
def test_a_switch_leaves_after_intake_with_nothing_in_flight(sync):
    loop, log = loop_over("AB", sync=sync)
    take_in = loop.port.intake

    def intake():
        take_in()
        loop.switch_requested = loop.port.intakes == 2

    loop.port.intake = intake
    assert loop.run() is Ended.SWITCH
    assert log[-2:] == ["intake", "process A' a"]
    assert not loop.queue and loop.port.last_batch.name == "A"


def test_a_switch_asked_for_in_a_pause_waits_for_its_end():
    loop, log = loop_over("AB", paused=(2, 3))
    take_in = loop.port.intake

    def intake():
        take_in()
        loop.switch_requested = loop.port.intakes >= 2

    loop.port.intake = intake
    assert loop.run() is Ended.SWITCH
    assert loop.port.intakes == 4 and log[-3:] == ["paused", "intake", "process A' a"]


def test_the_mode_after_a_switch_begins_with_the_selection():
    loop, log = loop_over("AB")
    loop.run(skip_intake=True)
    assert log[0] == "select" and log.count("intake") == 1


def test_a_barrier_that_fails_is_a_coarse_one(caplog):
    loop, log = loop_over(["A", "B", None])
    loop.launcher.streams.war_barrier = lambda *_, **__: 1 / 0
    loop.launcher.streams.schedule_waits_for_forward = lambda: log.append("waits for all")
    loop.run()
    assert log.count("waits for all") == 2 and loop.account.faults == {"barrier": 2}
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_copy_of_a_batch_that_fails_is_upstreams_copy_from_then_on(caplog):
    (loop, log), tries = loop_over(["A", "B", None]), []
    loop.snapshot = lambda batch: tries.append(batch) or 1 / 0
    loop.run()
    assert [line for line in log if line.startswith("process")] == ["process A' a", "process B' b"]
    assert len(tries) == 1 and loop.account.faults == {"snapshot": 1}


def test_a_failing_guard_means_no_overlap_and_is_logged_once(caplog):
    loop, log = loop_over("AB")

    def decide(batch, pending):
        raise ValueError("broken guard")

    loop.decide = decide
    loop.run()
    assert log.index("process A' a") < log.index("launch B")
    assert loop.account.paths["fallbacks"] == 2
    assert loop.account.reasons[Reason.GUARD_FAILED] == 2
    assert caplog.text.count("ValueError: broken guard") == 1


def test_every_iteration_beats_and_every_launch_is_decided_once():
    loop, _ = loop_over(["A", None, "B"], paused=(2,))
    loop.run()
    assert loop.beat == 4 and loop.launches == 2
    assert [n for n, _ in loop.account.decisions] == [1, 2]


def test_a_failing_launch_propagates_and_nothing_more_is_processed():
    loop, log = loop_over("AB")
    launch = loop.launcher.launch

    def fail(batch):
        if batch.name == "B":
            raise RuntimeError("illegal memory access")
        return launch(batch)

    loop.launcher.launch = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loop.run()
    assert "process A' a" not in log and len(loop.queue) == 1
