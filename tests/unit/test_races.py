"""The real loop and lane on the asynchronous device: random clients, random delays, no race, right answers.

The worlds are those of `test_properties` and `test_lane_properties`; here each of their streams is a thread.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit import async_gpu
from tests.unit.test_lane_mutations import reused_row, with_grammars
from tests.unit.test_lane_properties import scenarios as lane_scenarios
from tests.unit.test_properties import scenarios
from tests.unit.virtual_gpu import POLICIES
from zos_sglang.testing.races.detector import Detector

EXAMPLES = settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


def no_race(detector: Detector) -> None:
    assert detector.report() == ""
    assert detector.accesses > 0


@EXAMPLES
@given(scenarios(), st.booleans())
def test_the_loop_orders_every_access_and_gives_the_reference_tokens(scenario, masks_early):
    scenario = replace(scenario, limits=replace(scenario.limits, masks_early=masks_early))
    with async_gpu.core(scenario) as world:
        world.run().check()
        no_race(world.gpu.detector)


@EXAMPLES
@given(scenarios(embedding=True))
def test_the_loop_orders_every_access_of_embedding_batches(scenario):
    with async_gpu.core(scenario) as world:
        world.run().check()
        no_race(world.gpu.detector)


@EXAMPLES
@given(lane_scenarios())
def test_the_lane_orders_every_access_and_gives_the_right_tokens(scenario):
    with async_gpu.lane(scenario) as world:
        world.run().check()
        no_race(world.gpu.detector)


def watched(world) -> dict[str, set[str]]:
    """Who reaches each buffer, by its name, from here on."""
    seen: dict[str, set[str]] = {}
    access = world.gpu.detector.access_all

    def look(buffers, where, *, writes, label):
        for buffer in buffers:
            name = buffer[0] if isinstance(buffer, tuple) else buffer
            seen.setdefault(name, set()).add(where if isinstance(where, str) else where.where)
        access(buffers, where, writes=writes, label=label)

    world.gpu.detector.access_all = look
    return seen


@pytest.mark.parametrize("graphs", [True, False])
def test_the_lanes_runs_reach_every_buffer_that_two_streams_share(graphs):
    with async_gpu.lane(reused_row("random", graphs=graphs)) as world:
        seen = watched(world)
        world.run().check()
        assert seen["block"] == {"schedule", "forward", "copy"}
        assert seen["page table"] == {"schedule", "forward"}
        assert seen["ring slot"] == {"forward", "copy"}
        assert seen["pinned slot"] == {"copy", "host"}
        assert seen["host tokens"] == {"copy", "host"}


@pytest.mark.parametrize("policy", POLICIES)
def test_masks_are_written_by_the_host_and_read_by_the_forward_stream_in_order(policy):
    with async_gpu.lane(with_grammars(policy)) as world:
        seen = watched(world)
        world.run().check()
        assert seen["mask buffer"] == {"host", "forward"} and world.lane_account.masked_steps > 5
        no_race(world.gpu.detector)
