"""Tells waiting for a result from processing it."""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from zos_sglang.observe.complete import AT_PROCESS, WAITED
from zos_sglang.observe.tape import CPU_WAITED, WAITED_THERE
from zos_sglang.observe.tape import WAITED as WAITED_NS
from zos_sglang.overlap.watch import PROCESS, PROCESSED

if TYPE_CHECKING:
    from zos_sglang.observe.recorder import Recorder

#: A wait shorter than this (ns) is none: the result was there, the call itself takes as long.
LEAST_NS = 20_000


class WaitClock:
    """Stands in for a result's event (`copy_done`) and times whoever waits for it.

    A new one for each launch: an event must never be mistaken for a later one, however long its result lives.
    Whoever makes one sets `recorder`; there is no `__init__`, a call more for every step.
    """

    recorder: Recorder
    #: None: there is nothing yet that stands for the result.
    event: Any = None
    #: How the result was known to be there, and when (0: not known); how long it was waited for. In ns.
    ready = t_ready = waited = 0

    def synchronize(self) -> None:
        recorder = self.recorder
        stamps = recorder.stamps
        if recorder.clocked:
            cpu = thread_time_ns()
            begun = perf_counter_ns()
            self.event.synchronize()
            ended = perf_counter_ns()
            stamps[CPU_WAITED] += thread_time_ns() - cpu
        else:
            begun = perf_counter_ns()
            self.event.synchronize()
            ended = perf_counter_ns()
        waited = ended - begun
        stamps[WAITED_NS] += waited
        if stamps[PROCESS] and not stamps[PROCESSED]:
            stamps[WAITED_THERE] += waited
        self.waited += waited
        if not self.ready:
            self.ready = WAITED if waited >= LEAST_NS else AT_PROCESS
            self.t_ready = ended

    def query(self) -> bool:
        done: bool = self.event.query()
        return done

    def record(self, *args: Any, **kwargs: Any) -> Any:
        return self.event.record(*args, **kwargs)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self.event.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)
