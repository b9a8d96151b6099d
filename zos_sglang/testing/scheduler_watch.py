"""A plugin for tests: the scheduler's own account of aborts and of published loads; aborts at an exact token.

`SCHEDULER_WATCH=FILE` makes the scheduler process append one JSON object a line:

    abort     an abort was accepted: request id or all; `running` and `waiting` requests that it met
    out       a record left for the client: request id, tokens so far, finish reason (null: not the last one)
    echo      the last record of a request that ended outside the stream of results
    free      a request gave its KV slots back
    used      slots that neither are free nor belong to the prefix cache, at every intake after an abort
    load      a load was published for routers: requests running and waiting, slots used
    asked     whether the queue has room for a request: `waiting` others at that moment, and whether `refused`

Each carries `step`, the number of launches so far. A request whose id, or the part of it behind a dot, begins
with `at-N-` is aborted at the first intake that finds N output tokens on the host: where the step in flight
is about to end it, the two always meet.

`ENTRY` is the `entry_points.txt` of a distribution that lets SGLang find the plugin.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

ENTRY = "[sglang.srt.plugins]\nscheduler_watch = zos_sglang.testing.scheduler_watch:register\n"
FILE = "SCHEDULER_WATCH"

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"
_RECEIVER = f"{_COMPONENTS}.request_receiver.SchedulerRequestReceiver"
_AT = re.compile(r"(?:^|\.)at-(\d+)-")
#: Intakes after an abort for which the pool is looked at.
_LOOKS = 8


class Watcher:
    """Writes the account of one scheduler process."""

    def __init__(self, sink: TextIO) -> None:
        self.sink = sink
        self.scheduler: Any = None
        self._looks = 0
        self._cut: set[str] = set()

    def write(self, event: str, **more: Any) -> None:
        """One line."""
        step = self.scheduler.forward_ct if self.scheduler is not None else 0
        self.sink.write(json.dumps({"event": event, "step": step, **more}) + "\n")

    # ------------------------------------------------------------ hooks

    def intake(self, scheduler: Any, received: list[Any]) -> None:
        """Before the requests of an iteration are taken in."""
        self.scheduler = scheduler
        if self._looks:
            self._looks -= 1
            self.write("used", used=_used(scheduler))

    def received(self, result: Any, *_: Any, **__: Any) -> Any:
        """After requests were received: the aborts that are due are received with them."""
        from sglang.srt.managers.io_struct import AbortReq

        if self.scheduler is None or not isinstance(result, list):
            return None
        due = [req.rid for req in self.scheduler.collect_inflight_reqs() if self._is_due(req)]
        self._cut.update(due)
        return [*result, *(AbortReq(rid=rid) for rid in due)] if due else None

    def _is_due(self, req: Any) -> bool:
        at = _AT.search(req.rid)
        if at is None or req.rid in self._cut or req.finished():
            return False
        return len(req.output_ids) >= int(at[1])

    def abort(self, scheduler: Any, wanted: Any) -> None:
        """Before an abort is carried out."""

        def met(reqs: Iterable[Any]) -> list[str]:
            found = {r.rid for r in reqs if wanted.abort_all or r.rid.startswith(wanted.rid)}
            return sorted(found)

        self.scheduler = scheduler
        running = met(r for r in scheduler.collect_inflight_reqs() if not r.finished())
        self._looks = _LOOKS
        self.write(
            "abort",
            rid=wanted.rid,
            all=wanted.abort_all,
            running=running,
            waiting=met(scheduler.waiting_queue),
        )

    def sent(self, _: Any, output: Any, *__: Any) -> None:
        """Before a message leaves the scheduler."""
        kind = type(output).__name__
        if kind == "AbortReq":
            self.write("echo", rid=output.rid)
        elif kind == "BatchTokenIDOutput":
            rows = zip(output.rids, output.completion_tokens, output.finished_reasons, strict=True)
            for rid, tokens, finish in rows:
                self.write("out", rid=rid, tokens=tokens, finish=finish and finish["type"])

    def freed(self, _: Any, req: Any, *__: Any, **___: Any) -> None:
        """After a request's slots were released."""
        self.write("free", rid=req.rid)

    def published(self, load: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        """After the load of a step was published, or not (None)."""
        self.scheduler = scheduler
        if load is not None:
            loads = {"running": load.num_running_reqs, "waiting": load.num_waiting_reqs}
            self.write("load", **loads, used=load.num_used_tokens)

    def asked(self, refused: bool, scheduler: Any, req: Any) -> None:
        """After the limit of the queue was asked about a request."""
        self.write("asked", rid=req.rid, waiting=len(scheduler.waiting_queue), refused=refused)


def _used(scheduler: Any) -> int:
    """Slots held by requests."""
    cache, pool = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    return int(scheduler.max_total_num_tokens - pool.available_size() - cache.evictable_size())


def register() -> None:
    """Entry point of group `sglang.srt.plugins`; acts in processes that run a scheduler."""
    if "sglang.srt.managers.scheduler" not in sys.modules or not os.environ.get(FILE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Open for as long as the process lives; a line at a time, so that a reader sees whole ones.
    sink = Path(os.environ[FILE]).open("a", buffering=1)  # noqa: SIM115
    watcher = Watcher(sink)
    for target, hook, kind in (
        (f"{_SCHEDULER}.process_input_requests", watcher.intake, HookType.BEFORE),
        (f"{_SCHEDULER}.abort_request", watcher.abort, HookType.BEFORE),
        (f"{_SCHEDULER}.publish_load_snapshot", watcher.published, HookType.AFTER),
        (f"{_SCHEDULER}._abort_on_queued_limit", watcher.asked, HookType.AFTER),
        (
            f"{_COMPONENTS}.request_receiver.SchedulerRequestReceiver.recv_requests",
            watcher.received,
            HookType.AFTER,
        ),
        (f"{_COMPONENTS}.output_sender.SenderWrapper.send_output", watcher.sent, HookType.BEFORE),
        ("sglang.srt.mem_cache.common.release_kv_cache", watcher.freed, HookType.AFTER),
    ):
        HookRegistry.register(target, hook, kind)
