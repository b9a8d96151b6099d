"""Every wait, event, pin and second buffer is taken out once: the detector reports it, and answers are wrong.

Twice each. Where luck hides it: every operation runs as soon as it is queued, so the answers come out right,
and still the detector names the edge that is missing. With an adversary: a schedule made for this one runs
one stream early and another late, and the tokens are wrong, every time. docs/races.md has the same list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.unit import async_gpu, simulation
from tests.unit.fake_scheduler import Limits
from tests.unit.test_lane_mutations import lengths, new_weights, reused_row, same_prompt, with_grammars
from tests.unit.test_mutations import plain, prompts
from tests.unit.virtual_gpu import EARLY, LATE, Event
from zos_sglang.overlap.event_loop import EventLoop
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.launch import Launcher
from zos_sglang.overlap.streams import Barrier, Streams
from zos_sglang.resident import readback
from zos_sglang.resident.lane import Lane
from zos_sglang.upstream.lane_results import LaneResults

Patch = pytest.MonkeyPatch


def out_of(kind: type, method: str, owner: type, call: str, gives: Any = None) -> Callable[[Patch], None]:
    """Take `owner.call` out of `kind.method` and leave it everywhere else."""

    def mutate(patch: Patch) -> None:
        around, real = getattr(kind, method), getattr(owner, call)
        inside: list[bool] = []

        def mutated(*args: Any) -> Any:
            inside.append(True)
            try:
                return around(*args)
            finally:
                inside.pop()

        patch.setattr(kind, method, mutated)
        patch.setattr(owner, call, lambda *args, **named: gives if inside else real(*args, **named))

    return mutate


def everywhere(owner: Any, name: str, value: Any = lambda *_, **__: None) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def one_slot(patch: Patch) -> None:
    """A ring that is no ring: every step in the same slot."""
    patch.setattr(readback, "SMALLEST_DEPTH", 1)


@dataclass(frozen=True)
class Mutation:
    """What is taken out, and how that shows.

    Args:
        run: the scenario, given the schedule of the device.
        adversary: the schedule under which the answers are wrong; None where none makes them wrong.
        edge: where the earlier and the later access ran, of a race that must be among the reported.
        buffer: what that race is on.
    """

    run: Callable[[str], Any]
    take_out: Callable[[Patch], None]
    adversary: str | None
    edge: tuple[str, str]
    buffer: str
    #: Whether answers are right as long as everything runs at once.
    lucky: bool = True


def grammars(schedule: str) -> simulation.Scenario:
    """Requests with a grammar, whose masks are filled where results are processed."""
    return simulation.Scenario(simulation.submit(*prompts(grammar=True)), Limits(masks_early=True), schedule)


LOOP = {
    "launch: forward waits for schedule": Mutation(
        plain,
        out_of(Launcher, "_launch", Streams, "forward_waits_for_schedule"),
        "forward+copy",
        ("schedule", "forward"),
        "block",
    ),
    "readback: copy waits for forward": Mutation(
        plain,
        out_of(Launcher, "_hand_on", Streams, "copy_waits_for_forward"),
        "copy",
        ("forward", "copy"),
        "block",
    ),
    "delayed sampling: forward waits for schedule": Mutation(
        grammars,
        out_of(Launcher, "sample_delayed", Streams, "forward_waits_for_schedule"),
        "forward+copy",
        ("schedule", "forward"),
        "mask",
    ),
    **{
        f"barrier, {kind}": Mutation(
            partial(plain, limits=Limits(barrier=kind)),
            out_of(EventLoop, "_launch", Streams, "war_barrier", Barrier.OFF),
            "schedule",
            ("forward", "schedule"),
            "shared",
        )
        for kind in ("fine", "coarse")
    },
    "processing: the host waits for the copy": Mutation(
        plain, everywhere(Event, "synchronize"), LATE, ("copy", "host"), "host tokens"
    ),
    "readback: the event is recorded": Mutation(
        plain,
        everywhere(Event, "record"),
        LATE,
        ("copy", "host"),
        "host tokens",
    ),
    "launch: the batch is pinned": Mutation(
        plain, everywhere(PinRing, "pin"), "schedule", ("forward", "schedule"), "block"
    ),
}

LANE = {
    "opening: forward waits for schedule": Mutation(
        lengths,
        out_of(Lane, "_open", Streams, "forward_waits_for_schedule"),
        "forward+copy",
        ("schedule", "forward"),
        "block",
    ),
    "opening: schedule waits for forward before a pending result": Mutation(
        same_prompt,
        out_of(Lane, "_open", Streams, "war_barrier", Barrier.OFF),
        None,  # what moves are pages of equal content
        ("forward", "schedule"),
        "page table",
    ),
    "window: forward waits for the reservation": Mutation(
        lengths,
        out_of(Lane, "_has_slots", Streams, "forward_waits_for_schedule"),
        "forward+copy",
        ("schedule", "forward"),
        "page table",
    ),
    "step: copy waits for forward": Mutation(
        lengths,
        out_of(Lane, "_launched", Streams, "copy_waits_for_forward"),
        "copy",
        ("forward", "copy"),
        "ring slot",
    ),
    "step: more than one slot in the ring": Mutation(
        partial(lengths, depth=1),
        one_slot,
        "forward",
        ("copy", "forward"),
        "ring slot",
        lucky=False,  # nor does the host's side hold two steps
    ),
    "processing: the host waits for the copy of a step": Mutation(
        lengths,
        out_of(LaneResults, "_process_tokens", Event, "synchronize"),
        LATE,
        ("copy", "host"),
        "pinned slot",
    ),
    "masks: the host waits for a step's tokens before it fills the next": Mutation(
        with_grammars,
        out_of(LaneResults, "_process_tokens", Event, "synchronize"),
        LATE,
        ("forward", "host"),
        "mask buffer",
    ),
    "a row ends: schedule waits for forward before its release": Mutation(
        reused_row,
        out_of(LaneResults, "_finish", Streams, "war_barrier", Barrier.OFF),
        None,  # the table is written with pages of equal content
        ("forward", "schedule"),
        "page table",
    ),
    "closing: schedule waits for forward": Mutation(
        new_weights,
        out_of(Lane, "close", Streams, "war_barrier", Barrier.OFF),
        "schedule",
        ("forward", "schedule"),
        "weights",
    ),
    "rows go: forward waits for schedule": Mutation(
        partial(lengths, graphs=False),
        out_of(Lane, "_let_rows_go", Streams, "forward_waits_for_schedule"),
        None,  # every step makes anew what is read here
        ("schedule", "forward"),
        "block",
    ),
    "rows go: what the steps under way read is pinned": Mutation(
        partial(lengths, graphs=False),
        out_of(Lane, "_let_rows_go", PinRing, "pin"),
        "schedule",
        ("forward", "schedule"),
        "block",
    ),
    "closing: what the last step reads is pinned": Mutation(
        partial(lengths, in_place=False),
        out_of(Lane, "close", PinRing, "pin"),
        "schedule",
        ("forward", "schedule"),
        "block",
    ),
}


def reported(world: Any, mutation: Mutation) -> list[str]:
    """Races of the wanted kind; what else breaks once the answers are wrong does not matter here."""
    found = []
    for race in world.gpu.detector.races:
        buffer = race.buffer[0] if isinstance(race.buffer, tuple) else race.buffer
        if (race.first.op.where, race.second.op.where) == mutation.edge and buffer == mutation.buffer:
            found.append(str(race))
    return found


def outcome(world: Any) -> bool:
    """Run to the end or to the first failure; whether every answer is right."""
    try:
        world.run()
        world.gpu.finish()
    except (AssertionError, ValueError, IndexError):
        return False
    return bool(world.answers() == world.right_answers())


def scene(mutation: Mutation, lane: bool, schedule: str) -> Any:
    on_threads = async_gpu.lane if lane else async_gpu.core
    return on_threads(mutation.run(schedule))


ALL = [
    pytest.param(mutation, lane, id=name)
    for lane, table in ((False, LOOP), (True, LANE))
    for name, mutation in table.items()
]


@pytest.mark.parametrize(("mutation", "lane"), [p for p in ALL if p.values[0].take_out is not one_slot])
def test_nothing_is_reported_before_it_is_taken_out(mutation, lane):
    with scene(mutation, lane, mutation.adversary or EARLY) as world:
        assert outcome(world) and world.gpu.detector.report() == ""


@pytest.mark.parametrize(("mutation", "lane"), ALL)
def test_it_is_reported_although_everything_happens_to_run_in_order(monkeypatch, mutation, lane):
    mutation.take_out(monkeypatch)
    with scene(mutation, lane, EARLY) as world:
        assert outcome(world) is mutation.lucky
        found = reported(world, mutation)
        assert found and " must " in found[0], world.gpu.detector.report()


@pytest.mark.parametrize(("mutation", "lane"), [p for p in ALL if p.values[0].adversary is not None])
def test_an_adversary_makes_the_answers_wrong(monkeypatch, mutation, lane):
    mutation.take_out(monkeypatch)
    with scene(mutation, lane, mutation.adversary) as world:
        assert not outcome(world)


def test_a_barrier_put_off_until_the_result_before_is_processed_is_still_a_barrier(monkeypatch):
    """`late_barrier`: the loop owes it, and pays before the next batch is prepared."""
    late = partial(EventLoop, late_barrier=True)
    monkeypatch.setattr(simulation, "EventLoop", late)
    scenario = plain("schedule", Limits(barrier="coarse"))
    with async_gpu.core(scenario) as world:
        assert outcome(world) and world.gpu.detector.report() == ""
    monkeypatch.setattr(Streams, "schedule_waits_for_forward", lambda _: None)
    with async_gpu.core(scenario) as world:
        assert not outcome(world)
        assert "write 'shared buffer' on schedule" in world.gpu.detector.report()


def test_a_readback_after_one_that_failed_halfway_waits_for_what_that_one_queued(monkeypatch):
    for taken_out in (False, True):
        if taken_out:
            monkeypatch.setattr(Streams, "forward_waits_for_copy", lambda _: None)
        with async_gpu.core(plain("forward")) as world:
            world.device.faults["read back"] = 3
            right, said = outcome(world), world.gpu.detector.report()
            assert world.account.faults == {"readback": 1}
            assert ("host tokens" in said) is taken_out and (right or taken_out)


def test_a_result_left_to_upstream_waits_for_the_step_that_reads_what_it_may_write(monkeypatch):
    """Upstream releases rows that end, which writes the page table; the lane's own processing waits then."""
    for taken_out in (False, True):
        if taken_out:
            out_of(Lane, "fail", Streams, "war_barrier", Barrier.OFF)(monkeypatch)
        found = []
        for call in range(1, 12):
            with async_gpu.lane(reused_row("schedule")) as world:
                world.faults.at["read"] = call
                outcome(world)
                found += [str(race) for race in world.gpu.detector.races]
        assert bool(found) is taken_out


def test_two_slots_of_the_ring_would_do(monkeypatch):
    """The third one is a margin: the host waits for step N before it launches step N + 2."""
    monkeypatch.setattr(readback, "SMALLEST_DEPTH", 1)
    for schedule in (EARLY, "forward", "copy", LATE):
        with async_gpu.lane(lengths(schedule, depth=2)) as world:
            assert outcome(world) and world.gpu.detector.report() == ""


def test_a_wait_that_is_added_to_the_streams_is_to_be_added_here():
    waits = {name for name in vars(Streams) if "wait" in name or name == "war_barrier"}
    assert waits == {
        "forward_waits_for_schedule",
        "forward_waits_for_copy",
        "copy_waits_for_forward",
        "schedule_waits_for_forward",
        "war_barrier",
    }
