"""Makes records of what was stamped, keeps them, and hands complete ones on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter_ns as now

import numpy as np

from zos_sglang.observe import complete
from zos_sglang.observe.gpu_clock import GpuClock
from zos_sglang.observe.record import Ring
from zos_sglang.observe.split import charge
from zos_sglang.observe.tape import FLAGS, ROWS, blank, count_waits, describe, stamps_of
from zos_sglang.observe.totals import Totals

logger = logging.getLogger(__name__)

#: Records are handed on when so many wait; where somebody takes them, also when so much time has passed (ns).
DUE, DUE_NS, NEVER_NS = 1024, 1_000_000_000, 1 << 62
#: Rows between two looks at them: enough for what a look costs by itself to be little a step.
SETTLED = 1024


def name_of(sink: object) -> str:
    """A sink as people see it."""
    return str(getattr(sink, "__name__", type(sink).__name__))


class Keeper:
    """Makes records of what was stamped, now and then, and hands them on.

    Args:
        ring: where records go.
        gpu: completes records later; None: nobody does.
        asynchronous: whether a launch returns before its result is there.
    """

    # Slots, not a dict: with this many fields an attribute costs half.
    __slots__ = (
        *("ring", "gpu", "asynchronous", "totals", "sinks", "due_at", "flush_ns", "launches", "open"),
        *("faults", "sink_faults"),
        *(
            "unseen",
            "rows",
            "more_results",
            "readings",
            "stamps",
            "_table",
            "_stamps",
            "_first",
            "_blank",
            "_due",
        ),
        *("_full", "_incomplete", "_before", "_words", "_flushed", "_unflushed"),
    )

    def __init__(self, ring: Ring, gpu: GpuClock | None, asynchronous: bool) -> None:
        self.ring, self.gpu, self.asynchronous = ring, gpu, asynchronous
        self.totals = Totals()
        #: Take complete records of dtype `STEP`, in order, each one once; once a second also none.
        self.sinks: list[Callable[[np.ndarray], None]] = []
        #: Faults of recording; and, not among them, of sinks by name, each taken out for its own.
        self.faults = 0
        self.sink_faults: dict[str, int] = {}
        self.due = DUE
        self.due_at = 0
        #: Thread CPU spent on settling and handing on, ns.
        self.flush_ns = 0
        self.launches = 0
        #: How many of the last launches are not processed.
        self.open = 0
        #: Numbers of launches that nobody of ours processed or will process.
        self.unseen: list[int] = []
        #: Rows of iterations. Of those, in this order: have been looked at, have ended (until `rows`), is of
        #: the iteration under way, are blank.
        self._blank = blank(asks=asynchronous, detail=False)
        self._table = np.tile(self._blank, (SETTLED + 1, 1))
        self._stamps = [stamps_of(row) for row in self._table]
        self._first = self.rows = 0
        self.stamps = self._stamps[0]
        #: Of iterations that processed several results: rows with all but the last one.
        self.more_results: list[np.ndarray] = []
        #: What the thread burnt until the end of so many rows, since the reading before.
        self.readings: list[tuple[int, int]] = []
        #: Steps of before the tape whose result was not processed; and the last complete one.
        self._incomplete, self._before = complete.NONE, complete.NOTHING
        #: What the last launch of those rows was.
        self._words = np.zeros(FLAGS + 1 - ROWS, np.int64)
        self._flushed = self._unflushed = 0

    @property
    def due(self) -> int:
        """So many complete records are handed on, also before a second has passed."""
        return self._due

    @due.setter
    def due(self, steps: int) -> None:
        self._due = steps
        #: As many rows are looked at.
        self._full = min(steps, SETTLED)

    @property
    def room(self) -> int:
        """Rows until they are looked at."""
        return self._full - self.rows

    def settle(self) -> None:
        """Write what is complete. The last row has its reading of the thread clock."""
        rows = results = self._table[self._first : self.rows]
        self._words = describe(rows, self._words)
        count_waits(rows, complete.WAITED, complete.AT_PROCESS)
        if self.more_results:
            results = np.concatenate((self.more_results, rows))
        readings = [(end - self._first, cpu) for end, cpu in self.readings]
        unseen, self.unseen = self.unseen, []
        # What cannot be recorded once cannot be recorded later either.
        self.readings.clear()
        self.more_results.clear()
        self._first = self.rows
        if len(rows) or unseen:
            self._settle_rows(rows, results, readings, unseen)
        if self.gpu is not None and self.gpu.under_way:
            self.gpu.collect(self.ring)

    def rewind(self) -> None:
        """Use the rows again from the first one on. Between iterations, all of them looked at."""
        self._table[: self.rows + 1] = self._blank
        self._first = self.rows = 0
        self.stamps = self._stamps[0]

    def _settle_rows(
        self, rows: np.ndarray, results: np.ndarray, readings: list[tuple[int, int]], unseen: list[int]
    ) -> None:
        steps = complete.launched(rows, self.asynchronous)
        if len(self._incomplete):
            steps, self._incomplete = np.concatenate((self._incomplete, steps)), complete.NONE
        if len(rows):
            complete.charged(steps, rows, charge(rows, readings, self.asynchronous))
        done = complete.processed(steps, results, unseen, self.asynchronous)
        self._incomplete = steps[~done]
        steps = steps[done]
        if len(steps):
            complete.judged(steps, self._before)
            self._before = steps[-1:]
            self.ring.write(complete.records(steps))
            self._unflushed += len(steps)

    def is_due(self, t: int) -> bool:
        """Whether records are to be handed on at time `t`."""
        return self._unflushed >= self._due or t >= self.due_at

    @property
    def oldest_open(self) -> int:
        """Number of the oldest launch whose result was not processed; the next launch's if there is none."""
        return self.launches - self.open + 1

    def give_up_oldest(self) -> None:
        """The oldest open launch was processed by somebody else, or never will be."""
        self.unseen.append(self.oldest_open)
        self.open -= 1

    def hand_on(self) -> None:
        """Hand complete records on, up to the first incomplete one: nobody sees them out of order."""
        records = self.ring.since(self._flushed)
        limit = self.oldest_open
        if self.gpu is not None and (oldest := self.gpu.oldest()) is not None:
            limit = min(limit, oldest)
        records = records[records["step"] < limit]
        if len(records):
            self._flushed = int(records["step"][-1])
            self.totals.add(records)
        self._unflushed = 0
        self.due_at = now() + (DUE_NS if self.sinks else NEVER_NS)
        for sink in self.sinks[:]:
            try:
                sink(records)
            except Exception:
                # One reader's fault is neither the recorder's nor the other readers'.
                self.sinks.remove(sink)
                self.sink_faults[name_of(sink)] = self.sink_faults.get(name_of(sink), 0) + 1
                logger.exception("zos-sglang: records are not handed on any more to %s", name_of(sink))
