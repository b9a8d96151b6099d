"""Our loop in the roles of prefill/decode disaggregation does what SGLang's own loops do, in their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from tests.unit.disagg_script import (
    DECODE,
    EXTEND,
    ScriptedBatch,
    ScriptedScheduler,
    our_log,
    upstream_log,
)
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.upstream import port as port_module
from zos_sglang.upstream.disagg_decode import DecodeLauncher, DecodePort
from zos_sglang.upstream.disagg_prefill import PrefillDevice, PrefillPort
from zos_sglang.upstream.roles import DECODE as DECODE_ROLE
from zos_sglang.upstream.roles import PREFILL, role_of
from zos_sglang.upstream.stock_bridge import bridge_into_stock

steps = st.lists(
    st.one_of(st.none(), st.just("pause"), st.tuples(st.booleans(), st.booleans())), min_size=1, max_size=12
)


def script_of(kind: str, drawn: list[Any]) -> list[Any]:
    """Only a decode batch can need its grammar synchronised."""
    return [
        ScriptedBatch(i, kind, sync=step[0] and kind == DECODE, coarse=step[1])
        if isinstance(step, tuple)
        else step
        for i, step in enumerate(drawn)
    ]


@given(steps)
@settings(max_examples=150, deadline=None)
def test_the_decode_role_does_what_upstreams_loop_does(drawn: list[Any]) -> None:
    assert our_log("decode", script_of(DECODE, drawn)) == upstream_log("decode", script_of(DECODE, drawn))


@given(steps)
@settings(max_examples=150, deadline=None)
def test_the_prefill_role_does_what_upstreams_loop_does(drawn: list[Any]) -> None:
    assert our_log("prefill", script_of(EXTEND, drawn)) == upstream_log("prefill", script_of(EXTEND, drawn))


def test_a_grammar_that_must_see_the_last_token_is_synchronised_in_the_decode_role() -> None:
    account = Account()
    batches = [ScriptedBatch(0, DECODE), ScriptedBatch(1, DECODE, sync=True)]
    log = our_log("decode", batches, account)
    assert log.index(("process", 0)) < log.index(("launch", 1))
    assert account.reasons[Reason.GRAMMAR_SYNC] == 1


def test_a_coarse_barrier_of_the_prefill_role_waits_until_the_result_before_is_processed() -> None:
    log = our_log("prefill", [ScriptedBatch(0, EXTEND), ScriptedBatch(1, EXTEND, coarse=True)])
    after = log[log.index(("launch", 1)) :]
    assert after[1:5] == [("process", 0), ("in-flight queue",), ("barrier",), ("sample", 1)]


# ---------------------------------------------------------------- the prefill role's bookkeeping


def request(**fields: Any) -> Any:
    values = {
        "start_send_idx": 0,
        "inflight_middle_chunks": 0,
        "tmp_end_idx": -1,
        "extend_end": 8,
        "origin_input_ids": list(range(20)),
        "to_finish": None,
        "finished_reason": None,
        "prefix_len": 0,
    }
    return SimpleNamespace(**{**values, **fields})


def prefill_port(**fields: Any) -> tuple[PrefillPort, Any, Account]:
    scheduler: Any = ScriptedScheduler([])
    for name, value in fields.items():
        setattr(scheduler, name, value)
    account = Account()
    return PrefillPort(scheduler, PinRing(), account), scheduler, account


@pytest.mark.parametrize(("selected", "end"), [(False, 8), (True, 4)])
def test_the_end_of_a_chunk_is_remembered_if_its_result_comes_before_the_next_selection(selected, end):
    """Mode sync, a switch, an exit; after a selection it is upstream's to say, which has moved on by then."""
    chunked = request(tmp_end_idx=4, inflight_middle_chunks=1)
    port, scheduler, _ = prefill_port(
        chunked_req=chunked, last_batch=SimpleNamespace(prefill_chunk_processed=selected)
    )
    seen = []
    scheduler.process_batch_result = lambda batch, result: seen.append(chunked.tmp_end_idx)
    port.process(SimpleNamespace(reqs=[chunked]), None)
    assert seen == [end]


def test_what_is_sent_when_a_result_is_processed_is_counted_by_kind():
    middle, last, nothing = request(inflight_middle_chunks=1), request(), request()
    port, scheduler, account = prefill_port()

    def process(batch, result):
        middle.start_send_idx, middle.inflight_middle_chunks = 8, 0
        last.start_send_idx = 20

    scheduler.process_batch_result = process
    port.process(SimpleNamespace(reqs=[middle, last, nothing]), None)
    assert (account.paths["kv-sent-middle"], account.paths["kv-sent-last"]) == (1, 1)


@pytest.mark.parametrize("field", ["to_finish", "finished_reason"])
def test_a_chunk_aborted_after_its_launch_is_counted_and_processed(field):
    port, scheduler, account = prefill_port()
    seen = []
    scheduler.process_batch_result = lambda batch, result: seen.append(batch)
    batch = SimpleNamespace(reqs=[request(**{field: FINISH_ABORT()}), request()])
    port.process(batch, None)
    assert account.paths["aborted-after-launch"] == 1 and seen == [batch]


def test_a_request_given_up_during_its_handshake_is_counted_and_does_not_wait():
    port, scheduler, account = prefill_port()
    queue = scheduler.disagg_prefill_bootstrap_queue
    queue.queue = ["ready", "given up", "not yet"]

    def pop():
        queue.queue = ["not yet"]
        return ["ready"]

    queue.pop_bootstrapped = pop
    port.select()
    assert scheduler.waiting_queue == ["ready"] and account.paths["bootstrap-abandoned"] == 1
    assert port.waiting == 1


@pytest.mark.parametrize(
    ("loading", "allowed", "counted"), [(-1, True, "kv-sent-early"), (3, False, "early-send-held")]
)
def test_a_cached_prefix_is_sent_at_the_launch_unless_the_host_cache_still_writes(
    monkeypatch, loading, allowed, counted
):
    monkeypatch.setattr(port_module.SglangDevice, "prepare", lambda self, batch: None)
    device: Any = object.__new__(PrefillDevice)
    device.account, device.may_hold, asked = Account(), True, []
    req = request(prefix_len=4)

    def send(req, allow_send):
        asked.append(allow_send)
        req.start_send_idx = 4 if allow_send else 0

    device.scheduler = SimpleNamespace(maybe_send_cached_prefix_chunk=send)
    device.prepare(SimpleNamespace(reqs=[req], hicache_consumer_index=loading))
    assert asked == [allowed]
    kinds = ("kv-sent-early", "early-send-held")
    assert {name: device.account.paths[name] for name in kinds} == {
        **dict.fromkeys(kinds, 0),
        counted: 1,
    }


def test_where_upstream_cannot_hold_a_prefix_back_it_is_asked_as_upstream_asks(monkeypatch):
    """0.5.22: `maybe_send_cached_prefix_chunk` takes the request and nothing else."""
    monkeypatch.setattr(port_module.SglangDevice, "__init__", lambda self, scheduler, *_: None)
    monkeypatch.setattr(port_module.SglangDevice, "prepare", lambda self, batch: None)
    asked: list[Any] = []

    def send(req: Any) -> None:
        asked.append(req)

    scheduler: Any = SimpleNamespace(maybe_send_cached_prefix_chunk=send)
    device = PrefillDevice(scheduler, PinRing(), Account(), "block")
    device.scheduler, device.account = scheduler, Account()
    req = request(prefix_len=4)
    device.prepare(SimpleNamespace(reqs=[req], hicache_consumer_index=3))  # type: ignore[arg-type]
    assert asked == [req] and device.account.paths["early-send-held"] == 0


@pytest.mark.parametrize(("value", "said"), [("1", 1), ("0", 0)])
def test_a_variable_that_has_no_effect_in_our_loop_is_named(monkeypatch, caplog, value, said):
    monkeypatch.setenv("SGLANG_ENABLE_DISAGG_PREFILL_CONTINUOUS_INPUT_POLLING", value)
    prefill_port()
    assert caplog.text.count("CONTINUOUS_INPUT_POLLING has no effect") == said


def test_an_exit_waits_for_kv_that_is_on_its_way():
    port, scheduler, _ = prefill_port(disagg_prefill_inflight_queue=["sending", "sending"])
    scheduler.process_disagg_prefill_inflight_queue = scheduler.disagg_prefill_inflight_queue.pop
    assert [port.transfers() for _ in range(2)] == [1, 0]


# ---------------------------------------------------------------- the decode role's bookkeeping


def test_requests_whose_kv_has_arrived_are_counted_and_the_lanes_look_at_the_queues_is_not_repeated():
    scheduler: Any = ScriptedScheduler([])
    account = Account()
    port = DecodePort(scheduler, PinRing(), account)
    scheduler.process_decode_queue = lambda: scheduler.waiting_queue.extend(["a", "b"])
    port.move_queues()
    port.queues_moved = True
    port.select()
    assert account.paths["kv-arrived"] == 2
    port.select()
    assert account.paths["kv-arrived"] == 4 and port.waiting == len(scheduler.waiting_queue) > 0


def test_no_ranks_are_looked_up_while_the_engine_is_paused():
    scheduler: Any = ScriptedScheduler([])
    scheduler._engine_paused = True
    DecodePort(scheduler, PinRing(), Account()).ask_for_ranks()
    assert scheduler.log == []


@pytest.mark.parametrize(("placeholder", "upstreams"), [(True, 1), (False, 0)])
def test_the_placeholder_of_a_prefill_done_elsewhere_is_upstreams_to_run(monkeypatch, placeholder, upstreams):
    launched: list[str] = []
    monkeypatch.setattr(
        "zos_sglang.upstream.port.SglangLauncher.launch", lambda self, batch: launched.append("ours")
    )
    launcher: Any = object.__new__(DecodeLauncher)
    launcher.port = SimpleNamespace(launch_upstream=lambda batch: launched.append("upstream"))
    launcher.launch(SimpleNamespace(forward_mode=SimpleNamespace(is_prebuilt=lambda: placeholder)))
    assert launched.count("upstream") == upstreams and len(launched) == 1


# ---------------------------------------------------------------- into SGLang's own loop


@pytest.mark.parametrize(
    ("role", "port", "kind"), [("decode", DecodePort, DECODE), ("prefill", PrefillPort, EXTEND)]
)
def test_the_bridge_into_stock_selects_as_the_role_does(role, port, kind):
    scheduler: Any = ScriptedScheduler([ScriptedBatch(0, kind), ScriptedBatch(1, kind)])
    bridge_into_stock(scheduler, port(scheduler, PinRing(), Account()))
    assert scheduler.ingest_requests() == []
    assert scheduler.last_batch.name == 0 and len(scheduler.result_queue) == 1
    assert "ingest_requests" not in vars(scheduler)


def test_the_role_is_read_off_the_scheduler_each_time():
    """It can change while the server runs."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    scheduler = SimpleNamespace(disaggregation_mode=DisaggregationMode.PREFILL)
    assert role_of(scheduler) is PREFILL and not PREFILL.skips_finishing
    scheduler.disaggregation_mode = DisaggregationMode.DECODE
    assert role_of(scheduler) is DECODE_ROLE
    assert role_of(SimpleNamespace()).skips_finishing
