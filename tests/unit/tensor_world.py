"""The event loop and the lane over tensors of the asynchronous device.

Real here: event loop, launcher, streams, pins, lane, its port, window, pool, readback, results, both
executors, the references of the lane's kernels, and of SGLang the KV allocator, the request table and the
future map. Made up: the scheduler's choices and the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.unit.fake_batch import Mode
from tests.unit.fake_scheduler import Script
from tests.unit.fakes import FakeDevice, FakePort, onto
from tests.unit.lane_fakes import LaneRequest
from tests.unit.lane_ports import VirtualLanePort
from tests.unit.lane_scheduler import LaneScheduler, Messages
from tests.unit.tensor_model import CONTEXT, Decode, Model, lane_kernels, right_answer
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.event_loop import EventLoop
from zos_sglang.overlap.guards import PrefillRule, make_guard
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.launch import Launcher
from zos_sglang.overlap.result_queue import ResultQueue
from zos_sglang.overlap.streams import Streams
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eager import EagerExecutor
from zos_sglang.resident.graph_executor import GraphExecutor
from zos_sglang.resident.lane import Lane
from zos_sglang.resident.readback import Readback
from zos_sglang.settings import Settings
from zos_sglang.testing.races.device import Device, Event
from zos_sglang.testing.races.tensors import DEVICE, Simulated
from zos_sglang.upstream import lane_results
from zos_sglang.upstream.future_map import FutureMap
from zos_sglang.upstream.lane_port import SglangLanePort
from zos_sglang.upstream.runtime import runtime


@dataclass(frozen=True)
class TensorLimits:
    """The shape of the server and of its lane. `fine`: the forward leaves an event after its shared reads."""

    rows: int = 4
    slots: int = 300
    window: int = 4
    depth: int = 3
    graphs: bool = True
    greedy: bool = True
    fine: bool = True
    page_size: int = 1
    in_place: bool = True


class TensorBatch:
    """`ScheduleBatch`, as far as a step goes; what a step needs lives on the device."""

    mix_running_indices = chunked_req = spec_info = None
    has_grammar = return_logprob = return_hidden_states = after_idle_gap = False
    forward_iter = extend_num_tokens = 0
    launch_ts = 0.0
    seq_lens_sum = None
    device, enable_overlap, spec_algorithm = DEVICE, True, SpeculativeAlgorithm.NONE
    req_pool_indices: Any
    seq_lens: Any
    orig_seq_lens: Any
    seq_lens_cpu: Any

    def __init__(self, scheduler: TensorScheduler, reqs: list[LaneRequest], mode: Mode) -> None:
        self.scheduler, self.reqs, self.forward_mode = scheduler, reqs, mode
        self.is_extend_in_batch = mode.is_extend()
        self.sampling_info = None
        self.prefill_input_ids_cpu: Any = None
        self.input_ids: Any = None
        self.out_cache_loc: Any = None

    def copy(self) -> TensorBatch:
        out = TensorBatch(self.scheduler, self.reqs[:], self.forward_mode)
        out.is_extend_in_batch, out.forward_iter = self.is_extend_in_batch, self.forward_iter
        return out

    def grammar_needs_sync(self) -> bool:
        return False

    def write_shared(self) -> None:
        """What the forward reads of the schedule stream's here is the page table."""

    def prepare_for_extend(self) -> None:
        scheduler, reqs = self.scheduler, self.reqs
        lengths = [len(r.spec.prompt) for r in reqs]
        self.out_cache_loc = scheduler.allocator.alloc(sum(lengths))
        self.prefill_input_ids_cpu = torch.tensor([t for r in reqs for t in r.spec.prompt])
        self.extend_num_tokens, start = sum(lengths), 0
        for req, n in zip(reqs, lengths, strict=True):
            scheduler.pool.write(
                (req.kv.req_pool_idx, slice(0, n)), self.out_cache_loc[start : start + n].to(torch.int32)
            )
            req.kv.kv_committed_len = req.kv.kv_allocated_len = n
            start += n
        self.req_pool_indices = self._to_device([r.kv.req_pool_idx for r in reqs])
        self.seq_lens, self.orig_seq_lens = self._to_device(lengths), self._to_device(lengths)
        self.seq_lens_cpu = torch.tensor(lengths)

    def prepare_for_decode(self) -> None:
        self.forward_mode, self.is_extend_in_batch, self.extend_num_tokens = Mode.DECODE, False, 0
        self.out_cache_loc = self.scheduler.allocator.alloc(len(self.reqs))
        self.scheduler.pool.write((self.req_pool_indices, self.seq_lens), self.out_cache_loc.to(torch.int32))
        for req in self.reqs:
            req.decode_batch_idx += 1
            req.kv.kv_committed_len += 1
            req.kv.kv_allocated_len = req.kv.kv_committed_len
        self.seq_lens, self.orig_seq_lens = self.seq_lens + 1, self.orig_seq_lens + 1
        self.seq_lens_cpu = self.seq_lens_cpu + 1
        self.input_ids = None

    def filter(self, leave_out: Iterable[LaneRequest | None] = ()) -> None:
        gone = list(leave_out)
        self.filter_batch([i for i, r in enumerate(self.reqs) if not r.finished() and r not in gone])

    def filter_batch(self, keep_indices: list[int]) -> None:
        if len(keep_indices) == len(self.reqs):
            return
        self.reqs = [self.reqs[i] for i in keep_indices]
        if keep_indices:
            index = self._to_device(keep_indices)
            self.req_pool_indices = self.req_pool_indices[index]
            self.seq_lens, self.orig_seq_lens = self.seq_lens[index], self.orig_seq_lens[index]
            self.seq_lens_cpu = self.seq_lens_cpu[keep_indices]

    def merge(self, other: TensorBatch) -> None:
        self.reqs = self.reqs + other.reqs
        for name in ("req_pool_indices", "seq_lens", "orig_seq_lens", "seq_lens_cpu"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))

    def _to_device(self, values: list[int]) -> Any:
        return torch.tensor(values).to(DEVICE, non_blocking=True)


class TensorScheduler(LaneScheduler):
    """Prefill before decode, every request with room for its longest answer: nothing is ever retracted."""

    limits: Any
    spec_algorithm: Any = SpeculativeAlgorithm.NONE
    is_generation = True

    def __init__(self, on: Simulated, limits: TensorLimits, script: Script) -> None:
        device = on.device
        self.on, self.limits, self.script = on, limits, {t: list(a) for t, a in script.items()}
        self.gpu: Any = SimpleNamespace(advance=lambda: None)
        self.pool = ReqToTokenPool(limits.rows, CONTEXT, DEVICE, False)
        self.allocator = TokenToKVPoolAllocator(limits.slots, torch.int64, DEVICE, None, False)
        kv = torch.zeros(limits.slots + 1, dtype=torch.int64, device=DEVICE)
        self.model = Model(on, kv, self.pool.req_to_token)
        self.future_map: Any = FutureMap(DEVICE, SpeculativeAlgorithm.NONE, self.pool)
        self.messages = Messages()
        self._lane_services()
        self.token_to_kv_pool_allocator, self.req_to_token_pool = self.allocator, self.pool
        self.schedule_stream, self.forward_stream, self.copy_stream = device.streams.values()
        self.result_queue: Any = ResultQueue()
        self.waiting, self.requests, self.processed = [], {}, []
        self.running_batch, self.last_batch = self._batch([], Mode.DECODE), None
        self.chunked_req = None
        self.gracefully_exit = self._engine_paused = self._sched_idled = self.full = False
        self.clock = self.forward_ct = self.serials = self.spare = self.idled = 0
        self.deepest_at_intake = self.processed_tokens_counter = 0
        self.enable_skip_finishing_decode = True
        self.read_done: Event | None = None

    # ------------------------------------------------------------ selection

    def _room(self, req: LaneRequest) -> bool:
        taken = sum(len(r.spec.prompt) + r.spec.max_new for r in self.live())
        needed = len(req.spec.prompt) + req.spec.max_new
        return bool(self.pool.free_slots) and taken + needed <= self.limits.slots

    def _new_prefill(self, running: Any) -> Any:
        chosen: list[Any] = []
        while self.waiting and self._room(self.waiting[0]):  # type: ignore[arg-type]
            req: Any = self.waiting.pop(0)
            [req.kv.req_pool_idx] = self.pool.alloc_rows(1) or []
            chosen.append(req)
        self.full = bool(self.waiting) and not chosen
        if not chosen:
            return None
        batch = self._batch(chosen, Mode.EXTEND)
        batch.prepare_for_extend()
        return batch

    def _decode(self, running: Any) -> Any:
        running.filter(self._finishing(running))
        if not running.reqs:
            return None
        running.prepare_for_decode()
        return running

    def _batch(self, reqs: list[Any], mode: Mode) -> Any:
        return TensorBatch(self, reqs, mode)

    def _release(self, req: Any) -> None:
        """As upstream: the row is published, which writes it, and its slots are free again."""
        kv = req.kv
        assert kv.kv_committed_len == kv.kv_allocated_len, "released with a reservation"
        slots = self.pool.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len].to(torch.int64)
        self.pool.write((kv.req_pool_idx, slice(0, kv.kv_allocated_len)), slots.to(torch.int32))
        self.allocator.free(slots)
        self.pool.free_slots.append(kv.req_pool_idx)
        kv.req_pool_idx = None

    # ------------------------------------------------------------ processing

    def process_batch_result(self, batch: Any, result: Any) -> None:
        self.processed.append(result.serial)
        result.copy_done.synchronize()
        tokens = (result.host if hasattr(result, "host") else result.next_token_ids).tolist()
        assert len(batch.reqs) == len(tokens), "a result met another batch"
        for req, token in zip(batch.reqs, tokens, strict=True):
            if not req.finished():
                req.output_ids.append(token)
                req.update_finish_state()
                if req.finished():
                    self._release(req)

    def on_idle(self) -> None:
        self._sched_idled = True
        assert not self.result_queue and len(self.pool.free_slots) == self.limits.rows, "a row leaked"
        assert self.allocator.available_size() == self.limits.slots, "slots leaked"


class TensorDevice(FakeDevice):
    """`Device`: upstream's launch, reduced to what touches tensors."""

    scheduler: Any

    def resolve_inputs(self, batch: Any) -> None:
        self.scheduler.future_map.resolve(batch)

    def forward(self, batch: Any, rows: Any) -> Any:
        scheduler, model = self.scheduler, self.scheduler.model
        plan = model.metadata(rows, batch.seq_lens)
        if scheduler.limits.fine:
            scheduler.read_done = Event(scheduler.on.device)
            scheduler.read_done.record()
        result = SimpleNamespace(serial=scheduler.next_serial(), copy_done=Event(scheduler.on.device))
        result.next_token_ids = model.attend(plan, batch.input_ids, batch.out_cache_loc)
        return result

    def delayed_sample(self, result: Any) -> None:
        return None

    def relay(self, batch: Any, rows: Any, result: Any) -> None:
        self.scheduler.future_map.stash_bonus_tokens(rows, result.next_token_ids)

    def readback(self, batch: Any, result: Any) -> None:
        result.host = torch.empty_like(result.next_token_ids, device="cpu")
        result.host.copy_(result.next_token_ids, non_blocking=True)
        result.copy_done.record()

    def finish(self, batch: Any, rows: Any, result: Any) -> None:
        batch.input_ids = None

    def forward_context(self) -> Any:
        device = self.scheduler.on.device
        return onto(device, device.forward, device.schedule)

    def copy_context(self) -> Any:
        device = self.scheduler.on.device
        return onto(device, device.copy, device.forward)

    def take_read_done(self) -> Any:
        event, self.scheduler.read_done = self.scheduler.read_done, None
        return event


class TensorPort(FakePort):
    lane_results: Any = None

    def process(self, batch: Any, result: Any) -> None:
        if self.lane_results is not None and self.lane_results.owns(result):
            self.scheduler.processed.append(result.serial)  # type: ignore[attr-defined]
            self.lane_results.process(batch, result)
        else:
            super().process(batch, result)


class TensorLanePort(VirtualLanePort):
    def __init__(self, scheduler: Any, device: Any, streams: Any, pins: Any, account: LaneAccount) -> None:
        SglangLanePort.__init__(self, scheduler, device, streams, pins, account)
        self.pool.make_room = lambda slots: None  # type: ignore[method-assign]

    def on_device(self, rows: Any) -> Any:
        return torch.tensor(rows).to(DEVICE, non_blocking=True)


class TensorWorld:
    """The parts of one run."""

    def __init__(self, on: Simulated, limits: TensorLimits, script: Script) -> None:
        self.device = device = on.device
        self.script, self.limits = script, limits
        self.scheduler = scheduler = TensorScheduler(on, limits, script)
        self.account, self.lane_account, self.pins = Account(), LaneAccount(), PinRing()
        self.port: Any = TensorPort(scheduler)
        side: Any = TensorDevice(scheduler, self.pins, self.account)
        streams = Streams(
            device.schedule, device.forward, device.copy, barrier_enabled=True, force_coarse=False
        )
        self.launcher = Launcher(side, self.port, streams, self.pins, self.account)
        executor: Any
        if limits.graphs:
            decode = Decode(scheduler.model)
            decode.greedy = limits.greedy
            executor = GraphExecutor(decode, depth=limits.depth)
        else:
            table = scheduler.pool.req_to_token
            executor = EagerExecutor(scheduler.model, table, depth=limits.depth, capacity=8)
        port: Any = TensorLanePort(scheduler, side, streams, self.pins, self.lane_account)
        new_event = lambda: Event(device)  # noqa: E731
        home = Readback(executor.ring, streams.copy_waits_for_forward, side.copy_context, new_event)
        self.lane = lane = Lane(port, executor, home, self.lane_account, window=limits.window)
        bag = SimpleNamespace(enable_metrics=False)
        with mock.patch.object(lane_results, "get_observability", lambda: bag):
            self.port.lane_results = lane_results.LaneResults(
                scheduler,
                self.lane_account,
                undisturbed=lane.undisturbed,
                extra_steps=lane.extra_steps,
                row_ended=lane.row_ended,
                release_waits=port.schedule_waits_for_forward,
                failed=lane.fail,
            )
        device.finish()  # start-up is over before anything is served

    def run(self) -> TensorWorld:
        guard = make_guard(PrefillRule.NEVER, dp_attention=False, sync=False)
        queue = self.scheduler.result_queue
        EventLoop(self.port, self.launcher, queue, guard, self.account, lane=self.lane).run()
        while queue:
            self.port.process(*queue.popleft())
        self.device.finish()
        return self

    def specs(self) -> dict[int, Any]:
        actions = [a for actions in self.script.values() for a in actions]
        return {a[1].rid: a[1] for a in actions if a[0] == "submit"}

    def answers(self) -> dict[int, list[int]]:
        return {rid: list(r.output_ids) for rid, r in self.scheduler.requests.items()}  # type: ignore[attr-defined]

    def right_answers(self) -> dict[int, list[int]]:
        return {rid: right_answer(s) for rid, s in self.specs().items()}

    def check(self) -> TensorWorld:
        cut = {a[1] for actions in self.script.values() for a in actions if a[0] == "abort"}
        got, right = self.answers(), self.right_answers()
        assert got.keys() == right.keys()
        for rid, tokens in got.items():
            assert tokens == (right[rid][: len(tokens)] if rid in cut else right[rid]), f"request {rid}"
        assert self.scheduler.processed == list(range(1, self.scheduler.serials + 1))
        assert self.lane_account.faults == 0 and self.launcher.own
        return self


@contextmanager
def tensor_world(script: Script, limits: TensorLimits, policy: str, seed: int = 0) -> Iterator[TensorWorld]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(runtime, "settings", Settings(mode="resident")))
        on = stack.enter_context(Simulated(stack.enter_context(Device(policy, seed))))
        stack.enter_context(lane_kernels(on))
        yield TensorWorld(on, limits, script)
