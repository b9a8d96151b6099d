"""Where a step can be watched: the event loop, the launcher and the lane stamp these places.

A stamp is a store into `stamps`, made in place: between two forwards a processor's caches hold the model, and
a call of a Python function costs ten times as much there as in a row. Where `stamps` is None nobody records,
and a place costs a look. In the order of an iteration; what does not happen is not stamped or called:

    SELECT                intake is done, selection begins
    PROCESS, PROCESSED    around the processing of a result (before LAUNCH if the launch may not overlap);
                          `again()` first if this iteration has processed one before
    LAUNCH                a batch is selected and decided on; `launching()` first where `stamps[ASKS]`
    FORWARD               the model's forward, or the lane's graph, is called; of several in a launch the
                          first. Further steps of a lane of graphs have this stamp and no LAUNCH
    FORWARDED             it has returned, FORWARD_NS is what it and others took: where it runs in this thread
    READING_NS            what queueing copies to the host took
    LAUNCHED              the launch has returned; by the lane, whose launch ends with such a copy, else by
    launched(...)         or the loop where that is no call
    depending, depended   work that needs the sample of the step before (delayed sampling)
    WAIT_FROM, WAIT_TO    around the wait for a result, once PROCESS is stamped; `waiting(event)` instead
                          where `stamps[SAMPLED]`, before PROCESS (a grammar's barrier), and once more
    blocked               the thread was held up for so many nanoseconds
    idle, paused          no batch; the engine is paused
    end                   the iteration is over, and the next begins; `begin` where none has ended before

Where `stamps[SAMPLED]` the step's device time is sampled or its details are asked for: then `forwarding`,
`forwarded`, `reading_back` and `read_back` are called too.

Steady decode steps are all alike: further ones of a lane on the same rows, and without a lane those of which
the loop would say the same (`said`). Where `riding`, or where that is `said` already, such a launch is no
call: `stamps[STEP]` becomes `AS_BEFORE`, and `newest` what says whether its result is there.
"""

from __future__ import annotations

from typing import Any, Protocol

#: Places of `stamps`: times and durations, ns of `perf_counter_ns`; 0 where nothing was stamped.
SELECT, LAUNCH, FORWARD, FORWARDED, FORWARD_NS, READING_NS = range(6)
LAUNCHED, PROCESS, PROCESSED, SAMPLED, ASKS, WAIT_FROM, WAIT_TO, STEP = range(6, 14)
AS_BEFORE = -1


#: Whose launch it was: not the lane's; the lane's first step on its batch; a further one on the same batch.
OUTSIDE, OPENING, FURTHER = range(3)


class Watch(Protocol):
    """Told of everything above; must not raise, must not wait, must not synchronise."""

    @property
    def stamps(self) -> memoryview | None:
        """To be stamped in place; None: do not, and call nothing but `begin`, `idle`, `paused` and `end`.

        Another one in every iteration.
        """

    #: Whether a launch returns before its result is there: then the wait for it is timed.
    asynchronous: bool
    #: Whether a further step of the lane is stamped and not told of.
    riding: bool
    #: What the loop said of the last launch, if it was a decode step that the next one may be like; or None.
    said: Any
    #: The event of the newest result, or None.
    newest: Any

    def begin(self) -> None: ...

    def idle(self) -> None: ...

    def paused(self) -> None: ...

    def again(self) -> None: ...

    def launching(self) -> None: ...

    def forwarding(self) -> None: ...

    def forwarded(self) -> None: ...

    def reading_back(self) -> None: ...

    def read_back(self) -> None: ...

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
        """`depth` results were pending at the launch; `barrier` is the write-after-read barrier it used.

        `said`: what equals it for launches that need no call if this is a decode step; None: none does.
        """

    def rows_left(self) -> None:
        """Some rows of the open lane have gone: what was known of its batch is no longer so."""

    def depending(self) -> None: ...

    def depended(self) -> None: ...

    def waiting(self, event: Any) -> None:
        """Wait for `event`, which stands for a result."""

    def blocked(self, cause: str, nanoseconds: int) -> None: ...

    def end(self) -> None: ...


class Off:
    """Watches nothing."""

    __slots__ = ()

    stamps: memoryview | None = None
    asynchronous = riding = False
    said: Any = None
    newest: Any = None

    def begin(self) -> None: ...

    def idle(self) -> None: ...

    def paused(self) -> None: ...

    def again(self) -> None: ...

    def launching(self) -> None: ...

    def forwarding(self) -> None: ...

    def forwarded(self) -> None: ...

    def reading_back(self) -> None: ...

    def read_back(self) -> None: ...

    def launched(  # noqa: PLR0917  (named arguments cost more)
        self,
        batch: Any,
        result: Any,
        ride: int,
        reason: Any,
        depth: int,
        barrier: Any = None,
        said: Any = None,
    ) -> None: ...

    def rows_left(self) -> None: ...

    def depending(self) -> None: ...

    def depended(self) -> None: ...

    def waiting(self, event: Any) -> None:
        event.synchronize()

    def blocked(self, cause: str, nanoseconds: int) -> None: ...

    def end(self) -> None: ...


OFF = Off()
