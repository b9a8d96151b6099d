"""The `Watch` that records: takes down what happened where it happens.

What a step costs here is paid by every step of the server. So a stamp is a store into the row of the
iteration (`tape`), made by the loop itself; the thread clock, a system call, is read every few iterations
and its time split between them (`ledger`); and everything else is done for many steps at a time (`keeper`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from time import perf_counter_ns as now
from time import thread_time_ns
from typing import Any

from zos_sglang.observe import tape
from zos_sglang.observe.complete import AT_PROCESS
from zos_sglang.observe.complete import WAITED as READY_WAITED
from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.observe.ledger import Ledger
from zos_sglang.observe.names import (
    AFTER_IDLE,
    CODES,
    DELAYED_SAMPLING,
    LANE_OPENING,
    PAUSED,
    Forward,
    code,
)
from zos_sglang.observe.record import Ring
from zos_sglang.observe.tape import (
    BLOCKED,
    BY_EVENTS,
    CAUSE,
    CPU_FORWARD,
    CPU_WAITED,
    DEPENDS_NS,
    FLAGS,
    KIND,
    PROCESS_NS,
    READY,
    RESULT,
    ROWS,
    T_READY,
    WAIT,
    WAITED,
    WAITED_THERE,
    count_waits,
)
from zos_sglang.overlap.watch import (
    FURTHER,
    LAUNCHED,
    OUTSIDE,
    PROCESS,
    PROCESSED,
    READING_NS,
    SAMPLED,
    STEP,
    WAIT_FROM,
    WAIT_TO,
)

#: What a batch is: rows, tokens, waiting requests, code of the forward mode, flags, codes of the lane's
#: refusal and departure.
Facts = tuple[int, int, int, int, int, int, int]
#: What is the same for most launches: facts (None: not known yet), ride, reason, depth, barrier, mode.
Launch = tuple[Facts | None, int, Any, int, Any, int]

_REASONS = CODES["reason"]
_BARRIERS: dict[Any, int] = {None: 0, **CODES["barrier"]}
_CAUSES = CODES["block"]
_DECODE = code("forward", Forward.DECODE)


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
        *("facts", "new_event", "mode", "_delayed", "_riding", "_launch", "_described", "_cpu_from"),
        *("_t_depends", "_read_before"),
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
        self.restart()

    def restart(self) -> None:
        """Begin in the middle of things: what came before is not adjacent to what follows."""
        self.clear()
        while self.open:
            self.give_up_oldest()
        #: The result of a launch whose sampling comes later.
        self._delayed: Any = None
        #: Facts of the lane's further steps.
        self._riding: Facts | None = None
        #: The last launch, and its part of a row.
        self._launch: Launch | None = None
        self._described: array[int] = array("q")
        self._cpu_from = self._t_depends = self._read_before = 0
        self._flags |= AFTER_IDLE
        self.begin()

    # ------------------------------------------------------------ an iteration

    def idle(self) -> None:
        self._flags |= AFTER_IDLE
        self.said = None
        self.cut()

    def paused(self) -> None:
        self._flags |= PAUSED
        self.said = None
        self.cut()

    # ------------------------------------------------------------ a launch

    def launching(self) -> None:
        self._ask_at_launch()
        step = self.launches + 1
        if self.gpu is not None and step % (self._every or 1) <= 1:
            try:
                if self.gpu.arm(step):
                    self._armed = True
                    self.riding, self.said = False, None  # the sample is to be told of its launch
                    self.stamps[SAMPLED] |= BY_EVENTS
            except Exception:
                self.fault()

    def forwarding(self) -> None:
        if self._armed:
            self._try(self.gpu.start)  # type: ignore[union-attr]
        if self.clocked:
            self._cpu_from = thread_time_ns()

    def forwarded(self) -> None:
        if self.clocked:
            self.stamps[CPU_FORWARD] += thread_time_ns() - self._cpu_from

    def reading_back(self) -> None:
        if self._armed:
            self._try(self.gpu.stop)  # type: ignore[union-attr]

    def read_back(self) -> None:
        if self._armed:
            self._try(self.gpu.copied)  # type: ignore[union-attr]

    def blocked(self, cause: str, nanoseconds: int) -> None:
        stamps = self.stamps
        stamps[CAUSE], stamps[BLOCKED] = _CAUSES[cause], nanoseconds
        stamps[DEPENDS_NS] += nanoseconds

    def launched(  # noqa: PLR0917  (named arguments cost more)
        self,
        batch: Any,
        result: Any,
        ride: int,
        reason: Any,
        depth: int,
        barrier: Any = None,
        said: Any = None,
    ) -> None:
        stamps = self.stamps
        if not stamps[LAUNCHED]:
            stamps[LAUNCHED] = now()
        try:
            if stamps[PROCESS] or self._unknown or self.open != depth:
                self._find_pending(depth)
            facts = self._riding if ride == FURTHER else self.facts(batch, result, ride != OUTSIDE)
            # Most launches are like the one before.
            launch = (facts, ride, reason, depth, barrier, self.mode)
            if launch != self._launch:
                self._describe(launch, batch, result)
            stamps[ROWS : FLAGS + 1] = self._described
            if self._flags:
                stamps[FLAGS] |= self._flags
                self._flags = 0
            stamps[STEP] = self.launches = self.launches + 1
            self.open += 1
            delayed = stamps[FLAGS] & DELAYED_SAMPLING
            # The next one may be silent where what is pending then is this one's result, and no other.
            alone = not (delayed or self._unknown)
            self.riding = alone and ride == FURTHER
            self.said = said if alone and stamps[KIND] == _DECODE else None
            if not self.asynchronous:
                return
            if delayed:
                self._delayed, self.newest = result, None
            else:
                if self.new_event is not None and result.copy_done is None:
                    result.copy_done = self.new_event()
                    result.copy_done.record()
                self.newest = result.copy_done
            if self._armed:
                self._armed = False
                self.gpu.launched(not delayed)  # type: ignore[union-attr]
        except Exception:
            self.fault()

    def _describe(self, launch: Launch, batch: Any, result: Any) -> None:
        facts, ride, reason, depth, barrier, mode = launch
        if facts is None:  # the lane opened before this watched, or some of its rows have gone
            facts = self.facts(batch, result, True)
            facts = (*facts[:4], facts[4] & ~LANE_OPENING, *facts[5:])
            launch = (None, ride, reason, depth, barrier, mode)
        rows, tokens, waiting, kind, flags, refusal, departure = facts
        words = _REASONS[reason], kind, _BARRIERS[barrier], refusal, departure
        self._described = array("q", (rows, tokens, waiting, mode, ride, *words, depth, flags))
        self._launch = launch
        # Rows of an open lane stay until `rows_left` says otherwise, and whoever arrives ends it.
        self._riding = None if ride == OUTSIDE else (*facts[:4], flags & ~LANE_OPENING, 0, 0)

    def rows_left(self) -> None:
        self._riding = self._launch = None
        self.riding = False

    def _find_pending(self, depth: int) -> None:
        """Results may have been processed behind our back, or be pending from before we watched."""
        if self.stamps[PROCESS] and not self.stamps[RESULT]:
            self.find_result()
        while self.open > depth:
            self.give_up_oldest()
        self._unknown = depth - self.open

    def depending(self) -> None:
        self._t_depends, self._read_before = now(), self.stamps[READING_NS]

    def depended(self) -> None:
        stamps = self.stamps
        stamps[DEPENDS_NS] += now() - self._t_depends - (stamps[READING_NS] - self._read_before)
        if self._delayed is not None:
            # Only now is there something that the result's event stands for.
            self.newest, self._delayed = self._delayed.copy_done, None

    def waiting(self, event: Any) -> None:
        stamps = self.stamps
        cpu = thread_time_ns() if self.clocked else 0
        begun = now()
        event.synchronize()
        ended = now()
        if self.clocked:
            stamps[CPU_WAITED] += thread_time_ns() - cpu
        if stamps[PROCESS] and not stamps[WAIT_TO]:
            stamps[WAIT_FROM], stamps[WAIT_TO] = begun, ended
            return
        # In the launch, for a result that is processed behind it; or once more.
        took = ended - begun
        stamps[WAITED] += took
        stamps[WAIT] += took
        if stamps[PROCESS] and not stamps[PROCESSED]:
            stamps[WAITED_THERE] += took
        if not stamps[READY]:
            stamps[READY] = READY_WAITED if took >= tape.LEAST_NS else AT_PROCESS
            stamps[T_READY] = ended

    # ------------------------------------------------------------ a result

    def again(self) -> None:
        """One more result is about to be processed in this iteration."""
        stamps = self.stamps
        if not stamps[RESULT]:
            self.find_result()
        took = stamps[PROCESSED] - stamps[PROCESS]
        count_waits(self._table[self.rows][None], READY_WAITED, AT_PROCESS)
        self.more_results.append(self._table[self.rows].copy())
        for place in (PROCESS, PROCESSED, RESULT, READY, T_READY, WAIT, WAIT_FROM, WAIT_TO):
            stamps[place] = 0
        stamps[PROCESS_NS] += took

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self.fault()
