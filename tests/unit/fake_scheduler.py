"""A scheduler over the virtual GPU, with upstream's names and its ways, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.unit.fake_batch import NO_GRAMMAR, Batch, Mode, Request, Result, Spec, SpecAlgorithm
from tests.unit.fake_model import FutureMap, Worker
from tests.unit.virtual_gpu import Event, Gpu, Tensor
from zos_sglang.overlap.result_queue import ResultQueue

NO_PROGRESS = 3000


@dataclass(frozen=True)
class Limits:
    """The shape of the server."""

    rows: int = 6
    capacity: int = 200
    chunk: int = 16
    mixed: bool = False
    speculative: bool = False
    embedding: bool = False
    delay_all: bool = False
    #: Grammar masks are filled by processing, on the schedule stream, instead of by the sampler.
    masks_early: bool = False
    #: "fine", "coarse" or "both" in turn: does the runner leave an event after its shared reads?
    barrier: str = "fine"


Script = dict[int, list[tuple[Any, ...]]]


class Scheduler:
    """Upstream's scheduler on a virtual clock: one tick for each intake."""

    def __init__(self, gpu: Gpu, limits: Limits, script: Script) -> None:
        self.gpu, self.limits, self.script = gpu, limits, {t: list(a) for t, a in script.items()}
        self.algorithm = SpecAlgorithm(limits.speculative)
        self.spec_algorithm = self.algorithm
        self.is_generation, self.delay_all = not limits.embedding, limits.delay_all
        self.free_rows = list(range(limits.rows))[::-1]
        self.generations = [0] * limits.rows
        self.future_map = FutureMap(gpu, self.generations)
        self.tp_worker = self.model_worker = Worker(self)
        self.model_worker.last_shared_read_runner = self.model_worker  # type: ignore[attr-defined]
        self.batch_record_buf: list[Any] = [None, None]
        self.batch_record_ct = 0
        self.schedule_stream, self.forward_stream, self.copy_stream = gpu.schedule, gpu.forward, gpu.copy
        self.tp_group = SimpleNamespace(world_size=1)
        self.waiting: list[Request] = []
        self.requests: dict[int, Request] = {}
        self.chunked_req: Request | None = None
        self.running_batch = self._batch([], Mode.DECODE)
        self.last_batch: Batch | None = None
        self.result_queue: Any = ResultQueue()
        self.cur_batch_for_debug: Batch | None = None
        self.gracefully_exit = self._engine_paused = self._sched_idled = False
        self.enable_skip_finishing_decode = False
        self._war_barrier_enabled = True
        self.clock = self.forward_ct = self.serials = self.spare = 0
        self.processed_tokens_counter = 0
        self.processed: list[int] = []
        self.idled = 0
        self.deepest_at_intake = 0
        self.on_switch: Callable[[str], None] = lambda mode: None
        self.on_rule: Callable[[str], None] = lambda rule: None

    # ------------------------------------------------------------ intake

    def ingest_requests(self) -> list[Any]:
        self.clock += 1
        assert self.clock < NO_PROGRESS, "the simulation makes no progress"
        self.deepest_at_intake = max(self.deepest_at_intake, len(self.result_queue))
        self.gpu.advance()
        for name, *args in self.script.pop(self.clock, ()):
            getattr(self, f"_on_{name}")(*args)
        if not self.script and not self._engine_paused and all(r.finished() for r in self.requests.values()):
            self.spare += 1
            self.gracefully_exit = self.gracefully_exit or self.spare > 3
        return []

    def _on_submit(self, spec: Spec) -> None:
        request = self.requests[spec.rid] = Request(spec)
        self.waiting.append(request)

    def _on_abort(self, rid: int) -> None:
        request = self.requests.get(rid)
        if request is None or request.finished():
            return
        if request in self.waiting:
            self.waiting.remove(request)
            request.ended = "abort"
        request.aborted = True

    def _on_continue(self) -> None:
        self._engine_paused = False

    def _on_exit(self) -> None:
        self.gracefully_exit = True

    def _on_switch(self, mode: str) -> None:
        self.on_switch(mode)

    def _on_rule(self, rule: str) -> None:
        self.on_rule(rule)

    def _on_pause(self, how: str) -> None:
        self._engine_paused = True
        if how == "in_place":
            return
        if self.last_batch:
            self.process_batch_result(*self.result_queue.popleft())
        gone = [r for r in self.running_batch.reqs if not r.finished()]
        last = self.last_batch
        if last is not None and last.forward_mode.is_extend() and last is not self.running_batch:
            gone += [r for r in last.reqs if not r.finished()]
        if self.chunked_req is not None and self.chunked_req not in gone:
            gone.append(self.chunked_req)
        self._retract(gone)
        self.running_batch, self.last_batch, self.chunked_req = self._batch([], Mode.DECODE), None, None

    def _record_scheduler_state_for_paused_engine(self) -> None:
        pass

    # ------------------------------------------------------------ selection

    def get_next_batch_to_run(self, running_batch: Batch, last_batch: Batch | None) -> Any:
        running = running_batch
        if last_batch is not None and last_batch.forward_mode.is_extend():
            last_batch.filter([self.chunked_req, last_batch.chunked_req])
            if last_batch.reqs and last_batch is not running and self.is_generation:
                if running.reqs:
                    running.merge(last_batch)
                else:
                    running = last_batch
        running.filter()
        batch = self._new_prefill(running)
        if batch is not None and batch.forward_mode is Mode.MIXED:
            running = self._batch([], Mode.DECODE)
        elif batch is None and running.reqs:
            batch = self._decode(running)
        if batch is not None:
            batch.write_shared()
        return SimpleNamespace(running_batch=running, batch_to_run=batch)

    def _new_prefill(self, running: Batch) -> Batch | None:
        budget = self.limits.chunk if self.is_generation else 10**6
        candidates = [self.chunked_req] if self.chunked_req is not None else []
        candidates += self.waiting
        chosen, pieces = [], []
        for req in candidates:
            tokens = req.tokens()
            if budget <= 0 or not self._fits(req, len(tokens) + len(running.reqs)):
                break
            if req is not self.chunked_req:
                self.waiting.remove(req)
                req.row, req.retracted = self._take_row(), False
            piece = tokens[req.prefilled : req.prefilled + budget]
            budget -= len(piece)
            req.prefilled += len(piece)
            self.chunked_req = None
            chosen.append(req)
            pieces.append(piece)
            if req.prefilled < len(tokens):
                self.chunked_req = req
                req.inflight_middle_chunks += 1
                break
        if not chosen:
            return None
        batch = self._batch(chosen, Mode.EXTEND)
        batch.prepare_for_extend(pieces)
        batch.chunked_req = self.chunked_req
        if self.limits.mixed and running.reqs:
            batch.mix_with(running)
        return batch

    def _decode(self, running: Batch) -> Batch | None:
        finishing = self._finishing(running)
        running.filter(finishing)
        if not running.reqs:
            return None
        while self._used() + len(running.reqs) > self.limits.capacity and len(running.reqs) > 1:
            if finishing:
                return None
            victim = running.reqs[-1]
            running.filter([victim])
            self._retract([victim])
        running.prepare_for_decode()
        return running

    def _finishing(self, batch: Batch) -> list[Request]:
        if not self.enable_skip_finishing_decode or not self.result_queue:
            return []
        assert len(self.result_queue) == 1
        queued = self.result_queue[0][0].reqs
        return [r for r in batch.reqs if r in queued and len(r.output) + 1 >= r.spec.max_new]

    def _retract(self, reqs: list[Request]) -> None:
        for req in reqs:
            self._release(req)
            req.retracted, req.prefilled = True, 0
        self.waiting[:0] = reqs

    def _fits(self, req: Request, more: int) -> bool:
        if req is self.chunked_req:
            return True
        used = self._used()
        return bool(self.free_rows) and (used == 0 or used + more <= self.limits.capacity)

    def _used(self) -> int:
        return sum(len(r.tokens()) for r in self.requests.values() if r.row is not None)

    def _take_row(self) -> int:
        row = self.free_rows.pop()
        self.generations[row] += 1
        return row

    def _release(self, req: Request) -> None:
        assert req.row is not None
        self.free_rows.append(req.row)
        req.row = None

    def _batch(self, reqs: list[Request], mode: Mode) -> Batch:
        return Batch(self.gpu, reqs, mode, self.algorithm)

    # ------------------------------------------------------------ upstream's launch

    def run_batch(self, batch: Batch) -> Result:
        gpu = self.gpu
        self.count(batch)
        with gpu.on(gpu.forward):
            gpu.forward.wait_stream(gpu.schedule)
            self.future_map.resolve(batch)
            if not self.is_generation:
                return self.embed(batch)
            before = dict(batch.__dict__)
            assert batch.sampling_info is not None
            batch.sampling_info = batch.sampling_info.copy_for_forward()
            self.batch_record_ct = (self.batch_record_ct + 1) % 2
            self.batch_record_buf[self.batch_record_ct] = [batch, dict(batch.__dict__)]
            result = self.model_worker.forward_batch_generation(batch)
            rows = batch.req_pool_indices
            batch.sampling_info = before["sampling_info"]
            if self.algorithm.on:
                batch.__dict__.update(before)
            if result.delay_sample_func is None:
                self._relay_forward_payload(batch, rows, result)
            else:
                result.future_indices = rows
        result.copy_done = Event(gpu)
        if result.delay_sample_func is None:
            self._copy_result_to_cpu(result, batch)
        batch.input_ids = None
        if self.algorithm.on:
            batch.spec_info = result.next_draft_input
        return result

    def count(self, batch: Batch) -> None:
        self.forward_ct += 1
        batch.forward_iter, self._sched_idled = self.forward_ct, False
        self.processed_tokens_counter += batch.extend_num_tokens

    def embed(self, batch: Batch) -> Result:
        result = self.model_worker.forward_batch_embedding(batch)
        result.copy_done = Event(self.gpu)
        self.copy_to_cpu(result)
        return result

    def launch_batch_sample_if_needed(self, result: Result | None, batch: Batch | None) -> None:
        if result is None or batch is None or result.delay_sample_func is None:
            return
        gpu = self.gpu
        with gpu.on(gpu.forward):
            gpu.forward.wait_stream(gpu.schedule)
            result.delay_sample_func()
            self._relay_forward_payload(batch, result.future_indices, result)
        self._copy_result_to_cpu(result, batch)
        result.delay_sample_func = None

    def _copy_result_to_cpu(self, result: Result, batch: Batch) -> None:
        gpu = self.gpu
        gpu.copy.wait_stream(gpu.forward)
        with gpu.on(gpu.copy):
            self.copy_to_cpu(result)

    def _apply_war_barrier(self) -> None:
        event = self.model_worker.shared_read_done_event
        self.model_worker.shared_read_done_event = None
        if event is not None:
            self.gpu.schedule.wait_event(event)
        else:
            self.gpu.schedule.wait_stream(self.gpu.forward)

    def is_disable_overlap_for_batch(self, batch: Batch | None, last_batch: Batch | None) -> bool:
        if batch is None or not self.result_queue or batch.spec_algorithm.is_none():
            return False
        return batch.grammar_needs_sync() and batch.forward_mode.is_decode()

    def _relay_forward_payload(self, batch: Batch, rows: Tensor, result: Result) -> None:
        if self.is_generation:
            assert result.next_token_ids is not None
            self.future_map.stash(rows, result.next_token_ids, list(batch.rows))

    def copy_to_cpu(self, result: Result, **_: Any) -> None:
        gpu, n = self.gpu, len(result.host)
        assert result.next_token_ids is not None

        def read(at: Any = result.next_token_ids.address, host: list[int] = result.host) -> None:
            gpu.touch(("host tokens", result.serial), "tokens on the host", writes=True)
            host[:] = gpu.load(at, n, "sampled tokens")

        gpu.current.enqueue(read)
        result.copy_done.record()

    def records_read_done(self) -> bool:
        kind = self.limits.barrier
        return kind == "fine" or (kind == "both" and self.serials % 2 == 0)

    def next_serial(self) -> int:
        self.serials += 1
        return self.serials

    # ------------------------------------------------------------ processing

    def process_batch_result(self, batch: Batch, result: Result) -> None:
        self.processed.append(result.serial)
        result.copy_done.synchronize()
        self.gpu.touch(("host tokens", result.serial), "tokens on the host", writes=False)
        assert len(batch.reqs) == len(result.host), "a result met another batch"
        for req, token in zip(batch.reqs, result.host, strict=True):
            if batch.forward_mode.is_extend() and req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
            elif not (req.finished() or req.retracted):
                if self.is_generation:
                    req.accept(token)
                    if self.limits.masks_early and req.state != NO_GRAMMAR:
                        self._fill_mask(req)
                else:
                    req.output, req.ended = [token], "embedding"
                if req.finished():
                    self._release(req)

    def _fill_mask(self, req: Request) -> None:
        gpu, rid, state = self.gpu, req.rid, req.state

        def put() -> None:
            gpu.touch(("mask", rid), "grammar mask", writes=True)
            gpu.masks[rid] = state

        gpu.schedule.enqueue(put)

    def on_idle(self) -> None:
        self.idled += 1
        self._sched_idled = True
        assert not self.result_queue, "idle with a result in flight"
        if not self._engine_paused:
            assert len(self.free_rows) == self.limits.rows, "a row leaked"

    # ------------------------------------------------------------ what only the real port asks for

    device = "virtual"
    scheduler_stage_metrics = dllm_config = _confidence_budget_prepare = None
    enable_async_d2h_copy = enable_unified_memory = enable_unified_cache_external_linker = False
    enable_hierarchical_cache = enable_lmcache = enable_hicache_storage = False
    require_mlp_sync = False
    invariant_checker = SimpleNamespace(self_check_during_busy=lambda: None)
    metrics_reporter = SimpleNamespace(
        record_scheduler_active=lambda ns: None, current_scheduler_metrics_enabled=False
    )
    profiler_manager = SimpleNamespace(_profile_batch_predicate=lambda batch: None)
    forward_sleep_time = None
    scripted_scheduler_hook = None

    @property
    def waiting_queue(self) -> list[Request]:
        return self.waiting

    @property
    def device_module(self) -> Any:
        return SimpleNamespace(Event=lambda blocking=False: Event(self.gpu))

    @property
    def forward_stream_ctx(self) -> Any:
        return self.gpu.on(self.gpu.forward)

    @property
    def copy_stream_ctx(self) -> Any:
        return self.gpu.on(self.gpu.copy)

    ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(socket=None), send_to_detokenizer=SimpleNamespace(socket=None)
    )
