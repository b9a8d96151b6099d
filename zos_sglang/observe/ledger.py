"""Iterations and the thread clock, and when records are made: what a recorder does at a step's edges."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter_ns as now
from time import thread_time_ns
from typing import Any

from zos_sglang.observe import tape
from zos_sglang.observe.complete import AT_BEGIN, AT_LAUNCH
from zos_sglang.observe.complete import WAITED as READY_WAITED
from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.observe.keeper import SETTLED, Keeper
from zos_sglang.observe.record import Ring
from zos_sglang.observe.split import wall_of
from zos_sglang.observe.tape import (
    BEGIN,
    BY_CLOCK,
    END,
    EXCLUDED,
    NOBODYS,
    PROCESS_NS,
    READY,
    RESULT,
    SAMPLED,
    T_READY,
)
from zos_sglang.overlap.watch import AS_BEFORE, ASKS, PROCESS, PROCESSED, STEP, WAIT_FROM, WAIT_TO

logger = logging.getLogger(__name__)

#: Iterations between two readings of the thread clock.
CLOCKED = 16


class Ledger(Keeper):
    """Iterations, the thread clock, and faults.

    Args:
        ring, gpu, asynchronous: see `Keeper`.
        on_fault: called when recording fails; is to put something else in this one's place.
    """

    __slots__ = (
        *("on_fault", "stopped", "after", "clocked", "_flags", "_fresh", "_cpu", "_stop"),
        *("riding", "said", "newest", "_armed", "_unknown", "_waits", "_sees", "_every"),
    )

    def __init__(
        self, ring: Ring, gpu: GpuClock | None, *, asynchronous: bool, on_fault: Callable[[], None]
    ) -> None:
        super().__init__(ring, gpu, asynchronous)
        self.on_fault = on_fault
        #: Whether recording has failed and was said to have.
        self.stopped = False
        #: Called at the end of every iteration.
        self.after: Callable[[], None] | None = None
        #: `detail`, for those who look at every step: a property is a call.
        self.clocked = False
        self._flags = 0
        #: Steps from one sample of the device's time to the next.
        self._every = gpu.every if gpu is not None else 0
        self.clear()

    def clear(self) -> None:
        """Nothing was stamped yet; what has no reading of the clock never gets one."""
        if self.rows > self._read:
            self.readings.append((self.rows, 0))
        self._table[self.rows] = self._blank
        self._armed = False
        self.riding = False
        self.said: Any = None
        #: Says whether the newest result is there; None: it is, or nothing is pending.
        self.newest: Any = None
        #: Results that are pending from before this watched.
        self._unknown = 0
        #: The last result was waited for: the device is the slower one, and asking it early finds nothing.
        self._waits = False
        #: The last result was there when an iteration began.
        self._sees = True
        self._cpu = 0
        self._next_reading()
        self._fresh = True

    @property
    def interrupted(self) -> bool:
        """Whether the server was idle or paused since the last launch."""
        return self._flags != 0

    @property
    def detail(self) -> bool:
        """Whether the thread clock is read at every iteration, and at the edges of forwards and waits."""
        return self.clocked

    @detail.setter
    def detail(self, on: bool) -> None:
        if on == self.clocked:
            return
        # An iteration whose forward was clocked has a reading of its own.
        if not self._fresh:
            self._read_clock_within()
        self.clocked = on
        self._next_reading()
        self._blank[SAMPLED] = BY_CLOCK * on
        sampled = self._table[self.rows :, SAMPLED]
        sampled[:] = sampled & ~BY_CLOCK | BY_CLOCK * on

    # ------------------------------------------------------------ an iteration

    def begin(self) -> None:
        if self._fresh:
            self._fresh = False
            self._cpu = thread_time_ns()
            self.stamps[BEGIN] = now()

    def end(self) -> None:
        t = now()
        if self._fresh:
            self.begin()
        else:
            # As `end_iteration`; a call costs as much again.
            stamps = self.stamps
            if stamps[STEP] == AS_BEFORE:
                # The step before was pending, and has been processed.
                stamps[RESULT] = launches = self.launches
                self.launches = stamps[STEP] = launches + 1
            elif stamps[PROCESS] and not stamps[RESULT]:
                self.find_result()
            # How the result was waited for.
            if stamps[PROCESS]:
                ready = stamps[READY]
                self._sees = ready == AT_BEGIN
                waited = stamps[WAIT_TO] - stamps[WAIT_FROM]
                self._waits = ready == READY_WAITED or (not ready and waited >= tape.LEAST_NS)
            stamps[END] = t
            self.rows = rows = self.rows + 1
            stamps = self.stamps = self._stamps[rows]
            stamps[BEGIN] = t
            if rows >= self._stop:
                self._read_clock()
        if self.rows >= self._full or t >= self.due_at:
            self.settle_now()
        if self.asynchronous:
            every = self._every
            due = every != 0 and (self.launches + 1) % every <= 1
            # What is known by now is not asked for again at the launch; and what was not there the last time
            # is asked for now and then only.
            known = self._waits
            if not known and (self._sees or not self.rows % CLOCKED):
                # The answer goes into the row of the iteration that begins, in which the result is processed.
                newest, stamps = self.newest, self.stamps
                try:
                    known = newest is None or newest.query()
                    if known and newest is not None:
                        stamps[READY], stamps[T_READY] = AT_BEGIN, now()
                except Exception:
                    self.fault()
            self.stamps[ASKS] = due or not known
        if self.after is not None:
            self.after()

    def end_iteration(self, t: int) -> None:
        stamps = self.stamps
        if stamps[STEP] == AS_BEFORE:
            if stamps[PROCESSED]:
                stamps[RESULT] = self.launches
            else:  # cut short: the result before is still pending
                self.open += 1
            self.launches = stamps[STEP] = self.launches + 1
        elif stamps[PROCESS] and not stamps[RESULT]:
            self.find_result()
        stamps[END] = t
        self.rows += 1
        self.stamps = self._stamps[self.rows]
        self.stamps[BEGIN] = t

    def find_result(self) -> None:
        """Whose result it was that was processed: results are processed in the order of their launches."""
        stamps = self.stamps
        if self._unknown or not self.open:
            self._unknown = max(self._unknown - 1, 0)
            stamps[RESULT] = NOBODYS
            return
        stamps[RESULT] = self.launches - self.open + 1
        self.open -= 1
        if not self.open:
            self.newest = None

    def cut(self) -> None:
        """Whatever the thread does until the next begin belongs to no step."""
        if self._fresh:
            return
        self.end_iteration(now())
        self._read_clock()
        self._fresh = True
        if self._full < SETTLED or self.rows >= SETTLED:
            self.settle_now(all_of_it=True)  # somebody wants records soon

    # ------------------------------------------------------------ the thread clock

    @property
    def _read(self) -> int:
        """Number of the first row that has no reading of the clock."""
        return self.readings[-1][0] if self.readings else self._first

    def _read_clock(self) -> None:
        cpu = thread_time_ns()
        self.readings.append((self.rows, cpu - self._cpu))
        self._cpu = cpu
        self._next_reading()

    def _next_reading(self) -> None:
        """When the clock is to be read again, by number of rows."""
        self._stop = self.rows + (0 if self.clocked else CLOCKED)

    def _read_clock_within(self) -> None:
        """Give the iterations that have ended their part; the one under way keeps its own, by wall time."""
        rows = self._table[self._read : self.rows]
        if not len(rows):
            return
        ended = int(wall_of(rows).sum())
        under_way = now() - self.stamps[BEGIN] - self.stamps[EXCLUDED]
        burnt = thread_time_ns() - self._cpu
        part = burnt * ended // (ended + under_way) if ended else 0
        self.readings.append((self.rows, part))
        self._cpu += part
        self._next_reading()

    # ------------------------------------------------------------ records

    def settle_now(self, *, all_of_it: bool = False) -> None:
        """Make records of the rows that have ended. Between iterations; what it takes is nobody's step."""
        try:
            try:
                if self._read < self.rows:
                    self._read_clock()
                self.settle()
            finally:
                self.rewind()
            if all_of_it or self.is_due(now()):
                self.hand_on()
        except Exception:
            self.fault()
        cpu = thread_time_ns()
        # The reading was taken before; a step of a loop that goes on is not charged with this.
        self.flush_ns += cpu - self._cpu
        self._cpu, self.stamps[BEGIN] = cpu, now()
        self._next_reading()

    def flush(self) -> None:
        """Hand on all that is complete. At any time, also within an iteration, which then goes on."""
        begun, cpu = now(), thread_time_ns()
        if not self._fresh:
            self._read_clock_within()
        self.settle()
        self.hand_on()
        if not self._fresh:
            took = thread_time_ns() - cpu
            self.flush_ns += took
            self._cpu += took
            stamps, wall = self.stamps, now() - begun
            stamps[EXCLUDED] += wall
            if stamps[PROCESS] and not stamps[PROCESSED]:
                stamps[PROCESS_NS] -= wall
        self._next_reading()

    def reset(self) -> None:
        """Forget all records; totals and numbering go on."""
        self.flush()
        self.ring.clear()

    def close(self) -> None:
        """Write what is under way, as far as it is known, and hand it on."""
        self.cut()
        while self.open:
            self.give_up_oldest()
        self.settle()
        if self.gpu is not None:
            self.gpu.under_way.clear()
        self.hand_on()

    def _ask_at_launch(self) -> None:
        """Is the newest result there already, if it was neither seen there before nor processed?"""
        newest, stamps = self.newest, self.stamps
        if newest is None or stamps[READY] or stamps[PROCESS]:
            return
        try:
            if newest.query():
                stamps[READY], stamps[T_READY] = AT_LAUNCH, now()
        except Exception:
            self.fault()

    def fault(self) -> None:
        """Recording failed: say so once, and let the scheduler go on without."""
        self.faults += 1
        if not self.stopped:
            self.stopped = True
            logger.exception("zos-sglang: recording failed; steps are not recorded from here on")
        self._armed = self.riding = False
        self.on_fault()
