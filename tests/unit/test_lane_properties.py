"""The resident lane under whatever clients, device and operators do.

`check` after each run: every request got exactly the tokens of a sequential run, each in one message, each
result was processed once and in order, and no page, lock or row was lost. During a run, after every step:
each page has one owner, and launched, confirmed and allocated lengths agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.fake_batch import NO_GRAMMAR
from tests.unit.fake_scheduler import Script
from tests.unit.lane_fakes import LaneSpec
from tests.unit.lane_simulation import LaneLimits, LaneScenario, build, simulate
from tests.unit.test_properties import LAST_TICK, together
from tests.unit.virtual_gpu import POLICIES
from zos_sglang.overlap.guards import PrefillRule
from zos_sglang.resident.eligibility import Departure, Refusal

EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MORE = settings(EXAMPLES, max_examples=200)
#: Clients ask for few different texts, so that prefixes meet in the tree.
TEXTS = [tuple((7 * t + i) % 31 for i in range(24)) for t in range(3)]


@st.composite
def limits(draw: Callable[..., Any], roomy: bool = False) -> LaneLimits:
    """Servers of all shapes. Pools hold the longest request alone, and often little more."""
    page = draw(st.sampled_from([1, 4, 16]))
    slots = 400 if roomy else draw(st.sampled_from([56, 72, 110, 400]))
    return LaneLimits(
        rows=draw(st.integers(2, 6)),
        chunk=draw(st.sampled_from([3, 8, 64])),
        mixed=draw(st.booleans()),
        barrier=draw(st.sampled_from(["fine", "coarse", "both"])),
        pages=-(-slots // page) + (page > 1),
        page_size=page,
        window=draw(st.sampled_from([1, 2, 3, 5, 16])),
        depth=draw(st.sampled_from([3, 4, 7])),
        lane_rows=draw(st.sampled_from([2, 6, 6, 6])),
        graphs=draw(st.booleans()),
        in_place=draw(st.booleans()),
    )


@st.composite
def specs(draw: Callable[..., Any], rid: int, lengths_only: bool = False) -> LaneSpec:
    text = draw(st.sampled_from(TEXTS))
    spec = LaneSpec(
        rid,
        text[: draw(st.integers(1, len(text)))],
        draw(st.integers(1, 28)),
        draw(st.booleans()),
        ignore_eos=lengths_only or draw(st.booleans()),
    )
    if lengths_only:
        return spec
    return replace(
        spec,
        stop_ids=tuple(draw(st.lists(st.integers(1, 30), max_size=2))),
        stop_pair=draw(st.sampled_from([(), (), (3, 5), (18, 18)])),
        vocabulary=draw(st.sampled_from([31, 31, 30])),
        rides=draw(st.sampled_from([True] * 7 + [False])),
        grammar=draw(st.sampled_from([NO_GRAMMAR] * 3 + [5, 17])),
    )


@st.composite
def clients(draw: Callable[..., Any], lengths_only: bool = False) -> Script:
    """Up to eight requests that arrive at any time."""
    script: Script = {}
    for rid in range(draw(st.integers(1, 8))):
        spec = draw(specs(rid, lengths_only))
        script.setdefault(draw(st.integers(1, LAST_TICK)), []).append(("submit", spec))
    return script


@st.composite
def operators(draw: Callable[..., Any]) -> Script:
    """Aborts, pauses of both kinds with their end, and switches, also while paused."""
    script: Script = {}
    ticks = st.integers(1, LAST_TICK)
    for rid in draw(st.lists(st.integers(0, 7), max_size=3)):
        script.setdefault(draw(ticks), []).append(("abort", rid))
    for how in draw(st.lists(st.sampled_from(["in_place", "retract"]), max_size=2)):
        start = draw(ticks)
        script.setdefault(start, []).append(("pause", how))
        script.setdefault(start + draw(st.integers(1, 5)), []).append(("continue",))
    for mode in draw(st.lists(st.sampled_from(["sync", "overlap", "resident", "resident"]), max_size=4)):
        script.setdefault(draw(ticks), []).append(("switch", mode))
    return script


@st.composite
def scenarios(
    draw: Callable[..., Any], calm: bool = False, lengths_only: bool = False, roomy: bool = False
) -> LaneScenario:
    return LaneScenario(
        together(draw(clients(lengths_only)), {} if calm else draw(operators())),
        draw(limits(roomy)),
        draw(st.sampled_from(POLICIES)),
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from(list(PrefillRule))),
        early=draw(st.booleans()),
    )


@MORE
@given(scenarios())
def test_every_request_gets_the_right_tokens_whatever_the_order_of_execution(scenario):
    simulate(scenario).check()


@EXAMPLES
@given(scenarios(calm=True, lengths_only=True, roomy=True))
def test_nothing_is_sampled_in_vain_for_requests_that_end_by_length(scenario):
    assert simulate(scenario).check().lane_account.wasted_row_steps == 0


@EXAMPLES
@given(scenarios(calm=True))
def test_at_most_one_token_a_request_is_sampled_in_vain(scenario):
    world = simulate(scenario).check()
    assert world.lane_account.wasted_row_steps <= len(world.scheduler.requests) + world.scheduler.retractions


@EXAMPLES
@given(scenarios(calm=True), st.integers(1, 60))
def test_an_exit_at_any_tick_closes_the_lane_and_drains(scenario, tick):
    script = together(scenario.script, {tick: [("exit",)]})
    world = build(replace(scenario, script=script)).run().check()
    assert not world.scheduler.result_queue


FAULTS = {
    "open": "before the batch is loaded",
    "opened": "after it",
    "step": "before the step is queued",
    "stepped": "after the model, before its tokens",
    "refresh": "at the first reservation",
    "take": "with room for a window, before its slots are taken",
    "write": "with the slots taken, before they are written",
    "table": "while a batch is judged",
    "readback": "with the step queued, before its copy to the host",
    "read": "with the result on the host, before a row has its token",
    "due": "with every row's token appended, before anything is sent",
    "keeping": "before rows go",
    "keep": "with rows gone, before the rest has moved together",
}


@settings(EXAMPLES, max_examples=120)
@given(scenarios(), st.sampled_from(list(FAULTS)), st.integers(1, 12))
def test_a_fault_closes_the_lane_for_good_and_no_request_notices(scenario, where, call):
    world = build(scenario)
    world.faults.at[where] = call
    world.run().check()
    assert world.faults.struck == (world.faults.at[where] <= 0)


@EXAMPLES
@given(scenarios(calm=True), st.sampled_from(list(FAULTS)), st.integers(1, 4))
def test_after_a_fault_the_executor_is_not_called_again(scenario, where, call):
    world = build(scenario)
    calls: list[str] = []

    def fault(name):
        assert not world.faults.struck, f"{name} after a fault"
        calls.append(name)
        world.faults(name)

    world.executor.faults = world.pool.faults = fault
    world.faults.at[where] = call
    world.run().check()


@EXAMPLES
@given(scenarios(calm=True), st.integers(1, LAST_TICK))
def test_an_arrival_finds_the_lane_closed_before_anything_looks_at_it(scenario, tick):
    spec = LaneSpec(99, TEXTS[0][:5], 3)
    world = build(replace(scenario, script=together(scenario.script, {tick: [("submit", spec)]})))
    on_submit = world.scheduler._on_submit

    def submit(spec):
        assert not world.lane.is_open
        on_submit(spec)

    world.scheduler._on_submit = submit
    world.run().check()


@EXAMPLES
@given(scenarios(), st.booleans())
def test_rows_that_go_in_place_change_no_launch(scenario, skips_finishing):
    """The same rows in the same steps as where the lane closes and opens again, and nobody else is retracted.

    `skips_finishing` False: the decode role, where selection makes one more step of a row at its limit.
    """
    found = []
    for in_place in (True, False):
        world = build(replace(scenario, limits=replace(scenario.limits, in_place=in_place)))
        world.skips_finishing = skips_finishing
        rows = watch_rows(world)
        world.run().check()
        found.append((rows, world.scheduler.retractions))
    assert found[0] == found[1]


def watch_rows(world):
    """Rows of every launch."""
    rows: list[list[int]] = []
    process = world.port.process

    def watched(batch, result):
        rows.append([req.rid for req in batch.reqs])
        process(batch, result)

    world.port.process = watched
    return rows


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pages", [70, 400])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "reopened"])
def test_the_scenarios_reach_what_they_are_for(policy, graphs, pages, in_place):
    """A simulation that never rides, renews, retracts, replaces pages or leaves would prove nothing."""
    script: Script = {}
    for i in range(10):
        spec = LaneSpec(i, TEXTS[i % 2][: 20 - i], 20 + i, bool(i % 2), rides=i != 8, ignore_eos=i % 3 == 0)
        script.setdefault(1 + i // 2 * (1 + i), []).append(("submit", spec))
    script |= {
        32: [("abort", 3), ("abort", 4)],
        40: [("pause", "retract"), ("switch", "sync")],
        42: [("continue",)],
        47: [("switch", "resident")],
    }
    limits = LaneLimits(pages=pages, chunk=64, window=3, rows=6, graphs=graphs, in_place=in_place)
    world = build(LaneScenario(script, limits, policy, 7))
    replaced = watch_replacements(world)
    world.run().check()
    account = world.lane_account
    departures = [Departure.INTAKE, Departure.LENGTH_LIMIT]
    # In the small pool somebody always waits.
    if in_place and pages == 400:
        assert account.rows_left
    else:
        departures.append(Departure.FINISH)
        assert account.rows_left == 0
    if pages == 70:
        departures.append(Departure.POOL_FULL)
    else:
        assert account.windows > account.opened
    assert replaced and world.scheduler.retractions and world.scheduler.idled and account.wasted_row_steps
    for departure in departures:
        assert account.left[departure], departure
    for refusal in (Refusal.LOGPROBS, Refusal.ABORT_PENDING):
        assert account.refused[refusal], refusal


def watch_replacements(world):
    """Pages that the tree replaced by its own while the lane was open."""
    replaced: list[int] = []
    publish, give = world.scheduler.memory.publish, world.scheduler.memory.give

    def watched(req, up_to):
        def replacing(*pages):
            replaced.extend(pages if world.lane.is_open else ())
            give(*pages)

        world.scheduler.memory.give = replacing
        publish(req, up_to)
        world.scheduler.memory.give = give

    world.scheduler.memory.publish = watched
    return replaced
