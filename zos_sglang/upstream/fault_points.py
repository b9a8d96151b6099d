"""Where `ZOS_FAULT` strikes: in front of the live callables of one scheduler process.

Each is replaced when its owner is made, and only where the setting is given; without it nothing of this is
imported. A fault asked for over HTTP begins on a server that is whole: what faults before it have closed is
opened again first, by a loop that begins anew in the same mode.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from zos_sglang.faults import plan
from zos_sglang.faults.injector import Injector
from zos_sglang.faults.plan import Fault
from zos_sglang.resident.capture import Capture
from zos_sglang.resident.rows import RowTable
from zos_sglang.upstream.lane_grammar import GrammarMasks

logger = logging.getLogger(__name__)


class FaultPoints:
    """The injector in its places.

    Args:
        runtime: attached to its scheduler, no loop made yet.
        parts: what a lane is built of.
    """

    def __init__(self, runtime: Any, parts: Any) -> None:
        self.runtime, self.parts = runtime, parts
        faults = plan.parse(runtime.settings.fault)
        self._warn_of(faults)
        self.injector = Injector(faults, this_rank)
        self._own = runtime._launcher.own
        self._sinks: list[Any] = []
        #: Asked for: the next loop begins with a server that is whole, and with these armed.
        self._next: tuple[Fault, ...] | None = None
        logger.warning(
            "zos-sglang: ZOS_FAULT=%s: steps of this server fail on demand", runtime.settings.fault
        )
        self._into_runtime()
        self._into_launches(runtime._launcher.device)
        self._into_observation(runtime.observation)

    @staticmethod
    def _warn_of(faults: tuple[Fault, ...]) -> None:
        for fault in faults:
            try:
                one_of_ours(fault)
            except ValueError as error:
                logger.warning("zos-sglang: ZOS_FAULT: %s", error)

    # ------------------------------------------------------------ places

    def _into_runtime(self) -> None:
        runtime, over, cls = self.runtime, self.injector.over, type(self.runtime)
        # Of the class: a server that changes its role comes here again.
        runtime.report = over("report", partial(cls.report, runtime))
        runtime._let_go = over("mode-off", partial(cls._let_go, runtime))
        runtime._assemble_lane = self._into_lane(over("lane-build", partial(cls._assemble_lane, runtime)))
        runtime._make_loop = self._into_loop(partial(cls._make_loop, runtime))
        runtime._run_ours = self._armed_when_whole(partial(cls._run_ours, runtime))
        # Of objects that come and go, the class.
        self.injector.stand("capture", Capture, "graph_of")
        self.injector.stand("mask", GrammarMasks, "_fill")
        self.injector.stand("processing", RowTable, "candidates")
        self.injector.stand("stream-output", RowTable, "due")

    def _into_launches(self, device: Any) -> None:
        for point, name in (
            ("launch", "resolve_inputs"),
            ("relay", "relay"),
            ("readback", "readback"),
            ("barrier", "take_read_done"),
        ):
            self.injector.stand(point, device, name)

    def _into_observation(self, observation: Any) -> None:
        if not observation.can_record:
            return
        self.injector.stand("recording", observation.recorder, "facts")
        trace, sinks = observation.trace, observation.recorder.sinks
        if trace is not None:
            self.injector.stand("trace", trace, "_take")
        sinks[:] = [sink if sink is trace else self.injector.over("metrics", sink) for sink in sinks]
        self._sinks = sinks[:]

    def _into_loop(self, make_loop: Any) -> Any:
        def make(scheduler: Any) -> Any:
            if self._next is None:
                self.injector.passes("mode-switch")
            else:
                self._heal()
            loop = make_loop(scheduler)
            self.injector.stand("guard", loop, "decide")
            self.injector.stand("snapshot", loop, "snapshot")
            return loop

        return make

    def _armed_when_whole(self, run_ours: Any) -> Any:
        """A lane that is built anew for this loop is no call of what was asked for."""

        def run(*args: Any, **kwargs: Any) -> Any:
            asked, self._next = self._next, None
            if asked is not None:
                self.injector.arm(asked)
            return run_ours(*args, **kwargs)

        return run

    def _into_lane(self, assemble: Any) -> Any:
        def built(parts: Any) -> Any:
            found = assemble(parts)
            if found is not None:
                lane, _ = found
                for point, owner, name in (
                    ("judge", lane.port, "table"),
                    ("open", lane.executor, "open"),
                    ("advance", lane, "_queue_step"),
                    ("reservation", lane.port, "reserve"),
                    ("lane-readback", lane.readback, "queue"),
                    ("leave", lane.executor, "keeping"),
                ):
                    self.injector.stand(point, owner, name)
            return found

        return built

    # ------------------------------------------------------------ while it serves

    def request(self, fault: Fault | None) -> None:
        """This one fault from here on, or none, on a server that is whole. During intake."""
        faults = () if fault is None else (fault,)
        self.injector.arm(())
        logger.warning("zos-sglang: %s=%s", plan.KEY, fault or plan.ON)
        if self.runtime.restart_loop():
            self._next = faults
        else:
            self._heal()
            self.injector.arm(faults)

    def _heal(self) -> None:
        """Open again what faults have closed, and count them anew by step. With nothing in flight."""
        runtime = self.runtime
        runtime._launcher.own = self._own
        runtime.account.faults.clear()
        runtime.lane_account.faulted.clear()
        observation = runtime.observation
        runtime.watch_lane(None)
        runtime._lane = None
        runtime._make_lane = partial(runtime._lane_of_all_ranks, self.parts)
        if observation.can_record:
            recorder = observation.recorder
            recorder.sinks[:] = self._sinks
            recorder.faults, recorder.stopped = 0, False
            recorder.sink_faults.clear()
            observation.record(True)


def this_rank() -> int:
    """The tensor-parallel rank of this process; known once its scheduler is set up."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def one_of_ours(fault: Fault | None) -> None:
    """Raises ValueError for a fault of a rank that this server does not have."""
    if fault is None or fault.rank is None:
        return
    from sglang.srt.runtime_context import get_parallel

    ranks = get_parallel().tp_size
    if fault.rank >= ranks:
        raise ValueError(
            f"{fault} names rank {fault.rank}; this server has tensor-parallel ranks 0 to {ranks - 1}"
        )


def fault_handlers(runtime: Any) -> dict[str, Any]:
    """Update handlers by key, for a server that was started with `ZOS_FAULT`."""
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    def asked(value: Any) -> Fault | None:
        if not (isinstance(value, (int, float)) and value == value // 1):
            raise ValueError(f"{value} is no whole number")
        return plan.from_code(int(value))

    def validate(key: str, value: Any) -> None:
        if runtime.fault_points is None or runtime.scheduler is None:
            raise UpdateRejected(f"{key}: this server runs no event loop of ours.")
        try:
            one_of_ours(asked(value))
        except (ValueError, OverflowError) as error:
            raise UpdateRejected(f"{key}: {error}") from None

    def apply(key: str, value: Any) -> None:
        runtime.fault_points.request(asked(value))

    return {plan.KEY: _UpdateHandler(validate, apply)}
