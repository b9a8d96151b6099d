"""The overlapped iteration: launch batch N, then process the result of batch N-1.

One iteration, in this order: intake; select the next batch; decide; if this launch may not overlap,
process the pending result first; launch; write-after-read barrier; queue the snapshot and the
result; process the result before; sample N if its sampling was delayed; idle housekeeping only if
this batch and the last one are both empty. Upstream's counterpart is `Scheduler.event_loop_overlap`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from time import perf_counter_ns as now
from typing import Any

from zos_sglang.overlap.account import Account
from zos_sglang.overlap.guards import DUE_MARK, EARLY_FIRST_TOKEN, GUARD_FAILED, OverlapDecision, Reason
from zos_sglang.overlap.launch import Launcher
from zos_sglang.overlap.protocols import Batch, Decisions, Lane, SchedulerPort
from zos_sglang.overlap.result_queue import ResultQueue
from zos_sglang.overlap.streams import Barrier
from zos_sglang.overlap.timed_event import TimedEvent
from zos_sglang.overlap.watch import (
    AS_BEFORE,
    ASKS,
    FURTHER,
    LAUNCH,
    LAUNCHED,
    OFF,
    OPENING,
    OUTSIDE,
    PROCESS,
    PROCESSED,
    SELECT,
    STEP,
    Watch,
)

#: Looking a member up costs a call, once a step.
_OVERLAPPED = Reason.OVERLAPPED


def copied(batch: Any) -> Any:
    """Upstream's own copy of a batch, with the mark of the ranks' exchange, which belongs to the launch."""
    new = batch.copy()
    if hasattr(batch, DUE_MARK):
        setattr(new, DUE_MARK, getattr(batch, DUE_MARK))
    return new


class Ended(Enum):
    """Why `EventLoop.run` returned."""

    EXIT = "exit"
    SWITCH = "switch"


class EventLoop:
    """Owns the result queue and the order of an iteration.

    Args:
        port: the host's side of an iteration.
        launcher: one launch.
        queue: results in flight; upstream code sees it as `scheduler.result_queue`.
        decide: the guards, see `guards.make_guard`.
        account: counts.
        snapshot: `batch.copy()`, or something cheaper that returns the same.
        lane: the resident lane, which takes over the steps of a stable decode batch; None without one.
        sync: mode `sync`: wait for each result, right after intake, before the next selection.
        late_barrier: a coarse write-after-read barrier waits until the result before is processed. For loops
            whose processing reads the device itself and writes nothing that the new forward reads: with
            the barrier before it, that read would wait for the whole forward.
        early: `early(batch, pending, result)`: a launch that would overlap comes after this result all the
            same, which is there already (`guards.first_token_is_there`); None: it does not.
    """

    def __init__(
        self,
        port: SchedulerPort,
        launcher: Launcher,
        queue: ResultQueue,
        decide: Callable[[Batch, Any], OverlapDecision],
        account: Account,
        *,
        snapshot: Callable[[Any], Any] = copied,
        lane: Lane | None = None,
        sync: bool = False,
        late_barrier: bool = False,
        early: Callable[[Batch, Batch, Any], bool] | None = None,
    ) -> None:
        self.port = port
        self.launcher = launcher
        self.queue = queue
        self.decide = decide
        self.account = account
        self.snapshot = snapshot
        self.lane = lane
        self.sync = sync
        self.late_barrier = late_barrier
        self.early = early
        self._barrier_owed = False
        self.switch_requested = False
        #: Told of every step.
        self.watch: Watch = OFF
        #: Logs decisions where ranks are compared; None otherwise.
        self.ranks: Decisions | None = None
        #: What the loop is doing, for the stall detector; `beat` grows with every iteration.
        self.phase = "start"
        self.beat = 0
        self.launches = 0

    def run(self, skip_intake: bool = False) -> Ended:
        """Iterate until the server exits or the mode is to change.

        On `SWITCH` nothing is in flight: every launched result is processed. The intake of that iteration
        has happened; the mode that follows begins with its selection (`skip_intake`).
        """
        port, lane = self.port, self.lane
        self.watch.begin()
        while not port.exiting():
            if lane is not None and lane.is_open:
                if self._ride(lane):
                    self.beat += 1
                    continue
            elif not skip_intake:
                self.phase = "intake"
                port.intake()
            skip_intake = False
            if port.paused():
                self.phase = "paused"
                self.watch.paused()
                if self.ranks is not None:
                    self.ranks.resting("paused")
                port.note_paused()
                self.watch.begin()
            else:
                # Between intakes a last batch always has its result in the queue, also in mode `sync`:
                # upstream's pause takes it from there.
                if self.sync or self.switch_requested:
                    self.process_down_to(0)
                if self.switch_requested:
                    self.watch.end()
                    return Ended.SWITCH
                port.last_batch = self.step(port.last_batch)
                if lane is not None:
                    lane.settle()
                port.end_of_step()
                self.watch.end()
            self.beat += 1
        if lane is not None:
            lane.shut()
        return Ended.EXIT

    def _ride(self, lane: Lane) -> bool:
        """One iteration inside the lane: intake, launch, process. False: it closed, its intake is done."""
        self.phase = "lane"
        batch = lane.batch
        result = lane.ride()
        if result is None:
            return False
        self.launches += 1
        self.account.decided(self.launches, _OVERLAPPED)
        self._queue(batch, result, FURTHER, _OVERLAPPED)
        self.process_down_to(1)
        if lane.unsampled is not None:
            self.phase = "sample"
            lane.sample()
        lane.settle()
        self.port.end_of_step()
        self.watch.end()
        return True

    def step(self, last: Batch | None) -> Batch | None:
        """Select, decide, launch, process. Returns the batch that is now in flight, or None."""
        port = self.port
        self.phase = "select"
        watch = self.watch
        stamps = watch.stamps
        if stamps is not None:
            stamps[SELECT] = now()
        batch: Batch | None = port.select()
        if batch is None:
            port.note_no_batch()
            if self.ranks is not None:
                self.ranks.resting("idle")
            self.process_down_to(0)
            watch.idle()
            if last is None:
                self.phase = "idle"
                port.idle()
            port.settled()
        else:
            decision = self._decide(batch)
            if self.ranks is not None:
                self.ranks.launching(batch, "launch", decision.reason, 0)
            if not decision.overlap:
                self.process_down_to(0)
                port.between()
            if stamps is not None:
                if stamps[ASKS]:
                    watch.launching()
                stamps[LAUNCH] = now()
            result = self._launch(batch, decision.reason)
            self.process_down_to(1)
            port.settled()
            if self._barrier_owed:
                self._barrier_owed = False
                self.launcher.streams.schedule_waits_for_forward()
            self.phase = "sample"
            if self.lane is not None and self.lane.unsampled is not None:
                self.lane.sample()
            else:
                self.launcher.sample_delayed(batch, result)
        return batch

    def process_down_to(self, left: int) -> None:
        """Process the oldest results until `left` are in flight."""
        while len(self.queue) > left:
            self.phase = "process"
            batch, result = self.queue.popleft()
            stamps = self.watch.stamps
            if stamps is not None:
                if stamps[PROCESS]:
                    self.watch.again()
                stamps[PROCESS] = now()
            self.port.process(batch, result)
            if stamps is not None:
                stamps[PROCESSED] = now()
            if self.ranks is not None:
                self.ranks.processed(result)

    def _decide(self, batch: Batch) -> OverlapDecision:
        pending = self.queue[0][0] if self.queue else None
        try:
            decision = self.decide(batch, pending)
            early = self.early
            if early is not None and self.queue and decision.overlap and early(batch, *self.queue[0]):
                decision = EARLY_FIRST_TOKEN
        except Exception:
            # Not to overlap is right, if slower: the grammar guard protects answers.
            self.account.fell_back("guard", "such launches do not overlap")
            decision = GUARD_FAILED
        self.launches += 1
        self.account.decided(self.launches, decision.reason)
        return decision

    def _launch(self, batch: Batch, reason: Reason) -> Any:
        self.phase = "launch"
        result = None
        if self.lane is not None:
            result = self.lane.enter(batch, self.queue[0][0] if self.queue else None)
        if result is not None:
            self._queue(batch, result, OPENING, reason)
        else:
            launcher = self.launcher
            result = launcher.launch(batch)
            try:
                read_done = launcher.device.take_read_done()
                barrier = launcher.streams.war_barrier(read_done, defer_coarse=self.late_barrier)
            except Exception:
                self.account.fell_back("barrier", "that launch waits for all of the forward")
                launcher.streams.schedule_waits_for_forward()
                barrier = Barrier.OFF
            self._barrier_owed = self.late_barrier and barrier is Barrier.COARSE
            self.account.passed(barrier.value)
            self._queue(batch, result, OUTSIDE, reason, barrier)
        return result

    def _queue(self, batch: Batch, result: Any, ride: int, reason: Reason, barrier: Any = None) -> None:
        watch = self.watch
        stamps = watch.stamps
        if stamps is not None:
            said = None
            # All that tells one decode step of this loop from another; a lane has more to say.
            if reason is _OVERLAPPED and self.lane is None and not self.launcher.delayed:
                said = batch.forward_mode, len(batch.reqs), self.port.waiting, barrier
            if watch.riding if ride == FURTHER else said is not None and said == watch.said:
                if not stamps[LAUNCHED]:
                    stamps[LAUNCHED] = now()
                stamps[STEP], watch.newest = AS_BEFORE, result.copy_done
            else:
                watch.launched(batch, result, ride, reason, len(self.queue), barrier, said)
            # The lane's results are waited for by what processes them.
            if ride == OUTSIDE and watch.asynchronous and result.copy_done is not None:
                timed = TimedEvent()
                timed.event, timed.of = result.copy_done, self
                result.copy_done = timed
        self.account.launched(batch)
        try:
            snapshot = self.snapshot(batch)
        except Exception:
            self.account.fell_back("snapshot", "upstream's own copy of a batch is made")
            self.snapshot = copied
            snapshot = copied(batch)
        self.queue.append((snapshot, result))
