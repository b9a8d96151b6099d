"""Times whoever waits for a result in the middle of SGLang's processing."""

from __future__ import annotations

from time import perf_counter_ns as now
from typing import Any

from zos_sglang.overlap.watch import PROCESS, SAMPLED, WAIT_FROM, WAIT_TO


class TimedEvent:
    """Stands in for a result's event (`copy_done`) and stamps the wait.

    A new one for each result: an event must never be mistaken for a later one, however long its result lives.
    Whoever makes one sets both fields; there is no `__init__`, a call more for every step.
    """

    event: Any
    #: Has the `watch` that sees the steps when somebody waits.
    of: Any

    def synchronize(self) -> None:
        watch = self.of.watch
        stamps = watch.stamps
        if stamps is None:
            self.event.synchronize()
        elif stamps[SAMPLED] or not stamps[PROCESS] or stamps[WAIT_TO]:
            watch.waiting(self.event)
        else:
            stamps[WAIT_FROM] = now()
            self.event.synchronize()
            stamps[WAIT_TO] = now()

    def query(self) -> bool:
        done: bool = self.event.query()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)


def time_wait(result: Any, of: Any) -> None:
    """Let the wait for this result be timed, if there is one and nobody does already."""
    event = result.copy_done
    if event is None or type(event) is TimedEvent or not of.watch.asynchronous:
        return
    timed = TimedEvent()
    timed.event, timed.of = event, of
    result.copy_done = timed
