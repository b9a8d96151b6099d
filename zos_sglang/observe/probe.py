"""Times every decode step from the model's forward outward (`ZOS_PROBE`): the benchmark's clock.

What lies between the end of one decode forward and the start of the next is the scheduler's own work,
whichever loop runs it, so stock and ours are measured by the same two clock reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

#: Samples kept per mode and batch size.
KEPT = 4096


class _Step:
    """Looks to `StepProbe.wrap` like the forward batch of a decode step."""

    batch_size = 0

    @property
    def forward_mode(self) -> _Step:
        return self

    def is_decode(self) -> bool:
        return True


class StepProbe:
    """Wraps `model_runner.forward` of one scheduler.

    Args:
        mode: the mode in effect, read once a step.
    """

    def __init__(self, mode: Callable[[], str]) -> None:
        self.mode = mode
        self._samples: dict[tuple[str, int], tuple[deque[int], deque[int]]] = {}
        self._before: tuple[str, int] | None = None
        self._cpu_end = 0
        self._wall_start = 0

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward(forward_batch, ...)`, timed.

        A sample is taken between two adjacent decode forwards of one mode and one batch size: the
        scheduler thread's CPU time between them (ns), and their distance from start to start (ns).
        """

        def timed(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            key = (self.mode(), forward_batch.batch_size) if forward_batch.forward_mode.is_decode() else None
            if key is None:
                pass
            elif key == self._before and key in self._samples:
                cpu_samples, wall_samples = self._samples[key]
                cpu_samples.append(cpu - self._cpu_end)
                wall_samples.append(wall - self._wall_start)
            else:
                self._samples.setdefault(key, (deque(maxlen=KEPT), deque(maxlen=KEPT)))
            self._before, self._wall_start = key, wall
            try:
                return forward(forward_batch, *args, **kwargs)
            finally:
                self._cpu_end = time.thread_time_ns()

        return timed

    def wrap_step(self, step: Callable[[], None], rows: Callable[[], int]) -> Callable[[], None]:
        """A decode step of `rows()` rows that does not go through the model runner's forward, timed alike."""

        def forward(shape: _Step) -> None:
            step()

        timed, shape = self.wrap(forward), _Step()

        def timed_step() -> None:
            shape.batch_size = rows()
            timed(shape)

        return timed_step

    def reset(self) -> None:
        """Forget all samples."""
        self._samples.clear()
        self._before = None

    def report(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Samples by mode and batch size, in nanoseconds."""
        out: dict[str, dict[str, dict[str, Any]]] = {}
        for (mode, size), (cpu, wall) in self._samples.items():
            out.setdefault(mode, {})[str(size)] = {
                "steps": len(cpu),
                "cpu_ns": list(cpu),
                "wall_ns": list(wall),
            }
        return out
