"""The lane's state machine: the order of what it does, what it writes down, and when it leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.unit.fakes import Fault
from tests.unit.lane_fakes import LaneRequest, LaneSpec
from tests.unit.lane_recorder import Executing, Recorder
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Departure, Refusal
from zos_sglang.resident.lane import Lane


def batch_of(*limits):
    reqs = [LaneRequest(LaneSpec(i, (1, 2), limit)) for i, limit in enumerate(limits)]
    return SimpleNamespace(reqs=reqs, input_ids="inputs", seq_lens_cpu=torch.tensor([3] * len(reqs)))


@pytest.fixture
def world():
    """A lane over the recorder, windows of 4 steps."""
    port = Recorder()
    port.refuses = port.port_refuses
    executing = Executing(port)
    lane = Lane(port, executing, executing, LaneAccount(), window=4)
    return SimpleNamespace(port=port, executor=executing, lane=lane, account=lane.account)


def opened(world, *limits, pending=None):
    batch = batch_of(*(limits or (20, 20)))
    assert world.lane.enter(batch, pending) is not None
    world.lane.settle()
    world.mark = len(world.port.log)
    return batch


# ------------------------------------------------------------ enter


def test_an_opening_counts_waits_resolves_loads_and_launches_in_this_order(world):
    result = world.lane.enter(batch_of(9, 9), None)
    assert world.port.log == [
        "count", "[", "forward waits", "resolve", "open", "step", "]", "[", "readback 2", "]",
    ]  # fmt: skip
    assert (result.step, result.tokens, result.arrived) == (1, "home", "event")
    assert world.lane.is_open and world.lane.launched == 1


def test_with_a_result_pending_the_schedule_stream_waits_for_the_first_step(world):
    """Its processing may write what that step reads."""
    world.lane.enter(batch_of(9), batch_of(9))
    assert world.port.log[-4:] == ["schedule waits", "[", "readback 1", "]"]


def test_the_inputs_are_taken_from_the_batch(world):
    assert opened(world).input_ids is None


def test_an_opening_allocates_nothing(world):
    """The first step's slots are upstream's."""
    opened(world)
    assert world.lane.window is None and "reserve" not in world.port.log and world.port.lengths == []


def test_a_batch_that_is_no_decode_batch_is_not_counted_as_refused(world):
    world.port.refusal = Refusal.NOT_DECODE
    assert world.lane.enter(batch_of(9), None) is None
    assert world.account.report()["refused"] == {} and world.port.log == []


@pytest.mark.parametrize("who", ["port", "executor"])
def test_a_refused_batch_is_left_alone_and_the_reason_counted(world, who):
    getattr(world, who).refusal = Refusal.BATCH_SIZE
    batch = batch_of(9)
    assert world.lane.enter(batch, None) is None and not world.lane.is_open
    assert world.account.report()["refused"] == {"batch-size": 1} and world.port.log == []
    assert batch.input_ids == "inputs"


def test_the_floor_is_timed_once_between_load_and_first_step(world):
    world.lane.floor_replays = 200
    opened(world, 20, 20, 20)
    assert world.port.log[4:6] == ["open", "floor 200"]
    assert world.account.floors == [{"batch": 3, "mean_len": 3.0, "us": 12.5}]
    world.lane.close(Departure.EXIT)
    opened(world)
    assert len(world.account.floors) == 1


# ------------------------------------------------------------ ride


def test_the_first_ride_reserves_refreshes_and_launches(world):
    opened(world)
    result = world.lane.ride()
    assert world.port.since(world.mark) == [
        "receive", "dispatch", "lengths +0 +0", "reserve", "lengths +0 +4", "[", "forward waits", "refresh",
        "]", "selected", "count", "[", "step", "]", "[", "readback 2", "]",
    ]  # fmt: skip
    assert result.step == 2 and world.lane.launched == 2


def test_a_ride_inside_the_window_takes_in_and_launches(world):
    opened(world)
    world.lane.ride()
    mark = len(world.port.log)
    world.lane.ride()
    assert world.port.since(mark) == [
        "receive", "dispatch", "selected", "count", "[", "step", "]", "[", "readback 2", "]",
    ]  # fmt: skip


def test_a_renewal_confirms_the_spent_steps_and_refreshes_nothing(world):
    opened(world)
    for _ in range(5):
        world.lane.ride()
    assert world.port.lengths == [(0, 0), (0, 4), (4, 0), (0, 4)]
    assert world.port.log.count("refresh") == 1 and world.port.log.count("reserve") == 2
    assert world.account.windows == 2


def test_a_reservation_begins_where_the_launched_steps_end(world):
    """The batch knows of the first step; `done` are those after it."""
    opened(world)
    done = []
    for _ in range(9):
        world.lane.ride()
        done.append(world.port.done)
    assert done == [0, 0, 0, 0, 4, 4, 4, 4, 8]


def test_a_window_ends_where_the_first_row_reaches_its_limit(world):
    opened(world, 20, 7)
    for _ in range(6):
        assert world.lane.ride() is not None
        world.lane.settle()
    assert world.port.wanted == [4, 2]
    assert not world.lane.is_open and world.account.report()["left"] == {"length-limit": 1}


def test_an_arrival_closes_the_lane_before_it_is_dispatched(world):
    opened(world)
    world.port.arrivals = [True]
    assert world.lane.ride() is None and not world.lane.is_open
    log = world.port.since(world.mark)
    assert log[0] == "receive" and log[-1] == "dispatch" and "write back 0" in log and "step" not in log
    assert world.account.report()["left"] == {"intake": 1}


def test_without_room_for_a_window_the_lane_closes_and_nothing_is_launched(world):
    opened(world)
    world.port.room = 0
    assert world.lane.ride() is None
    log = world.port.since(world.mark)
    assert log[:2] == ["receive", "dispatch"] and "step" not in log and "count" not in log
    assert world.account.report()["left"] == {"pool-full": 1} and world.account.windows == 0


def test_a_smaller_window_is_taken_where_the_whole_one_does_not_fit(world):
    opened(world)
    world.port.room = 2
    for _ in range(3):
        world.lane.ride()
    assert world.port.lengths == [(0, 0), (0, 2), (2, 0), (0, 2)]


# ------------------------------------------------------------ settle


def test_nothing_settles_while_rows_go_on(world):
    opened(world)
    world.lane.ride()
    world.lane.settle()
    assert world.lane.is_open


def test_a_row_that_ended_closes_the_lane(world):
    opened(world)
    world.lane.ride()
    world.lane.row_ended(world.lane.table, [0])
    world.lane.settle()
    assert not world.lane.is_open and world.account.report()["left"] == {"finish": 1}


def test_a_row_of_an_earlier_opening_closes_nothing(world):
    opened(world)
    earlier = world.lane.table
    world.lane.close(Departure.INTAKE)
    opened(world)
    world.lane.row_ended(earlier, [0])
    world.lane.settle()
    assert world.lane.is_open


def test_a_row_that_ended_is_forgotten_with_its_opening(world):
    opened(world)
    world.lane.row_ended(world.lane.table, [0])
    world.lane.close(Departure.INTAKE)
    opened(world)
    assert world.lane.is_open


def test_the_result_pending_at_the_opening_may_end_a_row(world):
    batch = batch_of(20, 20)
    world.lane.enter(batch, batch)
    batch.reqs[1].finished_reason = "stop"
    world.lane.settle()
    assert not world.lane.is_open and world.account.report()["left"] == {"finish": 1}


def test_the_pending_result_is_looked_at_once(world):
    batch = opened(world, pending=batch_of(1))
    batch.reqs[0].finished_reason = "stop"  # would be told by `row_ended`
    world.lane.settle()
    assert world.lane.is_open


@pytest.mark.parametrize(("limit", "had"), [(1, 0), (5, 4)])
def test_a_row_with_one_token_to_go_closes_the_lane_at_once(world, limit, had):
    batch = batch_of(20, limit)
    batch.reqs[1].output_ids = [3] * had
    world.lane.enter(batch, None)
    world.lane.settle()
    assert world.account.report()["left"] == {"length-limit": 1} and "reserve" not in world.port.log


def test_a_closed_lane_settles_and_shuts_as_nothing(world):
    world.lane.settle()
    world.lane.shut()
    assert world.port.log == [] and world.account.report()["left"] == {}


# ------------------------------------------------------------ rows that go while the rest rides on


@pytest.fixture
def riding(world):
    """Three rows, three steps launched; nobody waits."""
    world.port.rides_on = True
    world.batch = opened(world, 20, 20, 20)
    world.lane.ride()
    world.lane.ride()
    world.mark = len(world.port.log)
    return world


def end(world, row):
    world.batch.reqs[row].finished_reason = "stop"
    world.lane.row_ended(world.lane.table, [row])


def test_what_was_reserved_goes_back_when_a_row_ended(riding):
    """It is in no request's lengths any more, and upstream checks its pool after every step."""
    end(riding, 1)
    riding.lane.settle()
    assert riding.port.since(riding.mark) == ["give back 2", "lengths +2 +0"]
    assert riding.lane.is_open and len(riding.batch.reqs) == 3, "upstream sees it until its last result"


def test_a_row_that_ended_goes_before_the_next_step_and_the_rest_rides_on(riding):
    end(riding, 1)
    riding.lane.settle()
    mark = len(riding.port.log)
    result = riding.lane.ride()
    assert riding.port.since(mark) == [
        "receive", "dispatch", "keeping [0, 2]", "room [0, 2] 2", "rows [0, 2]", "pin ['held', [0, 2]]",
        "leave [0, 2] 2",
        "[", "forward waits", "keep [0, 2]", "]",
        "lengths +0 +0", "reserve", "lengths +0 +4", "[", "forward waits", "refresh", "]",
        "selected", "count", "[", "step", "]", "[", "readback 2", "]",
    ]  # fmt: skip
    assert result.step == 4 and riding.port.done == 2, "steps count on"
    assert [req.rid for req in riding.lane.table.reqs] == [0, 2]
    assert riding.account.rows_left == 1 and riding.account.report()["left"] == {}


def test_rows_go_once(riding):
    end(riding, 1)
    riding.lane.settle()
    riding.lane.ride()
    riding.lane.settle()
    mark = len(riding.port.log)
    riding.lane.ride()
    assert riding.port.since(mark) == [
        "receive", "dispatch", "selected", "count", "[", "step", "]", "[", "readback 2", "]",
    ]  # fmt: skip


def test_a_row_whose_limit_the_step_under_way_reaches_goes_before_the_next(world):
    world.port.rides_on = True
    batch = opened(world, 20, 2)
    world.lane.ride()
    world.lane.settle()
    assert world.lane.is_open and len(batch.reqs) == 2
    world.lane.ride()
    world.lane.settle()
    assert world.account.rows_left == 1 and len(world.port.windows) == 2 and len(batch.reqs) == 1


def test_an_arrival_meets_the_batch_with_all_its_rows(riding):
    end(riding, 1)
    riding.lane.settle()
    riding.port.arrivals = [True]
    assert riding.lane.ride() is None and len(riding.batch.reqs) == 3
    assert riding.account.report()["left"] == {"intake": 1} and riding.account.rows_left == 0


def test_the_lane_closes_for_a_row_that_ended_if_somebody_waits(riding):
    riding.port.rides_on = False
    end(riding, 1)
    riding.lane.settle()
    assert not riding.lane.is_open and riding.account.report()["left"] == {"finish": 1}


def test_the_lane_closes_when_no_row_has_a_further_step(riding):
    for row in range(3):
        end(riding, row)
    riding.lane.settle()
    assert riding.account.report()["left"] == {"finish": 1} and riding.account.rows_left == 0


@pytest.mark.parametrize("why", ["finish", "length-limit"])
def test_the_lane_closes_where_the_executor_cannot_go_on_with_the_rest(world, why):
    world.port.rides_on = True
    world.executor.keeping = lambda rows: False
    world.batch = opened(world, 20, 2 if why == "length-limit" else 20)
    world.lane.ride()
    if why == "finish":
        end(world, 1)
    world.lane.settle()
    assert world.lane.ride() is None and len(world.batch.reqs) == 2
    assert world.account.report()["left"] == {why: 1} and world.account.rows_left == 0


def test_without_slots_for_the_rest_the_lane_closes_with_all_rows_in_the_batch(riding):
    """Upstream then waits for the slots of those that end, as long as it sees them."""
    riding.port.has_slots = False
    end(riding, 1)
    riding.lane.settle()
    assert riding.lane.ride() is None and len(riding.batch.reqs) == 3
    assert riding.account.report()["left"] == {"finish": 1} and riding.account.rows_left == 0


@pytest.mark.parametrize(("had", "left"), [(2, {"length-limit": 1}), (20, {})])
def test_where_selection_makes_one_more_step_of_a_row_at_its_limit_so_does_the_lane(world, had, left):
    """The decode role of disaggregation; ranks whose lane is closed make that step, too."""
    world.port.rides_on, world.port.skips_finishing = True, False
    world.batch = opened(world, 20, had)
    world.lane.ride()
    if had == 20:
        end(world, 1)
    world.lane.settle()
    assert world.account.report()["left"] == left and world.lane.is_open is (not left)


def test_who_watches_is_told_that_rows_have_gone(riding):
    told = []
    riding.lane.watch = SimpleNamespace(rows_left=lambda: told.append("left"), stamps=None)
    end(riding, 1)
    riding.lane.settle()
    assert told == []
    riding.lane.ride()
    assert told == ["left"]


def test_the_result_under_way_knows_its_own_rows_and_counts_only_for_those_that_ride(riding):
    before = riding.lane.table
    end(riding, 1)
    riding.lane.settle()
    riding.lane.ride()
    extra = [riding.lane.extra_steps(before, row) for row in range(3)]
    assert extra == [1, 0, 1], "the row that went has no step but those it was launched with"
    riding.lane.row_ended(before, [1])
    riding.lane.settle()
    riding.lane.ride()
    assert riding.account.rows_left == 1, "it went already"


def test_a_row_that_the_result_under_way_ends_goes_next(riding):
    before = riding.lane.table
    end(riding, 1)
    riding.lane.settle()
    riding.lane.ride()
    before.reqs[2].finished_reason = "stop"
    riding.lane.row_ended(before, [2])
    assert not riding.lane.undisturbed(riding.lane.table)
    riding.lane.settle()
    riding.lane.ride()
    assert riding.account.rows_left == 2 and [req.rid for req in riding.lane.table.reqs] == [0]


def test_an_older_result_counts_for_nothing(riding):
    oldest = riding.lane.table
    for _ in range(2):
        riding.lane.table.reqs[1].finished_reason = "stop"
        riding.lane.row_ended(riding.lane.table, [1])
        riding.lane.settle()
        riding.lane.ride()
    assert riding.lane.extra_steps(oldest, 0) == 0


def test_closing_writes_all_steps_back_to_the_rows_that_are_left(riding):
    end(riding, 1)
    riding.lane.settle()
    riding.lane.ride()
    riding.lane.close(Departure.INTAKE)
    assert riding.port.log[-1] == "write back 3" and "relay tokens 4" in riding.port.log
    opened(riding)
    assert riding.lane.is_open


def test_a_fault_before_rows_go_closes_the_lane_with_the_batch_as_it_was(riding):
    riding.port.fails = {"keeping [0, 2]"}
    end(riding, 1)
    riding.lane.settle()
    assert riding.lane.ride() is None and not riding.lane.is_open and len(riding.batch.reqs) == 3
    assert riding.account.faulted == {"leave": 1} and riding.account.report()["left"] == {"fault": 1}


def test_a_fault_after_rows_went_closes_the_lane_with_the_rest(riding):
    riding.port.fails = {"keep [0, 2]"}
    end(riding, 1)
    riding.lane.settle()
    assert riding.lane.ride() is None and [req.rid for req in riding.batch.reqs] == [0, 2]
    assert riding.account.faulted == {"leave": 1} and riding.port.log[-1] == "write back 2"
    assert riding.account.report()["left"] == {"fault": 1}


# ------------------------------------------------------------ close


def test_closing_waits_relays_pins_gives_back_and_writes_back_in_this_order(world):
    opened(world)
    for _ in range(3):
        world.lane.ride()
    mark = len(world.port.log)
    world.lane.close(Departure.INTAKE)
    assert world.port.since(mark) == [
        "schedule waits", "[", "relay tokens 4", "]", "close", "pin ['held']", "give back 1", "lengths +3 +0",
        "write back 3",
    ]  # fmt: skip


def test_closing_without_a_window_gives_nothing_back(world):
    opened(world)
    world.lane.close(Departure.INTAKE)
    log = world.port.since(world.mark)
    assert log[-2:] == ["lengths +0 +0", "write back 0"] and not any("give" in entry for entry in log)


def test_closing_behind_a_renewal_confirms_each_step_once(world):
    opened(world)
    for _ in range(6):
        world.lane.ride()
    world.lane.close(Departure.EXIT)
    assert sum(launched for launched, _ in world.port.lengths) == 6
    assert world.port.log[-1] == "write back 6"


def test_shutting_an_open_lane_counts_as_exit(world):
    opened(world)
    world.lane.shut()
    assert not world.lane.is_open and world.account.report()["left"] == {"exit": 1}


def test_an_opening_after_a_closing_begins_anew(world):
    opened(world)
    world.lane.ride()
    world.lane.close(Departure.INTAKE)
    batch = opened(world)
    assert world.lane.batch is batch and world.lane.launched == 1 and world.lane.window is None
    world.lane.ride()
    assert world.port.log.count("refresh") == 2


# ------------------------------------------------------------ lengths


def test_launched_steps_that_the_kv_lengths_do_not_count_are_those_of_the_window(world):
    opened(world)
    table, extra = world.lane.table, []
    for _ in range(6):
        extra.append(world.lane.extra_steps(table, 0))
        world.lane.ride()
    assert extra == [0, 1, 2, 3, 4, 1]


def test_a_table_of_an_earlier_opening_has_no_uncounted_steps(world):
    opened(world)
    earlier = world.lane.table
    world.lane.ride()
    world.lane.close(Departure.INTAKE)
    assert world.lane.extra_steps(earlier, 0) == 0
    opened(world)
    world.lane.ride()
    assert world.lane.extra_steps(earlier, 0) == 0


# ------------------------------------------------------------ faults


@pytest.mark.parametrize("where", ["forward waits", "resolve", "open", "floor 7", "step"])
def test_a_fault_at_the_opening_leaves_the_launch_to_the_ordinary_path(world, where):
    world.port.fails = {where}
    world.lane.floor_replays = 7
    batch = batch_of(9)
    assert world.lane.enter(batch, None) is None
    assert world.port.log[-2:] == ["uncount", "close"] and batch.input_ids == "inputs"
    assert not world.lane.is_open and world.account.opened == world.account.steps == 0


@pytest.mark.parametrize("where", ["step", "reserve", "refresh"])
def test_a_fault_while_riding_closes_the_lane_with_the_batch_as_it_was(world, where):
    opened(world)
    world.port.fails = {where}
    assert world.lane.ride() is None and not world.lane.is_open
    assert world.port.log[-1] == "write back 0" and world.port.lengths[-1] == (0, 0)
    assert "relay tokens 1" in world.port.log
    assert world.account.report()["left"] == {"fault": 1}
    assert ("give back 4" in world.port.log) == (where != "reserve")


@pytest.mark.parametrize("where", ["step", "floor 7"])
def test_a_step_that_other_ranks_run_too_is_not_repeated_when_it_fails(world, where):
    """Their collectives would not meet: the fault is raised, as stock's would be."""
    world.lane.may_repeat = False
    world.lane.floor_replays = 7
    world.port.fails = {where}
    with pytest.raises(RuntimeError):
        world.lane.enter(batch_of(9), None)
    world.port.fails = set()
    opened(world)
    world.port.fails = {"step"}
    with pytest.raises(RuntimeError):
        world.lane.ride()


def test_what_fails_before_the_step_leaves_it_to_the_ordinary_path_on_one_rank_alone_too(world):
    world.lane.may_repeat = False
    world.port.fails = {"open"}
    assert world.lane.enter(batch_of(9), None) is None
    assert world.account.faults == 1


def test_a_failed_step_is_not_counted_as_launched_or_used(world):
    opened(world)
    world.lane.ride()
    world.port.fails = {"step"}
    assert world.lane.ride() is None
    assert world.port.log.count("count") - world.port.log.count("uncount") == 2
    assert "give back 3" in world.port.log and world.port.log[-1] == "write back 1"
    assert world.account.steps == 2


def test_a_step_whose_readback_fails_is_fetched_not_repeated_and_the_lane_closes_behind_it(world):
    opened(world)
    world.port.fails = {"readback 2"}
    result = world.lane.ride()
    assert (result.step, result.tokens, result.arrived) == (2, "fetched", None)
    assert world.port.log[-4:] == ["[", "readback 2", "fetch tokens 2", "]"] and world.lane.is_open
    world.lane.settle()
    assert not world.lane.is_open and world.port.log[-1] == "write back 1"
    assert world.account.report()["left"] == {"fault": 1} and world.account.faulted == {"readback": 1}


def test_a_first_step_whose_readback_fails_is_fetched_too(world):
    world.port.fails = {"readback 1"}
    assert world.lane.enter(batch_of(9), None).tokens == "fetched"
    world.lane.settle()
    assert not world.lane.is_open and world.account.steps == 1


@pytest.mark.parametrize("is_open", [True, False])
def test_a_result_that_could_not_be_processed_ends_the_reservation_and_the_lane(world, is_open, caplog):
    if is_open:
        opened(world)
        world.lane.ride()
    mark = len(world.port.log)
    for _ in range(2):
        try:
            raise ValueError("broken")
        except ValueError:
            world.lane.fail("processing", "could not read a result")
    wanted = ["schedule waits", "give back 3", "lengths +1 +0", "schedule waits", "lengths +0 +0"]
    assert world.port.since(mark) == (wanted if is_open else [])
    world.lane.settle()
    assert not world.lane.is_open and not world.lane.is_sound
    assert world.account.report()["left"] == ({"fault": 1} if is_open else {})
    assert world.account.faulted == {"processing": 2} and caplog.text.count("it stays closed") == 1


def test_after_a_fault_the_lane_stays_closed_and_says_so(world, caplog):
    opened(world)
    world.port.fails = {"step"}
    world.lane.ride()
    world.port.fails = set()
    assert world.lane.enter(batch_of(9), None) is None
    report = world.account.report()
    assert report["refused"] == {"closed-for-good": 1} and report["faults"] == 1
    assert caplog.text.count("it stays closed") == 1


def test_a_prefill_is_no_refused_decode_step_after_a_fault_either(world):
    world.port.fails = {"open"}
    world.lane.enter(batch_of(9), None)
    world.port.refusal = Refusal.NOT_DECODE
    assert world.lane.enter(batch_of(9), None) is None
    assert world.account.report()["refused"] == {} and world.account.decode_steps == 1


# ------------------------------------------------------------ counts


def test_steps_and_row_steps_are_counted_at_their_launch(world):
    opened(world, 20, 20, 20)
    world.lane.ride()
    world.lane.ride()
    assert (world.account.opened, world.account.steps, world.account.row_steps) == (1, 3, 9)


def test_a_new_accounts_report_has_every_count_at_nothing():
    report = LaneAccount().report()
    assert report.pop("refused") == report.pop("left") == {} and report.pop("share") is None
    counts = ("opened", "decode_steps", "steps", "row_steps", "wasted_row_steps", "windows", "faults")
    assert set(report.values()) == {0} and report.keys() >= set(counts)


def test_the_share_is_that_of_the_decode_steps_of_this_mode(world):
    opened(world)
    world.lane.ride()
    world.lane.close(Departure.INTAKE)
    world.port.refusal = Refusal.GRAMMAR
    world.lane.enter(batch_of(9), None)
    world.port.refusal = Refusal.NOT_DECODE
    world.lane.enter(batch_of(9), None)
    report = world.account.report()
    assert (report["steps"], report["decode_steps"], report["share"]) == (2, 3, 0.6667)


def test_a_step_whose_opening_fails_is_a_decode_step_outside(world):
    world.port.fails = {"open"}
    world.lane.enter(batch_of(9), None)
    assert (world.account.steps, world.account.decode_steps) == (0, 1)


def test_a_report_names_the_reasons_that_occurred():
    account = LaneAccount()
    account.refused[Refusal.GRAMMAR] += 2
    account.left[Departure.INTAKE] += 1
    assert account.report()["refused"] == {"grammar": 2} and account.report()["left"] == {"intake": 1}


def test_two_accounts_count_apart():
    LaneAccount().refused[Refusal.GRAMMAR] += 1
    assert LaneAccount().report()["refused"] == {}


# ------------------------------------------------------------ rows with a grammar


def constrained(*limits):
    batch = batch_of(*limits)
    batch.reqs[0].grammar = "a grammar"
    return batch


def test_with_a_grammar_a_step_begins_and_is_sampled_when_the_result_before_is_processed(world):
    result = world.lane.enter(constrained(20, 20), None)
    assert world.port.log == ["count", "[", "forward waits", "resolve", "open", "begin", "]"]
    assert world.lane.unsampled is result and result.tokens is None
    mark = len(world.port.log)
    world.lane.sample()
    assert world.port.since(mark) == ["[", "finish", "readback 2", "]", "sampled 1"]
    assert world.lane.unsampled is None and (result.tokens, result.arrived) == ("home", "event")


def test_further_steps_with_a_grammar_are_in_two_parts_as_well(world):
    world.lane.enter(constrained(20, 20), None)
    world.lane.sample()
    world.lane.ride()
    world.lane.sample()
    mark = len(world.port.log)
    result = world.lane.ride()
    assert world.port.since(mark) == ["receive", "dispatch", "selected", "count", "[", "begin", "]"]
    world.lane.sample()
    assert world.port.since(mark)[-1] == "sampled 3" and result.step == 3


def test_a_lane_that_is_left_hands_on_the_tokens_of_the_step_sampled_last(world):
    world.lane.enter(constrained(20, 20), None)
    world.lane.sample()
    world.lane.ride()
    world.lane.sample()
    world.port.arrivals = [True]
    assert world.lane.ride() is None
    assert "relay tokens 2" in world.port.log


def test_rows_with_a_grammar_are_counted(world):
    world.lane.enter(constrained(20, 20, 20), None)
    world.lane.sample()
    world.lane.ride()
    report = world.account.report()
    assert (report["steps"], report["masked_steps"], report["grammar_row_steps"]) == (2, 2, 2)
    assert report["row_steps"] == 6


def test_the_lane_opens_without_two_parts_once_the_grammars_have_gone(world):
    world.lane.enter(constrained(20, 20), None)
    world.lane.sample()
    world.lane.close(Departure.FINISH)
    mark = len(world.port.log)
    opened(world)
    assert "step" in world.port.since(mark) and "begin" not in world.port.since(mark)
    assert world.lane.unsampled is None


def test_a_model_that_fails_in_a_step_with_a_grammar_leaves_to_the_ordinary_path(world):
    world.lane.enter(constrained(20, 20), None)
    world.lane.sample()
    world.port.fails = {"begin"}
    assert world.lane.ride() is None and not world.lane.is_open
    assert "relay tokens 1" in world.port.log and world.account.report()["left"] == {"fault": 1}


def test_a_sampler_that_fails_is_the_models_own_error(world):
    """The step's model has run; as in stock's delayed sampling nobody can repeat it."""
    world.lane.enter(constrained(20, 20), None)
    world.port.fails = {"finish"}
    with pytest.raises(Fault):
        world.lane.sample()
