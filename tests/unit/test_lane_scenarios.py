"""What the lane promises, one deterministic run each over the virtual GPU."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.fake_batch import VOCABULARY, Mode
from tests.unit.lane_fakes import LaneSpec, ends, right_answer
from tests.unit.lane_simulation import LaneLimits, LaneScenario, build, simulate, submit
from tests.unit.test_lane_mutations import OTHER, TEXT, ending_after, long
from tests.unit.test_lane_properties import FAULTS, watch_rows
from tests.unit.virtual_gpu import EARLY, LATE, RANDOM
from zos_sglang.resident.eligibility import Departure, Refusal

BOTH = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
POLICIES = pytest.mark.parametrize("policy", [LATE, EARLY, "schedule", "copy", RANDOM])
PAGES = pytest.mark.parametrize("page_size", [1, 4, 16])


def left(world):
    return world.lane_account.report()["left"]


# ------------------------------------------------------------ staying in


@PAGES
def test_a_steady_batch_decodes_in_the_lane_but_for_nothing(page_size):
    world = simulate(
        LaneScenario(submit(long(1, TEXT[:5], 40), long(2, OTHER[:7], 40)), LaneLimits(page_size=page_size))
    ).check()
    assert world.lane_account.steps == world.account.paths["decode"] == 39
    assert world.lane_account.opened == 1 and left(world) == {"length-limit": 1}


@BOTH
@PAGES
@pytest.mark.parametrize(("in_place", "openings"), [(True, 1), (False, 5)], ids=["in place", "reopened"])
def test_rows_that_end_leave_without_a_decode_step_outside(page_size, graphs, in_place, openings):
    specs = [long(rid, TEXT[: 3 + rid], 4 + 3 * rid) for rid in range(5)]
    limits = LaneLimits(chunk=64, page_size=page_size, graphs=graphs, in_place=in_place)
    world = simulate(LaneScenario(submit(*specs), limits)).check()
    account = world.lane_account
    assert account.steps == world.account.paths["decode"] and account.wasted_row_steps == 0
    assert account.opened == openings and left(world) == {"length-limit": openings}
    assert account.rows_left == 5 - openings


def test_rows_leave_together_that_end_with_one_step():
    specs = [long(1), *(long(2 + i, TEXT[: 3 + i], 9) for i in range(3)), ending_after(9, OTHER[:6])]
    world = simulate(LaneScenario(submit(*specs), LaneLimits(chunk=64))).check()
    assert world.lane_account.opened == 1 and world.lane_account.rows_left == 4
    assert world.lane_account.wasted_row_steps == 1


@BOTH
@pytest.mark.parametrize(("pages", "page_size"), [(33, 1), (9, 4)])
def test_the_rest_waits_for_the_slots_of_a_row_that_is_about_to_end(pages, page_size, graphs):
    """Gone too early, it would be out of upstream's sight, which would retract the rest, or end it."""
    limits = LaneLimits(chunk=64, pages=pages, page_size=page_size, window=4, graphs=graphs)
    world = simulate(LaneScenario(submit(long(1, TEXT[:8], 10), long(2, OTHER[:7], 20)), limits)).check()
    assert world.scheduler.retractions == 0 and world.lane_account.rows_left == 0


def test_a_row_at_its_limit_has_one_more_step_where_selection_makes_it():
    """The decode role. A rank whose lane is closed makes that step, so the lane of the others does."""
    scenario = LaneScenario(submit(long(1, TEXT[:5], 6), long(2, OTHER[:7], 12)), LaneLimits(chunk=64))
    launched = []
    for fault in ({}, {"open": 1}):
        world = build(scenario)
        world.skips_finishing, world.faults.at = False, fault
        launched.append(watch_rows(world))
        world.run()
    assert launched[0] == launched[1] and launched[0].count([1, 2]) == 7


def test_who_waits_for_the_place_of_a_row_gets_it_at_once():
    specs = [long(rid, TEXT[: 3 + rid], 6 + rid) for rid in range(4)]
    world = simulate(LaneScenario(submit(*specs), LaneLimits(rows=2, chunk=64))).check()
    assert left(world)["length-limit"] >= 2 and world.lane_account.steps == world.account.paths["decode"]


def test_a_row_that_ends_unforeseen_costs_one_token_sampled_in_vain():
    world = simulate(LaneScenario(submit(long(1), ending_after(6, TEXT[:5])))).check()
    assert world.lane_account.wasted_row_steps == 1 and left(world) == {"length-limit": 1}
    assert world.lane_account.rows_left == 1
    assert world.lane_account.steps == world.account.paths["decode"]


@BOTH
@POLICIES
def test_a_bucket_that_shrinks_and_grows_again(policy, graphs):
    """Five rows, three, one, and six: what the larger openings left in the buffers touches nothing."""
    specs = [long(1, TEXT[:4], 70), *(ending_after(4, TEXT[: 5 + i], 1000 * (1 + i)) for i in range(2))]
    specs += [long(20 + i, OTHER[: 4 + i], 14) for i in range(2)]
    again = [long(30 + i, (*OTHER[: 3 + i], 30), 9 + i) for i in range(5)]
    world = build(
        LaneScenario(
            submit(*specs) | submit(*again, at=40),
            LaneLimits(chunk=64, graphs=graphs, page_size=4),
            policy,
            3,
        )
    )
    rows, queue = [], world.lane.readback.queue

    def queued(n):
        rows.append(n)
        return queue(n)

    world.lane.readback.queue = queued
    world.run().check()
    sizes = [n for i, n in enumerate(rows) if i == 0 or rows[i - 1] != n]
    assert sizes[:4] == [5, 3, 1, 6], sizes


# ------------------------------------------------------------ making way


@pytest.mark.parametrize("tick", [6, 11, 16, 21])
def test_a_new_request_is_prefilled_by_the_very_next_launch(tick):
    world = build(LaneScenario(submit(long(1)) | submit(LaneSpec(2, TEXT[:6], 4), at=tick)))
    launched = []
    launch, on_submit = world.launcher.launch, world.scheduler._on_submit

    def submitted(spec):
        launched.append(("submit", world.scheduler.forward_ct))
        on_submit(spec)

    def launching(batch):
        launched.append((batch.forward_mode, world.scheduler.forward_ct))
        return launch(batch)

    world.scheduler._on_submit, world.launcher.launch = submitted, launching
    world.run().check()
    (_, at), (mode, before) = launched[-2:]
    assert mode is Mode.EXTEND and before == at
    assert left(world)["intake"] == 1


def test_requests_that_cannot_be_admitted_do_not_keep_the_lane_shut():
    specs = [long(rid, TEXT[: 3 + rid], 20) for rid in range(6)]
    world = simulate(LaneScenario(submit(*specs), LaneLimits(rows=2, chunk=64))).check()
    assert world.lane_account.steps == world.account.paths["decode"]


def test_a_refused_request_keeps_the_lane_shut_for_as_long_as_it_runs():
    refused = LaneSpec(2, OTHER[:5], 10, ignore_eos=True, rides=False)
    world = simulate(LaneScenario(submit(long(1, steps=30), refused))).check()
    assert world.lane_account.refused[Refusal.LOGPROBS] == 9
    assert world.lane_account.steps == world.account.paths["decode"] - 9


def test_an_aborted_request_ends_outside_and_the_others_ride_on():
    world = simulate(LaneScenario(submit(long(1), long(2, TEXT[:4])) | {10: [("abort", 2)]})).check()
    assert world.lane_account.refused[Refusal.ABORT_PENDING] == 1
    assert world.scheduler.requests[2].finished_reason == "abort"
    assert world.scheduler.requests[1].output_ids == world.right_answers()[1]


@pytest.mark.parametrize("how", ["in_place", "retract"])
def test_a_pause_finds_the_lane_closed_and_one_result_at_most(how):
    script = submit(long(1), long(2, TEXT[:4])) | {10: [("pause", how)], 14: [("continue",)]}
    world = simulate(LaneScenario(script)).check()
    assert left(world)["intake"] == 1 and world.scheduler.retractions == 2 * (how == "retract")


@POLICIES
def test_an_exit_while_the_lane_is_open_closes_it_and_drains(policy):
    """Not by a request, which would close it anyway."""
    world = build(LaneScenario(submit(long(1), long(2, TEXT[:4])), policy=policy))
    end_of_step = world.port.end_of_step

    def signal():
        end_of_step()
        world.scheduler.gracefully_exit = world.port.steps == 12

    world.port.end_of_step = signal
    world.run()
    assert left(world) == {"exit": 1} and not world.scheduler.result_queue
    assert world.scheduler.processed == list(range(1, world.scheduler.serials + 1))
    for rid, tokens in world.answers().items():
        # The lane's last step is drained too.
        assert len(tokens) > 9 and tokens == world.right_answers()[rid][: len(tokens)]


# ------------------------------------------------------------ memory


@BOTH
@POLICIES
@pytest.mark.parametrize("page_size", [1, 4])
def test_prefix_publication_replaces_pages_under_a_step_in_flight(policy, graphs, page_size):
    """And the lane's own first window gets the pages that were replaced."""
    specs = [long(rid, TEXT[:9]) for rid in range(3)]
    limits = LaneLimits(page_size=page_size, chunk=64, graphs=graphs)
    world = build(LaneScenario(submit(*specs), limits, policy))
    replaced, windows = [], []
    give, take = world.scheduler.memory.give, world.pool.take

    def giving(*pages):
        if world.lane.is_open and world.lane.window is None:
            replaced.extend(pages)
        give(*pages)

    def taking(count):
        windows.append(take(count))
        return windows[-1]

    world.scheduler.memory.give, world.pool.take = giving, taking
    world.run().check()
    assert len(replaced) == 2 * (9 // page_size)
    assert set(replaced) & set(windows[0])


@BOTH
@PAGES
def test_a_pool_too_small_for_a_window_leaves_retraction_to_stock(graphs, page_size):
    specs = [long(rid, (*TEXT[rid : rid + 4], rid), 40) for rid in range(4)]
    limits = LaneLimits(pages=-(-96 // page_size), page_size=page_size, chunk=64, graphs=graphs)
    world = simulate(LaneScenario(submit(*specs), limits, "schedule")).check()
    assert world.scheduler.retractions and left(world)["pool-full"]


def test_where_all_free_pages_belong_to_the_prefix_tree_the_lane_evicts_and_stays_open():
    """A server that has run for a while has no free pages: all are the prefix tree's, and stock evicts as
    it goes. A lane that took none of them would open and close for each single step."""
    old = [LaneSpec(rid, tuple((rid * 5 + i * i) % 31 for i in range(30)), 1) for rid in range(6)]
    script = {1 + 4 * i: [("submit", spec)] for i, spec in enumerate(old)}
    script |= submit(long(10, TEXT[:4], 40), long(11, OTHER[:4], 40), at=40)
    world = simulate(LaneScenario(script, LaneLimits(pages=120, chunk=64))).check()
    account = world.lane_account
    assert world.scheduler.retractions == 0
    assert account.opened * 2 <= account.steps, account.report()


# ------------------------------------------------------------ tokens


@pytest.mark.parametrize("depth", [3, 4, 6])
@POLICIES
def test_openings_that_follow_each_other_at_once_share_the_ring(policy, depth):
    """A row ends with every step or second step; the check watches every slot of the ring."""
    specs = [long(rid, TEXT[: 3 + rid], 3 + rid) for rid in range(6)]
    limits = LaneLimits(chunk=64, depth=depth, in_place=False)
    world = simulate(LaneScenario(submit(*specs), limits, policy, 5)).check()
    assert world.lane_account.opened >= 5 and world.executor.ring.count == world.lane_account.steps
    assert world.lane_account.steps < 2 * world.lane_account.opened


def test_a_request_that_does_not_stream_reports_every_fifty_tokens_and_one_that_does_each():
    script = submit(long(1, TEXT[:5], 120), LaneSpec(2, OTHER[:5], 120, stream=True, ignore_eos=True))
    world = simulate(LaneScenario(script, LaneLimits(pages=400))).check()
    sizes = {rid: [len(m) for m in r.messages] for rid, r in world.scheduler.requests.items()}
    assert sizes == {1: [50, 50, 20], 2: [1] * 120}


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("eos", {"vocabulary": VOCABULARY}),
        ("stop string", {"stop_pair": (7, 3), "ignore_eos": True}),
        ("vocabulary", {"vocabulary": 30, "ignore_eos": True}),
    ],
)
def test_a_request_ends_in_the_lane_for_upstreams_reasons(why, more):
    asked = (LaneSpec(rid, TEXT[:5], 60, **more) for rid in range(9000))
    spec = next(s for s in asked if len(right_answer(s)) > 3 and ends(s, right_answer(s)) == why)
    world = simulate(LaneScenario(submit(spec, long(9999, steps=70)))).check()
    assert world.scheduler.requests[spec.rid].finished_reason == why
    assert world.lane_account.rows_left == 1


# ------------------------------------------------------------ faults


@BOTH
@pytest.mark.parametrize("where", [*FAULTS])
def test_whatever_fails_the_answers_are_right_and_the_lane_is_not_entered_again(where, graphs):
    specs = [long(rid, TEXT[:6], 12 + 5 * rid) for rid in range(3)]
    # With rows that go in place there is one opening only.
    limits = LaneLimits(chunk=64, graphs=graphs, in_place=where not in ("open", "opened", "table"))
    world = build(LaneScenario(submit(*specs), limits, "schedule"))
    world.faults.at[where] = 1 if where.startswith("keep") else 2
    world.run().check()
    account = world.lane_account
    assert account.faults == 1 and account.refused[Refusal.CLOSED_FOR_GOOD] > 0
    assert account.opened == sum(account.left.values())
    assert account.left[Departure.FAULT] == (where not in ("open", "opened", "table"))


@BOTH
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_row_that_ends_with_the_very_result_that_cannot_be_read_leaves_its_slots_behind(page_size, graphs):
    """Upstream releases it then, in the middle of a window, and takes all that is reserved for the row's."""
    ending = ending_after(6, TEXT[:5])
    limits = LaneLimits(chunk=64, page_size=page_size, graphs=graphs)
    world = build(LaneScenario(submit(ending, long(1, steps=40)), limits, LATE))
    world.faults.at["read"] = 5  # its first token was the prefill's
    failed, windows = world.lane.fail, []

    def fail(*args):
        windows.append(world.lane.window)
        assert not world.scheduler.requests[ending.rid].finished()
        failed(*args)

    world.port.lane_results.failed = fail
    world.run().check()
    assert windows[0].left and world.lane_account.left[Departure.FAULT] == 1
    assert world.scheduler.requests[ending.rid].finished()


def test_a_fault_in_the_very_first_step_leaves_the_launch_to_the_ordinary_path():
    world = build(LaneScenario(submit(long(1))))
    world.faults.at["stepped"] = 1
    world.run().check()
    assert world.lane_account.opened == 0 and world.account.paths["decode"] == 29
    assert world.launcher.own and world.account.paths["fallbacks"] == 0


# ------------------------------------------------------------ rows with a grammar


def masked(rid, tokens, prompt=OTHER, ended=False, first=0):
    """A request under a grammar, with an answer of so many tokens. `ended`: its grammar ends it."""
    for grammar in range(first, first + 20_000):
        limit = 60 if ended else tokens
        spec = LaneSpec(rid, prompt, limit, ignore_eos=True, grammar=grammar)
        if len(right_answer(spec)) == tokens:
            return spec
    raise AssertionError("no such grammar")


@BOTH
@POLICIES
def test_rows_with_a_grammar_ride_beside_plain_ones_and_each_step_has_the_masks_of_its_token(policy, graphs):
    specs = [long(1, TEXT[:5], 30), masked(2, 30), masked(3, 22, TEXT[:8])]
    world = simulate(LaneScenario(submit(*specs), LaneLimits(chunk=64, graphs=graphs), policy)).check()
    account = world.lane_account
    assert account.steps == account.masked_steps == world.account.paths["decode"] == 29
    assert account.grammar_row_steps == 29 + 21
    # Two steps in a row with one mask would mean that a token was missed.
    assert all(one != next_one for one, next_one in itertools.pairwise(world.executor.masked))


@BOTH
def test_a_row_ends_one_token_after_its_grammar_and_is_not_masked_there(graphs):
    spec = masked(50, 5, TEXT[:6], ended=True)
    world = simulate(LaneScenario(submit(long(1), spec), LaneLimits(chunk=64, graphs=graphs))).check()
    assert world.scheduler.requests[50].finished_reason == "grammar"
    assert world.lane_account.rows_left == 1


def test_steps_are_whole_again_when_the_last_row_with_a_grammar_has_gone():
    world = simulate(LaneScenario(submit(long(1, TEXT[:5], 40), masked(2, 8)), LaneLimits(chunk=64)))
    account = world.check().lane_account
    assert (account.masked_steps, account.steps) == (7, 39)


@BOTH
def test_aborts_and_arrivals_between_masked_steps(graphs):
    script = submit(masked(1, 30), long(2, TEXT[:5], 30)) | submit(masked(3, 12, TEXT[:9]), at=9)
    script |= {13: [("abort", 1)], 17: [("switch", "overlap")], 21: [("switch", "resident")]}
    world = simulate(LaneScenario(script, LaneLimits(chunk=64, graphs=graphs), RANDOM, 7)).check()
    assert world.lane_account.masked_steps and left(world)["intake"] >= 2


@BOTH
def test_a_row_whose_grammar_rejects_its_token_ends_with_the_next_one_and_the_rest_goes_on(graphs):
    """As in stock: upstream notes the abort while it processes the token, and acts on it a step later."""
    other = masked(3, 22, TEXT[:8])
    world = build(LaneScenario(submit(long(1), masked(2, 30), other), LaneLimits(chunk=64, graphs=graphs)))
    services = world.scheduler.batch_result_processor

    def accept(req, token):
        if req.rid == 2 and len(req.output_ids) == 9:
            req.to_finish = "rejected"
        else:
            req.grammar.accept_token(token)

    services._accept_grammar_tokens = accept
    world.run()
    rejected = world.scheduler.requests[2]
    assert rejected.finished_reason == "rejected" and len(rejected.output_ids) == 10
    right = world.right_answers()
    assert {rid: world.answers()[rid] for rid in (1, 3)} == {rid: right[rid] for rid in (1, 3)}
    assert world.lane_account.rows_left == 2 and world.gpu.hazards == []
