"""Whatever clients, device and operators do: every request gets exactly the tokens of a sequential run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.fake_batch import NO_GRAMMAR, Spec
from tests.unit.fake_scheduler import Limits, Script
from tests.unit.fakes import Fault
from tests.unit.simulation import Scenario, build, simulate
from tests.unit.virtual_gpu import POLICIES
from zos_sglang.overlap.guards import PrefillRule, make_guard

EXAMPLES = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
MORE = settings(EXAMPLES, max_examples=150)
LAST_TICK = 30


@st.composite
def limits(draw: Callable[..., Any], embedding: bool = False) -> Limits:
    """Servers of all shapes; small pools retract, small chunks cut prompts."""
    speculative = draw(st.booleans()) and not embedding
    return Limits(
        rows=draw(st.integers(2, 6)),
        capacity=draw(st.sampled_from([25, 40, 70, 400])),
        chunk=draw(st.sampled_from([3, 8, 64])),
        mixed=draw(st.booleans()) and not (speculative or embedding),
        speculative=speculative,
        embedding=embedding,
        delay_all=draw(st.booleans()),
        barrier=draw(st.sampled_from(["fine", "coarse", "both"])),
    )


@st.composite
def clients(draw: Callable[..., Any]) -> Script:
    """Up to eight requests that arrive at any time."""
    script: Script = {}
    for rid in range(draw(st.integers(1, 8))):
        spec = Spec(
            rid,
            tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=20))),
            draw(st.integers(1, 12)),
            draw(st.booleans()),
            draw(st.one_of(st.just(NO_GRAMMAR), st.integers(0, 96))),
        )
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
    for mode in draw(st.lists(st.sampled_from(["sync", "overlap"]), max_size=4)):
        script.setdefault(draw(ticks), []).append(("switch", mode))
    return script


def together(*scripts: Script) -> Script:
    out: Script = {}
    for script in scripts:
        for tick, actions in script.items():
            out.setdefault(tick, []).extend(actions)
    # A client of this tick is there before an operator acts on it.
    return {t: sorted(actions, key=lambda a: a[0] != "submit") for t, actions in out.items()}


@st.composite
def scenarios(draw: Callable[..., Any], embedding: bool = False, calm: bool = False) -> Scenario:
    return Scenario(
        together(draw(clients()), {} if calm else draw(operators())),
        draw(limits(embedding)),
        draw(st.sampled_from(POLICIES)),
        draw(st.integers(0, 2**16)),
        draw(st.sampled_from(list(PrefillRule))),
        draw(st.sampled_from(["overlap", "overlap", "sync"])),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@MORE
@given(scenarios())
def test_every_request_gets_the_reference_tokens_whatever_the_order_of_execution(scenario):
    """Also: depth at most 2 and 1 between iterations, each result once and in order, nothing left."""
    simulate(scenario).check()


@EXAMPLES
@given(scenarios(embedding=True))
def test_embedding_batches_get_their_own_vectors(scenario):
    simulate(scenario).check()


@EXAMPLES
@given(scenarios(calm=True), st.integers(1, 40))
def test_an_exit_at_any_tick_drains_and_leaves_nothing(scenario, tick):
    script = together(scenario.script, {tick: [("exit",)]})
    world = build(Scenario(script, scenario.limits, scenario.policy, scenario.seed, scenario.rule))
    world.run().check()
    assert not world.scheduler.result_queue


@EXAMPLES
@given(scenarios(), st.sampled_from(["prepare", "resolve_inputs", "resolved"]), st.integers(1, 12))
def test_a_fault_before_the_forward_falls_back_to_upstream_and_loses_nothing(scenario, where, call):
    world = build(scenario)
    world.device.faults[where] = call
    world.run().check()
    struck = world.device.faults[where] <= 0
    assert world.launcher.own is not struck
    assert world.account.paths["fallbacks"] == struck


@EXAMPLES
@given(scenarios(), st.integers(1, 12))
def test_a_fault_in_a_guard_falls_back_to_overlap_and_loses_nothing(scenario, call):
    if scenario.limits.speculative:
        return  # there a guard decides what is right, not only what is fast
    calls = []
    decide = make_guard(scenario.rule, dp_attention=False)

    def guard(batch, pending):
        calls.append(batch)
        if len(calls) == call:
            raise Fault("guard")
        return decide(batch, pending)

    world = build(scenario)
    world.guard = guard
    world.run().check()
    assert world.account.paths["fallbacks"] == (len(calls) >= call)
    assert world.launcher.own


@EXAMPLES
@given(scenarios(calm=True), st.integers(1, 3))
def test_a_fault_in_the_forward_propagates_and_is_not_launched_again(scenario, call):
    world = build(scenario)
    world.device.faults["forward"] = call
    world.scheduler.run_batch = None  # upstream's launch must not be reached
    try:
        world.run()
    except Fault:
        assert world.launcher.own
        assert world.account.paths["fallbacks"] == 0
        assert world.scheduler.serials == call - 1
    else:
        assert world.device.faults["forward"] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_scenarios_reach_what_they_are_for(policy):
    """A simulation that never overlaps, delays, chunks, mixes or retracts would prove nothing."""
    specs = [
        Spec(i, tuple(range(1, 4 + 2 * i)), 10, bool(i % 2), i if i % 3 == 0 else NO_GRAMMAR)
        for i in range(8)
    ]
    script: Script = {1 + 2 * i: [("submit", s)] for i, s in enumerate(specs)}
    script |= {
        20: [("pause", "retract"), ("switch", "sync")],
        22: [("continue",)],
        26: [("switch", "overlap")],
    }
    world = build(Scenario(script, Limits(capacity=60, chunk=6, mixed=True, barrier="both"), policy, 7))
    retractions = []
    retract = world.scheduler._retract
    world.scheduler._retract = lambda reqs: (retractions.extend(reqs), retract(reqs))
    world.run().check()
    assert retractions and world.scheduler.idled
    paths, reasons = world.account.paths, {r.value: n for r, n in world.account.reasons.items()}
    for path in ("prefill", "decode", "mixed", "middle-chunk", "delayed-sampling", "barrier-fine"):
        assert paths[path] > 0, path
    for reason in ("overlapped", "nothing-pending", "first-token", "mode-sync"):
        assert reasons[reason] > 0, reason
