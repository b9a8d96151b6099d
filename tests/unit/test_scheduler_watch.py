"""The watcher of aborts: what it writes, and that it aborts at the token it was asked for."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from zos_sglang.testing.scheduler_watch import Watcher


class Scheduler:
    """As much of upstream's scheduler as the watcher reads."""

    def __init__(self, *running: Any, waiting: tuple[Any, ...] = ()) -> None:
        self.running, self.waiting_queue, self.forward_ct = running, list(waiting), 7
        self.max_total_num_tokens = 100
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 30)
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: 60)

    def collect_inflight_reqs(self) -> set[Any]:
        return set(self.running)


class Req:
    def __init__(self, rid: str, tokens: int = 0, finished: bool = False) -> None:
        self.rid, self.output_ids, self._finished = rid, [0] * tokens, finished

    def finished(self) -> bool:
        return self._finished


def wanted(rid: str = "", everything: bool = False) -> Any:
    return SimpleNamespace(rid=rid, abort_all=everything)


@pytest.fixture
def sink() -> io.StringIO:
    return io.StringIO()


def written(sink: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_an_abort_names_whom_it_met(sink):
    scheduler = Scheduler(Req("a-1"), Req("a-2", finished=True), Req("b"), waiting=(Req("a-3"),))
    Watcher(sink).abort(scheduler, wanted("a"))
    (entry,) = written(sink)
    assert (entry["running"], entry["waiting"], entry["step"]) == (["a-1"], ["a-3"], 7)


def test_after_an_abort_the_slots_in_use_are_looked_at(sink):
    watcher, scheduler = Watcher(sink), Scheduler(Req("a"))
    watcher.intake(scheduler, [])
    assert written(sink) == []
    watcher.abort(scheduler, wanted(everything=True))
    watcher.intake(scheduler, [])
    assert written(sink)[-1] == {"event": "used", "step": 7, "used": 10}


def test_a_request_is_aborted_once_at_its_token(sink):
    watcher = Watcher(sink)
    early, due, done = Req("x.at-5-a", 4), Req("at-5-b", 5), Req("at-5-c", 9, finished=True)
    watcher.scheduler = Scheduler(early, due, done, Req("other", 9))
    found = watcher.received([])
    assert [abort.rid for abort in found] == ["at-5-b"]
    assert watcher.received([]) is None
    early.output_ids.append(0)
    assert [abort.rid for abort in watcher.received(["first"])[1:]] == ["x.at-5-a"]


def test_of_a_message_every_row_is_written(sink):
    class BatchTokenIDOutput:
        rids, completion_tokens, finished_reasons = ["a", "b"], [3, 4], [None, {"type": "abort"}]

    Watcher(sink).sent(None, BatchTokenIDOutput())
    assert [(e["rid"], e["tokens"], e["finish"]) for e in written(sink)] == [
        ("a", 3, None),
        ("b", 4, "abort"),
    ]
