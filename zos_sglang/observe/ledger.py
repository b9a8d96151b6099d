"""Whose time an iteration was, and when records are made: what a recorder does between its stamps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter_ns as now
from time import thread_time_ns

from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.observe.keeper import SETTLED, Keeper
from zos_sglang.observe.record import Ring
from zos_sglang.observe.slot import CPU_FORWARD, FIELDS, WALL, Slot

logger = logging.getLogger(__name__)

#: Iterations between two readings of the thread clock.
CLOCKED = 16


class Ledger(Keeper):
    """Iterations, the thread clock, and faults.

    Args:
        ring, gpu, asynchronous: see `Keeper`.
        on_fault: called when recording fails; is to put something else in this one's place.
    """

    # Slots, not a dict: with this many fields an attribute costs half.
    __slots__ = (
        *("on_fault", "faults", "after", "detail", "waited", "cpu_waited", "_reading", "_process"),
        *("_depends", "_forward", "_cpu_forward", "_t_select", "_t_launch", "_t_forward", "_t_forwarding"),
        *("_t_forwarded", "_t_process", "_t_reading", "_t_depends", "_waited_before", "_read_before"),
        *("_armed", "_flags", "_fresh", "_from", "_cpu", "_slot", "_last", "_left", "_carried"),
    )

    def __init__(
        self, ring: Ring, gpu: GpuClock | None, *, asynchronous: bool, on_fault: Callable[[], None]
    ) -> None:
        super().__init__(ring, gpu, asynchronous)
        self.on_fault = on_fault
        self.faults = 0
        #: Called at the end of every iteration.
        self.after: Callable[[], None] | None = None
        #: Whether the thread clock is read at every iteration, and at the edges of forwards and waits.
        self.detail = False
        self._flags = 0
        self.clear()

    def clear(self) -> None:
        """Nothing was stamped yet; what has no reading of the clock never gets one."""
        del self.iterations[self.readings[-1][0] if self.readings else 0 :]
        #: Launched in this iteration; else the last one processed in it.
        self._slot: Slot | None = None
        self._last: Slot | None = None
        #: Time of the iteration under way that has been charged already.
        self._carried: Slot | None = None
        self._armed = False
        self._t_select = self._t_launch = self._t_forward = self._t_forwarding = self._t_forwarded = 0
        self._t_process = self._t_reading = self._t_depends = self._waited_before = self._read_before = 0
        self._reading = self._process = self._depends = self._forward = self._cpu_forward = 0
        self.waited = self.cpu_waited = self._from = self._cpu = 0
        self._left = CLOCKED
        self._fresh = True

    @property
    def interrupted(self) -> bool:
        """Whether the server was idle or paused since the last launch."""
        return self._flags != 0

    def cut(self) -> None:
        """Whatever the thread does until the next begin belongs to no step."""
        if self._fresh:
            return
        self.end_iteration(now())
        self._read_clock()
        self._fresh = True
        if self.due < SETTLED and self.processed_slots:
            self._settle(now(), all_of_it=True)  # somebody wants records soon

    def end(self) -> None:
        t = now()
        if not self._fresh:
            self.end_iteration(t)
        if len(self.iterations) >= SETTLED or len(self.processed_slots) >= self.due or t >= self.due_at:
            self._settle(t)
        if self.after is not None:
            self.after()

    def end_iteration(self, t: int) -> None:
        # Nothing was launched: what this iteration took was for the result that it processed.
        slot = self._slot or self._last
        self._slot = self._last = None
        if self._carried is not None and slot is not None:
            for place in range(WALL, CPU_FORWARD + 1):
                slot[place] += self._carried[place]
            self._carried = None
        self._charge(slot, t)
        self._t_select = self._t_launch = self._t_forward = self._t_forwarded = 0
        self._left -= 1
        if self._left <= 0 or self.detail:
            self._read_clock()

    def _charge(self, slot: Slot | None, t: int) -> None:
        """What was stamped until `t` was for this slot."""
        forward, waited = (self._cpu_forward, self.cpu_waited) if self.detail else (-1, -1)
        self.iterations.append(
            (
                *(slot, t - self._from, self.waited, self._reading, self._process, self._depends),
                *(self._forward, forward, waited),
            )
        )
        self._from = t
        self._reading = self._process = self._depends = self._forward = 0
        self.waited = self.cpu_waited = self._cpu_forward = 0

    def _read_clock(self) -> None:
        self._left = CLOCKED
        cpu = thread_time_ns()
        self.readings.append((len(self.iterations), cpu - self._cpu))
        self._cpu = cpu

    def _settle(self, t: int, *, all_of_it: bool = False) -> None:
        """Between two iterations. What it takes is nobody's step."""
        try:
            if not self.readings or self.readings[-1][0] < len(self.iterations):
                self._read_clock()
            self.settle()
            if all_of_it or self.is_due(t):
                self.hand_on()
        except Exception:
            self.fault()
        cpu = thread_time_ns()
        # The reading was taken before; a step of a loop that goes on is not charged with this.
        self.flush_ns += cpu - self._cpu
        self._cpu, self._from = cpu, now()

    def flush(self) -> None:
        """Hand on all that is complete. At any time, also within an iteration, which then goes on."""
        begun = now()
        if not self._fresh:
            carried = self._carried = self._carried or [0] * FIELDS
            self._charge(carried, begun)
            self._read_clock()
        self.settle()
        self.hand_on()
        if not self._fresh:
            cpu = thread_time_ns()
            self.flush_ns += cpu - self._cpu
            self._cpu = cpu
            # A stretch that is open goes on from here.
            self._from = self._t_process = self._t_reading = self._t_depends = self._t_forwarding = now()
            self._waited_before = self._read_before = 0

    def reset(self) -> None:
        """Forget all records; totals and numbering go on."""
        self.flush()
        self.ring.clear()

    def close(self) -> None:
        """Write what is under way, as far as it is known, and hand it on."""
        while self.open:
            self.give_up_oldest()
        self.cut()
        self.settle()
        if self.gpu is not None:
            self.gpu.under_way.clear()
        self.hand_on()

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self.fault()

    def fault(self) -> None:
        """Recording failed: say so once, and let the scheduler go on without."""
        self.faults += 1
        if self.faults == 1:
            logger.exception("zos-sglang: recording failed; steps are not recorded from here on")
        self._armed = False
        self.on_fault()
