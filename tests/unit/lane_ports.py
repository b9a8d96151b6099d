"""The core's and the lane's ports over the lane's fake scheduler."""

from __future__ import annotations

from typing import Any

from tests.unit.fakes import FakeDevice, FakePort
from tests.unit.lane_memory import LanePool
from tests.unit.lane_scheduler import LaneScheduler
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream.lane_port import SglangLanePort


class LaneSchedulerPort(FakePort):
    """`SchedulerPort`; checks the pool after every step, as upstream does in its strict mode."""

    scheduler: LaneScheduler
    lane: Any = None
    lane_results: Any = None

    def process(self, batch: Any, result: Any) -> None:
        gpu = self.scheduler.gpu
        assert gpu.current is gpu.schedule, "a result is processed, but not on the schedule stream"
        if hasattr(result, "table"):
            assert len(batch.reqs) == len(result.table), "a result met another batch"
            self.scheduler.processed.append(result.serial)
            self.lane_results.process(batch, result)
        else:
            super().process(batch, result)

    def end_of_step(self) -> None:
        super().end_of_step()
        scheduler = self.scheduler
        scheduler.memory.check(scheduler.live())
        if self.lane is not None and self.lane.is_open:
            self._check_lengths()

    def _check_lengths(self) -> None:
        """Of each row in the lane: confirmed tokens, launched ones, and what is allocated for it."""
        lane = self.lane
        visible = {id(req) for req in self.scheduler.running_batch.reqs}
        assert all(id(req) in visible for req in self.scheduler.live()), "a row that upstream does not see"
        window = lane.window
        used = window.used if window is not None else 0
        in_flight = len(self.scheduler.result_queue)
        assert in_flight == 1
        for row, req in enumerate(lane.table.reqs):
            if req.finished():
                continue  # it goes with the next step
            launched = req.kv.kv_committed_len + used
            assert launched == len(req.tokens()) + in_flight - 1
            assert launched == int(lane.batch.seq_lens_cpu[row]) + lane.launched - 1
            reserved = window.steps if window is not None else 0
            assert req.kv.kv_allocated_len == req.kv.kv_committed_len + reserved
            assert len(req.output_ids) + in_flight <= req.spec.max_new, "past its length limit"


class VirtualLanePort(SglangLanePort):
    """The real port over the fake scheduler; what needs a real one is replaced."""

    def __init__(self, scheduler: LaneScheduler, device: FakeDevice, streams: Any, pins: Any) -> None:
        # Not the real one's: its pool is made of tensors.
        self.scheduler, self.device, self.streams, self.pins = scheduler, device, streams, pins  # type: ignore[assignment]
        self.pool = LanePool(scheduler.memory)  # type: ignore[assignment]
        self.graphs = scheduler.limits.graphs
        self.account = LaneAccount()

    def receive(self) -> bool:
        return self.scheduler.receive()

    def dispatch(self) -> None:
        self.scheduler.dispatch()

    def refuses(self, batch: Any) -> Refusal | None:
        scheduler = self.scheduler
        if not batch.forward_mode.is_decode() or batch is not scheduler.running_batch:
            return Refusal.NOT_DECODE
        if scheduler.chunked_req is not None:
            return Refusal.CHUNKED_PREFILL
        if scheduler.waiting and not scheduler.full:
            return Refusal.ADMISSION_OPEN
        if any(req.to_finish is not None for req in batch.reqs):
            return Refusal.ABORT_PENDING
        if any(req.finished() for req in batch.reqs):
            return Refusal.ROW_ENDED
        return None if all(req.spec.rides for req in batch.reqs) else Refusal.LOGPROBS

    def on_device(self, rows: Any) -> Any:
        return rows

    def rest_rides(self) -> bool:
        scheduler = self.scheduler
        return scheduler.limits.in_place and not scheduler.waiting and scheduler.chunked_req is None

    def result(self, table: Any, step: int, tokens: Any, arrived: Any) -> Any:
        result: Any = super().result(table, step, tokens, arrived)
        result.serial = self.scheduler.next_serial()
        return result
