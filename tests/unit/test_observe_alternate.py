"""What recording costs: blocks with it and without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.recording import Clocks, Event, new_recorder, process, result
from zos_sglang.observe.alternate import Alternation
from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.watch import Watch


class Server:
    """Steps that cost 100 us, and 7 more while they are recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int, block: int = 4) -> None:
        self.clocks = Clocks(monkeypatch)
        self.recorder = new_recorder()
        self.rows, self.done = 16, 0
        self.forward = self.burnt = 0
        self.watch: Watch = self.recorder
        self.cost = Alternation(
            self.recorder,
            self.put,
            lambda: self.rows,
            steps=steps,
            forward_cpu=lambda: self.burnt,
            done=lambda: setattr(self, "done", self.done + 1),
            block=block,
            clock=self.clocks.thread,
        )
        self.pending: Any = None

    def put(self, watch: Watch) -> None:
        self.watch = watch

    def run(self, steps: int) -> None:
        for _ in range(steps):
            recorded = self.watch is self.recorder
            self.watch.begin()
            self.clocks.work(100_000)
            if recorded:
                self.clocks.work(7_000)
                self.recorder.launching(None, Reason.OVERLAPPED, int(self.pending is not None), None)
            self.clocks.work(self.forward)
            self.burnt += self.forward
            new: Any = result(Event(self.clocks))
            if recorded:
                self.recorder.launched(None, new, False)
                if self.pending is not None:
                    process(self.recorder, self.pending)
            self.pending = new
            self.watch.end()


def test_the_difference_is_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, 64)
    server.run(64)
    found = server.cost.report()
    assert (found["on_us"], found["off_us"], found["cost_us"], found["share"]) == (107.0, 100.0, 7.0, 0.07)
    assert found["blocks"] == 8 and not found["running"]
    assert server.watch is server.recorder and server.recorder.after is None and server.done == 1
    assert server.recorder.launches == 32


def test_the_devices_own_work_in_this_thread_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, 32)
    server.forward = 5_000_000
    server.run(32)
    assert server.cost.report()["off_us"] == 100.0


@pytest.mark.parametrize("how", ["rows", "idle", "paused"])
@pytest.mark.parametrize("blind", [False, True])
def test_a_block_that_something_disturbed_does_not_count(
    monkeypatch: pytest.MonkeyPatch, how: str, blind: bool
) -> None:
    server = Server(monkeypatch, 32)
    server.run(4 * blind + 2)
    if how == "rows":
        server.rows = 3
    else:
        server.watch.begin()
        getattr(server.watch, how)()
        server.watch.end()
    server.run(32)
    assert server.cost.report()["blocks"] == 3


def test_before_two_blocks_have_passed_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, 32)
    server.run(6)
    found = server.cost.report()
    assert found["running"] and found["blocks"] == 0 and found["cost_us"] is None


@pytest.mark.parametrize("steps", [2, 6])
def test_stopped_early_the_recorder_is_back_in_its_place(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    server = Server(monkeypatch, 1000)
    server.run(steps)
    server.cost.stop()
    assert server.watch is server.recorder and server.done == 1
    server.run(4)
    assert server.recorder.launches >= 4 and not server.cost.report()["running"]


def test_steps_across_a_gap_are_not_adjacent(monkeypatch: pytest.MonkeyPatch) -> None:
    from zos_sglang.observe.adjacent import pairs

    server = Server(monkeypatch, 64)
    server.run(64)
    server.recorder.close()
    records = server.recorder.ring.since(0)
    before, _ = pairs(records)
    assert not {4, 8, 12} & set(before["step"].tolist()) and len(before) == 8 * 3
