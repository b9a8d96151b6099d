"""The ring of the lane's simulation and its pinned counterpart: slots that notice when one is lost."""

from __future__ import annotations

from typing import Any

from tests.unit.lane_memory import LaneGpu


class Host:
    """Pinned memory behind `Readback`: what a step left there must be read before the next one comes."""

    def __init__(self, gpu: LaneGpu, depth: int) -> None:
        self.gpu, self.unread, self.slots = gpu, [False] * depth, [()] * depth

    def __getitem__(self, at: tuple[int, slice]) -> HostView:
        return HostView(self, at[0], at[1].stop)


class HostView:
    """One slot of `Host` as a step's result holds it."""

    def __init__(self, host: Host, slot: int, n: int) -> None:
        self.host, self.slot, self.n = host, slot, n

    def copy_(self, source: Any, non_blocking: bool) -> None:
        host, (ring, slot, n) = self.host, source
        assert non_blocking and n == self.n and host.gpu.current is host.gpu.copy

        def copy() -> None:
            host.gpu.touch(("pinned slot", self.slot), "pinned slot", writes=True)
            if host.unread[self.slot]:
                host.gpu.hazards.append("pinned slot: written over before the host read it")
            host.unread[self.slot] = True
            host.slots[self.slot] = ring.take(slot, n)

        host.gpu.current.enqueue(copy)

    def tolist(self) -> list[int]:
        self.host.gpu.touch(("pinned slot", self.slot), "pinned slot", writes=False)
        self.host.unread[self.slot] = False
        return list(self.host.slots[self.slot])


class Ring:
    """The executor's ring on the device. `torch.empty_like` makes its pinned counterpart."""

    is_cuda = False

    def __init__(self, gpu: LaneGpu, depth: int, capacity: int) -> None:
        self.gpu, self.shape = gpu, (depth, capacity)
        self.slots: list[tuple[int, ...] | None] = [None] * depth
        self.count = 0

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Host:
        assert func.__name__ == "empty_like" and kwargs["device"] == "cpu"
        return Host(args[0].gpu, args[0].shape[0])

    def __getitem__(self, at: tuple[int, slice]) -> tuple[Ring, int, int]:
        return self, at[0], at[1].stop

    def emit(self, tokens: list[int]) -> None:
        """The end of a step, on the device."""
        slot = self.count % self.shape[0]
        self.gpu.touch(("ring slot", slot), "ring slot", writes=True)
        if self.slots[slot] is not None:
            self.gpu.hazards.append("ring slot: written over before it was copied")
        self.slots[slot] = tuple(tokens)
        self.count += 1

    def take(self, slot: int, n: int) -> tuple[int, ...]:
        self.gpu.touch(("ring slot", slot), "ring slot", writes=False)
        found, self.slots[slot] = self.slots[slot], None
        if found is None or len(found) != n:
            self.gpu.hazards.append("ring slot: not what was asked for")
        return (*(found or ()), *[-1] * n)[:n]
