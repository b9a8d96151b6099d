"""The virtual GPU of the server tests: order, waiting, timing, held results, and its place in SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zos_sglang.testing import slow_device
from zos_sglang.testing.distribution import distribution
from zos_sglang.testing.slow_device import (
    Hooks,
    Pace,
    PaceFile,
    VirtualDevice,
    VirtualEvent,
    from_environment,
    set_pace,
)

MS = 1_000_000


class Clock:
    """Time that passes when somebody sleeps or works; every sleep ends a little late."""

    late = 7

    def __init__(self) -> None:
        self.time = 1000 * MS
        self.sleeps: list[float] = []

    def now(self) -> int:
        return self.time

    def work(self, nanoseconds: int) -> None:
        self.time += nanoseconds

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.time += round(seconds * 1e9) + self.late


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def device(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> VirtualDevice:
    made = VirtualDevice(clock.now, clock.sleep)
    monkeypatch.setattr(VirtualEvent, "device", made)
    return made


def recorded(**more: Any) -> VirtualEvent:
    event = VirtualEvent(**more)
    event.record()
    return event


def test_an_event_that_was_never_recorded_counts_as_done(device: VirtualDevice, clock: Clock) -> None:
    device.submit(5 * MS)
    event = VirtualEvent()
    assert event.query()
    event.synchronize()
    assert clock.sleeps == []


def test_on_an_idle_device_an_event_is_done_at_once(device: VirtualDevice, clock: Clock) -> None:
    event = recorded()
    assert event.query()
    event.synchronize()
    assert clock.sleeps == []


def test_an_event_is_done_when_the_work_before_it_is(device: VirtualDevice, clock: Clock) -> None:
    device.submit(5 * MS)
    event = recorded()
    clock.work(5 * MS - 1)
    assert not event.query()
    clock.work(1)
    assert event.query()


def test_work_submitted_after_an_event_does_not_delay_it(device: VirtualDevice, clock: Clock) -> None:
    start = clock.now()
    device.submit(5 * MS)
    event = recorded()
    device.submit(5 * MS)
    event.synchronize()
    assert clock.now() == start + 5 * MS + clock.late
    assert not recorded().query()


def test_a_wait_ends_at_the_event_and_sleeps_again_when_it_woke_too_early(
    device: VirtualDevice, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = clock.now()
    device.submit(5 * MS)
    event = recorded()
    monkeypatch.setattr(clock, "late", -2 * MS)
    device.sleep = lambda seconds: clock.sleep(max(seconds, 2.5e-3))
    event.synchronize()
    assert len(clock.sleeps) > 1
    assert start + 5 * MS <= clock.now() < start + 6 * MS


def test_steps_run_one_after_the_other_and_never_before_they_are_submitted(
    device: VirtualDevice, clock: Clock
) -> None:
    start = clock.now()
    device.submit(4 * MS)
    clock.work(1 * MS)
    device.submit(4 * MS)
    assert device.busy_until == start + 8 * MS
    clock.work(20 * MS)  # the device was idle
    device.submit(4 * MS)
    assert device.busy_until == clock.now() + 4 * MS


def test_an_event_recorded_again_moves(device: VirtualDevice, clock: Clock) -> None:
    event = recorded()
    device.submit(5 * MS)
    assert event.query()
    event.record()
    assert not event.query()


def test_elapsed_time_is_the_devices(device: VirtualDevice, clock: Clock) -> None:
    start, end = VirtualEvent(enable_timing=True), VirtualEvent(enable_timing=True)
    device.submit(2 * MS)
    start.record()  # reached when the step before is done
    device.submit(3 * MS)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == 3.0
    assert end.elapsed_time(start) == -3.0


def test_elapsed_time_of_what_has_no_time_is_an_error(device: VirtualDevice, clock: Clock) -> None:
    start = recorded(enable_timing=True)
    with pytest.raises(RuntimeError, match="without enable_timing"):
        start.elapsed_time(recorded())
    with pytest.raises(RuntimeError, match="not recorded"):
        start.elapsed_time(VirtualEvent(enable_timing=True))
    device.submit(MS)
    with pytest.raises(RuntimeError, match="not done"):
        start.elapsed_time(recorded(enable_timing=True))


def test_held_results_are_shown_in_pairs(device: VirtualDevice, clock: Clock) -> None:
    device.hold = 2
    start = clock.now()
    shown = []
    for _ in range(4):
        device.submit(2 * MS)
        shown.append(recorded())
    assert [event.reached - start for event in shown] == [2 * MS, 4 * MS, 6 * MS, 8 * MS]
    assert [event.shown - start for event in shown] == [4 * MS, 4 * MS, 8 * MS, 8 * MS]
    shown[0].synchronize()
    assert shown[1].query() and not shown[2].query()


def test_a_held_result_that_nothing_follows_is_shown_in_the_end(device: VirtualDevice, clock: Clock) -> None:
    device.hold = 2
    start = clock.now()
    device.submit(2 * MS)
    event = recorded()
    event.synchronize()
    assert clock.now() == start + 4 * MS + clock.late


def test_device_times_are_not_held(device: VirtualDevice, clock: Clock) -> None:
    device.hold = 2
    start = recorded(enable_timing=True)
    device.submit(2 * MS)
    end = recorded(enable_timing=True)
    clock.work(2 * MS)
    assert end.query() and start.elapsed_time(end) == 2.0


def test_real_waits_take_real_time() -> None:
    device = VirtualDevice()
    device.submit(20 * MS)
    cpu, wall = time.thread_time(), time.perf_counter()
    device.synchronize()
    assert time.perf_counter() - wall >= 0.0195
    assert time.thread_time() - cpu < 0.01  # it sleeps


# ---------------------------------------------------------------- pace


def test_the_pace_of_the_environment() -> None:
    assert from_environment({}) == Pace()
    variables = {"SLOW_DEVICE_US": "1500", "SLOW_DEVICE_PREFILL_US": "2e3", "SLOW_DEVICE_HOLD": "2"}
    assert from_environment({**variables, "SLOW_DEVICE_HOST_US": "10"}) == Pace(1500, 2000, 10, 2)


@pytest.mark.parametrize(
    "variables", [{"SLOW_DEVICE_US": "fast"}, {"SLOW_DEVICE_US": "-1"}, {"SLOW_DEVICE_HOLD": "3"}]
)
def test_a_pace_that_cannot_be_is_an_error(variables: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        from_environment(variables)


def test_a_pace_in_a_file_takes_the_place_of_the_first_one(tmp_path: Path) -> None:
    file = tmp_path / "pace"
    paces = PaceFile(str(file), Pace(us=1))
    assert paces.read() == Pace(us=1)
    set_pace(file, Pace(us=2, hold=2))
    assert paces.read() == Pace(us=2, hold=2)
    set_pace(file, Pace(us=3))
    assert paces.read() == paces.pace == Pace(us=3)
    assert json.loads(file.read_text())["us"] == 3


# ---------------------------------------------------------------- hooks


def batch(mode: str) -> Any:
    kind = SimpleNamespace(is_idle=lambda: mode == "idle", is_decode=lambda: mode == "decode")
    return SimpleNamespace(forward_mode=kind)


@pytest.mark.parametrize(("mode", "expected"), [("decode", 3), ("extend", 9), ("idle", 0)])
def test_a_forward_takes_what_its_kind_takes(
    device: VirtualDevice, clock: Clock, mode: str, expected: int
) -> None:
    hooks = Hooks(device, PaceFile(None, Pace(us=3000, prefill_us=9000, hold=2)))
    assert hooks.after_forward("output", "runner", batch(mode), option=5) is None
    assert max(device.busy_until - clock.now(), 0) == expected * MS
    assert device.hold == 2


def test_a_result_without_an_event_is_read_when_the_device_is_done(
    device: VirtualDevice, clock: Clock
) -> None:
    hooks = Hooks(device, PaceFile(None, Pace()))
    device.submit(2 * MS)
    hooks.before_processing(None, batch("decode"), SimpleNamespace(copy_done=VirtualEvent()))
    hooks.before_processing(None, batch("idle"), SimpleNamespace(copy_done=None))
    assert clock.sleeps == []
    hooks.before_processing(None, batch("decode"), SimpleNamespace(copy_done=None))
    assert clock.now() >= device.busy_until


def test_a_slow_host_takes_its_time_where_a_batch_was_selected(device: VirtualDevice, clock: Clock) -> None:
    hooks = Hooks(device, PaceFile(None, Pace(host_us=4000)))
    start = clock.now()
    hooks.after_selection(SimpleNamespace(batch_to_run=None))
    assert clock.now() == start
    hooks.after_selection(SimpleNamespace(batch_to_run=object()))
    assert clock.now() == start + 4 * MS + clock.late
    assert device.busy_until < clock.now()  # the host's time, not the device's


IN_A_SCHEDULER = """
import sys
if "scheduler" in sys.argv:
    import sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
load_plugins()
import torch
device = torch.get_device_module("cpu")
print("EVENT", device.Event.__module__, hasattr(device.Event(), "elapsed_time"))
if "scheduler" in sys.argv:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    hooked = (ModelRunner.forward, Scheduler.process_batch_result, Scheduler.get_next_batch_to_run)
    print("HOOKED", all(hasattr(f, "__wrapped__") for f in hooked))
"""


def loaded(folder: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    found = distribution(folder, "slow-device", "1.0", slow_device.ENTRY)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ZOS_", "SLOW_DEVICE_"))}
    return subprocess.run(
        [sys.executable, "-c", IN_A_SCHEDULER, *args],
        env={**env, **found, "SGLANG_PLATFORM": "zos_cpu", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_sglang_finds_it_by_its_entry_in_a_scheduler_process(tmp_path: Path) -> None:
    done = loaded(tmp_path, "scheduler", SLOW_DEVICE_US="5")
    assert "EVENT zos_sglang.testing.slow_device True" in done.stdout, done.stderr[-2000:]
    assert "HOOKED True" in done.stdout


def test_other_processes_stay_as_they_are(tmp_path: Path) -> None:
    assert "EVENT torch.cpu False" in loaded(tmp_path).stdout


def test_a_bad_variable_ends_the_process(tmp_path: Path) -> None:
    done = loaded(tmp_path, "scheduler", SLOW_DEVICE_HOLD="7")
    assert done.returncode != 0 and "slow_device: no pace" in done.stderr
