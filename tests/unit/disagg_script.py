"""A scheduler of one disaggregation role that follows a script and writes down every call.

SGLang's own loop and ours run over the same script; what they do, and in which order, must be the same.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.decode import SchedulerDisaggregationDecodeMixin
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.managers.scheduler import Scheduler as Upstream

from zos_sglang.overlap.account import Account
from zos_sglang.overlap.event_loop import EventLoop
from zos_sglang.overlap.guards import PrefillRule, make_guard
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.result_queue import ResultQueue
from zos_sglang.overlap.streams import Barrier
from zos_sglang.upstream.disagg_decode import DecodePort
from zos_sglang.upstream.disagg_prefill import PrefillPort

DECODE, EXTEND = "decode", "extend"


class ScriptedBatch:
    """`sync`: its grammar must see the result before it. `coarse`: its forward leaves no read event."""

    is_extend_in_batch = False
    chunked_req = None
    prefill_chunk_processed = False

    def __init__(self, name: int, kind: str, sync: bool = False, coarse: bool = False) -> None:
        self.name, self.kind, self.sync, self.coarse = name, kind, sync, coarse
        self.reqs: list[Any] = []
        self.has_grammar = sync
        self.forward_mode = SimpleNamespace(
            is_decode=lambda: kind == DECODE,
            is_extend=lambda **_: kind == EXTEND,
            is_mixed=lambda: False,
            is_prebuilt=lambda: False,
        )
        self.spec_algorithm = SimpleNamespace(
            is_none=lambda: not sync, supports_grammar_overlap=lambda: False
        )

    def copy(self) -> ScriptedBatch:
        return self

    def grammar_needs_sync(self) -> bool:
        return self.sync


class ScriptedScheduler:
    """`script`: per selection a batch, None for nothing to run, or "pause" for an iteration paused."""

    require_mlp_sync = enable_unified_memory = enable_staging = False
    _sched_idled = _engine_paused = gracefully_exit = False
    is_generation, tp_size = True, 1
    chunked_req: Any = None
    running_batch: Any = None
    last_batch: Any = None
    is_disable_overlap_for_batch = Upstream.is_disable_overlap_for_batch

    def __init__(self, script: list[Any]) -> None:
        self.script, self.log = list(script), []
        self.result_queue: Any = deque()
        self.waiting_queue: list[Any] = []
        self._deferred_input_requests: list[Any] = []
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, chunked_req: batch)
        self.disagg_decode_prealloc_queue = SimpleNamespace(
            prefetch_prefill_dp_rank_queries=self._logs("ask for ranks"), queue=[]
        )
        self.disagg_prefill_bootstrap_queue = SimpleNamespace(pop_bootstrapped=self._pop, queue=[])
        self.disagg_prefill_inflight_queue: list[Any] = []

    def _logs(self, *words: Any) -> Any:
        return lambda *_, **__: self.log.append(words)

    # ------------------------------------------------------------ intake and the roles' queues

    def ingest_requests(self, stop_at_pause: bool = False) -> list[Any]:
        self.gracefully_exit = not self.script
        self._engine_paused = bool(self.script) and self.script[0] == "pause"
        self.log.append(("intake",))
        return []

    def _record_scheduler_state_for_paused_engine(self) -> None:
        self.script.pop(0)
        self.log.append(("paused",))

    def _yield_gil_if_needed(self) -> None:
        self.log.append(("yield",))

    def _pop(self) -> list[Any]:
        self.log.append(("bootstrap queue",))
        return []

    def process_decode_queue(self) -> None:
        self.log.append(("decode queues",))

    def process_disagg_prefill_inflight_queue(self) -> None:
        self.log.append(("in-flight queue",))

    # ------------------------------------------------------------ a step

    def _select(self, running_batch: Any, last_batch: Any = None) -> Any:
        batch = self.script.pop(0) if self.script else None
        self.log.append(("select", getattr(batch, "name", None), getattr(last_batch, "name", None)))
        return SimpleNamespace(running_batch=running_batch, batch_to_run=batch)

    def get_next_disagg_decode_batch_to_run(self, running_batch: Any) -> Any:
        return self._select(running_batch)

    def get_next_disagg_prefill_batch_to_run(self, running_batch: Any, last_batch: Any, **_: Any) -> Any:
        return self._select(running_batch, last_batch)

    def run_batch(self, batch: ScriptedBatch) -> Any:
        self.log.append(("launch", batch.name))
        self.read_done = not batch.coarse
        return SimpleNamespace(of=batch.name, delayed=True)

    def process_batch_result(self, batch: ScriptedBatch, result: Any) -> None:
        assert result.of == batch.name
        self.log.append(("process", batch.name))

    def launch_batch_sample_if_needed(self, result: Any, batch: Any) -> None:
        if result is not None and batch is not None and result.delayed:
            result.delayed = False
            self.log.append(("sample", batch.name))

    def on_idle(self) -> None:
        self.log.append(("idle",))

    # ------------------------------------------------------------ the barrier

    def _is_continuous_input_polling_enabled(self) -> bool:
        return False

    def _war_barrier_is_coarse(self) -> bool:
        return not self.read_done

    def _apply_war_barrier(self) -> None:
        self.log.append(("barrier",))


class LoggingLauncher:
    """Launches and waits as upstream's names in the log."""

    def __init__(self, scheduler: ScriptedScheduler) -> None:
        self.scheduler = scheduler
        self.device = SimpleNamespace(take_read_done=lambda: "read" if scheduler.read_done else None)
        self.streams = self

    def launch(self, batch: ScriptedBatch) -> Any:
        return self.scheduler.run_batch(batch)

    def sample_delayed(self, batch: ScriptedBatch, result: Any) -> None:
        self.scheduler.launch_batch_sample_if_needed(result, batch)

    def war_barrier(self, read_done: Any, *, defer_coarse: bool = False) -> Barrier:
        if read_done is None and defer_coarse:
            return Barrier.COARSE
        self.scheduler._apply_war_barrier()
        return Barrier.COARSE if read_done is None else Barrier.FINE

    def schedule_waits_for_forward(self) -> None:
        self.scheduler._apply_war_barrier()


def upstream_log(role: str, script: list[Any]) -> list[Any]:
    """What SGLang's loop of a role does."""
    scheduler: Any = ScriptedScheduler(script)
    if role == "decode":
        SchedulerDisaggregationDecodeMixin.event_loop_overlap_disagg_decode(scheduler)
    else:
        SchedulerDisaggregationPrefillMixin.event_loop_overlap_disagg_prefill(scheduler)
    return scheduler.log


def our_log(role: str, script: list[Any], account: Account | None = None) -> list[Any]:
    """What ours does."""
    scheduler: Any = ScriptedScheduler(script)
    scheduler.result_queue = queue = ResultQueue()
    account = account or Account()
    port = (DecodePort if role == "decode" else PrefillPort)(scheduler, PinRing(), account)
    launcher: Any = LoggingLauncher(scheduler)
    guard = make_guard(PrefillRule.NEVER, dp_attention=False)
    EventLoop(port, launcher, queue, guard, account, late_barrier=role == "prefill").run()
    return scheduler.log
