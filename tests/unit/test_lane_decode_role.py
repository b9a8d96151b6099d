"""The lane in the decode role of disaggregation: when it stays open, and when it makes room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.lane_standins import plain_scheduler
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream.disagg_decode import DecodePort
from zos_sglang.upstream.lane_decode import DecodeLanePort
from zos_sglang.upstream.lane_port import SglangLanePort
from zos_sglang.upstream.port import SglangPort

pytestmark = pytest.mark.usefixtures("published")


@pytest.fixture
def scheduler() -> Any:
    """One whose queues do nothing by themselves; `log` says what was asked of them."""
    made = plain_scheduler()
    made.log, made._engine_paused = [], False
    made.disagg_decode_prealloc_queue = SimpleNamespace(
        queue=[], prefetch_prefill_dp_rank_queries=lambda: made.log.append("ask for ranks")
    )
    made.process_decode_queue = lambda: made.log.append("queues")
    return made


@pytest.fixture
def port(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> DecodeLanePort:
    """`arrived` is what `SglangLanePort.receive` finds."""
    made = DecodeLanePort(scheduler, None, None, PinRing(), LaneAccount())  # type: ignore[arg-type]
    made.role_port = DecodePort(scheduler, PinRing(), Account())
    scheduler.arrived = False
    monkeypatch.setattr(SglangLanePort, "receive", lambda self: scheduler.arrived)
    return made


def waits(shaken_hands: bool) -> Any:
    return SimpleNamespace(waiting_for_input=shaken_hands)


def test_the_queues_move_on_in_every_step_and_the_lane_stays_open(port, scheduler):
    scheduler.disagg_decode_prealloc_queue.queue = [waits(False)]
    assert [port.receive() for _ in range(3)] == [False] * 3
    assert scheduler.log == ["ask for ranks", "queues"] * 3


def test_a_lane_that_ends_by_a_fault_of_this_rank_alone_polls_no_second_time(port, scheduler, monkeypatch):
    """The polls are reduced over the ranks: one more on this one would meet another's next."""
    taken = SimpleNamespace(running_batch=scheduler.running_batch, batch_to_run=None)
    scheduler.get_next_disagg_decode_batch_to_run = lambda running_batch: taken
    scheduler.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=lambda batch, chunked_req: batch)
    assert not port.receive()
    port.role_port.select()
    assert scheduler.log.count("queues") == 1
    port.role_port.select()
    assert scheduler.log.count("queues") == 2


def test_the_iteration_after_the_lane_moves_the_queues_itself(port, scheduler, monkeypatch):
    assert not port.receive()
    monkeypatch.setattr(SglangPort, "intake", lambda self: None)
    port.role_port.intake()
    assert not port.role_port.queues_moved


def test_what_arrives_from_clients_is_dispatched_before_the_queues_move(port, scheduler):
    """As in the ordinary loop: intake first."""
    scheduler.arrived = True
    assert port.receive()
    assert scheduler.log == ["ask for ranks"] and not port.role_port.queues_moved


def test_the_lane_is_left_in_the_step_in_which_a_request_can_join(port, scheduler):
    scheduler.process_decode_queue = lambda: scheduler.waiting_queue.append("transferred")
    assert port.receive()
    assert port.role_port.queues_moved, "the selection that follows must not poll a second time"


def test_a_request_that_finds_the_batch_full_does_not_end_the_lane(port, scheduler):
    scheduler.waiting_queue = ["transferred"]
    scheduler.running_batch.reqs = scheduler.running_batch.reqs[:1] * scheduler.max_running_requests
    assert not port.receive()
    assert port.refuses(scheduler.running_batch) is None


def test_the_rows_of_the_table_bound_the_batch_too(port, scheduler):
    scheduler.waiting_queue = ["transferred"]
    scheduler.max_running_requests = 10**6
    scheduler.running_batch.reqs = [object()] * scheduler.req_to_token_pool.size
    assert not port.receive()


def test_a_request_that_got_no_slots_ends_the_lane_once(port, scheduler):
    """The lane's window may be what it lacks; a selection judges without it, and the lane opens again."""
    assert port.refuses(scheduler.running_batch) is None
    queue = scheduler.disagg_decode_prealloc_queue.queue
    queue.append(waits(True))
    assert port.receive()
    assert port.refuses(scheduler.running_batch) is None
    assert not port.receive()
    queue.append(waits(True))
    assert port.receive()


def test_a_request_that_is_blocked_after_another_got_its_slots_ends_the_lane_too(port, scheduler):
    queue = scheduler.disagg_decode_prealloc_queue.queue
    queue.append(waits(True))
    assert port.refuses(scheduler.running_batch) is None
    queue[:] = [waits(False)]
    assert not port.receive()
    queue[:] = [waits(True)]
    assert port.receive()


def test_rows_do_not_go_alone_while_a_request_that_has_shaken_hands_lacks_slots(port, scheduler):
    assert port.rest_rides()
    queue = scheduler.disagg_decode_prealloc_queue.queue
    queue.append(waits(True))
    assert not port.rest_rides()
    queue[:] = [waits(False)]
    assert port.rest_rides()


def test_the_lane_does_not_open_while_somebody_can_join(port, scheduler):
    scheduler.waiting_queue = ["transferred"]
    assert port.refuses(scheduler.running_batch) is Refusal.ADMISSION_OPEN
