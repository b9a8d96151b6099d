"""Device times from events: right, late, and never waited for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.recording import Clocks, Event, new_recorder, process, result
from zos_sglang.observe.columns import to_columns
from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.observe.keeper import SETTLED
from zos_sglang.overlap.guards import Reason
from zos_sglang.upstream.gpu_events import follow, is_asynchronous, make_gpu_clock

MS = 1_000_000


class TimedEvent:
    """Of a device whose clock the test moves; passes when the test says so. Whoever waits for it fails."""

    now = 0.0
    passed = False

    def __init__(self) -> None:
        self.at: float | None = None
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.at, self.stream = TimedEvent.now, stream

    def query(self) -> bool:
        return TimedEvent.passed

    def synchronize(self) -> None:
        pytest.fail("the recorder waited for the device")

    wait = synchronize

    def elapsed_time(self, end: TimedEvent) -> float:
        assert self.at is not None and end.at is not None and TimedEvent.passed
        return end.at - self.at


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    TimedEvent.now, TimedEvent.passed = 0.0, False
    return Clocks(monkeypatch)


def run(
    it: Any, clocks: Clocks, count: int, *, gpu: float = 2.0, copy: float = 0.25, gap: float = 0.5
) -> Any:
    pending = None
    for _ in range(count):
        it.begin()
        it.launching(None, Reason.OVERLAPPED, int(pending is not None), None)
        TimedEvent.now += gap
        it.forwarding()
        TimedEvent.now += gpu
        it.forwarded()
        it.reading_back()
        TimedEvent.now += copy
        it.read_back()
        new: Any = result(Event(clocks))
        it.launched(None, new, False)
        if pending is not None:
            process(it, pending)
        pending = new
        it.end()
    return pending


def recorder_with(**options: Any) -> Any:
    return new_recorder(gpu=GpuClock(TimedEvent, "forward stream", "copy stream", **options))


def found(it: Any) -> dict[str, list[Any]]:
    it.flush()
    return to_columns(it.ring.since(0))


def test_every_so_many_steps_a_pair_is_timed(clocks: Clocks) -> None:
    it = recorder_with(every=8)
    TimedEvent.passed = True
    it.launches = 7
    run(it, clocks, 12)
    it.close()
    columns = found(it)
    timed = [step for step, gpu in zip(columns["step"], columns["gpu"], strict=True) if gpu >= 0]
    assert timed == [8, 9, 16, 17]
    at = {name: dict(zip(columns["step"], columns[name], strict=True)) for name in ("gpu", "gpu_gap", "d2h")}
    assert at["gpu"][8] == 2 * MS and at["d2h"][8] == MS // 4
    assert (at["gpu_gap"][8], at["gpu_gap"][9]) == (-1, MS // 4 + MS // 2)


def test_times_come_late_and_sinks_wait_for_them(clocks: Clocks) -> None:
    it = recorder_with(every=8)
    it.launches = 6
    seen: list[int] = []
    it.sinks.append(lambda records: seen.extend(records["step"].tolist()))
    run(it, clocks, 6)
    it.flush()
    assert seen == [7] and found(it)["gpu"] == [-1] * 5
    TimedEvent.passed = True
    it.end()
    it.flush()
    assert seen == [7, 8, 9, 10, 11]
    assert found(it)["gpu"] == [-1, 2 * MS, 2 * MS, -1, -1]


def test_a_device_that_never_passes_costs_no_more_than_its_samples(clocks: Clocks) -> None:
    it = recorder_with(every=4, pairs=2)
    run(it, clocks, 40)
    assert len(it.gpu.under_way) == 4 and set(found(it)["gpu"]) == {-1}


def test_events_stand_on_the_streams_of_what_they_time(clocks: Clocks) -> None:
    clock = GpuClock(TimedEvent, "forward stream", "copy stream", every=16)
    assert clock.arm(16)
    clock.start()
    clock.stop()
    clock.copied()
    clock.launched(True)
    (sample,) = clock.under_way
    streams = sample.start.stream, sample.end.stream, sample.copy.stream
    assert streams == ("forward stream", "forward stream", "copy stream")


def test_a_copy_that_somebody_else_queues_is_not_timed(clocks: Clocks) -> None:
    it = new_recorder(gpu=GpuClock(TimedEvent, "forward stream", None, every=4))
    TimedEvent.passed = True
    run(it, clocks, 8)
    assert set(found(it)["d2h"]) == {-1} and 2 * MS in found(it)["gpu"]


def test_a_launch_whose_sampling_comes_later_is_not_timed(clocks: Clocks) -> None:
    clock = GpuClock(TimedEvent, every=16, pairs=8)
    clock.arm(16)
    clock.start()
    clock.stop()
    clock.launched(False)
    assert not clock.under_way and clock.oldest() is None and len(clock._free) == 16


def test_the_samples_between_two_looks_at_the_rows_all_have_events() -> None:
    """Nobody asks whether they have passed in between."""
    clock = GpuClock(TimedEvent)
    for step in range(1, SETTLED + 1):
        armed = clock.arm(step)
        assert armed == (step % clock.every in (0, 1)), step
        clock.start()
        clock.stop()
        clock.launched(True)


def test_a_launch_that_failed_gives_its_events_back(clocks: Clocks) -> None:
    clock = GpuClock(TimedEvent, every=16, pairs=1)
    for _ in range(5):
        assert clock.arm(16)
        clock.start()


@pytest.mark.parametrize(("copy", "blocked"), [(0.04, False), (0.06, True)])
def test_a_slow_copy_blocks_its_step(clocks: Clocks, copy: float, blocked: bool) -> None:
    it = recorder_with(every=4)
    TimedEvent.passed = True
    it.launches = 3
    run(it, clocks, 3, gpu=1.0, copy=copy)
    columns = found(it)
    assert columns["block"][0] == ("copy" if blocked else None)
    assert columns["path"][0] == ("overlap-blocked" if blocked else "overlap")
    assert columns["blocked"][0] == (60_000 if blocked else -1)


def test_a_copy_that_is_short_against_its_step_blocks_nothing(clocks: Clocks) -> None:
    it = recorder_with(every=4)
    TimedEvent.passed = True
    it.launches = 3
    run(it, clocks, 3, gpu=20.0, copy=0.5)
    assert found(it)["block"][0] is None


def test_lengths_on_the_host_are_the_reason_before_the_copy(clocks: Clocks) -> None:
    it = recorder_with(every=4)
    TimedEvent.passed = True
    it.launches = 3
    it.begin()
    it.launching(None, Reason.OVERLAPPED, 0, None)
    it.blocked("host-lengths", 7)
    it.forwarding()
    it.forwarded()
    it.reading_back()
    TimedEvent.now += 9
    it.read_back()
    given: Any = launch_end(it, clocks)
    process(it, given)
    it.end()
    columns = found(it)
    assert (columns["block"], columns["blocked"], columns["d2h"]) == (["host-lengths"], [7], [9 * MS])


def launch_end(it: Any, clocks: Clocks) -> Any:
    given = result(Event(clocks))
    it.launched(None, given, False)
    return given


# ---------------------------------------------------------------- which device


def scheduler(event: Any, **more: Any) -> Any:
    return SimpleNamespace(
        device_module=SimpleNamespace(Event=event),
        schedule_stream="schedule",
        forward_stream="forward",
        copy_stream="copy",
        **{"enable_async_d2h_copy": False, **more},
    )


def test_a_plain_cpu_is_synchronous_and_has_no_clock() -> None:
    assert not is_asynchronous(scheduler(torch.cpu.Event))
    assert make_gpu_clock(scheduler(torch.cpu.Event)) is None


def test_events_that_cannot_be_timed_make_no_clock() -> None:
    assert is_asynchronous(scheduler(lambda: 1))
    assert make_gpu_clock(scheduler(lambda: 1)) is None
    assert make_gpu_clock(scheduler(lambda enable_timing: object())) is None


@pytest.mark.parametrize(
    ("normal", "elsewhere", "streams"),
    [
        (False, False, ("forward", "copy")),
        (False, True, ("forward", None)),
        (True, False, ("schedule", None)),
    ],
)
def test_the_clock_follows_the_loop(normal: bool, elsewhere: bool, streams: tuple[str, str | None]) -> None:
    server = scheduler(lambda enable_timing: TimedEvent(), enable_async_d2h_copy=elsewhere)
    clock = make_gpu_clock(server)
    assert clock is not None
    follow(clock, server, normal=normal)
    assert (clock.forward, clock.copy) == streams
