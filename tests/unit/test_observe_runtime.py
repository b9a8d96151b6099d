"""Records of whole runs over the fake scheduler: in every mode, across switches, pauses, exits and errors."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.scheduler import Scheduler as RealScheduler
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

from tests.unit.fake_scheduler import Limits, Script
from tests.unit.recording import complete
from tests.unit.test_runtime import (
    MODES,
    POLICIES,
    assert_right,
    over_the_virtual_gpu,
    specs,
    start,
    stock_loop,
)
from tests.unit.virtual_gpu import EARLY, LATE
from zos_sglang.observe.columns import from_columns, to_columns
from zos_sglang.observe.names import AFTER_IDLE, DELAYED_SAMPLING, EMBEDDING, MIDDLE_CHUNK, PAUSED, code
from zos_sglang.observe.recorder import Recorder
from zos_sglang.overlap.watch import OFF
from zos_sglang.upstream import entry, overlap_off, rank_board, runtime_observe
from zos_sglang.upstream.unobserved import Unobserved
from zos_sglang.upstream.watch_stock import StockWatch

__all__ = ["over_the_virtual_gpu"]

#: Upstream's loop without overlap, run on the fake scheduler.
normal_loop = RealScheduler.event_loop_normal
WATCHED = (
    *("get_next_batch_to_run", "run_batch", "process_batch_result", "_copy_result_to_cpu"),
    *("launch_batch_sample_if_needed", "_record_scheduler_state_for_paused_engine"),
)


class Run:
    """One run of the runtime, and what was recorded of it."""

    def __init__(self, script: Script, mode: str = "overlap", **options: Any) -> None:
        self.script = script
        self.runtime, self.scheduler = start(script, mode, **options)
        self.observations: list[Any] = []
        attach = self.runtime.attach

        def attaching(scheduler: Any) -> None:
            attach(scheduler)
            self.observations.append(self.runtime.observation)

        self.runtime.attach = attaching  # type: ignore[method-assign]

    def go(self, loop: Any = stock_loop) -> Run:
        self.runtime.run(loop, self.scheduler)
        assert_right(self.scheduler, self.script)
        return self

    @property
    def recorder(self) -> Any:
        return self.observations[0].recorder

    @property
    def records(self) -> np.ndarray:
        return self.recorder.ring.since(0)

    @property
    def columns(self) -> dict[str, list[Any]]:
        return to_columns(self.records)

    def check(self) -> Run:
        assert self.recorder.faults == 0
        assert self.records["step"].tolist() == list(range(1, self.scheduler.serials + 1))
        complete(self.records)
        assert_nothing_stands(self.scheduler)
        return self


def assert_nothing_stands(scheduler: Any) -> None:
    for name in WATCHED:
        assert name not in vars(scheduler), name
    assert "forward" not in vars(scheduler.tp_worker.model_runner)


def all_at_once(grammar: bool = False) -> Script:
    return {1: [("submit", s) for s in specs(grammar=grammar)]}


# ---------------------------------------------------------------- every mode


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["sync", "stock", "overlap"])
def test_every_launch_of_every_mode_has_its_record(mode: str, policy: str) -> None:
    run = Run(all_at_once(), mode, policy=policy, limits=Limits(chunk=6)).go().check()
    columns = run.columns
    assert set(columns["mode"]) == {mode}
    assert sum(columns["rows"]) > len(columns["rows"])
    assert {"extend", "decode"} <= set(columns["forward"])
    decode = [i for i, forward in enumerate(columns["forward"]) if forward == "decode"]
    assert all(columns["tokens"][i] == columns["rows"][i] for i in decode)
    if mode == "sync":
        assert set(columns["path"]) == {"sync"} and set(columns["reason"]) == {"mode-sync"}
        assert set(columns["depth"]) == {0}
    else:
        assert {"nothing-pending", "overlapped"} <= set(columns["reason"])
        assert set(columns["path"]) <= {"overlap", "overlap-blocked", "sync"}
    assert set(columns["barrier"]) == ({None} if mode == "stock" else {"barrier-fine"})


@pytest.mark.parametrize("mode", ["sync", "stock", "overlap"])
def test_a_device_that_is_done_at_once_makes_steps_cpu_bound_and_one_that_waits_none(mode: str) -> None:
    early = Run(all_at_once(), mode, policy=EARLY).go().check().columns
    late = Run(all_at_once(), mode, policy=LATE).go().check().columns
    blocked = {r: b for r, b in zip(early["reason"], early["block"], strict=True)}
    if mode != "sync":
        assert blocked["overlapped"] == "cpu-bound"
    assert blocked.get("nothing-pending") is None and blocked.get("mode-sync") is None
    assert late["block"].count("cpu-bound") < len(late["block"]) // 2


@pytest.mark.parametrize("mode", ["stock", "overlap"])
def test_flags_say_middle_chunks_and_delayed_sampling(mode: str) -> None:
    run = Run(all_at_once(grammar=True), mode, limits=Limits(chunk=6)).go().check()
    records = run.records
    assert ((records["flags"] & DELAYED_SAMPLING) > 0).any()
    extend = records["forward"] == code("forward", "extend")
    assert ((records["flags"] & MIDDLE_CHUNK) > 0)[extend].any()
    assert not ((records["flags"] & MIDDLE_CHUNK) > 0)[~extend].any()
    assert records["cpu_depends"].sum() > 0


def test_embeddings_are_recorded_too() -> None:
    run = Run({t: [("submit", s)] for t, s in enumerate(specs(), 1)}, "stock", limits=Limits(embedding=True))
    run.runtime.run(stock_loop, run.scheduler)
    run.check()
    assert ((run.records["flags"] & EMBEDDING) > 0).all() and len(run.records) > 1


def test_a_server_without_overlap_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    script = all_at_once()
    runtime, scheduler = start(script)
    scheduler.enable_overlap, scheduler.server_args = False, "its arguments"
    rule = overlap_off.RULES[next(iter(overlap_off.RULES))]
    monkeypatch.setattr(overlap_off, "overlap_rules", {"its arguments": [rule]}.get)
    seen: list[Any] = []
    process = scheduler.process_batch_result

    def look(batch: Any, result: Any) -> None:
        process(batch, result)
        report = runtime.report()
        seen.append((report["steps"]["loop"], runtime.mode))
        assert report["overlap_off"] == [rule.as_json()]

    type(scheduler).process_batch_result, kept = look_at(look), type(scheduler).process_batch_result
    try:
        runtime.watch_only(normal_loop, scheduler)
    finally:
        type(scheduler).process_batch_result = kept
    assert_right(scheduler, script)
    assert set(seen) == {("normal", "normal")}
    records = runtime.observation.recorder.ring.since(0)
    columns = to_columns(records)
    assert len(records) == scheduler.serials
    complete(records)
    assert set(columns["mode"]) == {"normal"} and set(columns["reason"]) == {"overlap-off"}
    assert set(columns["path"]) == {"sync"} and set(columns["depth"]) == {0}
    # Each result is processed in the iteration that launched it.
    assert all(out <= start for out, start in zip(columns["t_output"], columns["t_intake"][1:], strict=False))
    assert_nothing_stands(scheduler)


def look_at(look: Any) -> Any:
    return lambda scheduler, batch, result: look(batch, result)


# ---------------------------------------------------------------- counts


SUBMITS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), max_size=6, unique_by=lambda s: s[1])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    SUBMITS,
    st.lists(st.tuples(st.integers(1, 30), MODES), max_size=5),
    st.lists(st.tuples(st.integers(2, 25), st.sampled_from(["in_place", "retract"])), max_size=2),
    st.tuples(MODES, st.sampled_from(POLICIES), st.booleans(), st.booleans(), st.integers(0, 1000)),
)
def test_records_say_what_the_account_counts_whatever_happens(
    submits: Any, switches: Any, pauses: Any, server: Any
) -> None:
    mode, policy, grammar, speculative, seed = server
    script: Script = {}
    every = specs(6, grammar)
    for tick, which in submits:
        script.setdefault(tick, []).append(("submit", every[which]))
    for tick, how in pauses:
        script.setdefault(tick, []).append(("pause", how))
        script.setdefault(tick + 3, []).append(("continue",))
    for tick, to in switches:
        script.setdefault(tick, []).append(("switch", to))
    mixed = seed % 2 == 1 and not speculative
    limits = Limits(chunk=6, capacity=60, mixed=mixed, barrier="both", speculative=speculative)
    run = Run(script, mode, policy=policy, limits=limits, seed=seed).go().check()
    records, account = run.records, run.runtime.account
    ours = records[records["mode"] != code("mode", "stock")]
    for reason, count in account.reasons.items():
        assert (ours["reason"] == code("reason", reason)).sum() == count, reason
    kinds = ("decode", "decode"), ("extend", "prefill"), ("mixed", "mixed")
    for forward, path in kinds:
        assert (ours["forward"] == code("forward", forward)).sum() == account.paths[path]
    for barrier in ("barrier-fine", "barrier-coarse", "barrier-off"):
        assert (ours["barrier"] == code("barrier", barrier)).sum() == account.paths[barrier]
    unseen = int((records["ready"] == code("ready", "unseen")).sum())
    assert unseen <= sum(how == "retract" for _, how in pauses) + account.paths["drained"] + len(switches)
    # What follows a pause or nothing at all is not adjacent to what was before.
    if len(records):
        assert records["flags"][0] & AFTER_IDLE


def test_a_pause_that_retracts_leaves_no_wrong_record() -> None:
    for mode in ("sync", "overlap", "stock"):
        script = all_at_once()
        script[6] = [("pause", "retract")]
        script[9] = [("continue",)]
        run = Run(script, mode).go().check()
        columns = run.columns
        # Ours does not see upstream process it; the watched stock loop does.
        assert columns["ready"].count("unseen") == (0 if mode == "stock" else 1), mode
        after = [i for i, flags in enumerate(columns["flags"]) if flags & PAUSED]
        assert len(after) == 1 and columns["forward"][after[0]] == "extend", mode
        assert columns["wall"][after[0]] < 1_000_000_000


# ---------------------------------------------------------------- what stands in SGLang meanwhile


def test_stocks_attributes_stand_while_it_runs_and_only_then() -> None:
    script: Script = {1: [("submit", s) for s in specs()], 5: [("switch", "stock")], 9: [("switch", "sync")]}
    run = Run(script)
    seen: list[tuple[str, bool]] = []
    forward = type(run.scheduler).count

    def count(scheduler: Any, batch: Any) -> None:
        seen.append((run.runtime.mode, all(name in vars(scheduler) for name in WATCHED)))
        forward(scheduler, batch)

    type(run.scheduler).count = count  # type: ignore[method-assign]
    try:
        run.go().check()
    finally:
        type(run.scheduler).count = forward  # type: ignore[method-assign]
    assert ("stock", True) in seen
    assert {stands for mode, stands in seen if mode != "stock"} <= {False}


def test_stocks_attributes_are_gone_after_an_error() -> None:
    run = Run(all_at_once(), "stock")
    work = run.scheduler.model_worker.forward_batch_generation
    calls: list[int] = []

    def fail(batch: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("device-side assert")
        return work(batch, **options)

    run.scheduler.model_worker.forward_batch_generation = fail
    with pytest.raises(RuntimeError, match="device-side assert"):
        run.runtime.run(stock_loop, run.scheduler)
    assert_nothing_stands(run.scheduler)
    assert len(run.records) == 3


def test_an_attribute_that_stood_there_before_is_called_and_comes_back() -> None:
    run = Run(all_at_once(), "stock")
    calls: list[int] = []
    launch = run.scheduler.run_batch

    def theirs(batch: Any) -> Any:
        calls.append(1)
        return launch(batch)

    run.scheduler.run_batch = theirs
    run.go()
    assert vars(run.scheduler)["run_batch"] is theirs
    assert len(calls) == len(run.records) == run.scheduler.serials


def test_what_somebody_else_puts_in_place_of_ours_stays() -> None:
    run = Run(all_at_once(), "stock")
    watch = StockWatch(run.scheduler)
    watch.install(OFF)
    ours = run.scheduler.run_batch

    def theirs(batch: Any) -> Any:
        return ours(batch)

    run.scheduler.run_batch = theirs
    watch.remove()
    assert vars(run.scheduler).pop("run_batch") is theirs
    assert_nothing_stands(run.scheduler)


def test_mode_off_leaves_nothing_and_keeps_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zos_sglang.upstream.hooks.restore", list)
    script = all_at_once()
    script[6] = [("switch", "off")]
    run = Run(script).go()
    assert_nothing_stands(run.scheduler)
    assert 0 < len(run.records) < run.scheduler.serials
    assert isinstance(run.runtime.observation, Unobserved)


# ---------------------------------------------------------------- on and off


def switch_recording_of(run: Run) -> None:
    """Let a script say `("record", True)`."""

    def record(on: bool) -> None:
        run.runtime.observation.record(on)

    run.scheduler._on_record = record  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["sync", "stock", "overlap"])
def test_without_recording_nothing_is_put_anywhere(mode: str) -> None:
    run = Run(all_at_once(), mode, record=False)
    seen: list[Any] = []
    process = type(run.scheduler).on_idle

    def look(scheduler: Any) -> None:
        assert_nothing_stands(scheduler)
        seen.append(run.runtime._launcher.watch)  # type: ignore[union-attr]
        process(scheduler)

    type(run.scheduler).on_idle = look  # type: ignore[method-assign]
    try:
        run.go()
    finally:
        type(run.scheduler).on_idle = process  # type: ignore[method-assign]
    assert set(seen) == {OFF} and len(run.records) == 0


@pytest.mark.parametrize("mode", ["sync", "stock", "overlap"])
def test_recording_is_switched_while_the_server_runs(mode: str) -> None:
    script = all_at_once()
    script |= {4: [("record", False)], 8: [("record", True)]}
    run = Run(script, mode)
    switch_recording_of(run)
    run.go()
    records = run.records
    assert 0 < len(records) < run.scheduler.serials
    complete(records)
    assert ((records["flags"] & AFTER_IDLE) > 0).sum() == 2
    assert_nothing_stands(run.scheduler)


@pytest.mark.parametrize("to", ["sync", "overlap"])
def test_recording_that_begins_as_stock_is_about_to_be_left_leaves_nothing_behind(to: str) -> None:
    script = all_at_once()
    script[6] = [("switch", to), ("record", True)]
    run = Run(script, "stock", record=False)
    switch_recording_of(run)
    run.go()
    assert run.runtime.mode == to and len(run.records) > 0
    assert_nothing_stands(run.scheduler)


@pytest.mark.parametrize("mode", ["sync", "stock", "overlap"])
def test_a_fault_swaps_nothing_in_and_loses_no_step(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(all_at_once(), mode)
    attach = run.runtime.attach

    def attaching(scheduler: Any) -> None:
        attach(scheduler)
        facts, calls = run.recorder.facts, []

        def fail(*given: Any) -> Any:
            calls.append(1)
            if len(calls) == 5:
                raise ValueError("a field that is no more")
            return facts(*given)

        run.recorder.facts = fail

    run.runtime.attach = attaching  # type: ignore[method-assign]
    run.go()
    assert run.recorder.faults == 1 and len(run.records) <= 5
    assert caplog.text.count("recording failed") == 1
    assert_nothing_stands(run.scheduler)


def test_a_scheduler_that_cannot_be_observed_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(all_at_once())
    run.scheduler.metrics_reporter = None
    monkeypatch.setattr(runtime_observe, "make_metrics", lambda scheduler: 1 / 0)
    scheduler_class = type(run.scheduler)
    run.scheduler.metrics_reporter = scheduler_class.metrics_reporter
    run.go()
    assert isinstance(run.runtime.observation, Unobserved)
    assert "steps cannot be recorded here" in caplog.text


@pytest.mark.parametrize("call", ["enter", "leave", "close", "place"])
def test_whatever_of_watching_fails_the_scheduler_runs_on(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inside = {
        "enter": (runtime_observe, "follow"),
        "leave": (StockWatch, "remove"),
        "close": (Recorder, "close"),
        "place": (Recorder, "begin"),
    }
    run = Run(all_at_once(), "stock")
    attach = run.runtime.attach

    def attaching(scheduler: Any) -> None:
        attach(scheduler)
        owner, name = inside[call]
        monkeypatch.setattr(owner, name, lambda *_, **__: 1 / 0)
        run.runtime.observation.trace = Trace()

    class Trace:
        def close(self) -> None:
            raise OSError("no space left")

    run.runtime.attach = attaching  # type: ignore[method-assign]
    run.go()
    assert run.recorder.faults >= 1 and caplog.text.count("recording failed") == 1


def test_a_report_that_fails_is_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(all_at_once()).go()
    monkeypatch.setattr(runtime_observe, "make_block", lambda *_, **__: 1 / 0)
    assert run.runtime.observation.report() is None


# ---------------------------------------------------------------- reports and requests


def test_the_report_is_json_and_its_records_come_back() -> None:
    run = Run(all_at_once()).go()
    run.observations[0].reported = 5
    block = json.loads(json.dumps(run.runtime.report()["steps"]))
    assert block["format"] == 1 and block["asynchronous"] is True and block["loop"] == "ours"
    assert block["launches"] == run.scheduler.serials == block["totals"]["steps"]
    assert from_columns(block["last"]).tolist() == run.records[-5:].tolist()
    assert {sign["sign"] for sign in block["signs"]} and block["cost"] is None
    run.observations[0].reported = 0
    assert run.runtime.report()["steps"]["last"]["step"] == []


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runtime in front of its first iteration, as the update handlers see it."""
    runtime, scheduler = start(all_at_once())
    runtime.attach(scheduler)
    monkeypatch.setattr(entry, "runtime", runtime)
    yield runtime
    runtime._stop_stall_detector()
    runtime.observation.close()


def update(key: str, value: float) -> None:
    handler = entry.after_update_handlers({}, None)[key]
    handler.validate(key, value)
    handler.apply(key, value)


def test_requests_reach_the_recorder(attached: Any) -> None:
    observation = attached.observation
    update("zos_record_detail", 1.0)
    assert observation.recorder.detail is True
    update("zos_report_steps", 4096)
    assert observation.reported == 4096 and type(observation.reported) is int
    update("zos_record_reset", 1)
    update("zos_record", 0)
    assert observation.watch is OFF
    update("zos_record", 1)
    assert observation.watch is observation.recorder
    update("zos_record_cost", 128)
    assert observation.cost.left == 128


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("zos_record", 2), ("zos_record", 0.5), ("zos_record_detail", -1), ("zos_record_reset", 0)],
        *[("zos_report_steps", 4097), ("zos_report_steps", -1), ("zos_record_cost", 0)],
        *[("zos_record_cost", float("nan")), ("zos_record_cost", float("inf"))],
    ],
)
def test_numbers_out_of_range_are_rejected(attached: Any, key: str, value: float) -> None:
    with pytest.raises(UpdateRejected, match="a whole number from"):
        update(key, value)


def test_cost_is_measured_only_while_recording_in_a_loop_of_ours(attached: Any) -> None:
    attached.observation.loop = "stock"
    with pytest.raises(UpdateRejected, match="needs mode sync, overlap or resident"):
        update("zos_record_cost", 64)
    attached.observation.loop = "ours"
    attached.observation.record(False)
    with pytest.raises(UpdateRejected, match="with recording on"):
        update("zos_record_cost", 64)


@pytest.mark.parametrize("key", ["zos_record", "zos_record_cost"])
def test_of_several_ranks_none_refuses_what_it_alone_cannot_do(
    attached: Any, key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the other ranks take with it, a switch perhaps, this one must take too."""
    attached.observation.close()
    monkeypatch.setattr(attached, "observation", Unobserved())
    with pytest.raises(UpdateRejected, match="records no steps"):
        update(key, 1)
    attached.scheduler.tp_group = SimpleNamespace(world_size=2)
    update(key, 1)
    assert f"{key}: this server records no steps" in caplog.text
    with pytest.raises(UpdateRejected, match="a whole number from"):
        update(key, 0.5)


@pytest.mark.parametrize(
    ("key", "inside"), [("zos_record_reset", "flush"), ("zos_record_detail", "_read_clock_within")]
)
def test_a_request_that_fails_in_the_recorder_ends_recording_and_not_the_scheduler(
    attached: Any, monkeypatch: pytest.MonkeyPatch, key: str, inside: str
) -> None:
    attached.observation.recorder.begin()
    monkeypatch.setattr(Recorder, inside, lambda *_: 1 / 0)
    update(key, 1)
    assert attached.observation.recorder.faults >= 1 and attached.observation.watch is OFF


def test_where_nobody_observes_there_is_every_request_all_the_same() -> None:
    nobody = Unobserved()
    nobody.reset()
    nobody.detail(True)


def test_a_lane_that_another_rank_lacks_is_let_go_whole(
    attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Executor:
        def step(self) -> None: ...

    held: list[Any] = []

    def build(_: Any) -> Any:
        lane = SimpleNamespace(executor=Executor())
        held.append(weakref.ref(lane.executor))
        attached.observation.place("lane", lane)
        attached.observation.place_forward("lane step", lane.executor, "step")
        return lane

    monkeypatch.setattr(attached, "_build_lane", build)
    monkeypatch.setattr(rank_board, "all_ranks_have", lambda *_: False)
    attached.scheduler.tp_group = None
    assert attached._lane_of_all_ranks("parts") is None
    gc.collect()
    assert held[0]() is None
    attached.observation.record(False)
    attached.observation.record(True)
    assert attached.observation.recorder.faults == 0


def test_nothing_is_recorded_where_nobody_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = start(all_at_once())
    monkeypatch.setattr(entry, "runtime", runtime)
    with pytest.raises(UpdateRejected, match="records no steps"):
        update("zos_record", 1)


def test_a_server_without_overlap_refuses_modes_and_says_why(attached: Any) -> None:
    attached.mode = "normal"
    with pytest.raises(UpdateRejected, match="without overlap"):
        entry.after_update_handlers({}, None)["zos_mode"].validate("zos_mode", 3.0)


def test_the_loop_without_overlap_is_left_alone_unless_the_plugin_is_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mode, watched in ((None, False), ("off", False), ("overlap", True)):
        runtime, _ = start({}, mode or "overlap")
        if mode is None:
            runtime.settings = type(runtime.settings)()
        ran: list[str] = []
        monkeypatch.setattr(entry, "runtime", runtime)
        monkeypatch.setattr(runtime, "watch_only", lambda loop, scheduler, ran=ran: ran.append("watched"))
        entry.around_event_loop_normal(lambda scheduler, ran=ran: ran.append("plain"), None)
        assert ran == ["watched" if watched else "plain"]


@pytest.mark.parametrize("mode", ["sync", "overlap"])
def test_cost_is_measured_over_a_run_and_recording_goes_on(mode: str) -> None:
    script: Script = {1: [("submit", s) for s in specs(5)], 3: [("cost", 8)]}
    run = Run(script, mode)

    def measure(steps: int) -> None:
        observation = run.runtime.observation
        observation.measure_cost(steps)
        observation.cost.block = 2

    run.scheduler._on_cost = measure  # type: ignore[attr-defined]
    run.go()
    cost = run.observations[0].cost.report()
    assert not cost["running"]
    assert 0 < len(run.records) < run.scheduler.serials and run.recorder.faults == 0
    complete(run.records)
