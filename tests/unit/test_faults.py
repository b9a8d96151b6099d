"""Steps that fail in the real runtime over the fake scheduler: every token right, the loop goes on."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

from tests.unit.fake_scheduler import Limits, Script
from tests.unit.test_runtime import (
    assert_nothing_left_behind,
    assert_right,
    over_the_virtual_gpu,
    specs,
    start,
    stock_loop,
)
from tests.unit.virtual_gpu import POLICIES
from zos_sglang.faults import plan
from zos_sglang.faults.plan import Fault
from zos_sglang.settings import Settings
from zos_sglang.upstream import entry, lane_build, rank_board
from zos_sglang.upstream.runtime import Runtime

__all__ = ["over_the_virtual_gpu"]

#: After these every later launch is upstream's.
LAUNCHES = ("launch", "relay", "readback")
OVERLAP = (*LAUNCHES, "guard", "barrier", "snapshot")


def script_of(grammar=True, **more) -> Script:
    return {1: [("submit", s) for s in specs(grammar=grammar)], **more}


def said(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("when", ["1", "4", "1+", "4+"])
@pytest.mark.parametrize("point", OVERLAP)
def test_a_step_of_the_loop_that_fails_costs_nobody_a_token(point, when, policy, caplog):
    script = script_of()
    runtime, scheduler = start(script, "overlap", policy, Limits(chunk=6, barrier="both"))
    runtime.settings = runtime.settings.model_copy(update={"fault": f"{point}:{when}"})
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    struck = runtime.fault_points.injector.struck[point]
    assert struck == 1 or ("+" in when and struck > 1)
    assert runtime.account.faults == {point: struck} and runtime.account.paths["fallbacks"] == struck
    assert runtime._launcher.own is (point not in LAUNCHES)
    assert [line for line in said(caplog) if f"{point} failed" in line] == said(caplog)
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("before", ["sync", "overlap", "stock"])
@pytest.mark.parametrize("after", ["sync", "overlap"])
def test_a_mode_that_cannot_be_had_is_mode_stock(before, after, caplog):
    """Also with requests in flight."""
    script = script_of()
    script[6] = [("switch", after)]
    runtime, scheduler = start(script, before)
    if before == after:
        return
    calls = 1 if before == "stock" else 2  # the first is the start
    runtime.settings = runtime.settings.model_copy(update={"fault": f"mode-switch:{calls}"})
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert_nothing_left_behind(scheduler)
    assert runtime.mode == "stock" and runtime.pending is None
    assert runtime.account.faults == {"mode-switch": 1}
    assert said(caplog) == [f"zos-sglang: mode-switch failed; mode {after} cannot be had, mode stock runs"]


def test_a_mode_that_another_rank_cannot_have_is_mode_stock_here_too(monkeypatch, caplog):
    """Also with requests in flight. Else this one would have seen results that the other has not."""
    ranks = [("runtime 1", True), ("loop 2", True), ("loop 3", False)]

    def others(what, here, *_):
        assert here and what == ranks[0][0]
        return ranks.pop(0)[1]

    monkeypatch.setattr(rank_board, "all_ranks_have", others)
    script = script_of()
    script[6] = [("switch", "sync")]
    runtime, scheduler = start(script, "overlap")
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert_nothing_left_behind(scheduler)
    assert runtime.mode == "stock" and not ranks and runtime.account.faults == {}
    assert "another rank cannot have mode sync; mode stock runs" in caplog.text and not said(caplog)


def test_off_runs_stock_also_where_it_cannot_let_go(caplog):
    script = script_of()
    script[6] = [("switch", "off")]
    runtime, scheduler = start(script)
    runtime.settings = runtime.settings.model_copy(update={"fault": "mode-off:1"})
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert runtime.mode == "off" and runtime.scheduler is None
    assert len(said(caplog)) == 1


def test_a_lane_that_cannot_be_built_leaves_mode_overlap(monkeypatch, caplog):
    monkeypatch.setattr(lane_build, "build_lane", lambda *_: pytest.fail("built all the same"))
    script = script_of()
    runtime, scheduler = start(script, "resident")
    runtime.settings = runtime.settings.model_copy(update={"fault": "lane-build:1"})
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert runtime.report()["faults"] == {"lane build": 1}
    assert len(said(caplog)) == 1


def test_a_fault_that_is_asked_for_does_not_strike_the_lane_that_is_built_anew_for_it(monkeypatch):
    """It begins on a server that is whole."""
    built = []
    monkeypatch.setattr(lane_build, "build_lane", lambda *_: built.append("lane"))
    script = script_of()
    script[6] = [("ask", 0)]
    runtime, scheduler = start(script, "resident", fault="on")
    one = handler(runtime, monkeypatch)
    scheduler._on_ask = lambda _: one.apply(plan.KEY, plan.to_code(Fault("lane-build")))
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert built == ["lane", "lane"] and not runtime.fault_points.injector.struck


def test_recording_that_fails_costs_nobody_a_token(caplog):
    script = script_of()
    runtime, scheduler = start(script)
    runtime.settings = runtime.settings.model_copy(update={"fault": "recording:3"})
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)


def test_a_start_with_faults_says_so_and_one_without_knows_nothing_of_them(caplog):
    for fault, words in ((None, 0), ("on", 1)):
        caplog.clear()
        script = script_of()
        runtime, scheduler = start(script, fault=fault)
        runtime.run(stock_loop, scheduler)
        assert_right(scheduler, script)
        assert caplog.text.count("steps of this server fail on demand") == words
        assert (runtime.fault_points is None) is (fault is None)
        for name in ("resolve_inputs", "relay", "readback", "take_read_done"):
            assert (name in vars(runtime._launcher.device)) is (fault is not None)


# ------------------------------------------------------------ while it serves


def handler(runtime, monkeypatch):
    monkeypatch.setattr(entry, "runtime", runtime)
    return entry.after_update_handlers({}, None).get(plan.KEY)


def test_a_server_without_the_setting_has_no_such_handler(monkeypatch):
    runtime = Runtime()
    runtime.settings = Settings(mode="overlap")
    assert handler(runtime, monkeypatch) is None


@pytest.mark.parametrize("value", [-1, 1, 0.5, float("nan"), float("inf"), 10**30])
def test_a_number_that_is_no_fault_is_rejected(value, monkeypatch):
    runtime = Runtime()
    runtime.settings = Settings(mode="overlap", fault="on")
    runtime.scheduler = runtime.fault_points = SimpleNamespace()
    with pytest.raises(UpdateRejected, match=plan.KEY):
        handler(runtime, monkeypatch).validate(plan.KEY, value)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_fault_of_a_rank_that_is_not_there_is_rejected(rank, monkeypatch):
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_size=2))
    runtime = Runtime()
    runtime.settings = Settings(mode="overlap", fault="on")
    runtime.scheduler = runtime.fault_points = SimpleNamespace()
    one, code = handler(runtime, monkeypatch), plan.to_code(Fault("launch", 3, rank=rank))
    if rank < 2:
        one.validate(plan.KEY, code)
        return
    with pytest.raises(UpdateRejected, match=r"launch@2:3 names rank 2; .* ranks 0 to 1"):
        one.validate(plan.KEY, code)


def test_faults_asked_for_one_after_the_other_each_find_a_whole_server(monkeypatch):
    """Asked for during intake; the loop begins anew in its mode, and what was closed is open again."""
    script = script_of()
    asked = [Fault(point, 1) for point in OVERLAP]
    for number in range(len(asked) + 1):
        script[4 + 2 * number] = [("ask", number)]
    runtime, scheduler = start(script, fault="on")
    one, seen = handler(runtime, monkeypatch), []

    def ask(number):
        seen.append((dict(runtime.account.faults), runtime._launcher.own))
        if number < len(asked):
            value = plan.to_code(asked[number])
            one.validate(plan.KEY, value)
            one.apply(plan.KEY, value)

    scheduler._on_ask = ask
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert seen == [
        ({}, True),
        *(({fault.point: 1}, fault.point not in LAUNCHES) for fault in asked),
    ]
    assert runtime.mode == "overlap"
