"""The runtime over the fake scheduler: upstream's own loop, our loop, and every change between them."""

from __future__ import annotations

import logging
import time
from collections import deque
from types import SimpleNamespace

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.overlap_utils import FutureMap as UpstreamFutureMap
from sglang.srt.managers.scheduler import Scheduler as RealScheduler

from tests.unit.fake_batch import NO_GRAMMAR, Mode, Spec, reference
from tests.unit.fake_scheduler import Limits, Scheduler, Script
from tests.unit.virtual_gpu import EARLY, POLICIES, Gpu
from zos_sglang.overlap.guards import PrefillRule
from zos_sglang.overlap.row_ledger import RowLedger
from zos_sglang.settings import Settings
from zos_sglang.upstream import port
from zos_sglang.upstream.future_map import FutureMap
from zos_sglang.upstream.roles import DECODE, PREFILL
from zos_sglang.upstream.runtime import Runtime
from zos_sglang.upstream.versions import installed

#: Upstream's loop itself, run on the fake scheduler.
stock_loop = RealScheduler.event_loop_overlap


def resolve(batch, future_map):
    future_map.check(batch)
    future_map.resolve(batch)


@pytest.fixture(autouse=True)
def over_the_virtual_gpu(monkeypatch):
    monkeypatch.setattr(port, "resolve_forward_inputs", resolve)
    moe = SimpleNamespace(elastic_ep_backend=None)
    monkeypatch.setattr(port, "get_exec", lambda: SimpleNamespace(moe=moe))


def specs(n=5, grammar=False):
    return [
        Spec(i, tuple(range(1, 4 + 2 * i)), 6 + 2 * i, i % 2 == 1, i if grammar else NO_GRAMMAR)
        for i in range(n)
    ]


def start(script: Script, mode="overlap", policy=EARLY, limits=None, seed=0, **options):
    """A runtime and its scheduler, wired as the plugin wires them."""
    runtime, scheduler = Runtime(), Scheduler(Gpu(policy, seed), limits or Limits(), script)
    runtime.settings = Settings(mode=mode, **{"stall_timeout_s": 0, **options})
    scheduler.on_switch = runtime.request
    scheduler.on_rule = lambda rule: runtime.request_rule(PrefillRule(rule))
    return runtime, scheduler


def assert_right(scheduler, script):
    wanted = {a[1].rid: reference(a[1]) for actions in script.values() for a in actions if a[0] == "submit"}
    assert {rid: r.output for rid, r in scheduler.requests.items()} == wanted
    assert scheduler.gpu.hazards == []
    assert scheduler.processed == list(range(1, scheduler.serials + 1))


def assert_nothing_left_behind(scheduler):
    for name in ("ingest_requests", "get_next_batch_to_run"):
        assert name not in vars(scheduler), name


@pytest.mark.parametrize("mode", ["off", "sync", "stock", "overlap"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_mode_gives_the_reference_tokens(mode, policy):
    script: Script = {1: [("submit", s) for s in specs(grammar=True)]}
    runtime, scheduler = start(script, mode, policy, Limits(chunk=6, barrier="both"))
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert runtime.mode == mode and runtime.pending is None
    assert runtime.account.paths["fallbacks"] == 0
    assert not scheduler.result_queue or mode in ("off",)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("before", ["sync", "stock", "overlap"])
@pytest.mark.parametrize("after", ["sync", "stock", "overlap", "off"])
def test_a_switch_loses_nothing_and_leaves_nothing_behind(before, after, policy):
    script: Script = {1: [("submit", s) for s in specs()], 6: [("switch", after)]}
    runtime, scheduler = start(script, before, policy)
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert runtime.mode == after and runtime.pending is None
    assert runtime.account.paths["mode-switches"] == (before != after)
    assert_nothing_left_behind(scheduler)


MODES = st.sampled_from(["sync", "stock", "overlap"])
RULES = st.sampled_from(list(PrefillRule))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.integers(1, 30), MODES), max_size=6),
    st.lists(st.tuples(st.integers(2, 25), st.sampled_from(["in_place", "retract"])), max_size=2),
    st.lists(st.tuples(st.integers(1, 30), RULES), max_size=4),
    st.tuples(MODES, st.sampled_from(POLICIES), st.booleans(), st.integers(0, 1000)),
)
def test_switches_at_any_point_also_while_paused_lose_nothing(switches, pauses, rules, server):
    mode, policy, grammar, seed = server
    script: Script = {}
    for i, spec in enumerate(specs(6, grammar)):
        script.setdefault(1 + 3 * i, []).append(("submit", spec))
    for tick, how in pauses:
        script.setdefault(tick, []).append(("pause", how))
        script.setdefault(tick + 3, []).append(("continue",))
    for tick, to in switches:
        script.setdefault(tick, []).append(("switch", to))
    for tick, rule in rules:
        script.setdefault(tick, []).append(("rule", rule))
    limits = Limits(chunk=6, capacity=60, mixed=seed % 2 == 1, barrier="both")
    runtime, scheduler = start(script, mode, policy, limits, seed)
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert_nothing_left_behind(scheduler)


def test_a_request_for_the_mode_in_effect_is_no_switch():
    script: Script = {1: [("submit", s) for s in specs()], 4: [("switch", "overlap")]}
    runtime, scheduler = start(script)
    runtime.run(stock_loop, scheduler)
    assert runtime.account.paths["mode-switches"] == 0


def test_the_last_of_several_requests_in_one_tick_wins():
    script: Script = {1: [("submit", s) for s in specs()], 4: [("switch", "stock"), ("switch", "sync")]}
    runtime, scheduler = start(script)
    runtime.run(stock_loop, scheduler)
    assert runtime.mode == "sync" and runtime.account.paths["mode-switches"] == 1
    assert_right(scheduler, script)


def prefills_under(rules, mode="overlap"):
    """Reasons counted while streaming prompts prefill in chunks; `rules` by the tick of their switch."""
    script: Script = {1: [("submit", s) for s in specs(8)]}
    for tick, rule in rules.items():
        script.setdefault(tick, []).insert(0, ("rule", rule))
    runtime, scheduler = start(script, mode, limits=Limits(chunk=6), consecutive_prefill="never")
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert_nothing_left_behind(scheduler)
    return runtime, runtime.account.report()["reasons"]


@pytest.mark.parametrize("rule", PrefillRule)
def test_a_prefill_rule_holds_from_the_step_at_which_it_is_asked_for(rule):
    runtime, reasons = prefills_under({1: rule})
    assert runtime.prefill_rule() is rule and runtime.report()["prefill_rule"] == rule
    assert (reasons["consecutive-prefill"] > 0) is (rule is PrefillRule.ALWAYS)
    assert (reasons["first-token"] > 0) is (rule is PrefillRule.FIRST_TOKEN)


def test_a_prefill_rule_can_change_amid_prefills(caplog):
    caplog.set_level(logging.INFO)
    runtime, reasons = prefills_under({2: "always", 4: "first-token"})
    assert reasons["consecutive-prefill"] > 0 and reasons["first-token"] > 0
    said = [record.message for record in caplog.records if "prefill rule" in record.message]
    assert [line.rpartition(" ")[2] for line in said] == ["always", "first-token"]
    assert runtime.account.paths["mode-switches"] == 0 and runtime.mode == "overlap"


def test_a_prefill_rule_asked_for_in_stock_holds_when_our_loop_comes_back():
    script: Script = {
        1: [("rule", "always")],
        2: [("switch", "overlap")],
        3: [("submit", s) for s in specs(8)],
    }
    runtime, scheduler = start(script, "stock", limits=Limits(chunk=6))
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert runtime.account.report()["reasons"]["consecutive-prefill"] > 0


def test_a_switch_is_pending_until_a_pause_ends():
    script: Script = {1: [("submit", s) for s in specs()], 5: [("pause", "in_place")]}
    script |= {6: [("switch", "stock")], 9: [("continue",)]}
    runtime, scheduler = start(script)
    seen = []
    scheduler._record_scheduler_state_for_paused_engine = lambda: seen.append(
        (runtime.mode, runtime.report()["pending_mode"])
    )
    runtime.run(stock_loop, scheduler)
    assert seen == [("overlap", None)] + [("overlap", "stock")] * 3
    assert_right(scheduler, script)


@pytest.mark.parametrize("before", ["sync", "overlap"])
def test_the_bridge_into_stock_launches_one_batch_and_its_result_waits_in_the_queue(before):
    script: Script = {1: [("submit", s) for s in specs()], 6: [("switch", "stock")]}
    runtime, scheduler = start(script, before)
    seen = []

    def watch(scheduler):
        launched = scheduler.serials
        take_in = scheduler.ingest_requests

        def first(*args):
            take_in(*args)
            seen.append((scheduler.serials - launched, len(scheduler.result_queue), scheduler.clock))
            assert "ingest_requests" not in vars(scheduler)

        scheduler.ingest_requests = first
        return stock_loop(scheduler)

    runtime.run(watch, scheduler)
    # One launch, one result in flight, and no second intake in this iteration.
    assert seen == [(1, 1, 6)]
    assert_right(scheduler, script)


def test_no_bridge_is_needed_where_nothing_ran_before():
    script: Script = {1: [("switch", "stock")], 3: [("submit", s) for s in specs()]}
    runtime, scheduler = start(script)
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert_nothing_left_behind(scheduler)


def test_off_gives_everything_back_and_lets_go(monkeypatch, caplog):
    restored = []
    monkeypatch.setattr("zos_sglang.upstream.hooks.restore", lambda: restored.append(1) or [])
    script: Script = {1: [("submit", s) for s in specs()], 6: [("switch", "off")]}
    runtime, scheduler = start(script)
    caplog.set_level(logging.INFO)
    runtime.run(stock_loop, scheduler)
    assert restored == [1]
    assert runtime._launcher is None and runtime._stall is None
    assert not [name for name, value in vars(runtime).items() if isinstance(value, port.SglangPort)]
    assert "every callable is SGLang's own again" in caplog.text
    assert runtime.scheduler is None
    assert_right(scheduler, script)


def test_off_says_what_it_could_not_give_back(monkeypatch, caplog):
    monkeypatch.setattr("zos_sglang.upstream.hooks.restore", lambda: ["some.target"])
    script: Script = {1: [("submit", s) for s in specs()], 6: [("switch", "off")]}
    runtime, scheduler = start(script)
    runtime.run(stock_loop, scheduler)
    assert "could not put back some.target" in caplog.text


def test_off_turns_our_future_map_back_into_upstreams(monkeypatch):
    """Its buffers hold tokens in flight, so the object stays and only its class goes."""
    monkeypatch.setattr("zos_sglang.upstream.hooks.restore", list)
    future_map = object.__new__(FutureMap)
    future_map.ledger, future_map.output_tokens_buf = RowLedger(), "tokens"
    Runtime()._let_go(SimpleNamespace(future_map=future_map))
    assert type(future_map) is UpstreamFutureMap
    assert not hasattr(future_map, "ledger") and future_map.output_tokens_buf == "tokens"


def test_speculation_runs_through_the_real_port():
    script: Script = {1: [("submit", s) for s in specs(grammar=True)]}
    runtime, scheduler = start(script, limits=Limits(speculative=True))
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert runtime.account.report()["reasons"]["grammar-sync"] > 0


# ---------------------------------------------------------------- attaching


def test_a_scheduler_that_cannot_be_attached_to_runs_stock(monkeypatch, caplog):
    script: Script = {1: [("submit", s) for s in specs()]}
    runtime, scheduler = start(script)
    monkeypatch.setattr(port, "get_exec", lambda: 1 / 0)
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert runtime.scheduler is None
    assert "stock SGLang runs" in caplog.text


def test_a_configuration_that_ours_does_not_cover_launches_through_upstream(caplog):
    script: Script = {1: [("submit", s) for s in specs()]}
    runtime, scheduler = start(script)
    scheduler.dllm_config = object()
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    paths = runtime.account.paths
    assert paths["upstream-launch"] == scheduler.serials == paths["prefill"] + paths["decode"]
    assert "upstream's run_batch: diffusion LLM" in caplog.text


def test_streams_that_share_a_handle_are_warned_about(caplog):
    script: Script = {1: [("submit", s) for s in specs()]}
    runtime, scheduler = start(script)
    scheduler.copy_stream.cuda_stream = scheduler.forward_stream.cuda_stream
    runtime.run(stock_loop, scheduler)
    assert "streams share a handle: forward and copy" in caplog.text


# ---------------------------------------------------------------- settings and reports


@pytest.mark.parametrize(
    ("own", "upstream", "generates", "rule"),
    [
        (None, None, True, PrefillRule.FIRST_TOKEN),
        (None, None, False, PrefillRule.NEVER),
        (None, "1", True, PrefillRule.ALWAYS),
        (None, "0", True, PrefillRule.NEVER),
        ("first-token", "1", True, PrefillRule.FIRST_TOKEN),
        ("never", "1", True, PrefillRule.NEVER),
        ("always", None, True, PrefillRule.ALWAYS),
    ],
)
def test_our_setting_beats_upstreams_variable_which_beats_the_default(
    monkeypatch, own, upstream, generates, rule
):
    name = "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP"
    monkeypatch.delenv(name, raising=False)
    if upstream is not None:
        monkeypatch.setenv(name, upstream)
    runtime = Runtime()
    runtime.settings = Settings(mode="overlap", consecutive_prefill=own)
    runtime.scheduler = SimpleNamespace(is_generation=generates)
    assert runtime.prefill_rule() is rule


@pytest.mark.parametrize(
    ("mode", "setting", "ranks", "speculative", "on"),
    [
        ("overlap", "early", 1, False, True),
        ("overlap", "in-order", 1, False, False),
        ("overlap", "early", 2, False, False),
        ("overlap", "early", 1, True, False),
        ("sync", "early", 1, False, False),
    ],
)
def test_a_first_token_goes_out_early_only_with_one_rank_and_no_drafts(mode, setting, ranks, speculative, on):
    runtime, scheduler = start({}, mode, limits=Limits(speculative=speculative), first_token=setting)
    runtime.attach(scheduler)
    scheduler.tp_group.world_size = ranks
    assert (runtime._make_loop(scheduler).early is not None) is on


def test_first_tokens_that_go_out_early_are_counted_and_right():
    script: Script = {1: [("submit", s) for s in specs(4)]}  # the last one streams
    runtime, scheduler = start(script, policy=EARLY, first_token="early", consecutive_prefill="never")
    runtime.run(stock_loop, scheduler)
    assert runtime.account.report()["reasons"]["early-first-token"] > 0
    assert_right(scheduler, script)


@pytest.mark.parametrize(
    "cache",
    [
        "enable_hierarchical_cache",
        "enable_lmcache",
        "enable_hicache_storage",
        "enable_unified_cache_external_linker",
    ],
)
def test_with_a_cache_on_the_host_no_result_is_processed_before_a_step_that_writes_for_its_rows(cache):
    runtime, scheduler = start({}, first_token="early", consecutive_prefill="always")
    runtime.attach(scheduler)
    prefill = SimpleNamespace(forward_mode=Mode.EXTEND)
    mixed = SimpleNamespace(forward_mode=Mode.MIXED, spec_algorithm=scheduler.spec_algorithm)
    loop = runtime._make_loop(scheduler)
    assert loop.early is not None and not loop.decide(mixed, prefill).overlap
    setattr(scheduler, cache, True)
    loop = runtime._make_loop(scheduler)
    assert loop.early is None and loop.decide(mixed, prefill).overlap


@pytest.mark.parametrize("tree", [{"enable_flexkv": True}, {"radix_cache_backend": "theirs"}])
def test_a_prefix_tree_from_elsewhere_may_be_such_a_cache(tree):
    runtime, scheduler = start({}, first_token="early")
    runtime.attach(scheduler)
    assert runtime._make_loop(scheduler).early is not None
    scheduler.server_args = SimpleNamespace(
        **vars(getattr(scheduler, "server_args", SimpleNamespace())) | tree
    )
    assert runtime._make_loop(scheduler).early is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_role_of_disaggregation_sends_a_first_token_early(role):
    runtime, scheduler = start({}, first_token="early")
    runtime.attach(scheduler)
    runtime.role = {"prefill": PREFILL, "decode": DECODE}[role]
    assert runtime._make_loop(scheduler).early is None


@pytest.mark.parametrize(
    ("mode", "rule", "dp_attention", "on"),
    [
        ("overlap", "first-token", True, True),
        ("overlap", "first-token", False, False),
        ("overlap", "always", True, False),
        ("overlap", "never", True, False),
        ("sync", "first-token", True, False),
        ("stock", "first-token", True, False),
    ],
)
def test_ranks_tell_each_other_about_first_tokens_only_where_our_loop_asks(mode, rule, dp_attention, on):
    script: Script = {1: [("submit", s) for s in specs()]}
    runtime, scheduler = start(script, mode, consecutive_prefill=rule)
    scheduler.require_mlp_sync = dp_attention
    seen, select = set(), scheduler.get_next_batch_to_run

    def selecting(*args, **kwargs):
        seen.add(runtime.first_token.active)
        return select(*args, **kwargs)

    scheduler.get_next_batch_to_run = selecting
    runtime.run(stock_loop, scheduler)
    assert seen == {on}
    assert runtime.first_token.active is False
    assert_right(scheduler, script)


def test_the_report_says_mode_rule_streams_and_counts():
    script: Script = {1: [("submit", s) for s in specs()]}
    runtime, scheduler = start(script)
    runtime.run(stock_loop, scheduler)
    report = runtime.report()
    assert report["mode"] == "overlap" and report["sglang"] == installed()
    assert report["prefill_rule"] == "first-token" and report["own_launch"] is True
    assert report["streams"] == {"schedule": 1, "forward": 2, "copy": 3}
    assert sum(report["reasons"].values()) == scheduler.serials
    assert report["paths"]["decode"] > 0


def test_what_is_in_flight_is_described_for_the_stall_report():
    script: Script = {1: [("submit", s) for s in specs()]}
    runtime, scheduler = start(script)
    lines = []
    process = scheduler.process_batch_result

    def watch(batch, result):
        lines.append(runtime.describe())
        process(batch, result)

    scheduler.process_batch_result = watch
    runtime.run(stock_loop, scheduler)
    said = "\n".join(lines[2])
    assert "mode overlap, phase process" in said
    assert "pending: DECODE, 5 requests: 0, 1, 2, 3, 4; readback" in said
    assert "forward stream: " in said and "1:nothing-pending, 2:" in said


def test_a_stall_is_seen_while_the_loop_waits_and_counted():
    script: Script = {1: [("submit", s) for s in specs()]}
    # Long enough that a busy machine makes no second one.
    runtime, scheduler = start(script, stall_timeout_s=0.5)
    process, stalled = scheduler.process_batch_result, []
    deadline = time.monotonic() + 60

    def stick(batch, result):
        while not stalled and runtime.account.paths["stalls"] == 0:
            assert time.monotonic() < deadline, "no stall was noticed"
            time.sleep(0.01)
        stalled.append(1)
        process(batch, result)

    scheduler.process_batch_result = stick
    runtime.run(stock_loop, scheduler)
    assert runtime.account.paths["stalls"] == 1
    assert runtime._stall is None
    assert_right(scheduler, script)


def test_busy_means_work_in_flight_in_the_stock_loop_and_not_idle_in_ours():
    runtime = Runtime()
    scheduler = SimpleNamespace(result_queue=[1], _engine_paused=False, forward_ct=7)
    runtime.scheduler = scheduler
    assert runtime._busy() and runtime._progress() == (0, 7)
    scheduler._engine_paused = True
    assert not runtime._busy()
    for phase, busy in (("idle", False), ("paused", False), ("process", True)):
        runtime.loop = SimpleNamespace(phase=phase, beat=3)
        assert runtime._busy() is busy
    assert runtime._progress() == (3, 7)


# ---------------------------------------------------------------- exit


def exiting(ready, timeout):
    """A runtime at its exit with two results in flight."""
    events = [
        SimpleNamespace(copy_done=SimpleNamespace(query=lambda: ready)),
        SimpleNamespace(copy_done=None),
    ]
    queue, done = deque(("batch", e) for e in events), []
    channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(socket=None), send_to_detokenizer=SimpleNamespace(socket=None)
    )
    runtime = Runtime()
    runtime.settings = Settings(mode="overlap", exit_timeout_s=timeout)
    runtime.scheduler = SimpleNamespace(
        result_queue=queue, process_batch_result=lambda b, r: done.append(r), ipc_channels=channels
    )
    port = SimpleNamespace(process=lambda b, r: done.append(r), transfers=lambda: 0)
    runtime._launcher = SimpleNamespace(port=port)
    return runtime, queue, done


def test_a_graceful_exit_processes_what_is_in_flight():
    runtime, queue, done = exiting(ready=True, timeout=5)
    runtime.drain_for_exit()
    assert len(done) == 2 and not queue and runtime.account.paths["drained"] == 2


def test_a_result_that_is_never_ready_does_not_hold_up_the_exit(caplog):
    runtime, queue, done = exiting(ready=False, timeout=0.2)
    began = time.monotonic()
    runtime.drain_for_exit()
    assert 0.2 <= time.monotonic() - began < 10
    assert done == [] and len(queue) == 2
    assert "2 results were not ready within ZOS_EXIT_TIMEOUT_S=0.2" in caplog.text


def test_an_exit_waits_for_transfers_but_not_for_ever(caplog):
    runtime, _, _ = exiting(ready=True, timeout=10)
    left = [2, 1, 0]
    runtime._port.transfers = lambda: left.pop(0)
    runtime.drain_for_exit()
    assert left == [] and not caplog.text
    runtime, _, _ = exiting(ready=True, timeout=0.2)
    runtime._port.transfers = lambda: 3
    runtime.drain_for_exit()
    assert "3 KV transfers had not ended in time" in caplog.text


def test_a_socket_to_a_dead_peer_does_not_hold_up_the_exit():
    runtime, _, _ = exiting(ready=True, timeout=3)
    context = zmq.Context()
    with context, context.socket(zmq.PUSH) as socket:
        runtime.scheduler.ipc_channels.send_to_tokenizer.socket = socket
        assert socket.getsockopt(zmq.LINGER) < 0
        runtime.drain_for_exit()
        assert 0 <= socket.getsockopt(zmq.LINGER) <= 3000


@pytest.mark.parametrize("ready", [True, False])
def test_what_was_sent_leaves_also_where_the_time_is_over(ready):
    runtime, _, _ = exiting(ready=ready, timeout=0)
    context = zmq.Context()
    with context, context.socket(zmq.PUSH) as socket:
        runtime.scheduler.ipc_channels.send_to_tokenizer.socket = socket
        runtime.drain_for_exit()
        assert 400 <= socket.getsockopt(zmq.LINGER) <= 1000


def test_a_failing_forward_leaves_without_waiting_for_anything():
    script: Script = {1: [("submit", s) for s in specs()]}
    runtime, scheduler = start(script)
    run = scheduler.model_worker.forward_batch_generation
    calls = []

    def fail(batch, **options):
        calls.append(batch)
        if len(calls) == 6:
            raise RuntimeError("device-side assert")
        return run(batch, **options)

    scheduler.model_worker.forward_batch_generation = fail
    with pytest.raises(RuntimeError, match="device-side assert"):
        runtime.run(stock_loop, scheduler)
    assert runtime.account.paths["drained"] == 0 and len(scheduler.result_queue) == 1
