"""The regression's judgement of the lane: what it did is read right, and what it did not is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.fake_scheduler import Script
from tests.unit.lane_fakes import LaneSpec
from tests.unit.lane_simulation import LaneLimits, LaneScenario, LaneWorld, build, submit
from tests.unit.test_compare import SCENARIO, answers, run_cli
from zos_sglang.resident.eligibility import Departure, Refusal
from zos_sglang.testing.compare import report
from zos_sglang.testing.compare.evidence import Evidence, counters, growth
from zos_sglang.testing.compare.lane import (
    SUITE_DEPARTURES,
    SUITE_REFUSALS,
    LaneEvidence,
    block,
    line,
    missing_from_lane,
    missing_from_suite,
    percent,
    summary,
    total,
)
from zos_sglang.testing.compare.runner import Played, Result, Side, judge
from zos_sglang.testing.compare.scenario import Scenario, ServerConfig
from zos_sglang.testing.compare.scenarios import ALL
from zos_sglang.testing.compare.scenarios.metrics import EXACT, samples

ZOS: dict[str, Any] = {
    "reasons": {"overlapped": 9},
    "paths": {"decode": 50},
    "lane": {
        "share": 0.9,
        "opened": 4,
        "decode_steps": 40,
        "steps": 36,
        "row_steps": 300,
        "wasted_row_steps": 2,
        "windows": 5,
        "faults": 0,
        "device_bytes": 1000,
        "refused": {"grammar": 4},
        "left": {"intake": 3, "finish": 1},
    },
}
GROWN = counters(ZOS)


def test_the_lanes_account_is_read_and_grows_like_every_counter() -> None:
    later = json.loads(json.dumps(ZOS))
    later["lane"]["steps"] += 5
    later["lane"]["decode_steps"] += 6
    later["lane"]["left"]["pool-full"] = 1
    grown = growth(counters(ZOS), counters(later))
    assert grown == {"lane.steps": 5, "lane.decode_steps": 6, "lane.left.pool-full": 1}
    seen = block(grown)
    assert (seen["share"], seen["left"], seen["refused"]) == (0.8333, {"pool-full": 1}, {})


def test_a_server_without_a_lane_block_has_no_lane_counters() -> None:
    assert counters({"reasons": {"overlapped": 1}}) == {"reasons.overlapped": 1}
    assert block({})["share"] is None
    assert line({}) == "- of 0, opened 0"


def test_a_share_is_never_rounded_up_to_all() -> None:
    assert percent({"share": 0.9999}) == "99.9 %"
    assert percent({"share": 1.0}) == "100 %"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (LaneEvidence(), None),
        (LaneEvidence(0.9), None),
        (LaneEvidence(0.91), "90 % of 40 decode steps rode the lane, 91% wanted"),
        (LaneEvidence(left=("intake", "finish"), refused=("grammar",)), None),
        (LaneEvidence(left=("pool-full",)), "never left for pool-full"),
        (LaneEvidence(refused=("penalties",)), "never refused for penalties"),
        (LaneEvidence(masked=True), "no row with a grammar rode the lane in 36 steps"),
        (LaneEvidence(closed="model"), "36 steps rode a lane that must stay closed"),
    ],
)
def test_what_the_lane_did_not_do_is_named(wanted: LaneEvidence, words: str | None) -> None:
    faults = missing_from_lane(wanted, GROWN, {"lane.refused.model": 1})
    assert [words is not None and words in fault for fault in faults] == ([True] if words else [])


def test_rows_with_a_grammar_that_rode_are_evidence() -> None:
    assert missing_from_lane(LaneEvidence(masked=True), GROWN | {"lane.grammar_row_steps": 3}, {}) == []


def test_a_lane_that_nothing_rode_fails_unless_chance_decides() -> None:
    grown = {"lane.decode_steps": 12, "lane.refused.logprobs": 12}
    assert missing_from_lane(LaneEvidence(), grown, {}) == ["ours: none of 12 decode steps rode the lane"]
    assert missing_from_lane(LaneEvidence(None, refused=("logprobs",)), grown, {}) == []


def test_a_closed_lane_must_have_been_closed_for_its_reason() -> None:
    assert missing_from_lane(LaneEvidence(closed="model"), {}, {"lane.refused.model": 1}) == []
    assert missing_from_lane(LaneEvidence(closed="model"), {}, {"lane.refused.kv-pool": 1}) == [
        "ours: the lane was not closed for model"
    ]


def played(scenario: Scenario, zos: dict[str, int], before: dict[str, int] | None = None) -> Result:
    found = {"reasons.overlapped": zos.get("reasons.overlapped", 0)}
    return Result(
        scenario,
        stock=Played(records=answers()),
        ours=Played(records=answers(), before=before or {}, zos=dict(zos), found=found),
    )


def scenario(name: str, lane: LaneEvidence, config: str = "unit") -> Scenario:
    evidence = Evidence(reasons=("overlapped",), batch=0, lane=lane)
    return Scenario(name, "of a test", SCENARIO.play, ServerConfig(config), evidence)


@pytest.mark.parametrize(("mode", "passes"), [("resident", False), ("overlap", True)])
def test_only_mode_resident_is_judged_by_its_lane(mode: str, passes: bool) -> None:
    result = played(scenario("unit", LaneEvidence()), {"reasons.overlapped": 3})
    judge(result, Side("ours", mode))
    assert result.passed == passes


def test_a_fault_of_the_lane_fails_a_scenario_whose_answers_are_equal() -> None:
    result = played(scenario("unit", LaneEvidence()), GROWN | {"lane.faults": 1})
    judge(result, Side("ours", "resident"))
    assert result.faults == ["ours: lane.faults = 1, must be zero"]


# ---------------------------------------------------------------- the whole suite


def test_a_suite_must_have_left_the_lane_for_every_reason() -> None:
    every = {f"lane.left.{r}": 1 for r in SUITE_DEPARTURES} | {f"lane.refused.{r}": 1 for r in SUITE_REFUSALS}
    assert missing_from_suite(every) == []
    for name in every:
        (sentence,) = missing_from_suite(every | {name: 0})
        assert name.rsplit(".", maxsplit=1)[-1] in sentence


def test_departures_that_no_client_can_cause_are_all_that_the_suite_leaves_out() -> None:
    assert {*SUITE_DEPARTURES} == {d.value for d in Departure} - {"exit", "fault"}
    assert {*SUITE_REFUSALS} <= {r.value for r in Refusal}


def test_scenarios_name_reasons_that_exist() -> None:
    for each in ALL:
        wanted = each.evidence.lane
        assert {*wanted.left} <= {d.value for d in Departure}, each.name
        assert {*wanted.refused, wanted.closed} - {None} <= {r.value for r in Refusal}, each.name
        # One server, one answer to whether it has a lane at all.
        same = {s.evidence.lane.closed for s in ALL if s.config == each.config}
        assert same == {wanted.closed}, each.config.name


def test_the_suites_departures_and_refusals_are_each_asked_of_some_scenario() -> None:
    left = {reason for each in ALL for reason in each.evidence.lane.left}
    refused = {reason for each in ALL for reason in each.evidence.lane.refused}
    assert left == {*SUITE_DEPARTURES}
    assert refused == {*SUITE_REFUSALS}


def suite() -> list[Result]:
    """Two scenarios of one server and one of a server whose lane stays closed."""
    closed = {"lane.refused.model": 1}
    return [
        played(scenario("one", LaneEvidence()), GROWN),
        played(scenario("two", LaneEvidence()), GROWN, before=GROWN),
        played(scenario("three", LaneEvidence(closed="model"), "other"), {"reasons.overlapped": 1}, closed),
    ]


def test_the_sum_counts_each_step_once_and_each_start() -> None:
    seen = block(report.lane_total(suite()))
    assert (seen["steps"], seen["decode_steps"], seen["share"]) == (72, 80, 0.9)
    assert seen["refused"] == {"grammar": 8, "model": 1}
    assert total([{"a": 1}, {"a": 2, "b": 3}]) == {"a": 3, "b": 3}


def test_shares_and_reasons_are_printed_and_written(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    report.print_report(console, suite(), "title", resident=True)
    text = console.export_text()
    assert "90 % of 40, opened 4" in text
    assert "lane: 90 % of 80 decode steps, opened 8" in text
    assert "left: finish 2, intake 6; refused: grammar 8, model 1" in text
    assert summary({}).endswith("left: none; refused: none")
    report.write_json(tmp_path / "out.json", report.document(suite(), {}, resident=True))
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["lane"]["left"] == {"finish": 2, "intake": 6}
    assert written["scenarios"][0]["lane"]["share"] == 0.9
    assert not any(key.startswith("lane.") for key in written["scenarios"][0]["zos"])


def test_other_modes_say_nothing_of_the_lane() -> None:
    console = Console(record=True, width=200)
    report.print_report(console, suite(), "title")
    assert "lane" not in console.export_text()
    assert "lane" not in report.document(suite(), {})["scenarios"][0]


@pytest.mark.parametrize(
    ("extra", "code"),
    [(["--suite", "full"], 1), (["--suite", "smoke"], 0), (["--suite", "full", "--scenario", "eos"], 0)],
)
def test_a_full_suite_that_never_left_for_a_reason_fails(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    code: int,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "found.json"
    argv = ["--model", str(tmp_path), "--mode", "resident", "--out", str(out), *extra]
    assert run_cli(monkeypatch, argv, played(scenario("one", LaneEvidence()), GROWN)) == code
    assert ("never left the lane for pool-full" in capsys.readouterr().out) == bool(code)
    assert any("pool-full" in sentence for sentence in json.loads(out.read_text())["unseen"]) == bool(code)


# ---------------------------------------------------------------- what clients cannot cause


def world(then: Script | None = None) -> LaneWorld:
    specs = [LaneSpec(rid, tuple(range(1, 4 + rid)), 20, ignore_eos=True) for rid in range(3)]
    return build(LaneScenario(submit(*specs) | (then or {}), LaneLimits()))


def test_an_exit_that_finds_the_lane_open_is_counted() -> None:
    seen = world(then={12: [("exit",)]}).run().check().lane_account.report()
    assert seen["left"]["exit"] == 1
    assert 0 < seen["steps"] < 19  # the requests were not done


@pytest.mark.parametrize("where", ["step", "write"])
def test_a_fault_is_counted_and_no_request_notices(where: str) -> None:
    faulty = world()
    faulty.faults.at[where] = 2 if where == "step" else 1
    faulty.run().check()
    seen = faulty.lane_account.report()
    assert (seen["left"]["fault"], seen["faults"]) == (1, 1)
    assert seen["refused"]["closed-for-good"]


# ---------------------------------------------------------------- Prometheus text


def test_prometheus_samples_are_summed_by_name_and_mode() -> None:
    text = """\
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{mode="decode",rank="0"} 40.0
sglang:realtime_tokens_total{mode="decode",rank="1"} 2.0
sglang:realtime_tokens_total{mode="prefill_compute",rank="0"} 900.0
sglang:cuda_graph_passes_total{mode="decode_none"} 7.0
sglang:cuda_graph_passes_total{mode="prefill_none"} 3.0
sglang:generation_tokens_total{model="m"} 1.5e+03
sglang:e2e_request_latency_seconds_count{model="m"} 4.0
"""
    seen = samples(text)
    assert (seen["decode-tokens"], seen["decode-steps"], seen["answer-tokens"]) == (42, 7, 1500)
    assert (seen["latencies"], seen["requests"]) == (4, 0)
    assert {*EXACT} <= {*seen}
