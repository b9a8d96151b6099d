"""The `Watch` that records: stamps a step where it happens.

What a step costs here is paid by every step of the server. So a stamp is a store; the thread clock, a system
call, is read every few iterations and its time split between them (`ledger`); and everything else is done for
many steps at a time (`keeper`).
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns as now
from time import thread_time_ns
from typing import Any

from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.observe.ledger import Ledger
from zos_sglang.observe.names import AFTER_IDLE, DELAYED_SAMPLING, DETAIL, LANE_OPENING, PAUSED
from zos_sglang.observe.record import Ring
from zos_sglang.observe.slot import (
    AT_BEGIN,
    AT_LAUNCH,
    EVENT,
    READY,
    T_OUTPUT,
    T_PROCESS,
    T_READY,
    Slot,
)
from zos_sglang.observe.wait import WaitClock

#: What a batch is: rows, tokens, waiting requests, code of the forward mode, flags, codes of the lane's
#: refusal and departure.
Facts = tuple[int, int, int, int, int, int, int]


class Recorder(Ledger):
    """One scheduler's records. All calls come from its thread.

    Args:
        ring: where records go.
        facts: `facts(batch, result, resident)`; not asked for further steps of an open lane.
        gpu: samples device times; None: no device to time.
        asynchronous: whether a launch returns before its result is there.
        on_fault: called when recording fails; is to put something else in this one's place.
    """

    __slots__ = (
        *("facts", "new_event", "mode", "launches", "_reason", "_depth", "_barrier", "_cause", "_blocked"),
        *("_newest", "_processing", "_unknown", "_delayed", "_riding", "_rides", "_cpu_forward_from"),
    )

    def __init__(
        self,
        ring: Ring,
        facts: Callable[[Any, Any, bool], Facts],
        gpu: GpuClock | None = None,
        *,
        asynchronous: bool,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(ring, gpu, asynchronous=asynchronous, on_fault=on_fault)
        self.facts = facts
        #: Makes an event to be recorded behind results that bring none, and that block where they are read;
        #: None: such results stay as they are.
        self.new_event: Callable[[], Any] | None = None
        #: Code of the mode in effect.
        self.mode = 0
        self.launches = 0
        self.restart()

    def restart(self) -> None:
        """Begin in the middle of things: what came before is not adjacent to what follows."""
        self.clear()
        while self.open:
            self.give_up_oldest()
        self._newest: Slot | None = None
        self._processing: Slot | None = None
        #: A launch whose sampling comes later, with its result.
        self._delayed: tuple[Slot, Any] | None = None
        #: Facts of the lane's further steps; whether the launch under way is one.
        self._riding: Facts | None = None
        self._rides = False
        #: Results that are pending from before this watched.
        self._unknown = 0
        self._reason, self._depth, self._blocked, self._cpu_forward_from = "", 0, -1, 0
        self._barrier: Any = None
        self._cause: str | None = None
        self._flags |= AFTER_IDLE
        self.begin()

    # ------------------------------------------------------------ an iteration

    def begin(self) -> None:
        if self._fresh:
            self._fresh = False
            self._cpu = thread_time_ns()
            self._from = now()
        if self.asynchronous:
            self._ask(AT_BEGIN)

    def selecting(self) -> None:
        self._t_select = now()

    def idle(self) -> None:
        self._flags |= AFTER_IDLE
        self.cut()

    def paused(self) -> None:
        self._flags |= PAUSED
        self.cut()

    # ------------------------------------------------------------ a launch

    def launching(self, batch: Any, reason: Any, depth: int, pending: Any) -> None:
        self._reason, self._depth = reason, depth
        self._barrier = self._cause = None
        self._blocked = -1
        # The lane knows what is pending, and does not say.
        self._rides = depth > 0 and pending is None
        self._unknown = 0
        if len(self.open) != depth:
            self._find_pending(depth)
        if depth and self.asynchronous:
            self._ask(AT_LAUNCH)
        if self.gpu is not None:
            try:
                self._armed = self.gpu.arm(self.launches + 1)
            except Exception:
                self.fault()
        self._t_launch = now()

    def _find_pending(self, depth: int) -> None:
        """Results were processed behind our back, or are pending from before we watched."""
        while len(self.open) > depth:
            self.give_up_oldest()
        self._unknown = depth - len(self.open)
        if not self.open:
            self._newest = None

    def forwarding(self) -> None:
        if self._armed:
            self._try(self.gpu.start)  # type: ignore[union-attr]
        if self.detail:
            self._cpu_forward_from = thread_time_ns()
        t = self._t_forwarding = now()
        if not self._t_forward:
            self._t_forward = t

    def forwarded(self) -> None:
        t = self._t_forwarded = now()
        self._forward += t - self._t_forwarding
        if self.detail:
            self._cpu_forward += thread_time_ns() - self._cpu_forward_from

    def reading_back(self) -> None:
        if self._armed:
            self._try(self.gpu.stop)  # type: ignore[union-attr]
        self._t_reading = now()

    def read_back(self) -> None:
        self._reading += now() - self._t_reading
        if self._armed:
            self._try(self.gpu.copied)  # type: ignore[union-attr]

    def barrier(self, kind: Any) -> None:
        self._barrier = kind

    def blocked(self, cause: str, nanoseconds: int) -> None:
        self._cause, self._blocked = cause, nanoseconds
        self._depends += nanoseconds

    def launched(self, batch: Any, result: Any, resident: bool) -> None:
        t = now()
        try:
            facts = self._riding
            if not resident:
                self._riding = None
                facts = self.facts(batch, result, resident)
            elif facts is None or not self._rides:
                facts = self.facts(batch, result, resident)
                # Rows of an open lane stay, and whoever arrives ends it.
                self._riding = (*facts[:4], facts[4] & ~LANE_OPENING, 0, 0)
            rows, tokens, waiting, forward, flags, refusal, departure = facts
            step = self.launches = self.launches + 1
            t_forward = self._t_forward or self._t_launch
            # fmt: off
            slot: Slot = [
                step, self._from, self._t_select or self._t_launch, self._t_launch, t_forward, t, 0, 0, 0,
                0, 0, 0, 0, 0, 0, 0, 0, self._blocked, -1, -1, -1,
                rows, tokens, waiting,
                self.mode, 0, self._reason, self._cause, forward, self._barrier, refusal, departure,
                self._depth, 0, flags | self._flags | (DETAIL if self.detail else 0), 0,
                None, self._newest, resident, self._t_forwarded or t,
            ]
            # fmt: on
            self._flags = 0
            self._newest = self._slot = slot
            self.open.append(slot)
            if self.asynchronous or self._armed:
                self._follow(slot, result, flags)
        except Exception:
            self.fault()

    def _follow(self, slot: Slot, result: Any, flags: int) -> None:
        delayed = flags & DELAYED_SAMPLING
        if delayed:
            self._delayed = slot, result
        elif self.asynchronous:
            self._arm(slot, result)
        if self._armed:
            self._armed = False
            self.gpu.launched(not delayed)  # type: ignore[union-attr]

    def _arm(self, slot: Slot, result: Any) -> None:
        event = result.copy_done
        if event is None:
            if self.new_event is None:
                return
            event = self.new_event()
            event.record()
        slot[EVENT] = event
        result.copy_done = WaitClock(event, self, slot)

    def depending(self) -> None:
        self._t_depends, self._read_before = now(), self._reading

    def depended(self) -> None:
        self._depends += now() - self._t_depends - (self._reading - self._read_before)
        if self._delayed is not None:
            # Only now is there something that the result's event stands for.
            slot, result = self._delayed
            self._delayed = None
            self._try(lambda: self._arm(slot, result))

    # ------------------------------------------------------------ a result

    def processing(self, result: Any) -> None:
        t = self._t_process = now()
        self._waited_before = self.waited
        if self._unknown:
            self._unknown -= 1
        elif self.open:
            # Results are processed in the order of their launches.
            slot = self._processing = self.open.popleft()
            slot[T_PROCESS] = t

    def processed(self) -> None:
        t = now()
        self._process += t - self._t_process - (self.waited - self._waited_before)
        slot = self._processing
        if slot is not None:
            self._processing = None
            slot[T_OUTPUT] = t
            self.processed_slots.append(slot)
            self._last = slot

    def _ask(self, when: int) -> None:
        """Is the newest result there already?"""
        slot = self._newest
        if slot is None or slot[READY] or slot[EVENT] is None:
            return
        try:
            if slot[EVENT].query():
                slot[READY], slot[T_READY] = when, now()
        except Exception:
            self.fault()
