"""Watching one scheduler: the recorder, the places where it is put, and who gets its records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Literal

from sglang.srt.runtime_context import get_parallel

from zos_sglang.observe.alternate import Alternation
from zos_sglang.observe.block import make_block
from zos_sglang.observe.gather import Gather
from zos_sglang.observe.names import code
from zos_sglang.observe.record import Ring
from zos_sglang.observe.recorder import Recorder
from zos_sglang.observe.trace_sink import STEPS, TraceSink, make_trace
from zos_sglang.overlap.watch import OFF, Watch
from zos_sglang.resident.account import LaneAccount
from zos_sglang.settings import Settings
from zos_sglang.upstream.gpu_events import follow, is_asynchronous, make_gpu_clock
from zos_sglang.upstream.metrics_factory import make_metrics
from zos_sglang.upstream.roles import role_of
from zos_sglang.upstream.step_facts import make_facts
from zos_sglang.upstream.stock_bridge import leave_stock
from zos_sglang.upstream.versions import installed
from zos_sglang.upstream.watch_stock import ForwardMeter, ForwardWatch, StockWatch

logger = logging.getLogger(__name__)

Loop = Literal["ours", "stock", "normal"]

#: Steps in `/server_info` unless asked for otherwise.
REPORTED = 64


def harmless(method: Callable[..., Any]) -> Callable[..., Any]:
    """A fault of watching is logged, and the server goes on without; the call then gives None."""

    @wraps(method)
    def guarded(self: Observation, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            with suppress(Exception):
                self.recorder.fault()
            return None

    return guarded


class Observation:
    """Everything that watches. Made once a process; `place` and the loops say where.

    Args:
        scheduler: upstream's.
        settings: `record`, `trace`, `trace_mb`.
        lane_account: for the lane's reasons.
    """

    can_record = True

    def __init__(self, scheduler: Any, settings: Settings, lane_account: LaneAccount) -> None:
        self.scheduler = scheduler
        self.loop: Loop = "ours"
        self.reported = REPORTED
        self.watch: Watch = OFF
        self.cost: Alternation | None = None
        self.stock: StockWatch | None = None
        self._meter: ForwardMeter | None = None
        self._gather: Gather | None = None
        self._places: dict[str, Any] = {}
        self._forwards: dict[str, tuple[Any, str]] = {}
        self._asynchronous = is_asynchronous(scheduler)
        gpu = make_gpu_clock(scheduler)
        self.recorder = Recorder(
            Ring(),
            make_facts(scheduler, lane_account),
            gpu,
            asynchronous=self._asynchronous,
            on_fault=self._faulted,
        )
        runner = getattr(scheduler.tp_worker, "model_runner", None)
        if runner is not None:
            self._forwards["forward"] = (runner, "forward")
        self.trace: TraceSink | None = None
        self._add_sinks(settings)
        if settings.record:
            self.put(self.recorder)

    def _add_sinks(self, settings: Settings) -> None:
        metrics = make_metrics(self.scheduler)
        if settings.trace is None:
            if metrics is not None:
                self.recorder.sinks.append(metrics)
            return
        if metrics is not None:
            # A trace wants records every few steps; these would take longer than the steps' records.
            self._gather = Gather(metrics)
            self.recorder.sinks.append(self._gather)
        facts = {
            "asynchronous": self._asynchronous,
            "mode": settings.mode,
            "versions": {"sglang": installed()},
        }
        self.trace = make_trace(settings, _rank(), facts)
        if self.trace is not None:
            self.trace.before_end = self._flush
            self.recorder.sinks.append(self.trace)
            self.recorder.due = STEPS

    # ------------------------------------------------------------ places

    @harmless
    def place(self, name: str, owner: Any) -> None:
        """An object whose `watch` is told of steps; None: it is no more."""
        if owner is None:
            self._places.pop(name, None)
        else:
            self._places[name] = owner
            owner.watch = self.watch

    @harmless
    def place_forward(self, name: str, owner: Any, attribute: str, *, stamped: bool = False) -> None:
        """A callable that runs the model; owner None: it is no more.

        `stamped`: whoever calls it stamps when. Then it is watched only where a call is the model's own time.
        """
        if owner is None:
            self._forwards.pop(name, None)
            if name in self._places:
                self._places.pop(name).remove()
            return
        if stamped and self._asynchronous:
            return
        self._forwards[name] = (owner, attribute)
        if self.watch is not OFF:
            self._stand_forwards()

    def put(self, watch: Watch) -> None:
        """Let `watch` see what happens from here on."""
        if self.watch is self.recorder and watch is not self.recorder:
            self.recorder.cut()
        self.watch = watch
        for owner in self._places.values():
            owner.watch = watch
        if watch.stamps is None:
            self._remove_forwards()
        else:
            self._stand_forwards()

    def _stand_forwards(self) -> None:
        for name, (owner, attribute) in self._forwards.items():
            if name not in self._places:
                self.place(name, ForwardWatch(owner, attribute, self._asynchronous))

    def _remove_forwards(self) -> None:
        for name in [n for n in self._places if n in self._forwards]:
            self._places.pop(name).remove()

    # ------------------------------------------------------------ loops

    @harmless
    def enter(self, mode: str, loop: Loop) -> None:
        """A loop begins to run in `mode`."""
        self.loop = loop
        recorder = self.recorder
        recorder.mode, recorder.said = code("mode", mode), None
        # Without overlap a result has no event; its tokens are read by a call that waits.
        makes_events = loop == "normal" and self._asynchronous
        recorder.new_event = self.scheduler.device_module.Event if makes_events else None
        if recorder.gpu is not None:
            follow(recorder.gpu, self.scheduler, normal=loop == "normal")
        if loop == "ours":
            return
        self.stock = StockWatch(self.scheduler, normal=loop == "normal")
        if self.watch is not OFF:
            self._watch_stock()

    def _watch_stock(self) -> None:
        assert self.stock is not None
        # In its place first: a fault on the way must find it there.
        self.place("stock", self.stock)
        self.stock.install(self.watch)

    @harmless
    def leave(self) -> None:
        """The loop has ended."""
        if self.cost is not None and self.cost.left:
            self.cost.stop()
        if self.stock is not None:
            self.watch.end()
            self.place("stock", None)
            self.stock.remove()
            self.stock = None

    @harmless
    def close(self) -> None:
        """Watch no more: complete the records, end the trace, leave nothing behind. Once or more often."""
        self.leave()
        if self.watch is not OFF:
            self.put(OFF)
            self._flush(last=True)
        if self.trace is not None:
            self.trace.close()

    def _flush(self, last: bool = False) -> None:
        try:
            self.recorder.close() if last else self.recorder.flush()
            if last and self._gather is not None:
                self._gather.flush()
        except Exception:
            self.recorder.fault()

    def _faulted(self) -> None:
        if self.cost is not None:
            self.cost.left = 0
            self.recorder.after = None
        self.put(OFF)
        self._unmeter()

    # ------------------------------------------------------------ on request

    @harmless
    def record(self, on: bool) -> None:
        """Begin to record, or stop. At any time that requests are taken in."""
        if on == (self.watch is not OFF):
            return
        self._stop_cost()
        if not on:
            self.put(OFF)
            return
        self.recorder.restart()
        self.put(self.recorder)
        # Not over what makes SGLang's loop end at its next selection: that goes away by itself.
        leaving = vars(self.scheduler).get(role_of(self.scheduler).select) is leave_stock
        if self.stock is not None and not self.stock.installed and not leaving:
            self._watch_stock()

    @harmless
    def reset(self) -> None:
        """Forget all records, once they are handed on."""
        self.recorder.reset()

    @harmless
    def detail(self, on: bool) -> None:
        """Read the thread clock at every iteration, or at some."""
        self.recorder.detail = on

    @harmless
    def measure_cost(self, steps: int) -> None:
        """Alternate between recording and not for so many steps. Needs `can_measure_cost`."""
        self._stop_cost()
        if not self._asynchronous and "forward" in self._forwards:
            # Below what watches, so that it stands there without.
            self._remove_forwards()
            self._meter = ForwardMeter(*self._forwards["forward"], time.thread_time_ns)
            self._stand_forwards()
        meter = self._meter
        self.cost = Alternation(
            self.recorder,
            self.put,
            self._batch,
            steps=steps,
            forward_cpu=lambda: meter.cpu if meter is not None else 0,
            done=self._unmeter,
        )

    def _unmeter(self) -> None:
        if self._meter is not None:
            self._remove_forwards()
            self._meter.remove()
            self._meter = None
            self.put(self.watch)

    @property
    def can_measure_cost(self) -> bool:
        """In a loop of ours, while recording: in SGLang's own the places of recording cannot be emptied."""
        return self.loop == "ours" and self.watch is not OFF

    def _stop_cost(self) -> None:
        if self.cost is not None and self.cost.left:
            self.cost.stop()

    def _batch(self) -> tuple[int, int]:
        return self.recorder.mode, len(self.scheduler.running_batch.reqs)

    @property
    def faults(self) -> dict[str, int]:
        """Faults by what failed, where there were any."""
        recorder = self.recorder
        trace = self.trace.faults if self.trace is not None else 0
        counted = {"recording": recorder.faults, "trace": trace, **recorder.sink_faults}
        return {what: times for what, times in counted.items() if times}

    @harmless
    def report(self) -> dict[str, Any]:
        """The block `steps` of `/server_info`."""
        cost = self.cost.report() if self.cost is not None else None
        return make_block(self.recorder, loop=self.loop, last=self.reported, cost=cost)


def _rank() -> int | str:
    """Tells the traces of a server's schedulers apart: a tensor-parallel rank, or a label."""
    parallel = get_parallel()
    if parallel.dp_rank is None:
        return int(parallel.tp_rank)
    return f"dp{parallel.dp_rank}.tp{parallel.tp_rank}"
