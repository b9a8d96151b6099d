"""Each safety mechanism of the lane is taken out once, and the simulation notices.

One schedule of the virtual device per mutation, chosen so that the missing piece is needed; nothing is
random, so nothing flakes. `without` takes a call out of one method of the lane and leaves it everywhere else.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.unit.lane_fakes import LaneSpec, right_answer
from tests.unit.lane_memory import LanePool
from tests.unit.lane_simulation import LaneLimits, LaneScenario, LaneWorld, build, submit
from tests.unit.virtual_gpu import EARLY, LATE
from zos_sglang.overlap.row_ledger import RowLedgerError
from zos_sglang.resident.lane import Lane
from zos_sglang.resident.window import Window
from zos_sglang.upstream.lane_results import LaneResults

TEXT = tuple(range(1, 25))
OTHER = tuple(range(24, 0, -1))
LEAK = "pages leaked or owned twice"
BOTH = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])


def long(rid: int, prompt: tuple[int, ...] = OTHER, steps: int = 30) -> LaneSpec:
    return LaneSpec(rid, prompt, steps, ignore_eos=True)


def ending_after(tokens: int, prompt: tuple[int, ...], first_rid: int = 100) -> LaneSpec:
    """A request that ends on a stop token, its `tokens`-th, a long way before its limit."""
    for rid in range(first_rid, first_rid + 900):
        answer = right_answer(LaneSpec(rid, prompt, tokens))
        if len(set(answer)) == len(answer) == tokens:
            return LaneSpec(rid, prompt, 60, stop_ids=answer[-1:])  # type: ignore[arg-type]
    raise AssertionError("no such request")


def lengths(policy: str, **limits) -> LaneScenario:
    """Four requests of different lengths, and two more while they decode; all end by length."""
    specs = [long(rid, TEXT[: 3 + rid], 12 + 3 * rid) for rid in range(4)]
    late = submit(long(9, (4, 5, 6), 9), long(10, (1, 2), 5), at=9)
    return LaneScenario(submit(*specs) | late, LaneLimits(**limits), policy)


def same_prompt(policy: str, **limits) -> LaneScenario:
    """Two requests of one prompt in one prefill: the second one's pages are replaced by the first one's."""
    return LaneScenario(
        submit(long(1, TEXT[:9]), long(2, TEXT[:9]), long(3, OTHER[:7])), LaneLimits(**limits), policy
    )


def reused_row(policy: str, **limits) -> LaneScenario:
    """A request ends on a stop token, with one more step launched. Its row goes to one that waits, whose
    prompt is longer than the ended request and cached."""
    cached = submit(LaneSpec(1, TEXT, 1))
    then = submit(long(2), ending_after(3, OTHER[5:10]), long(4, (*TEXT[:20], 30), 8), at=6)
    return LaneScenario(cached | then, LaneLimits(rows=2, chunk=64, **limits), policy)


def new_weights(policy: str, **limits) -> LaneScenario:
    """New weights arrive while the lane is open."""
    script = submit(*(long(rid, TEXT[: 3 + rid]) for rid in range(3))) | {12: [("weights",)]}
    return LaneScenario(script, LaneLimits(barrier="coarse", **limits), policy)


def world_that_was_right(scenario: LaneScenario) -> LaneWorld:
    """The same run with nothing taken out is right; returns a fresh world for the mutated run."""
    world = build(scenario).run().check()
    assert world.lane_account.steps > 10
    return build(scenario)


def assert_wrong_tokens(world: LaneWorld) -> None:
    assert world.run().answers() != world.right_answers(), "nothing noticed"


def take_out(monkeypatch, method: str, owner, call: str) -> None:
    """Take `owner.call` out of `Lane.method`."""
    around, real = getattr(Lane, method), getattr(owner, call)
    inside = []

    def mutated(*args):
        inside.append(True)
        try:
            return around(*args)
        finally:
            inside.pop()

    monkeypatch.setattr(Lane, method, mutated)
    monkeypatch.setattr(owner, call, lambda *args: None if inside else real(*args))


# ------------------------------------------------------------ opening


def test_without_the_wait_at_the_opening_a_step_reads_a_batch_that_is_not_there_yet(monkeypatch):
    world = world_that_was_right(lengths("forward+copy"))
    take_out(monkeypatch, "_open", world.lane.port, "forward_waits_for_schedule")
    assert_wrong_tokens(world)
    assert "slots: not written yet" in world.gpu.hazards


# ------------------------------------------------------------ the window


@BOTH
def test_without_the_wait_after_a_reservation_a_step_finds_no_slots(monkeypatch, graphs):
    world = world_that_was_right(lengths("forward+copy", graphs=graphs))
    take_out(monkeypatch, "_has_slots", world.lane.port, "forward_waits_for_schedule")
    assert_wrong_tokens(world)


@pytest.mark.parametrize("policy", [LATE, EARLY])
@pytest.mark.parametrize("page_size", [1, 4])
def test_without_the_refresh_a_replaced_page_is_read_after_it_has_a_new_owner(monkeypatch, policy, page_size):
    world = world_that_was_right(same_prompt(policy, page_size=page_size, chunk=64))
    monkeypatch.setattr(world.executor, "refresh", lambda: None)
    assert_wrong_tokens(world)
    assert world.gpu.hazards == []  # every tensor was right: only the pages were not


@pytest.mark.parametrize("page_size", [1, 4])
def test_without_the_give_back_the_unused_part_of_the_window_leaks(monkeypatch, page_size):
    world = world_that_was_right(lengths(EARLY, page_size=page_size))
    monkeypatch.setattr(Window, "give_back", lambda _: None)
    with pytest.raises(AssertionError, match=LEAK):
        world.run()


def test_giving_back_one_step_too_much_hands_out_a_slot_in_use(monkeypatch):
    world = world_that_was_right(lengths(EARLY))
    give_back = Window.give_back

    def too_much(window):
        window.used -= window.used > 0
        give_back(window)

    monkeypatch.setattr(Window, "give_back", too_much)
    with pytest.raises(AssertionError, match=LEAK):
        world.run()


def test_without_the_length_limit_in_the_window_requests_are_launched_past_it(monkeypatch):
    """What `settle` and the size of the window do together: neither alone is enough to notice."""
    world = world_that_was_right(lengths(EARLY, window=16))
    reserve = LanePool.reserve
    monkeypatch.setattr(LanePool, "reserve", lambda pool, batch, done, _: reserve(pool, batch, done, 16))
    monkeypatch.setattr(Lane, "settle", lambda _: None)
    with pytest.raises(AssertionError):
        world.run()


# ------------------------------------------------------------ lengths


def test_without_the_reserved_steps_in_the_kv_lengths_the_pool_does_not_add_up(monkeypatch):
    world = world_that_was_right(lengths(EARLY))
    monkeypatch.setattr(world.lane.port, "set_allocated", lambda *_: None)
    with pytest.raises(AssertionError, match=LEAK):
        world.run()


def test_without_the_spent_steps_in_the_kv_lengths_confirmed_and_launched_disagree(monkeypatch):
    world = world_that_was_right(lengths(EARLY))
    port, written = world.lane.port, world.lane.port.set_allocated
    monkeypatch.setattr(port, "set_allocated", lambda table, _, reserved: written(table, 0, reserved))
    with pytest.raises(AssertionError):
        world.run()


def test_without_the_steps_under_way_in_its_length_a_row_that_ends_leaves_pages_behind(monkeypatch):
    world = world_that_was_right(reused_row(EARLY))
    monkeypatch.setattr(world.port.lane_results, "extra_steps", lambda *_: 0)
    with pytest.raises(AssertionError, match=LEAK):
        world.run()


def test_without_the_write_back_the_batch_is_as_many_steps_behind_as_the_lane_took(monkeypatch):
    world = world_that_was_right(lengths(EARLY))
    monkeypatch.setattr(world.lane.port, "write_back", lambda *_: None)
    with pytest.raises(AssertionError):
        world.run()


# ------------------------------------------------------------ closing


def test_without_settle_a_row_that_ended_rides_on(monkeypatch):
    world = world_that_was_right(reused_row(EARLY))
    monkeypatch.setattr(Lane, "settle", lambda _: None)
    with pytest.raises(AssertionError, match=LEAK):
        world.run()


def test_without_a_look_at_the_requests_a_row_that_the_pending_result_ended_rides_on(monkeypatch):
    """The prefill's own token is the end, and its result is processed with the first step under way."""
    asked = (LaneSpec(rid, TEXT[:5], 20) for rid in range(1, 1000))
    one_token = next(spec for spec in asked if len(right_answer(spec)) == 1)
    world = world_that_was_right(LaneScenario(submit(long(1000), one_token), LaneLimits(chunk=64), EARLY))
    settle = Lane.settle

    def unlooked(lane):
        lane._unseen = False
        settle(lane)

    monkeypatch.setattr(Lane, "settle", unlooked)
    with pytest.raises(AssertionError):
        world.run()


@BOTH
def test_without_the_wait_at_closing_what_arrived_changes_weights_under_the_last_step(monkeypatch, graphs):
    world = world_that_was_right(new_weights("schedule", graphs=graphs))
    assert "INTAKE" in {reason.name for reason in build(world.scenario).run().lane_account.left}
    take_out(monkeypatch, "close", world.lane.port, "schedule_waits_for_forward")
    assert_wrong_tokens(world)


@BOTH
def test_without_any_wait_after_a_row_ends_a_late_step_writes_into_the_next_owners_prefix(
    monkeypatch, graphs
):
    world = world_that_was_right(reused_row("schedule", graphs=graphs))
    take_out(monkeypatch, "close", world.lane.port, "schedule_waits_for_forward")
    monkeypatch.setattr(world.port.lane_results, "release_waits", lambda: None)
    assert_wrong_tokens(world)
    assert world.gpu.hazards == []  # nothing was freed or unwritten: only the page table


def test_without_the_relay_at_closing_the_next_launch_has_no_input(monkeypatch):
    world = world_that_was_right(lengths(EARLY))
    take_out(monkeypatch, "close", world.lane.port, "relay")
    with pytest.raises(RowLedgerError, match="was read without a write"):
        world.run()


def test_without_the_relay_and_the_check_the_tokens_are_wrong(monkeypatch):
    world = world_that_was_right(lengths(EARLY))
    world.scheduler.future_map.ledger = None
    take_out(monkeypatch, "close", world.lane.port, "relay")
    assert_wrong_tokens(world)


@BOTH
def test_without_the_pin_at_closing_the_relay_reads_memory_that_was_handed_out_again(monkeypatch, graphs):
    world = world_that_was_right(lengths("schedule", graphs=graphs, in_place=False))
    take_out(monkeypatch, "close", world.lane.port, "pin")
    assert_wrong_tokens(world)
    assert "rows to relay to: written over" in world.gpu.hazards


# ------------------------------------------------------------ the ring


@pytest.mark.parametrize("depth", [3, 5])
def test_a_ring_that_counts_from_zero_at_each_opening_reads_another_steps_slot(monkeypatch, depth):
    world = world_that_was_right(lengths(EARLY, depth=depth, in_place=False))
    opens = Lane._open

    def from_zero(lane, *args):
        lane.readback._count = 0
        return opens(lane, *args)

    monkeypatch.setattr(Lane, "_open", from_zero)
    with pytest.raises(ValueError, match="zip"):  # not even as many tokens as rows
        world.run()
    assert "ring slot: not what was asked for" in world.gpu.hazards


def test_without_the_wait_of_the_copy_stream_a_slot_is_read_before_it_is_written(monkeypatch):
    world = world_that_was_right(lengths("copy"))
    monkeypatch.setattr(world.lane.readback, "copy_waits", lambda: None)
    assert_wrong_tokens(world)
    assert "ring slot: not what was asked for" in world.gpu.hazards


# ------------------------------------------------------------ masks


def with_grammars(policy: str, **limits) -> LaneScenario:
    grammars = [LaneSpec(rid, OTHER[:5], 20, ignore_eos=True, grammar=5 + rid) for rid in (2, 3)]
    return LaneScenario(submit(long(1, TEXT[:6], 20), *grammars), LaneLimits(chunk=64, **limits), policy)


@BOTH
def test_sampling_before_the_result_before_is_processed_is_noticed(monkeypatch, graphs):
    """The masks would be one token old."""
    world = world_that_was_right(with_grammars(LATE, graphs=graphs))
    launched = Lane._launched

    def at_once(lane):
        result = launched(lane)
        if lane.unsampled is not None:
            lane.sample()
        return result

    monkeypatch.setattr(Lane, "_launched", at_once)
    with pytest.raises(AssertionError, match="another mask"):
        world.run().check()


@BOTH
def test_a_grammar_that_is_not_given_its_token_is_noticed(monkeypatch, graphs):
    world = world_that_was_right(with_grammars(EARLY, graphs=graphs))
    monkeypatch.setattr(LaneResults, "_accept", lambda *_: None)
    assert_wrong_tokens(world)


@BOTH
def test_masks_of_one_buffer_that_is_rewritten_at_once_would_be_read_wrong(monkeypatch, graphs):
    """What `GrammarMasks` relies on: the host sees a step's tokens before it fills the next masks."""
    world = world_that_was_right(with_grammars(LATE, graphs=graphs))
    fill = world.executor.fill

    def rewritten(masks):
        fill(masks)
        world.executor.pinned[world.executor.turn][: len(masks)] = [97] * len(masks)

    monkeypatch.setattr(world.executor, "fill", rewritten)
    with pytest.raises(AssertionError, match="another mask"):
        world.run().check()


# ------------------------------------------------------------ streams


@BOTH
def test_a_readback_outside_the_forward_streams_context_is_noticed(monkeypatch, graphs):
    """The copy stream's context leads back to the forward stream; results belong on the schedule stream."""
    world = world_that_was_right(reused_row(EARLY, graphs=graphs))
    port, real = world.lane.port, world.lane.port.forward_context
    launched = Lane._launched

    def outside(lane):
        port.forward_context = nullcontext
        try:
            return launched(lane)
        finally:
            port.forward_context = real

    monkeypatch.setattr(Lane, "_launched", outside)
    with pytest.raises(AssertionError, match="not on the schedule stream"):
        world.run()
