"""The lane's state machine: closed, or open on one batch.

    enter     upstream selected the running decode batch and prepared a step: it is the lane's first
    ride      intake, one more step; or it closes, because something arrived or no slots can be had
    sample    after a result was processed: samples the step just launched, if its sampling waited for that
    settle    after a row ended or reached its length limit: closes if the rest cannot ride on, else the row
              goes with the next ride; closes after a fault

Rows that go leave the batch as upstream's filter leaves it, and the executor moves the rest together. Their
last step may still be under way: its result knows its own rows. The lane closes instead if somebody waits,
who may take their place.

Closing gives back what was reserved and leaves the batch as the ordinary loop would have left it, with at
most one result under way. The next selection then sees exactly stock's state, and the lane may open on its
outcome: rows come and go between two steps, and no decode step is spent outside.

What a row with a grammar may sample depends on its last token, which the host has to see first. With such a
row a step is launched in two parts: the model, and after the result before has been processed, while the
device works on the model, the masks and the sampling. The device waits only if the host takes longer than the
model does.

Every decision depends on what all ranks of a tensor-parallel group know alike: requests received (broadcast
by upstream), counts of steps, requests' states and the pool's free slots. No clock, no event query, no race
decides. Only a fault of ours may befall one rank alone: its lane is closed then, and its ordinary path runs
the steps that the others' lanes run. ZOS_CHECK_RANKS compares all of this between ranks.
"""

from __future__ import annotations

import logging
from time import perf_counter_ns as now
from typing import Any

from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.protocols import Decisions
from zos_sglang.overlap.row_ledger import RowLedgerError
from zos_sglang.overlap.watch import ASKS, FORWARD, LAUNCH, LAUNCHED, OFF, READING_NS, SAMPLED, Watch
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Departure, Refusal
from zos_sglang.resident.executor import Executor
from zos_sglang.resident.port import LanePort
from zos_sglang.resident.readback import Readback
from zos_sglang.resident.rows import RowTable
from zos_sglang.resident.window import Window

logger = logging.getLogger(__name__)


class Lane:
    """Owns the open batch, its window, and the count of steps since it opened.

    Args:
        port: scheduler and device.
        executor: runs the steps.
        readback: brings tokens home.
        account: counts.
        window: steps whose KV slots are reserved at a time.
    """

    def __init__(
        self, port: LanePort, executor: Executor, readback: Readback, account: LaneAccount, *, window: int
    ) -> None:
        self.port = port
        self.executor = executor
        self.readback = readback
        self.account = account
        self.window_steps = window
        #: Told of every step.
        self.watch: Watch = OFF
        #: Logs decisions where ranks are compared; None otherwise.
        self.ranks: Decisions | None = None
        self.batch: Any = None
        self.table: RowTable | None = None
        #: The rows as they were in the step under way, when some have just gone, and which of them have.
        self._before: RowTable | None = None
        self._gone: frozenset[int] = frozenset()
        self.window: Window | None = None
        #: Steps launched since the lane opened; the first one was prepared by upstream.
        self.launched = 0
        #: Replays of the bare model step to time at the next opening.
        self.floor_replays = 0
        #: Whether a step that failed may run again on the ordinary path. Not where other ranks run the same
        #: step: its collectives would not meet theirs. It then fails as stock's step does.
        self.may_repeat = True
        #: The result of the step whose sampling is to come.
        self.unsampled: Any = None
        self._row_ended = False
        #: The rows that have a further step, if the others go before it.
        self._staying: list[int] | None = None
        self._unseen = False
        self._broken = False
        self._stepping = False

    @property
    def is_open(self) -> bool:
        return self.batch is not None

    # ------------------------------------------------------------ enter

    def enter(self, batch: Any, pending: Any) -> Any:
        """Open on `batch` and launch its prepared step; returns its result, or None if it may not ride."""
        try:
            refusal = self._refuses(batch)
            table = self.port.table(batch, pending) if refusal is None else None
        except Exception:
            self._break("judge", "could not judge a batch")
            refusal, table = Refusal.CLOSED_FOR_GOOD, None
        if table is not None:
            return self._open(batch, table, pending)
        if refusal is not None and refusal is not Refusal.NOT_DECODE:
            self.account.refused[refusal] += 1
            self.account.refusal = self.account.last_refusal = refusal
            self.account.decode_steps += 1
        return None

    def _open(self, batch: Any, table: RowTable, pending: Any) -> Any:
        port = self.port
        self._stepping = False
        try:
            port.count_launch(batch)
            with port.forward_context():
                port.forward_waits_for_schedule()
                port.resolve_inputs(batch)
                self.executor.open(batch)
                self._stepping = True
                if self.floor_replays:
                    self._time_floor(batch)
                self._queue_step(table)
        except RowLedgerError:
            raise  # debug mode found a wrong input; another launch would run on it
        except Exception:
            if self._stepping and not self.may_repeat:
                raise
            self._break("advance" if self._stepping else "open", "could not open")
            port.uncount_launch(batch)
            self.executor.close()
            self.account.decode_steps += 1
            return None
        self.batch, self.table, self.window, self._before = batch, table, None, None
        self.launched = 0
        self._row_ended, self._staying = False, None
        # The pending result may end rows and move pages; it is processed right after this launch.
        self._unseen = pending is not None
        if self._unseen:
            port.schedule_waits_for_forward()
        batch.input_ids = None
        self.account.opened += 1
        return self._launched()

    def _refuses(self, batch: Any) -> Refusal | None:
        refusal = self.port.refuses(batch)
        if self._broken and refusal is not Refusal.NOT_DECODE:
            return Refusal.CLOSED_FOR_GOOD
        return refusal or self.executor.refuses(batch)

    def _time_floor(self, batch: Any) -> None:
        replays, self.floor_replays = self.floor_replays, 0
        microseconds = self.executor.floor_us(replays)
        lengths = batch.seq_lens_cpu
        self.account.floors.append(
            {"batch": len(lengths), "mean_len": float(lengths.double().mean()), "us": microseconds}
        )

    # ------------------------------------------------------------ ride

    def ride(self) -> Any:
        """One iteration's intake and launch; returns the step's result.

        None: the lane has closed; the intake of this iteration is done.
        """
        port = self.port
        if port.receive():
            # Whatever arrived must find the ordinary state: it may read or change anything.
            self.close(Departure.INTAKE)
            port.dispatch()
            return None
        port.dispatch()
        if self._staying is not None and not self._let_rows_go(self._staying):
            return None
        try:
            room = self._has_slots()
        except Exception:
            self._break("reservation", "could not reserve slots")
            self.close(Departure.FAULT)
            return None
        if not room:
            self.close(Departure.POOL_FULL)
            return None
        port.selected_again()
        stamps = self.watch.stamps
        if stamps is not None and stamps[ASKS]:
            self.watch.launching()
        if self.ranks is not None:
            assert self.window is not None
            self.ranks.launching(self.batch, "lane step", Reason.OVERLAPPED, self.window.steps)
        return self._advance()

    def _advance(self) -> Any:
        port = self.port
        self._stepping = False
        try:
            port.count_launch(self.batch)
            with port.forward_context():
                self._stepping = True
                self._queue_step(self.table)
        except Exception:
            if self._stepping and not self.may_repeat:
                raise
            self._break("advance", "could not make a step")
            port.uncount_launch(self.batch)
            self.close(Departure.FAULT)
            return None
        assert self.window is not None
        self.window.used += 1
        return self._launched()

    def _has_slots(self) -> bool:
        """Whether the next step has its slots, after taking more if need be."""
        if self.window is not None and self.window.left:
            return True
        assert self.table is not None
        port = self.port
        spent, first = 0, self.window is None
        if self.window is not None:
            spent, self.window = self.window.used, None
        port.set_allocated(self.table, spent, 0)
        wanted = min(self.window_steps, self.table.first_limit - self.launched)
        self.window = port.reserve(self.batch, self.launched - 1, wanted)
        if self.window is None:
            return False
        self.account.windows += 1
        port.set_allocated(self.table, 0, self.window.steps)
        with port.forward_context():
            port.forward_waits_for_schedule()
            if first:
                # The result that was pending at the opening is processed by now.
                self.executor.refresh()
        return True

    def _queue_step(self, table: Any) -> None:
        watch = self.watch
        stamps = watch.stamps
        if stamps is not None:
            if self.executor.graphs:
                if stamps[SAMPLED]:
                    watch.forwarding()
                stamps[FORWARD] = now()
            elif not stamps[LAUNCH]:
                stamps[LAUNCH] = now()  # and the runner's forward is watched by itself
        (self.executor.begin if table.constrained else self.executor.step)()

    def _launched(self) -> Any:
        """Count the step just launched and queue its readback, if it is sampled; returns its result."""
        table = self.table
        assert table is not None
        rows = len(table)
        self.launched += 1
        self.account.steps += 1
        self.account.decode_steps += 1
        self.account.row_steps += rows
        if table.constrained:
            self.account.masked_steps += 1
            self.account.grammar_row_steps += len(table.constrained)
            self.unsampled = self.port.result(table, self.launched, None, None)
            return self.unsampled
        with self.port.forward_context():
            tokens, arrived = self._read_back(rows)
        return self.port.result(table, self.launched, tokens, arrived)

    def sample(self) -> None:
        """Sample the step just launched. The result before is processed: the grammars have its tokens.

        Raises what the model's sampler raises, as stock's own delayed sampling does.
        """
        result, self.unsampled = self.unsampled, None
        port, table = self.port, self.table
        assert table is not None
        self.watch.depending()
        with port.forward_context():
            self.executor.finish()
            tokens, arrived = self._read_back(len(table))
        port.sampled(result, tokens, arrived)
        self.watch.depended()

    def _read_back(self, rows: int) -> tuple[Any, Any]:
        """Queue the copy of the newest tokens to the host; returns where they will be, and its event.

        Inside the forward stream's context, which the copy stream's leads back to.
        """
        watch = self.watch
        stamps = watch.stamps
        begun = 0
        if stamps is not None:
            if stamps[SAMPLED]:
                watch.reading_back()
            begun = now()
        try:
            tokens, arrived = self.readback.queue(rows)
        except Exception:
            self._break("readback", "could not queue a readback")
            tokens, arrived = self._fetch(), None
        if stamps is not None:
            ended = now()
            stamps[READING_NS] += ended - begun
            if not stamps[LAUNCHED]:
                stamps[LAUNCHED] = ended
            if stamps[SAMPLED]:
                watch.read_back()
        return tokens, arrived

    def _fetch(self) -> Any:
        """The newest tokens, waited for: the step has run and is not repeated."""
        return self.readback.fetch(self.executor.last_tokens())

    # ------------------------------------------------------------ leave

    def row_ended(self, table: RowTable, rows: list[int]) -> None:
        """Result processing ended these rows of `table`."""
        if any(self._rides(table, row) for row in rows):
            self._row_ended = True

    def _rides(self, table: RowTable, row: int) -> bool:
        """Whether a row of a step's table is still in the lane."""
        return table is self.table or (table is self._before and row not in self._gone)

    def settle(self) -> None:
        """After processing: rows that ended, or whose limit the step under way reaches, are to go before the
        next step; or the lane closes."""
        table = self.table
        if table is None:
            return
        if self._unseen:
            self._unseen = False
            self._row_ended = self._row_ended or any(req.finished_reason is not None for req in table.reqs)
        at_limit = self.launched >= table.first_limit
        if self._row_ended or at_limit:
            self._staying = self._rest_of(table, at_limit)
        if self._staying is not None:
            # They stay visible to upstream until their last result is processed. What is reserved for those
            # that ended is nobody's: it goes back at once.
            self._give_back(table)
        elif self._row_ended:
            self.close(Departure.FINISH)
        elif self._broken:
            self.close(Departure.FAULT)
        elif at_limit:
            self.close(Departure.LENGTH_LIMIT)

    def _rest_of(self, table: RowTable, at_limit: bool) -> list[int] | None:
        """The rows that have a further step; None if they cannot ride on alone, or there are none."""
        if self._broken or not self.port.rest_rides():
            return None
        if at_limit and not self.port.skips_finishing:
            # Selection makes one more step of such a row, and so do ranks whose lane is closed.
            return None
        launched = self.launched
        stays = [
            row
            for row, (req, limit) in enumerate(zip(table.reqs, table.limits, strict=True))
            if req.finished_reason is None and limit > launched
        ]
        return stays or None

    def _let_rows_go(self, stays: list[int]) -> bool:
        """Go on with the rows that have a further step; False if that closed the lane."""
        table, port, executor = self.table, self.port, self.executor
        assert table is not None
        ended, self._staying, self._row_ended = self._row_ended, None, False
        try:
            # Without room upstream must see them all: it waits for the slots of those that end, and retracts
            # none of the rest.
            rides = executor.keeping(stays) and port.has_room(self.batch, stays, self.launched - 1)
            rest, kept = (table.keep(stays), port.on_device(stays)) if rides else (None, None)
        except Exception:
            self._break("leave", "could not let rows go")
            self.close(Departure.FAULT)
            return False
        if rest is None:
            self.close(Departure.FINISH if ended else Departure.LENGTH_LIMIT)
            return False
        # Filtering makes new tensors; the step under way may read the old ones.
        port.pin(self.batch, [*executor.held(), kept])
        port.leave(self.batch, table, stays, self.launched - 1)
        self._before, self._gone = table, frozenset(range(len(table))).difference(stays)
        self.table = rest
        self.account.rows_left += len(self._gone)
        self.watch.rows_left()
        try:
            with port.forward_context():
                port.forward_waits_for_schedule()
                executor.keep(self.batch, kept)
        except Exception:
            self._break("leave", "could not go on with the rest of a batch")
            self.close(Departure.FAULT)
            return False
        return True

    def undisturbed(self, table: RowTable) -> bool:
        """Whether no row of `table` can have ended or been aborted since the lane opened on it."""
        return table is self.table and not self._row_ended and not self._unseen

    def extra_steps(self, table: RowTable, row: int) -> int:
        """Steps of a row of `table` that are launched but not yet in its KV lengths."""
        if self.window is None or not self._rides(table, row):
            return 0
        return self.window.used

    def close(self, reason: Departure) -> None:
        """Leave: afterwards the batch is as the ordinary loop would have left it."""
        batch, table = self.batch, self.table
        assert table is not None
        port = self.port
        # Upstream is about to write what the last step may still read.
        port.schedule_waits_for_forward()
        with port.forward_context():
            port.relay(batch, self.executor.last_tokens())
        port.pin(batch, self.executor.close())
        self._give_back(table)
        port.write_back(batch, table, self.launched - 1)
        self.batch = self.table = self._before = None
        self.account.left[reason] += 1
        self.account.departure = self.account.last_departure = reason

    @property
    def is_sound(self) -> bool:
        """False after a fault of ours; the lane then stays closed."""
        return not self._broken

    def fail(self, step: str, what: str) -> None:
        """A result could not be processed our way; from an `except`. Upstream's way may be taken from here.

        What is reserved goes back at once, as upstream's release of a row takes it for the row's. The step in
        flight may still have to be sampled after this result, so the lane closes when it settles.
        """
        self._break(step, what)
        if self.table is None:
            return
        # Upstream may publish prefixes now, and that writes what the step in flight still reads.
        self.port.schedule_waits_for_forward()
        self._give_back(self.table)

    def _give_back(self, table: RowTable) -> None:
        """End the reservation: the rows keep the slots of the steps that were launched."""
        window, self.window = self.window, None
        used = 0
        if window is not None:
            used = window.used
            window.give_back()
        self.port.set_allocated(table, used, 0)

    def shut(self) -> None:
        """Close, if open, because the event loop ends."""
        if self.is_open:
            self.close(Departure.EXIT)

    def _break(self, step: str, what: str) -> None:
        """A fault of ours: the ordinary path from here on."""
        if not self._broken:
            logger.exception("zos-sglang: the resident lane %s; it stays closed", what)
        self._broken = True
        self.account.fault(step)
