"""Tells waiting for a result from processing it."""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from zos_sglang.observe.slot import AT_PROCESS, READY, T_READY, WAIT, WAITED, Slot

if TYPE_CHECKING:
    from zos_sglang.observe.recorder import Recorder

#: A wait shorter than this (ns) is none: the result was there, the call itself takes as long.
WAITED_NS = 20_000


class WaitClock:
    """Stands in for a result's event (`copy_done`) and times whoever waits for it.

    A new one for each launch: an event must never be mistaken for a later one, however long its result lives.
    """

    __slots__ = ("event", "recorder", "slot")

    def __init__(self, event: Any, recorder: Recorder, slot: Slot) -> None:
        self.event = event
        self.recorder = recorder
        self.slot = slot

    def synchronize(self) -> None:
        recorder, slot = self.recorder, self.slot
        if recorder.detail:
            cpu = thread_time_ns()
            begun = perf_counter_ns()
            self.event.synchronize()
            ended = perf_counter_ns()
            recorder.cpu_waited += thread_time_ns() - cpu
        else:
            begun = perf_counter_ns()
            self.event.synchronize()
            ended = perf_counter_ns()
        waited = ended - begun
        recorder.waited += waited
        slot[WAIT] += waited
        if not slot[READY]:
            slot[READY] = WAITED if waited >= WAITED_NS else AT_PROCESS
            slot[T_READY] = ended

    def query(self) -> bool:
        done: bool = self.event.query()
        return done

    def record(self, *args: Any, **kwargs: Any) -> Any:
        return self.event.record(*args, **kwargs)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self.event.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)
