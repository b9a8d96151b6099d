"""Device times of step records on a CUDA device: against kernels whose time is known, and without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.gpu.test_gpu_kernels import nothing_waits
from tests.unit.made_records import records
from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.observe.record import Ring
from zos_sglang.testing.server import cuda_available

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_available(), reason="no CUDA device"),
]
#: Clock cycles of a kernel that does nothing else: 2 to 4 ms on a device of 1 to 2 GHz.
CYCLES = 4_000_000
MS = 1_000_000


@pytest.fixture
def ring() -> Ring:
    return Ring(64)


@pytest.fixture
def clock() -> Iterator[GpuClock]:
    yield GpuClock(
        partial(torch.cuda.Event, enable_timing=True), torch.cuda.Stream(), torch.cuda.Stream(), every=2
    )


def kernel_ns(times: int = 1) -> float:
    """What `times` of the kernel take, by events of the test's own."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CYCLES)  # the device leaves its idle clock
    start.record()
    for _ in range(times):
        torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * MS


def step(clock: GpuClock, number: int, kernels: int, *, idle: int = 0, copies: int = 0) -> None:
    """One launch: idle time of the device, the forward, the copy; each so many kernels."""
    assert clock.arm(number)
    with torch.cuda.stream(clock.forward):
        for _ in range(idle):
            torch.cuda._sleep(CYCLES)
        clock.start()
        for _ in range(kernels):
            torch.cuda._sleep(CYCLES)
        clock.stop()
    with torch.cuda.stream(clock.copy):
        clock.copy.wait_stream(clock.forward)
        for _ in range(copies):
            torch.cuda._sleep(CYCLES)
        clock.copied()
    clock.launched(True)


def write(ring: Ring, number: int) -> None:
    ring.write(records(1, step=number))


def test_forward_gap_and_copy_are_the_devices_own_times(clock: GpuClock, ring: Ring) -> None:
    unit = kernel_ns(4) / 4
    step(clock, 2, 3, copies=1)
    step(clock, 3, 2, idle=2, copies=2)
    torch.cuda.synchronize()
    for number in (2, 3):
        write(ring, number)
    clock.collect(ring)
    first, second = ring.last(2)
    assert first["gpu"] == pytest.approx(3 * unit, rel=0.05)
    assert first["d2h"] == pytest.approx(unit, rel=0.1)
    assert second["gpu"] == pytest.approx(2 * unit, rel=0.05)
    assert second["gpu_gap"] == pytest.approx(2 * unit, rel=0.1)
    assert second["d2h"] == pytest.approx(2 * unit, rel=0.1)


def test_nothing_of_it_waits_for_the_device(clock: GpuClock, ring: Ring) -> None:
    kernel_ns()
    with nothing_waits():
        step(clock, 2, 20)
        write(ring, 2)
        clock.collect(ring)
        # 20 kernels take tens of milliseconds: the device cannot be done, and nobody waited for it.
        assert clock.oldest() == 2
        assert ring.last(1)["gpu"] == -1
    torch.cuda.synchronize()
    clock.collect(ring)
    assert ring.last(1)["gpu"] > 0
