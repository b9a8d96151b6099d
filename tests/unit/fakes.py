"""The core's protocols over the fake scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.fake_batch import Batch, Result
from tests.unit.fake_scheduler import Scheduler
from tests.unit.virtual_gpu import Event
from zos_sglang.overlap.account import Account


class Fault(RuntimeError):
    """Planted by a test."""


@contextmanager
def onto(gpu: Any, stream: Any, back: Any) -> Iterator[None]:
    """As `upstream.port.OnStream`: afterwards `back` is current, whatever was before."""
    gpu.set_stream(stream)
    try:
        yield
    finally:
        gpu.set_stream(back)


class FakePort:
    """`SchedulerPort` over the fake scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.steps = self.betweens = self.waiting = 0

    @property
    def last_batch(self) -> Any:
        return self.scheduler.last_batch

    @last_batch.setter
    def last_batch(self, batch: Any) -> None:
        self.scheduler.last_batch = batch

    def exiting(self) -> bool:
        return self.scheduler.gracefully_exit

    def paused(self) -> bool:
        return self.scheduler._engine_paused

    def intake(self) -> None:
        self.scheduler.ingest_requests()

    def note_paused(self) -> None:
        self.scheduler._record_scheduler_state_for_paused_engine()

    def select(self) -> Any | None:
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(scheduler.running_batch, scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        self.waiting = len(scheduler.waiting_queue)
        return plan.batch_to_run

    def between(self) -> None:
        assert not self.scheduler.result_queue
        self.betweens += 1

    def launch_upstream(self, batch: Any) -> Any:
        return self.scheduler.run_batch(batch)

    def process(self, batch: Any, result: Any) -> None:
        self.scheduler.process_batch_result(batch, result)

    def note_no_batch(self) -> None:
        self.scheduler._sched_idled = True

    def idle(self) -> None:
        self.scheduler.on_idle()

    def settled(self) -> None: ...

    def transfers(self) -> int:
        return 0

    def end_of_step(self) -> None:
        self.steps += 1


class FakeDevice:
    """`Device` over the fake scheduler. `faults` maps a method to the call at which it fails."""

    def __init__(self, scheduler: Scheduler, pins: Any, account: Account) -> None:
        self.scheduler, self.pins, self.account = scheduler, pins, account
        self.faults: dict[str, int] = {}

    def _fault(self, name: str) -> None:
        if name in self.faults:
            self.faults[name] -= 1
            if self.faults[name] == 0:
                raise Fault(name)

    def prepare(self, batch: Batch) -> None:
        self.scheduler.count(batch)
        self._fault("prepare")

    def undo_prepare(self, batch: Batch) -> None:
        self.scheduler.forward_ct -= 1
        self.scheduler.processed_tokens_counter -= batch.extend_num_tokens

    def resolve_inputs(self, batch: Batch) -> None:
        self._fault("resolve_inputs")
        self.scheduler.future_map.check(batch)
        self.scheduler.future_map.resolve(batch)
        self._fault("resolved")

    def forward(self, batch: Batch, rows: Any) -> Any:
        self._fault("forward")
        if not self.scheduler.is_generation:
            return self.scheduler.embed(batch)
        result = self.scheduler.model_worker.forward_batch_generation(batch)
        result.copy_done = Event(self.scheduler.gpu)
        return result

    def delayed_sample(self, result: Result) -> Callable[[], Any] | None:
        return result.delay_sample_func

    def relay(self, batch: Batch, rows: Any, result: Result) -> None:
        self._fault("relay")
        self.relay_upstream(batch, rows, result)
        self._fault("relayed")

    def relay_upstream(self, batch: Batch, rows: Any, result: Result) -> None:
        self.scheduler._relay_forward_payload(batch, rows, result)

    def readback(self, batch: Batch, result: Result) -> None:
        self._fault("readback")
        self.readback_here(batch, result)
        self._fault("read back")

    def readback_here(self, batch: Batch, result: Result) -> None:
        if self.scheduler.is_generation:
            self.scheduler.copy_to_cpu(result)

    def hold_sample(self, rows: Any, result: Result) -> None:
        result.future_indices = rows

    def release_sample(self, result: Result) -> None:
        result.delay_sample_func = None

    def finish(self, batch: Batch, rows: Any, result: Result) -> None:
        if self.scheduler.is_generation:
            batch.input_ids = None
            if self.scheduler.algorithm.on:
                batch.spec_info = result.next_draft_input

    def forward_context(self) -> Any:
        gpu = self.scheduler.gpu
        return onto(gpu, gpu.forward, gpu.schedule)

    def copy_context(self) -> Any:
        gpu = self.scheduler.gpu
        return onto(gpu, gpu.copy, gpu.forward)

    def take_read_done(self) -> Any:
        self._fault("take_read_done")
        worker = self.scheduler.model_worker
        event, worker.shared_read_done_event = worker.shared_read_done_event, None
        return event
