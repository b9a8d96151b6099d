"""The runtime's lane: built in mode resident, done without where it cannot be had, timed on request."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

from tests.unit.fake_scheduler import Script
from tests.unit.test_runtime import assert_right, over_the_virtual_gpu, specs, start, stock_loop
from zos_sglang.settings import Settings
from zos_sglang.upstream import entry, lane_build
from zos_sglang.upstream.entry import MOST_REPLAYS
from zos_sglang.upstream.runtime import Runtime

__all__ = ["over_the_virtual_gpu"]


def runtime_with(*, own: bool = True) -> Any:
    """A runtime that is attached, as far as building a lane needs it."""
    runtime: Any = Runtime()
    runtime.settings = Settings(mode="resident")
    runtime._launcher = SimpleNamespace(own=own, port=SimpleNamespace())
    return runtime


def built_by(monkeypatch: Any, answer: Any) -> list[Any]:
    """Let `build_lane` give `answer`, or raise it; returns what it is called with."""
    calls: list[Any] = []

    def build(*given: Any) -> Any:
        calls.append(given)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(lane_build, "build_lane", build)
    return calls


def executor(graphs: bool) -> Any:
    ran: list[str] = []
    return SimpleNamespace(graphs=graphs, rows=3, ran=ran, step=lambda: ran.append("step"))


# ---------------------------------------------------------------- building


def test_the_lane_gets_settings_and_account_and_the_port_its_results(monkeypatch: Any) -> None:
    lane = SimpleNamespace(executor=executor(graphs=True))
    runtime = runtime_with()
    step = lane.executor.step
    calls = built_by(monkeypatch, (lane, "results"))
    assert runtime._build_lane("parts") is lane
    assert calls == [("parts", runtime.settings, runtime.lane_account)]
    assert runtime._launcher.port.lane_results == "results"
    assert lane.executor.step is step, "where nobody records nothing is wrapped"


def test_launches_that_go_through_upstream_leave_no_room_for_a_lane(monkeypatch: Any) -> None:
    calls = built_by(monkeypatch, ("lane", "results"))
    runtime = runtime_with(own=False)
    assert runtime._build_lane("parts") is None and calls == []
    assert runtime.lane_account.report()["refused"] == {"upstream-launch": 1}


def test_a_server_without_a_lane_keeps_its_port(monkeypatch: Any) -> None:
    built_by(monkeypatch, None)
    runtime = runtime_with()
    assert runtime._build_lane("parts") is None
    assert not hasattr(runtime._launcher.port, "lane_results")
    assert runtime.lane_account.faults == 0


def test_a_fault_while_building_is_logged_and_counted(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    built_by(monkeypatch, ValueError("no such backend"))
    runtime = runtime_with()
    assert runtime._build_lane("parts") is None
    assert runtime.lane_account.report()["faults"] == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "mode overlap runs" in record.getMessage()
    assert record.exc_info and "no such backend" in caplog.text


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_of_graphs_are_watched_by_themselves(graphs: bool, monkeypatch: Any) -> None:
    """Eager ones go through the runner's forward, which is watched already."""
    runtime = runtime_with()
    placed: list[Any] = []
    runtime.observation = SimpleNamespace(
        place=lambda *given: None, place_forward=lambda *given, stamped: placed.append((*given, stamped))
    )
    lane = SimpleNamespace(executor=executor(graphs))
    built_by(monkeypatch, (lane, "results"))
    runtime._build_lane("parts")
    places = [("lane step", lane.executor, "step", True), ("lane step, masked", lane.executor, "begin", True)]
    assert placed == (places if graphs else [])


def test_a_lane_that_is_no_more_is_watched_nowhere() -> None:
    """Its successor could not be put in a place that is still taken."""
    runtime = runtime_with()
    placed: list[Any] = []
    runtime.observation = SimpleNamespace(
        place=lambda *given: placed.append(given), place_forward=lambda *given, stamped: placed.append(given)
    )
    runtime.watch_lane(None)
    steps = [("lane step", None, "step"), ("lane step, masked", None, "begin")]
    assert placed == [("lane", None), ("lane results", None), *steps]


def test_mode_resident_without_a_lane_is_mode_overlap(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tried = built_by(monkeypatch, RuntimeError("cannot"))
    script: Script = {1: [("submit", s) for s in specs(grammar=True)]}
    runtime, scheduler = start(script, "resident")
    runtime.run(stock_loop, scheduler)
    assert_right(scheduler, script)
    assert len(tried) == 1 and tried[0][0].scheduler is scheduler
    assert runtime.mode == "resident" and not runtime.can_ride
    report = runtime.report()
    assert report["lane"]["faults"] == 1 and report["lane"]["opened"] == 0
    assert report["paths"]["fallbacks"] == 0 and "mode overlap runs" in caplog.text


def test_other_modes_build_no_lane(monkeypatch: Any) -> None:
    tried = built_by(monkeypatch, RuntimeError("cannot"))
    script: Script = {1: [("submit", s) for s in specs()]}
    for mode in ("overlap", "sync", "stock"):
        runtime, scheduler = start(script, mode)
        runtime.run(stock_loop, scheduler)
        assert_right(scheduler, script)
    assert tried == []


# ---------------------------------------------------------------- the floor


@pytest.fixture
def fresh(monkeypatch: Any) -> Any:
    runtime = runtime_with()
    monkeypatch.setattr(entry, "runtime", runtime)
    return runtime


def floor() -> Any:
    return entry.after_update_handlers({}, None)["zos_floor"]


@pytest.mark.parametrize("replays", [1, 50.0, MOST_REPLAYS])
def test_the_floor_is_timed_by_the_lane_as_often_as_asked(fresh: Any, replays: float) -> None:
    fresh.mode, fresh._lane = "resident", SimpleNamespace(floor_replays=0, is_sound=True)
    floor().validate("zos_floor", replays)
    floor().apply("zos_floor", replays)
    assert fresh._lane.floor_replays == replays and type(fresh._lane.floor_replays) is int


@pytest.mark.parametrize("replays", [0, -1, 1.5, MOST_REPLAYS + 1, float("nan"), float("inf")])
def test_a_number_of_replays_that_is_none_or_too_large_is_rejected(fresh: Any, replays: float) -> None:
    fresh.mode, fresh._lane = "resident", SimpleNamespace(floor_replays=0, is_sound=True)
    with pytest.raises(UpdateRejected, match=f"from 1 to {MOST_REPLAYS}"):
        floor().validate("zos_floor", replays)


@pytest.mark.parametrize(
    ("mode", "lane"),
    [
        ("resident", None),
        ("overlap", SimpleNamespace(is_sound=True)),
        ("resident", SimpleNamespace(is_sound=False)),
    ],
)
def test_without_a_lane_that_can_open_there_is_no_floor(fresh: Any, mode: Any, lane: Any) -> None:
    fresh.mode, fresh._lane = mode, lane
    with pytest.raises(UpdateRejected, match="needs mode resident"):
        floor().validate("zos_floor", 10)


def test_of_several_ranks_none_refuses_the_floor_for_a_lane_that_failed_in_it_alone(
    fresh: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What the other ranks take with it, a switch perhaps, this one must take too."""
    fresh.mode, fresh._lane = "resident", SimpleNamespace(is_sound=False)
    fresh.scheduler = SimpleNamespace(tp_group=SimpleNamespace(world_size=2))
    floor().validate("zos_floor", 10)
    floor().apply("zos_floor", 10)
    assert "zos_floor: needs mode resident, with its lane in working order" in caplog.text
    fresh.mode = "overlap"
    with pytest.raises(UpdateRejected, match="needs mode resident"):
        floor().validate("zos_floor", 10)
