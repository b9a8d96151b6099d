"""The fake scheduler with pages, a prefix tree and retraction, and the services that the lane calls."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.unit.fake_batch import Mode, Result
from tests.unit.fake_model import FutureMap
from tests.unit.fake_scheduler import Limits, Scheduler, Script
from tests.unit.lane_device import LaneWorker
from tests.unit.lane_fakes import LaneBatch, LaneRequest, LaneSpec
from tests.unit.lane_memory import LaneGpu, Memory
from tests.unit.virtual_gpu import Tensor

FORCED_INTERVAL = 50


@dataclass(frozen=True)
class LaneLimits(Limits):
    """The shape of the server and of its lane."""

    pages: int = 200
    page_size: int = 1
    window: int = 4
    depth: int = 3
    lane_rows: int = 6
    #: The executor: static buffers with a page table of its own, or new tensors each step.
    graphs: bool = True
    #: Whether rows may go while the rest rides on; not, as if somebody waited all the time.
    in_place: bool = True


class LaneFutureMap(FutureMap):
    gpu: LaneGpu

    def stash_bonus_tokens(self, rows: Tensor, tokens: Tensor) -> None:
        self.stash(rows, tokens, list(self.gpu.hosted[rows.address]))


class Messages:
    """Upstream's streamer (interval 1), and its allocator's group of frees."""

    def __init__(self) -> None:
        self.grouped = False

    def stream_output(self, reqs: list[LaneRequest], _logprob: bool) -> None:
        for req in reqs:
            if req.finished_output:
                continue
            req.finished_output = req.finished()
            if req.finished() or req.stream or len(req.output_ids) % FORCED_INTERVAL == 0:
                req.messages.append(req.output_ids[req.sent :])
                req.sent = len(req.output_ids)

    def free_group_begin(self) -> None:
        assert not self.grouped
        self.grouped = True

    def free_group_end(self) -> None:
        assert self.grouped
        self.grouped = False


class LaneScheduler(Scheduler):
    """As the overlap core's, with upstream's KV accounting."""

    limits: LaneLimits
    gpu: LaneGpu

    def __init__(self, gpu: LaneGpu, limits: LaneLimits, script: Script) -> None:
        self.memory = Memory(gpu, limits.rows, limits.pages, limits.page_size)
        super().__init__(gpu, limits, script)
        self.future_map = LaneFutureMap(gpu, self.generations)
        self.tp_worker = self.model_worker = LaneWorker(self)  # type: ignore[assignment]
        self.full = False
        self.retractions = 0
        self.messages = Messages()
        self._lane_services()

    def _lane_services(self) -> None:
        """What `LaneResults` calls, and what `SglangLanePort` reads."""
        nothing = lambda *_, **__: None  # noqa: E731
        self.batch_result_processor = SimpleNamespace(
            output_streamer=self.messages,
            token_to_kv_pool_allocator=self.messages,
            _maybe_update_reasoning_tokens=nothing,
            _accept_grammar_tokens=lambda req, token: req.grammar.accept_token(token),
            _handle_finish_state_updated_req=lambda req, *_: self._release(req),
            process_batch_result_decode=self._process,
        )
        self.publish_load_snapshot = self._record_step_counters = nothing
        self.maybe_send_health_check_signal = nothing
        self.load_publisher = SimpleNamespace(publish_load_stat=nothing)
        self.load_inquirer = SimpleNamespace(get_loads=nothing)
        self.tree_cache = SimpleNamespace(flush_pending_backups=nothing)
        self.metrics_reporter = SimpleNamespace(
            record_scheduler_active=nothing,
            log_batch_result_stats=nothing,
            update_device_timer=nothing,
            report_decode_stats=nothing,
            num_generated_tokens=0,
            forward_ct_decode=0,
            decode_log_interval=40,
        )
        self.model_config = SimpleNamespace(self_opened_think_start_ids=())
        self.token_to_kv_pool_allocator = SimpleNamespace(page_size=self.limits.page_size)
        self.req_to_token_pool = SimpleNamespace(req_to_token=None)
        self.new_token_ratio_tracker = SimpleNamespace(decay_step=nothing)

    # ------------------------------------------------------------ intake in two halves

    def receive(self) -> bool:
        self.clock += 1
        assert self.clock < 3000, "the simulation makes no progress"
        self.deepest_at_intake = max(self.deepest_at_intake, len(self.result_queue))
        self.gpu.advance()
        return self.clock in self.script

    def dispatch(self) -> None:
        for name, *args in self.script.pop(self.clock, ()):
            getattr(self, f"_on_{name}")(*args)
        if not self.script and not self._engine_paused and all(r.finished() for r in self.requests.values()):
            self.spare += 1
            self.gracefully_exit = self.gracefully_exit or self.spare > 3

    def ingest_requests(self) -> list[Any]:
        self.receive()
        self.dispatch()
        return []

    def _on_submit(self, spec: LaneSpec) -> None:  # type: ignore[override]
        request = self.requests[spec.rid] = LaneRequest(spec)  # type: ignore[assignment]
        self.waiting.append(request)  # type: ignore[arg-type]

    def _on_weights(self) -> None:
        self.gpu.update_weights()

    # ------------------------------------------------------------ selection

    def _new_prefill(self, running: Any) -> Any:
        budget, chosen, pieces = self.limits.chunk, [], []
        candidates: list[Any] = [*filter(None, [self.chunked_req]), *self.waiting]
        for req in candidates:
            tokens = req.tokens()
            if budget <= 0 or not self._admitted(req, running, budget):
                break
            piece = tokens[req.prefilled : req.prefilled + budget]
            budget -= len(piece)
            req.prefilled += len(piece)
            self.memory.extend(req, req.prefilled)
            self.chunked_req = None
            chosen.append(req)
            pieces.append(piece)
            if req.prefilled < len(tokens):
                self.chunked_req = req
                req.inflight_middle_chunks += 1
                break
        self.full = bool(self.waiting) and not chosen
        if not chosen:
            return None
        batch = self._batch(chosen, Mode.EXTEND)
        batch.prepare_for_extend(pieces)
        batch.chunked_req = self.chunked_req
        if self.limits.mixed and running.reqs and self.memory.room() >= self._next_pages(running.reqs):
            batch.mix_with(running)
        return batch

    def _admitted(self, req: Any, running: Any, budget: int) -> bool:
        """Give a waiting request its row and its cached prefix, if there is room for it."""
        memory, chunked = self.memory, self.chunked_req is req
        if chunked:
            end = min(len(req.tokens()), req.prefilled + budget)
            return memory.room() >= memory.new_pages(req.prefilled, end)
        needed = memory.new_pages(0, len(req.tokens()) + 1) + len(running.reqs)
        alone = not any(r.row is not None for r in self.requests.values())
        if not self.free_rows or (memory.room() < needed and not alone):
            return False
        self.waiting.remove(req)
        req.kv.req_pool_idx, req.is_retracted = self._take_row(), False
        memory.match(req)
        return True

    def _next_pages(self, reqs: list[Any]) -> int:
        return sum(self.memory.new_pages(r.kv.kv_committed_len, r.kv.kv_committed_len + 1) for r in reqs)

    def _decode(self, running: Any) -> Any:
        finishing = self._finishing(running)
        running.filter(finishing)
        while running.reqs and self.memory.room() < self._next_pages(running.reqs):
            if finishing:
                return None
            victim = running.reqs[-1]
            running.filter([victim])
            self._retract([victim])
        if not running.reqs:
            return None
        running.prepare_for_decode()
        return running

    def _finishing(self, batch: Any) -> list[Any]:
        if not self.enable_skip_finishing_decode or not self.result_queue:
            return []
        assert len(self.result_queue) == 1
        queued = self.result_queue[0][0].reqs
        return [r for r in batch.reqs if r in queued and len(r.output_ids) + 1 >= r.spec.max_new]

    def _retract(self, reqs: list[Any]) -> None:
        for req in reqs:
            self._release(req)
            req.is_retracted, req.prefilled = True, 0
        self.retractions += len(reqs)
        self.waiting[:0] = reqs

    def _release(self, req: Any) -> None:
        self.free_rows.append(req.kv.req_pool_idx)
        self.memory.release(req)

    def _batch(self, reqs: list[Any], mode: Mode) -> Any:
        return LaneBatch(self.memory, reqs, mode)

    # ------------------------------------------------------------ processing

    def process_batch_result(self, batch: Any, result: Any) -> None:
        """Upstream's processing; it takes the lane's results too (pause, exit)."""
        self.processed.append(result.serial)
        self._process(batch, result)

    def _process(self, batch: Any, result: Any) -> None:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        if isinstance(result, Result):
            self.gpu.touch(("host tokens", result.serial), "tokens on the host", writes=False)
        tokens = result.host if isinstance(result, Result) else result.next_token_ids.tolist()
        assert len(batch.reqs) == len(tokens), "a result met another batch"
        for req, token in zip(batch.reqs, tokens, strict=True):
            if batch.forward_mode.is_extend() and req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
            elif not (req.finished() or req.is_retracted):
                req.output_ids.append(token)
                req.update_finish_state()
                req.accept(token)
                if req.finished():
                    self._release(req)
                elif batch.forward_mode.is_extend() and req not in batch.decoding:
                    self.memory.publish(req, req.prefilled)
        self.messages.stream_output(
            [
                r
                for r in batch.reqs
                if (r.output_ids and not r.is_retracted and r.row is not None) or r.finished()
            ],
            False,
        )

    def live(self) -> list[Any]:
        return [r for r in self.requests.values() if r.row is not None]

    def on_idle(self) -> None:
        super().on_idle()
        if not self._engine_paused:
            assert not self.memory.locks.total(), "a lock leaked"
