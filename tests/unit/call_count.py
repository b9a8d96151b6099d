"""What recording does in each iteration of the real loop, counted: calls, looks at clocks, device calls.

Times say what a step costs on this machine, with these caches, today. Counts say it everywhere and always the
same; and what a count costs differs from host to host (a look at the thread's clock is a system call, which
takes from 0.3 µs to several).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from types import CodeType, FrameType
from typing import Any, ClassVar

import zos_sglang
from tests.unit.lane_scheduler import LaneLimits
from tests.unit.lane_simulation import LaneScenario, LaneWorld, build, submit
from tests.unit.test_lane_mutations import OTHER, TEXT, long
from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.observe.ledger import Ledger
from zos_sglang.observe.record import Ring
from zos_sglang.observe.recorder import Recorder
from zos_sglang.overlap.watch import Off
from zos_sglang.upstream.step_facts import make_facts
from zos_sglang.upstream.watch_stock import ForwardWatch

_HERE = Path(zos_sglang.__file__).parent
#: Where recording is written down; whatever else runs in a step runs without it, too.
_RECORDING = (
    *(str(_HERE / "observe"), str(_HERE / "overlap" / "watch.py")),
    *(str(_HERE / "upstream" / name) for name in ("watch_stock.py", "step_facts.py")),
)
_CLOCKS = {perf_counter_ns: "clock", thread_time_ns: "thread clock"}
#: Iterations at either end of a run that are not like the others.
EDGE = 12
_ENDS = {Ledger.end.__code__, Off.end.__code__}


class DeviceEvent:
    """An event that can be timed, on a device that has passed it. Calls are counted by name."""

    calls: ClassVar[Counter[str]] = Counter()

    def record(self, stream: Any = None) -> None:
        DeviceEvent.calls["record"] += 1

    def query(self) -> bool:
        DeviceEvent.calls["query"] += 1
        return True

    def elapsed_time(self, end: Any) -> float:
        DeviceEvent.calls["elapsed_time"] += 1
        return 1.0


class Counts:
    """By iteration: `calls` of functions of recording, looks at each clock, and which functions they were."""

    def __init__(self) -> None:
        self.iterations: list[Counter[str]] = []
        self._now: Counter[str] = Counter()
        self._kinds: dict[CodeType, bool] = {}

    def saw(self, frame: FrameType, event: str, what: Any) -> None:
        """To be given to `sys.setprofile`."""
        if event == "call" and self._is_recording(frame.f_code):
            self._now["calls"] += 1
            self._now[frame.f_code.co_qualname] += 1
        elif event == "c_call" and what in _CLOCKS:
            self._now[_CLOCKS[what]] += 1
        elif event == "return" and frame.f_code in _ENDS:
            self.iterations.append(self._now)
            self._now = Counter()

    def _is_recording(self, code: CodeType) -> bool:
        found = self._kinds.get(code)
        if found is None:
            found = self._kinds[code] = code.co_filename.startswith(_RECORDING)
        return found

    @property
    def ordinary(self) -> Counter[str]:
        """Of the commonest iteration."""
        commonest, _ = Counter(tuple(sorted(one.items())) for one in self.iterations).most_common(1)[0]
        return Counter(dict(commonest))

    def mean(self, what: str) -> float:
        """Of all iterations but the first and the last ones, in which a prompt is read and requests end."""
        steady = self.iterations[EDGE:-EDGE]
        return sum(one[what] for one in steady) / len(steady)


@contextmanager
def counting() -> Iterator[Counts]:
    """Count in this thread; what profiles or traces it otherwise (coverage) goes on afterwards."""
    counts, before = Counts(), sys.getprofile()
    DeviceEvent.calls = Counter()
    sys.setprofile(counts.saw)
    try:
        yield counts
    finally:
        sys.setprofile(before)


def world_of(mode: str, policy: str, steps: int, graphs: bool) -> LaneWorld:
    """Two requests of so many tokens, and memory for them."""
    limits = LaneLimits(pages=3 * steps, capacity=3 * steps, graphs=graphs, window=16)
    requests = long(1, TEXT[:5], steps), long(2, OTHER[:7], steps)
    return build(LaneScenario(submit(*requests), limits, policy, mode=mode))


def recorded(world: LaneWorld, asynchronous: bool) -> tuple[Recorder, Callable[[], None]]:
    """Let a recorder watch, as `runtime_observe` does; returns it, and what takes its places away."""

    def fault() -> None:
        raise AssertionError("recording failed")

    recorder = Recorder(
        Ring(),
        make_facts(world.scheduler, world.lane_account),
        GpuClock(DeviceEvent, "forward stream", "copy stream") if asynchronous else None,
        asynchronous=asynchronous,
        on_fault=fault,
    )
    world.watch = recorder
    forwards = [ForwardWatch(world.launcher.device, "forward", asynchronous)]
    if not asynchronous:
        forwards.append(ForwardWatch(world.executor, "step", asynchronous))
    for forward in forwards:
        forward.watch = recorder

    def remove() -> None:
        for one in forwards:
            one.remove()

    return recorder, remove
