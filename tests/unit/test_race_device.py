"""The asynchronous device: operations run later on other threads, in any order that the waits allow."""

from __future__ import annotations

import threading
import time

import pytest

from tests.unit.async_gpu import AsyncGpu
from zos_sglang.testing.races.device import RANDOM, Device, Event


def late() -> Device:
    """Nothing runs before somebody waits for it."""
    return Device("")


def test_an_operation_runs_on_its_streams_own_thread():
    with late() as device:
        names: list[str] = []
        for stream in device.streams.values():
            stream.enqueue(lambda: names.append(threading.current_thread().name))
        device.finish()
        assert names == ["schedule", "forward", "copy"]


def test_nothing_runs_on_a_late_stream_before_somebody_waits_for_it():
    with late() as device:
        ran: list[int] = []
        device.forward.enqueue(lambda: ran.append(1))
        device.forward.enqueue(lambda: ran.append(2))
        time.sleep(0.02)
        assert ran == [] and not device.forward.query()
        device.forward.run_until(1)
        assert ran == [1]


def test_an_eager_stream_has_run_when_the_launch_returns_and_the_others_have_not():
    with Device("schedule") as device:
        ran: list[str] = []
        device.forward.enqueue(lambda: ran.append("forward"))
        device.schedule.enqueue(lambda: ran.append("schedule"))
        assert ran == ["schedule"]


def test_a_wait_of_an_eager_stream_makes_the_other_stream_run_as_far_as_needed():
    with Device("schedule") as device:
        ran: list[str] = []
        device.forward.enqueue(lambda: ran.append("covered"))
        event = Event(device)
        event.record(device.forward)
        device.forward.enqueue(lambda: ran.append("behind the event"))
        device.schedule.wait_event(event)
        device.schedule.enqueue(lambda: ran.append("schedule"))
        assert ran == ["covered", "schedule"]


def test_the_host_sleeps_until_an_event_is_done():
    with Device(RANDOM) as device:
        ran: list[int] = []
        with device.on(device.copy):
            device.current.enqueue(lambda: (time.sleep(0.02), ran.append(1)))
            event = Event(device)
            event.record()
        event.synchronize()
        assert ran == [1] and event.query()


def test_an_event_that_was_never_recorded_is_done_and_holds_nobody_up():
    with late() as device:
        event = Event(device)
        assert event.query()
        event.synchronize()
        device.forward.wait_event(event)
        assert device.forward.queued == 0


def test_without_a_wait_an_adversary_runs_a_reader_before_its_writer():
    with Device("forward") as device:
        box: list[int] = [0]
        seen: list[int] = []
        device.schedule.enqueue(lambda: box.__setitem__(0, 7))
        device.forward.enqueue(lambda: seen.append(box[0]))
        assert seen == [0]
        device.forward.wait_stream(device.schedule)
        device.forward.enqueue(lambda: seen.append(box[0]))
        assert seen == [0, 7]


def test_what_an_operation_raises_reaches_the_host_where_it_waits():
    with late() as device:

        def fails() -> None:
            raise ValueError("inside a kernel")

        device.forward.enqueue(fails)
        with pytest.raises(ValueError, match="inside a kernel"):
            device.forward.synchronize()


@pytest.mark.parametrize("schedule", ["", "forward", RANDOM])
def test_accesses_of_operations_are_told_to_the_detector_with_their_stream_and_the_hosts_as_the_hosts(
    schedule,
):
    with Device(schedule) as device:
        device.schedule.enqueue(lambda: device.touch("b", "numbers", writes=True), "fill")
        device.forward.enqueue(lambda: device.touch("b", "numbers", writes=False), "model")
        device.finish()
        [race] = device.detector.races
        assert (race.first.op.label, race.second.op.label) == ("fill", "model")
        device.touch("b", "numbers", writes=True)
        assert len(device.detector.races) == 1  # the host has waited for both


@pytest.mark.parametrize("schedule", ["", RANDOM])
def test_a_wait_on_the_device_orders_accesses_for_the_detector(schedule):
    with Device(schedule) as device:
        device.schedule.enqueue(lambda: device.touch("b", "numbers", writes=True))
        device.forward.wait_stream(device.schedule)
        device.forward.enqueue(lambda: device.touch("b", "numbers", writes=False))
        device.finish()
        assert device.detector.races == []


def test_memory_that_a_stream_was_said_to_use_is_not_handed_out_before_it_is_done():
    gpu = AsyncGpu("schedule")
    try:
        tensor = gpu.tensor([1, 2])
        block = tensor.address[0]
        gpu.forward.wait_stream(gpu.schedule)
        gpu.forward.enqueue(lambda at=tensor.address: gpu.load(at, 2, "gather"))
        tensor.record_stream(gpu.forward)
        del tensor
        assert gpu.tensor([3]).address[0] != block
        gpu.forward.synchronize()
        again = gpu.tensor([4])
        assert again.address[0] == block
        assert gpu.detector.races == [] and gpu.hazards == []
    finally:
        gpu.device.close()


def test_memory_without_an_owner_is_handed_out_at_once_and_a_late_reader_is_reported():
    gpu = AsyncGpu("schedule")
    try:
        tensor = gpu.tensor([1, 2])
        block = tensor.address[0]
        gpu.forward.wait_stream(gpu.schedule)
        gpu.forward.enqueue(lambda at=tensor.address: gpu.load(at, 2, "gather"))
        del tensor
        again = gpu.tensor([3])
        assert again.address[0] == block
        gpu.finish()
        assert gpu.hazards == ["gather: written over"]
        assert "read 'gather' on forward" in gpu.detector.report()
    finally:
        gpu.device.close()
