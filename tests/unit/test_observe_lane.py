"""Records of the lane's steps, over its simulation."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from tests.unit.fake_scheduler import Limits, Script
from tests.unit.lane_fakes import LaneSpec
from tests.unit.lane_scheduler import LaneLimits
from tests.unit.lane_simulation import LaneScenario, LaneWorld, build, submit
from tests.unit.recording import complete, record_world
from tests.unit.simulation import Scenario
from tests.unit.simulation import build as build_plain
from tests.unit.test_lane_mutations import OTHER, TEXT, long
from tests.unit.test_lane_properties import EXAMPLES, scenarios
from tests.unit.test_runtime import specs
from tests.unit.virtual_gpu import EARLY
from zos_sglang.observe.adjacent import pairs
from zos_sglang.observe.columns import to_columns
from zos_sglang.observe.names import DELAYED_SAMPLING, EMBEDDING, LANE_OPENING, code
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream.watch_stock import ForwardWatch


def watched(scenario: LaneScenario) -> tuple[LaneWorld, np.ndarray]:
    """A run, checked as without a recorder, and its records."""
    world = build(scenario)
    recorder = record_world(world)
    world.watch = recorder
    # In place of the runner's forward, which graphs do not go through.
    eager = () if world.executor.graphs else ("step", "begin")
    forwards = [ForwardWatch(world.executor, name, True) for name in eager]
    for forward in forwards:
        forward.watch = recorder
    world.run().check()
    for forward in forwards:
        forward.remove()
    recorder.close()
    records = recorder.ring.since(0)
    complete(records)
    assert records["step"].tolist() == list(range(1, world.scheduler.serials + 1))
    return world, records


def of_lane(records: np.ndarray) -> np.ndarray:
    return np.isin(records["path"], [code("path", "resident"), code("path", "resident-blocked")])


def test_steps_of_the_lane_are_resident_and_the_first_one_opens_it() -> None:
    world, records = watched(LaneScenario(submit(long(1, TEXT[:5], 12), long(2, OTHER[:7], 9))))
    columns = to_columns(records)
    lane = of_lane(records)
    assert lane.sum() == world.lane_account.steps
    assert [f for f, inside in zip(columns["forward"], lane, strict=True) if not inside] == ["extend"]
    opening = (records["flags"] & LANE_OPENING) > 0
    assert opening.sum() == world.lane_account.opened == 1 and lane[opening].all()
    assert records["rows"][lane].tolist() == [2] * 8 + [1] * 3, "a row has gone in place"
    assert set(records["depth"][lane & ~opening].tolist()) == {1}
    assert set(records["tokens"][lane].tolist()) == {1, 2}
    before, _ = pairs(records[lane], same_rows=True)
    assert len(before) == 7 + 2 and (records["t_forward"][lane] >= records["t_launch"][lane]).all()


def test_a_further_step_begins_with_its_graph_and_ends_with_its_readback() -> None:
    """The lane reads the clock for few of the eight times; none of them is missing."""
    _, records = watched(LaneScenario(submit(long(1, TEXT[:5], 12))))
    further = of_lane(records) & ((records["flags"] & LANE_OPENING) == 0)
    steps = records[further]
    assert len(steps) > 8
    assert (steps["t_select"] == steps["t_forward"]).all() and (steps["t_launch"] == steps["t_forward"]).all()
    assert (steps["t_intake"] < steps["t_forward"]).all()
    assert (steps["t_forward"] < steps["t_launched"]).all()
    assert (steps["t_launched"] < steps["t_output"]).all()


def test_a_further_step_without_graphs_begins_before_the_runners_forward() -> None:
    _, records = watched(LaneScenario(submit(long(1, TEXT[:5], 12)), LaneLimits(graphs=False)))
    steps = records[of_lane(records)]
    assert len(steps) > 8 and (steps["t_launch"] < steps["t_forward"]).all()


def test_leaving_and_refusing_explain_the_launch_that_follows() -> None:
    script = submit(long(1, TEXT[:5], 30))
    script[12] = [("submit", long(2, OTHER[:4], 4))]
    script[24] = [("submit", LaneSpec(3, OTHER[:6], 4, rides=False, ignore_eos=True))]
    world, records = watched(LaneScenario(script))
    columns = to_columns(records)
    assert columns["departure"].count("intake") == 2
    first = columns["departure"].index("intake")
    assert columns["forward"][first] == "extend" and columns["path"][first - 1].startswith("resident")
    refused = [i for i, refusal in enumerate(columns["refusal"]) if refusal == "logprobs"]
    assert len(refused) == world.lane_account.refused[Refusal.LOGPROBS] > 0
    assert all(columns["path"][i].startswith("overlap") for i in refused)


def test_a_lane_whose_device_is_done_first_is_bound_by_the_thread() -> None:
    _, records = watched(LaneScenario(submit(long(1, TEXT[:5], 12)), policy=EARLY))
    columns = to_columns(records)
    lane = [i for i, path in enumerate(columns["path"]) if path.startswith("resident")]
    assert {columns["block"][i] for i in lane} == {"cpu-bound"}
    assert {columns["path"][i] for i in lane} == {"resident-blocked"}


def test_masked_steps_say_that_their_sampling_waited_and_when_their_forward_began() -> None:
    _, records = watched(LaneScenario(submit(long(1, TEXT[:5], 12), LaneSpec(2, OTHER[:7], 6, grammar=5))))
    lane = of_lane(records)
    delayed = (records["flags"] & DELAYED_SAMPLING) > 0
    assert 0 < delayed[lane].sum() < lane.sum()
    for place in ("t_forward", "t_ready"):
        assert (records[place][lane & delayed] > 0).all(), place


@EXAMPLES
@given(scenarios())
def test_records_say_what_the_accounts_count_whatever_happens(scenario: LaneScenario) -> None:
    world, records = watched(scenario)
    account, opening = world.lane_account, (records["flags"] & LANE_OPENING) > 0
    lane = of_lane(records)
    assert lane.sum() == account.steps and opening.sum() == account.opened
    for reason, count in world.account.reasons.items():
        assert (records["reason"] == code("reason", reason)).sum() == count, reason
    assert (records["reason"][lane & ~opening] == code("reason", "overlapped")).all()
    for refusal, count in account.refused.items():
        assert (records["refusal"] == code("refusal", refusal)).sum() == count, refusal
    for departure, count in account.left.items():
        found = (records["departure"] == code("departure", departure)).sum()
        assert found <= count, departure
    # At most the last time that it was left has no launch behind it.
    assert (records["departure"] > 0).sum() >= account.opened - 1
    assert records["rows"][lane].sum() == account.row_steps
    delayed = (records["flags"] & DELAYED_SAMPLING) > 0
    assert delayed[lane].sum() == account.masked_steps


def test_embeddings_of_our_loop_are_recorded() -> None:
    script: Script = {t: [("submit", s)] for t, s in enumerate(specs(), 1)}
    world = build_plain(Scenario(script, Limits(embedding=True)))
    world.watch = recorder = record_world(world)
    world.run().check()
    recorder.close()
    records = recorder.ring.since(0)
    complete(records)
    assert len(records) == world.scheduler.serials
    assert ((records["flags"] & EMBEDDING) > 0).all() and set(to_columns(records)["forward"]) == {"extend"}
