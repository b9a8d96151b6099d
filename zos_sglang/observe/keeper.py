"""Keeps records and hands complete ones on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns as now

import numpy as np

from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.observe.record import Ring
from zos_sglang.observe.slot import FIELDS, STEP_NUMBER, Slot, complete, give_up
from zos_sglang.observe.split import Iteration, charge
from zos_sglang.observe.totals import Totals

#: Records are handed on when so many wait; where somebody takes them, also when so much time has passed (ns).
DUE, DUE_NS, NEVER_NS = 1024, 1_000_000_000, 1 << 62
#: Iterations between two looks at what was stamped. Python that runs once a step finds the processor's
#: caches filled by the model, and takes five times as long as in a row.
SETTLED = 64


class Keeper:
    """Makes records of what was stamped, now and then, and hands them on.

    Args:
        ring: where records go.
        gpu: completes records later; None: nobody does.
        asynchronous: whether a launch returns before its result is there.
    """

    __slots__ = (
        *("ring", "gpu", "asynchronous", "totals", "sinks", "due", "due_at", "flush_ns"),
        *("open", "processed_slots", "iterations", "readings", "_flushed", "_unflushed"),
    )

    def __init__(self, ring: Ring, gpu: GpuClock | None, asynchronous: bool) -> None:
        self.ring, self.gpu, self.asynchronous = ring, gpu, asynchronous
        self.totals = Totals()
        #: Take complete records of dtype `STEP`, in order, each one once; once a second also none.
        self.sinks: list[Callable[[np.ndarray], None]] = []
        self.due = DUE
        self.due_at = 0
        #: Thread CPU spent on settling and handing on, ns.
        self.flush_ns = 0
        #: Launched, not processed; and processed, not written.
        self.open: deque[Slot] = deque()
        self.processed_slots: list[Slot] = []
        #: Ended, not charged; and what the thread burnt until the end of so many of them.
        self.iterations: list[Iteration] = []
        self.readings: list[tuple[int, int]] = []
        self._flushed = self._unflushed = 0

    def settle(self) -> None:
        """Write what is complete. The last iteration has its reading of the thread clock."""
        begin, done = 0, self.processed_slots
        try:
            for end, cpu in self.readings:
                charge(self.iterations[begin:end], cpu, self.asynchronous)
                begin = end
            for slot in done:
                complete(slot, self.asynchronous)
                self.ring.write(slot[:FIELDS])
            self._unflushed += len(done)
        finally:
            # What cannot be recorded once cannot be recorded later either.
            self.iterations.clear()
            self.readings.clear()
            done.clear()
        if self.gpu is not None and self.gpu.under_way:
            self.gpu.collect(self.ring)

    def is_due(self, t: int) -> bool:
        """Whether records are to be handed on at time `t`."""
        return self._unflushed >= self.due or t >= self.due_at

    def give_up_oldest(self) -> None:
        """The oldest open launch was processed by somebody else, or never will be."""
        slot = self.open.popleft()
        give_up(slot)
        self.processed_slots.append(slot)

    def hand_on(self) -> None:
        """Hand complete records on, up to the first incomplete one: nobody sees them out of order."""
        records = self.ring.since(self._flushed)
        limits = [slot[STEP_NUMBER] for slot in self.open]
        if self.gpu is not None and (oldest := self.gpu.oldest()) is not None:
            limits.append(oldest)
        if limits:
            records = records[records["step"] < min(limits)]
        if len(records):
            self._flushed = int(records["step"][-1])
            self.totals.add(records)
        self._unflushed = 0
        self.due_at = now() + (DUE_NS if self.sinks else NEVER_NS)
        for sink in self.sinks:
            sink(records)
