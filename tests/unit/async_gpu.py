"""The virtual GPU on threads, every access of its kernels and of the host shown to the race detector.

Worlds built on it run as they are: kernels, memory and scheduler are the ones of the single-threaded virtual
GPU. Buffers that only one stream ever touches (the KV cache, static buffers of a graph) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit import lane_simulation, simulation
from tests.unit.lane_memory import LaneGpu
from zos_sglang.testing.races.detector import Detector
from zos_sglang.testing.races.device import Device


class Row(list[int]):
    """A row of the page table; entries are written in slices."""

    def __init__(self, gpu: AsyncGpu, number: int, entries: list[int]) -> None:
        super().__init__(entries)
        self.gpu, self.number = gpu, number

    def __setitem__(self, at: Any, slots: Any) -> None:
        for column in range(at.start, at.stop):
            self.gpu.touch(("page table", self.number, column), "page table", writes=True)
        super().__setitem__(at, slots)


class Future(dict[int, int]):
    """The future map: a read takes the token out."""

    def __init__(self, gpu: AsyncGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def pop(self, row: int, default: Any = None) -> Any:
        self.gpu.touch(("future map", row), "future map", writes=True)
        return super().pop(row, default)

    def update(self, pairs: Any) -> None:  # type: ignore[override]
        for row, token in pairs:
            self.gpu.touch(("future map", row), "future map", writes=True)
            self[row] = token


def buffer(name: str) -> Any:
    """A buffer at one address, as an attribute."""
    hidden = f"_{name}"

    def read(gpu: AsyncGpu) -> Any:
        gpu.touch(name, f"{name} buffer", writes=False)
        return getattr(gpu, hidden)

    def write(gpu: AsyncGpu, values: Any) -> None:
        gpu.touch(name, f"{name} buffer", writes=True)
        setattr(gpu, hidden, values)

    return property(read, write)


class AsyncGpu(LaneGpu):
    """`LaneGpu` whose streams are those of `Device`."""

    shared = buffer("shared")
    logits = buffer("logits")

    def __init__(self, policy: str, seed: int = 0) -> None:
        self.device = Device(policy, seed)
        super().__init__(policy, seed)
        self.schedule, self.forward, self.copy = self.device.streams.values()  # type: ignore[assignment]
        self.streams = self.device.streams  # type: ignore[assignment]
        self._current = [self.schedule]
        self.future = Future(self)

    @property
    def detector(self) -> Detector:
        return self.device.detector

    def advance(self) -> None:
        """The threads run by themselves."""

    def touch(self, buffer: Any, label: str, *, writes: bool) -> None:
        self.device.touch(buffer, label, writes=writes)

    def reclaimed(self, block: int) -> None:
        self.detector.forget(("block", block))

    @property
    def table(self) -> list[Row]:
        return self._table

    @table.setter
    def table(self, rows: list[list[int]]) -> None:
        self._table = [Row(self, number, row) for number, row in enumerate(rows)]

    def row(self, row: int, length: int) -> list[int]:
        if 0 <= row < len(self.table):
            for column in range(min(max(length, 0), len(self.table[row]))):
                self.touch(("page table", row, column), "page table", writes=False)
        return super().row(row, length)


@contextmanager
def threads(build: Callable[..., Any], scenario: Any) -> Iterator[Any]:
    """A world of `simulation` or `lane_simulation` on threads, which end with the block."""
    gpu = AsyncGpu(scenario.policy, scenario.seed)
    try:
        yield build(scenario, gpu)
    finally:
        gpu.device.close()


@contextmanager
def core(scenario: simulation.Scenario) -> Iterator[simulation.World]:
    with threads(simulation.build, scenario) as world:
        yield world


@contextmanager
def lane(scenario: lane_simulation.LaneScenario) -> Iterator[lane_simulation.LaneWorld]:
    with threads(lane_simulation.build, scenario) as world:
        yield world
