"""The core's protocols over SGLang's own scheduler: what is called, in which configuration."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.unit.fake_batch import SpecAlgorithm
from zos_sglang.overlap.account import Account
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.launch import Launcher
from zos_sglang.upstream import port
from zos_sglang.upstream.poll import PolledEvent
from zos_sglang.upstream.port import SglangDevice, SglangLauncher, SglangPort, needs_upstream_launch


class Log(list):
    """Calls by name, in order; `log("name")` makes a function that writes itself down."""

    def __call__(self, name, answer=None):
        def call(*args, **kwargs):
            self.append((name, args, kwargs))
            return answer

        return call

    def names(self):
        return [name for name, _, _ in self]


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def elastic(monkeypatch):
    """`get_exec()` without a running server; the backend can be set."""
    moe = SimpleNamespace(elastic_ep_backend=None)
    monkeypatch.setattr(port, "get_exec", lambda: SimpleNamespace(moe=moe))
    return moe


def scheduler(log, **fields):
    runner = SimpleNamespace(shared_read_done_event="read")
    worker = SimpleNamespace(
        last_shared_read_runner=runner,
        forward_batch_generation=log("forward", SimpleNamespace(extra_keep_alive_refs=None, copy_done=None)),
    )
    values = {
        "enable_unified_memory": False,
        "enable_unified_cache_external_linker": False,
        "_confidence_budget_prepare": None,
        "dllm_config": None,
        "device": "cuda",
        "device_module": SimpleNamespace(Event=lambda **kwargs: ("event", kwargs)),
        "future_map": SimpleNamespace(
            publish=log("publish"), resolve_seq_lens_cpu=log("lengths"), needs_cpu_seq_lens=True
        ),
        "metrics_reporter": SimpleNamespace(record_scheduler_active=log("active")),
        "profiler_manager": SimpleNamespace(_profile_batch_predicate=log("profile")),
        "scripted_scheduler_hook": None,
        "scheduler_stage_metrics": None,
        "forward_sleep_time": None,
        "forward_ct": 10,
        "processed_tokens_counter": 100,
        "_sched_idled": True,
        "is_generation": True,
        "model_worker": worker,
        "tp_worker": worker,
        "enable_async_d2h_copy": False,
        "_war_barrier_enabled": True,
        "_advance_pending_grammar": "barrier",
        "_relay_forward_payload": log("relay"),
        "forward_stream_ctx": nullcontext("forward"),
        "copy_stream_ctx": nullcontext("copy"),
        "schedule_stream": "schedule",
        "forward_stream": "forward",
        "copy_stream": "copy",
        "beam_coordinator": SimpleNamespace(maybe_select_and_relay=log("beam")),
        "chunked_req": None,
    }
    return SimpleNamespace(**{**values, **fields})


def batch(**fields):
    values = {
        "extend_num_tokens": 7,
        "spec_algorithm": SpecAlgorithm(False),
        "spec_info": None,
        "forward_mode": SimpleNamespace(is_extend=lambda: True),
        "return_logprob": False,
        "return_hidden_states": False,
        "extend_lens": [3, 4],
        "extend_logprob_start_lens": [1, 2],
        "input_ids": "tokens",
        "after_idle_gap": None,
        "beam_tail": None,
    }
    return SimpleNamespace(**{**values, **fields})


def device(sched, wait="block", pins=None):
    return SglangDevice(sched, pins or PinRing(), Account(), wait)


# ---------------------------------------------------------------- who launches


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("run_batch", lambda batch: None, "another component wraps run_batch"),
        ("enable_unified_memory", True, "unified memory pool"),
        ("enable_unified_cache_external_linker", True, "external cache linker"),
        ("_confidence_budget_prepare", lambda *_: None, "confidence-budgeted speculation"),
        ("dllm_config", object(), "diffusion LLM"),
    ],
)
@pytest.mark.usefixtures("elastic")
def test_a_configuration_that_only_upstream_covers_is_named(log, field, value, name):
    assert needs_upstream_launch(scheduler(log)) is None
    assert needs_upstream_launch(scheduler(log, **{field: value})) == name


def test_elastic_experts_and_hip_launch_through_upstream(log, elastic, monkeypatch):
    elastic.elastic_ep_backend = "mooncake"
    assert needs_upstream_launch(scheduler(log)) == "elastic expert parallelism"
    elastic.elastic_ep_backend = None
    monkeypatch.setattr(port, "is_hip", lambda: True)
    assert needs_upstream_launch(scheduler(log)) == "HIP"


def test_a_launch_counts_as_upstreams_stage(log):
    stages = []
    recorder = SimpleNamespace(
        _trace_stage=None, enter=lambda s: stages.append(s) or "before", exit=stages.append
    )
    sched = scheduler(log, scheduler_stage_metrics=recorder)
    upstream = SimpleNamespace(launch_upstream=lambda batch: stages.append("launch") or "result")
    launcher = SglangLauncher(device(sched), upstream, None, PinRing(), Account(), own=False)
    assert isinstance(launcher, Launcher)
    assert launcher.launch(batch()) == "result"
    assert stages == ["run_batch", "launch", "before"]


# ---------------------------------------------------------------- the host's side


def test_each_duty_reaches_upstreams_own(log):
    plan = SimpleNamespace(running_batch="running 2", batch_to_run="batch")
    sched = SimpleNamespace(
        last_batch="last",
        running_batch="running",
        waiting_queue=["one", "two"],
        cur_batch_for_debug=None,
        gracefully_exit=0,
        _engine_paused=1,
        _sched_idled=False,
        ingest_requests=log("intake"),
        _record_scheduler_state_for_paused_engine=log("paused"),
        get_next_batch_to_run=log("select", plan),
        run_batch=log("run", "result"),
        process_batch_result=log("process"),
        on_idle=log("idle"),
    )
    it = SglangPort(sched)
    assert it.last_batch == "last" and it.exiting() is False and it.paused() is True
    it.intake()
    it.note_paused()
    assert it.select() == "batch" and it.waiting == 2
    assert (sched.running_batch, sched.cur_batch_for_debug) == ("running 2", "batch")
    assert it.launch_upstream("batch") == "result"
    it.process("batch", "result")
    it.note_no_batch()
    it.idle()
    it.last_batch = "batch"
    assert sched.last_batch == "batch" and sched._sched_idled is True
    assert log == [
        ("intake", (), {}),
        ("paused", (), {}),
        ("select", (), {"running_batch": "running", "last_batch": "last"}),
        ("run", ("batch",), {}),
        ("process", ("batch", "result"), {}),
        ("idle", (), {}),
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_the_leak_check_runs_each_step_where_upstream_would_run_it(log, monkeypatch, strict):
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", str(int(strict)))
    checker = SimpleNamespace(self_check_during_busy=log("check"))
    SglangPort(SimpleNamespace(invariant_checker=checker)).end_of_step()
    assert log.names() == ["check"] * strict


def test_a_unified_pool_is_flushed_between_launches_and_may_fail(log):
    def fail():
        log.append(("flush", (), {}))
        raise RuntimeError("busy")

    allocator = SimpleNamespace(flush_opportunistic=fail)
    for unified in (False, True):
        sched = SimpleNamespace(enable_unified_memory=unified, token_to_kv_pool_allocator=allocator)
        SglangPort(sched).between()
    assert log.names() == ["flush"]


# ---------------------------------------------------------------- the forward's side


@pytest.mark.parametrize(
    ("where", "wait", "made"),
    [
        ("cuda", "block", ("event", {"blocking": True})),
        ("cuda", "spin", ("event", {"blocking": False})),
        ("xpu", "block", ("event", {})),
        ("xpu", "poll", ("event", {})),
        ("cpu", "block", ("event", {})),
    ],
)
def test_the_scheduler_thread_sleeps_on_its_events_unless_it_shall_spin(log, monkeypatch, where, wait, made):
    sched = scheduler(log, device=where)
    if where == "cuda":  # other devices' events take no such argument
        monkeypatch.setattr(torch.cuda, "Event", sched.device_module.Event)
    assert device(sched, wait).new_event() == made


def test_where_it_shall_poll_its_events_are_ones_that_poll(log):
    sched = scheduler(log, device_module=SimpleNamespace(Event=torch.cuda.Event))
    assert device(sched, "poll").new_event is PolledEvent
    assert issubclass(PolledEvent, torch.cuda.Event)


def test_a_polled_event_asks_until_it_is_there():
    answers = iter([False, False, True, False])
    event = SimpleNamespace(query=lambda: next(answers))  # a real one needs CUDA
    PolledEvent.synchronize(event)
    assert list(answers) == [False]


def test_preparing_counts_and_stamps_the_launch(log):
    sched, b = scheduler(log), batch()
    device(sched).prepare(b)
    assert (sched.forward_ct, b.forward_iter, sched.processed_tokens_counter) == (11, 11, 107)
    assert b.after_idle_gap is True and sched._sched_idled is False and b.launch_ts > 0
    assert log.names() == ["active", "profile"]


def test_what_was_prepared_can_be_taken_back(log):
    sched, b = scheduler(log), batch()
    it = device(sched)
    it.prepare(b)
    it.undo_prepare(b)
    assert (sched.forward_ct, sched.processed_tokens_counter, sched._sched_idled) == (10, 100, True)


def test_a_decode_has_no_prompt_tokens_to_count(log):
    sched, b = scheduler(log), batch(extend_num_tokens=None)
    it = device(sched)
    it.prepare(b)
    it.undo_prepare(b)
    assert sched.processed_tokens_counter == 100


def test_scripts_and_the_test_sleep_of_upstream_still_act(log, monkeypatch):
    monkeypatch.setattr(port.time, "sleep", log("sleep"))
    hook = SimpleNamespace(on_run_batch=log("script"))
    device(scheduler(log, scripted_scheduler_hook=hook, forward_sleep_time=0.5)).prepare(batch())
    assert log.names() == ["active", "script", "profile", "sleep"]


@pytest.mark.parametrize(
    ("host", "draft", "blocked"),
    [(True, "rows", 1), (False, "rows", 0), (True, None, 0)],
)
def test_host_lengths_under_speculation_are_resolved_and_counted_when_they_block(log, host, draft, blocked):
    sched = scheduler(log)
    sched.future_map.needs_cpu_seq_lens = host
    it = device(sched)
    b = batch(spec_algorithm=SpecAlgorithm(True), spec_info=SimpleNamespace(future_indices=draft))
    it.prepare(b)
    assert "lengths" in log.names() and it.account.paths["blocked-host-lengths"] == blocked


def test_a_plain_forward_publishes_no_lengths(log):
    result = device(scheduler(log)).forward(batch(), "rows")
    assert log[-1][2] == {} and result.copy_done == ("event", {})


def test_a_speculative_forward_publishes_its_rows(log):
    device(scheduler(log)).forward(batch(spec_algorithm=SpecAlgorithm(True)), "rows")
    options = log[-1][2]
    assert set(options) == {"on_publish"}
    options["on_publish"]("lengths")
    assert log[-1] == ("publish", ("rows", "lengths"), {})


def test_an_algorithm_that_advances_grammars_itself_gets_the_barrier(log, monkeypatch):
    monkeypatch.setattr(SpecAlgorithm, "supports_grammar_overlap", lambda self: True)
    device(scheduler(log)).forward(batch(spec_algorithm=SpecAlgorithm(True)), "rows")
    assert log[-1][2]["grammar_barrier"] == "barrier"


def test_what_a_worker_wants_kept_alive_is_pinned_with_this_launch(log):
    sched, pins = scheduler(log), PinRing()
    pins.pin("batch", {})
    sched.model_worker.forward_batch_generation = lambda b: SimpleNamespace(extra_keep_alive_refs=["tensor"])
    device(sched, pins=pins).forward(batch(), "rows")
    assert pins.slots[pins.newest] == ["batch", {}, "tensor"]


def test_embeddings_come_back_through_the_forward_itself(log):
    pooled = SimpleNamespace(embeddings=torch.tensor([[1.0, 2.0]]), pooled_hidden_states=None)
    sched = scheduler(log, is_generation=False)
    sched.tp_worker.forward_batch_embedding = lambda b: (pooled, True)
    it, b = device(sched), batch()
    result = it.forward(b, "rows")
    assert result.embeddings.tolist() == [[1.0, 2.0]] and result.can_run_cuda_graph
    assert result.copy_done.query()
    it.relay(b, "rows", result)
    it.readback(b, result)
    it.finish(b, "rows", result)
    assert it.delayed_sample(result) is None
    assert log == [] and b.input_ids == "tokens"
    assert it.account.paths["embedding"] == 1


@pytest.mark.parametrize(
    ("fields", "ours"),
    [({"beam_tail": "rows of beams"}, True), ({"spec_algorithm": SpecAlgorithm(True)}, True), ({}, False)],
)
def test_other_than_plain_steps_and_other_maps_are_relayed_by_upstream(log, fields, ours):
    it, b = device(scheduler(log)), batch(**fields)
    it.own_map = ours
    it.relay(b, "rows", "result")
    assert log == [("relay", (b, "rows", "result"), {})]


@pytest.mark.parametrize("sampled", [True, False])
def test_tokens_of_a_plain_step_go_straight_into_our_map_and_then_to_beams(log, sampled):
    sched = scheduler(log, chunked_req="chunked")
    sched.future_map.stash_bonus_tokens = log("map")
    it, b = device(sched), batch()
    it.own_map = True
    result = SimpleNamespace(has_sampled_token_ids=sampled, next_token_ids="tokens")
    it.relay(b, "rows", result)
    relayed = [("map", ("rows", "tokens"), {}), ("beam", (b, result), {"chunked_req": "chunked"})]
    assert log == (relayed if sampled else [])


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_copy_is_left_to_the_worker_thread_except_for_views_of_graph_buffers(log, hidden, asynchronous):
    sched = scheduler(log, enable_async_d2h_copy=asynchronous)
    sched.async_d2h_worker = SimpleNamespace(submit=log("submit", "host event"))
    result = SimpleNamespace(copy_to_cpu=log("copy"), copy_done="event")
    device(sched).readback(batch(return_hidden_states=hidden, return_logprob=True), result)
    if asynchronous and not hidden:
        assert log.names() == ["submit"] and result.copy_done == "host event"
        log[0][1][0]()
    wanted = {"return_logprob": True, "return_hidden_states": hidden}
    assert log[-1] == ("copy", (), wanted) and len(log) == 1 + (asynchronous and not hidden)


def test_a_delayed_sample_is_held_with_its_rows_and_released_with_its_logits(log):
    it = device(scheduler(log))
    logits = SimpleNamespace(next_token_logits="large")
    result = SimpleNamespace(delay_sample_func="closure", logits_output=logits)
    it.hold_sample("rows", result)
    assert it.delayed_sample(result) == "closure" and result.future_indices == "rows"
    it.release_sample(result)
    assert it.delayed_sample(result) is None and logits.next_token_logits is None
    result.logits_output = None
    it.release_sample(result)


@pytest.mark.parametrize(
    ("fields", "lens", "starts"),
    [
        ({}, None, None),
        ({"return_logprob": True}, [3, 4], [1, 2]),
        ({"return_hidden_states": True}, [3, 4], None),
        ({"return_logprob": True, "forward_mode": SimpleNamespace(is_extend=lambda: False)}, None, [1, 2]),
    ],
)
def test_finishing_keeps_what_the_next_step_changes(log, fields, lens, starts):
    b, result = batch(**fields), SimpleNamespace()
    device(scheduler(log)).finish(b, "rows", result)
    assert b.input_ids is None
    assert result.extend_input_len_per_req == lens and result.extend_logprob_start_len_per_req == starts
    b.extend_lens.append(9)
    assert result.extend_input_len_per_req == lens


@pytest.mark.parametrize(("indices", "available"), [("topk", True), (None, False)])
def test_finishing_a_speculative_launch_leaves_the_next_draft_on_the_batch(log, indices, available):
    draft = SimpleNamespace(dsa_topk_indices=indices)
    b = batch(spec_algorithm=SpecAlgorithm(True))
    device(scheduler(log)).finish(b, "rows", SimpleNamespace(next_draft_input=draft))
    assert b.spec_info is draft and draft.future_indices == "rows"
    assert draft.future_dsa_topk_indices_available is available


def test_the_event_after_the_shared_reads_is_taken_once(log):
    it = device(scheduler(log))
    assert [it.take_read_done(), it.take_read_done()] == ["read", None]


def test_without_a_barrier_the_event_stays_where_it_is(log):
    sched = scheduler(log, _war_barrier_enabled=False)
    assert device(sched).take_read_done() is None
    assert sched.model_worker.last_shared_read_runner.shared_read_done_event == "read"


def test_the_contexts_are_upstreams(log):
    it = device(scheduler(log))
    with it.forward_context() as forward, it.copy_context() as copy:
        assert (forward, copy) == ("forward", "copy")


class Stream:
    """Stands for `torch.cuda.Stream` where there is none."""


@pytest.mark.parametrize("current", [True, False])
def test_known_cuda_streams_are_switched_without_asking_for_the_current_one(log, monkeypatch, current):
    schedule, forward, copy = Stream(), Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: schedule if current else copy)
    switched = []
    monkeypatch.setattr(torch.cuda, "set_stream", switched.append)
    it = device(scheduler(log, schedule_stream=schedule, forward_stream=forward, copy_stream=copy))
    with it.forward_context(), it.copy_context():
        pass
    assert switched == ([forward, copy, forward, schedule] if current else [])


def test_inputs_come_from_our_map_or_through_upstreams_function(log, monkeypatch):
    monkeypatch.setattr(port, "resolve_forward_inputs", log("upstream"))
    sched = scheduler(log)
    device(sched).resolve_inputs("batch")
    assert log == [("upstream", ("batch",), {"future_map": sched.future_map})]
    ours = object.__new__(port.FutureMap)
    ours.resolve = log("ours")
    device(scheduler(log, future_map=ours)).resolve_inputs("batch")
    assert log[-1] == ("ours", ("batch",), {})


def test_a_hook_of_somebody_else_on_run_batch_sends_launches_through_it(log, elastic, monkeypatch):
    sched = scheduler(log)
    assert needs_upstream_launch(sched) is None
    monkeypatch.setattr(port.hooks, "rival_of", lambda target, kinds: f"a plugin hooks {target}")
    assert needs_upstream_launch(sched) == "another component wraps run_batch"


def test_upstreams_launch_and_ours_share_one_ring_of_pins():
    pins = PinRing()
    sched = SimpleNamespace(batch_record_ct=0)

    def run_batch(batch):
        sched.batch_record_ct = (sched.batch_record_ct + 1) % 2
        pins.slots[sched.batch_record_ct] = batch

    sched.run_batch = run_batch
    pins.pin("ours", {})
    SglangPort(sched, pins).launch_upstream("upstream's")
    assert "ours" in pins.slots[1] and pins.slots[0] == "upstream's"
    pins.pin("next", {})
    assert pins.slots[0] == "upstream's"
