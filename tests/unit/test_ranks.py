"""Comparing what ranks decide: rows, the log of one rank, the exchange between several."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.lane_recorder import Executing, Recorder
from tests.unit.test_event_loop import loop_over
from tests.unit.test_lane import batch_of as lane_batch
from zos_sglang.overlap.guards import FIRST_TOKEN, OVERLAPPED, Reason
from zos_sglang.ranks import exchange as exchange_module
from zos_sglang.ranks import log as log_module
from zos_sglang.ranks.checker import Checker
from zos_sglang.ranks.exchange import CannotCompareError, Exchange, Peer
from zos_sglang.ranks.log import DecisionLog
from zos_sglang.ranks.peers import peers_of
from zos_sglang.ranks.row import FIELDS, SHARED, Row, decode, encode, first_difference
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Departure
from zos_sglang.resident.lane import Lane


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_extend(self) -> bool:
        return self.name == "EXTEND"


DECODE, EXTEND = Mode("DECODE"), Mode("EXTEND")


def batch_of(*rids: str, mode: Mode = DECODE, new_tokens: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        reqs=[SimpleNamespace(rid=rid) for rid in rids],
        forward_mode=mode,
        is_extend_in_batch=mode is EXTEND,
        extend_num_tokens=new_tokens,
    )


class Rank:
    """One rank's log, with what it reads from a scheduler."""

    def __init__(self) -> None:
        self.lane, self.free, self.loop = LaneAccount(), 100, SimpleNamespace(beat=0)
        self.log = DecisionLog(self.lane, lambda: self.free, lambda result: result)
        self.log.loop = self.loop

    def decide(self, *rids: str, reason: Reason = Reason.OVERLAPPED, **more: object) -> None:
        self.loop.beat += 1
        self.log.launching(batch_of(*rids, **more), "launch", reason, 0)  # type: ignore[arg-type]


class Dict:
    """A board in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def remove(self, key: str) -> None:
        self.values.pop(key, None)


def pair(every: int = 4, fields: tuple[str, ...] = FIELDS) -> tuple[list[Rank], list[Exchange], Dict]:
    board, ranks = Dict(), [Rank(), Rank()]
    both = [Exchange(board, rank, [Peer(1 - rank, fields)], every, ranks[rank].log.take) for rank in range(2)]
    return ranks, both, board


def turns(both: list[Exchange], now_s: float = 0.0) -> list[object]:
    """Two turns of every exchange: what one publishes last the other has seen."""
    return [found for _ in range(2) for exchange in both if (found := exchange.turn(now_s)) is not None]


# ------------------------------------------------------------ rows

ROW = Row(7, 1, 2, 3, None, "finish", 90, 41, "launch", "DECODE", False, 2, "ab (a b)", 0, "overlapped", 0)


def test_a_row_survives_its_line():
    assert decode(encode(ROW)) == ROW


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_compared_and_named(name: str):
    other = ROW._replace(**{name: "something else"})
    found = first_difference(ROW, other)
    assert found is not None and found.field == name
    assert (found.mine, found.theirs) == (getattr(ROW, name), "something else")
    assert first_difference(ROW, ROW) is None


def test_of_several_differences_the_cause_is_named():
    other = ROW._replace(request_ids="cd (c d)", tokens=9, rows=3)
    found = first_difference(ROW, other)
    assert found is not None and found.field == "tokens"


def test_the_sentence_names_step_field_and_both_values_with_their_ranks():
    found = first_difference(ROW, ROW._replace(overlap="first-token"))
    assert found is not None
    assert found.sentence(3, 1) == (
        "ranks decided differently at decision 7 (iteration 41): overlap differs: "
        "rank 1: 'first-token', rank 3: 'overlapped'"
    )


def test_between_attention_groups_only_what_they_share_is_compared():
    assert first_difference(ROW, ROW._replace(rows=9, request_ids="x", free_KV_slots=1), SHARED) is None
    assert first_difference(ROW, ROW._replace(is_extend_in_batch=True), SHARED) is not None


def test_a_grammar_that_waits_in_one_group_is_no_difference_between_groups_but_one_within():
    waiting = ROW._replace(overlap=Reason.GRAMMAR_SYNC)
    assert first_difference(waiting, ROW, SHARED) is None
    assert first_difference(decode(encode(waiting)), decode(encode(ROW)), SHARED) is None
    assert first_difference(waiting, ROW) is not None
    assert first_difference(ROW, ROW._replace(overlap=Reason.FIRST_TOKEN), SHARED) is not None


# ------------------------------------------------------------ log


def test_a_batch_that_goes_on_as_it_is_costs_no_digest():
    class Ids(list):
        reads = 0

        def __iter__(self):
            Ids.reads += 1
            return super().__iter__()

    rank, batch = Rank(), batch_of("a", "b")
    batch.reqs = Ids(batch.reqs)
    for _ in range(5):
        rank.log.launching(batch, "lane step", Reason.OVERLAPPED, 8)
    assert Ids.reads == 1
    assert len({row.request_ids for row in rank.log.take()}) == 1


def test_order_of_requests_and_a_batch_extended_in_place_show_in_the_digest():
    rank, batch = Rank(), batch_of("a", "b")
    rank.log.launching(batch, "launch", Reason.OVERLAPPED, 0)
    batch.reqs.append(SimpleNamespace(rid="c"))
    rank.log.launching(batch, "launch", Reason.OVERLAPPED, 0)
    rank.decide("b", "a")
    one, two, three = rank.log.take()
    assert len({one.request_ids, two.request_ids, three.request_ids}) == 3
    assert three.request_ids.endswith("(b a)")


def test_tokens_since_the_row_before_are_in_the_row():
    rank, other = Rank(), Rank()
    for log in (rank.log, other.log):
        log.processed(b"\1\2")
    rank.log.processed(b"\3")
    other.log.processed(b"\4")
    for one in (rank, other):
        one.decide("a")
        one.decide("a")
    (mine, quiet), (theirs, _) = rank.log.take(), other.log.take()
    assert mine.tokens != theirs.tokens
    assert quiet.tokens == 0


def test_only_the_beginning_of_idleness_is_a_row():
    rank = Rank()
    rank.decide("a")
    for _ in range(1000):
        rank.loop.beat += 1
        rank.log.resting("idle")
    rank.decide("b")
    rows = rank.log.take()
    assert [row.action for row in rows] == ["launch", "idle", "launch"]
    assert [row.iteration for row in rows] == [1, 2, 1002]
    assert [row.number for row in rows] == [0, 1, 2]


def test_the_last_departure_from_the_lane_is_told_though_the_recorder_takes_it_away():
    rank = Rank()
    rank.lane.last_departure = Departure.INTAKE
    rank.decide("a", mode=EXTEND, new_tokens=12)
    (row,) = rank.log.take()
    assert (row.last_departure_from_the_lane, row.new_tokens) == ("intake", 12)


def test_a_fault_in_logging_ends_the_log_and_disturbs_nobody(caplog):
    rank = Rank()
    rank.decide("a")
    rank.log.launching(SimpleNamespace(), "launch", Reason.OVERLAPPED, 0)
    rank.decide("b")
    rank.log.resting("idle")
    rank.log.processed(b"1")
    assert not rank.log.sound and len(rank.log.take()) == 1
    assert caplog.text.count("ZOS_CHECK_RANKS is off") == 1


# ------------------------------------------------------------ exchange


def test_equal_ranks_agree_block_by_block():
    ranks, both, _ = pair(every=4)
    for step in range(10):
        for rank in ranks:
            rank.decide("a", f"b{step}")
    assert turns(both) == []
    assert [(e.agreed, e.blocks, e.differences) for e in both] == [(8, 2, 0)] * 2
    assert both[0].waiting == 2


@given(
    split=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    every=st.integers(1, 9),
    at=st.integers(0, 60),
)
def test_the_one_row_that_differs_is_found_however_the_ranks_proceed(split, every, at):
    ranks, both, _ = pair(every)
    total, found = sum(split), []
    for rank, chunks in zip(ranks, (split, split[::-1]), strict=True):
        # Ranks get on at different paces; the second one decides otherwise in row `at`.
        exchange = both[ranks.index(rank)]
        made = 0
        for count in chunks:
            for _ in range(count):
                rank.decide("x" if rank is ranks[1] and made == at else "a")
                made += 1
            found.append(exchange.turn(0.0))
    found = [item[1] for item in [*found, *turns(both, 10.0), *turns(both, 20.0)] if item]
    if at < total:
        assert {(difference.number, difference.field) for difference in found} == {(at, "request_ids")}
        assert len(found) == sum(e.differences for e in both)
    else:
        assert not found and [e.agreed for e in both] == [total] * 2


def test_a_block_that_does_not_fill_goes_out_after_a_while():
    ranks, both, _ = pair(every=100)
    ranks[0].decide("a")
    ranks[1].decide("a", reason=Reason.FIRST_TOKEN)
    assert turns(both, now_s=1.0) == []
    (found, *_) = turns(both, now_s=3.1)
    assert found[1].field == "overlap"


def test_a_rank_that_stands_still_is_waited_for_without_complaint():
    ranks, both, _ = pair(every=2)
    for _ in range(6):
        ranks[0].decide("a")
    ranks[1].decide("a")
    assert turns(both, now_s=1.0) == []
    assert turns(both, now_s=9.0) == []
    assert [e.agreed for e in both] == [1, 1]


def test_the_board_does_not_grow(monkeypatch):
    monkeypatch.setattr(exchange_module, "KEPT", 8)
    ranks, both, board = pair(every=2)
    for _ in range(300):
        for rank in ranks:
            rank.decide("a")
        assert turns(both) == []
    assert len(board.values) <= 2 * 8
    assert max(e.waiting for e in both) < 4 and both[0].agreed == 300


def test_a_peer_that_is_never_heard_of_ends_the_check_not_the_server(monkeypatch):
    monkeypatch.setattr(exchange_module, "MOST_KEPT_ROWS", 10)
    ranks, both, _ = pair(every=2)
    for _ in range(11):
        ranks[0].decide("a")
    with pytest.raises(CannotCompareError, match="rank 1 has not shown its decisions for 11"):
        both[0].turn(0.0)


def test_lost_rows_end_the_check_and_accuse_nobody(monkeypatch):
    monkeypatch.setattr(log_module, "MOST_WAITING", 3)
    ranks, both, _ = pair(every=2)
    for _ in range(5):
        ranks[0].decide("a")
    with pytest.raises(CannotCompareError, match="decision 0 of this rank is lost"):
        both[0].turn(0.0)


def test_a_difference_is_written_where_every_rank_reads_it():
    ranks, both, board = pair(every=1)
    assert both[1].told_to_stop() is None
    ranks[0].decide("a")
    ranks[1].decide("b")
    turns(both)
    third = Exchange(board, 2, [], 1, list)
    assert "request ids differs: rank 0: " in (third.told_to_stop() or "")


# ------------------------------------------------------------ peers


def test_a_ring_covers_every_rank():
    assert [peers_of(r, range(4))[0].rank for r in range(4)] == [1, 2, 3, 0]
    assert all(len(peers_of(r, range(4))) == 1 for r in range(4))


def test_under_dp_attention_all_is_compared_inside_a_group_and_little_between_groups():
    found = {
        rank: [(p.rank, tuple(p.fields)) for p in peers_of(rank, range(8, 16), 2)] for rank in range(8, 16)
    }
    assert found[8] == [(9, FIELDS), (12, SHARED)]
    assert found[11] == [(8, FIELDS)]
    assert found[12] == [(13, FIELDS), (8, SHARED)]
    assert [(p.rank, p.fields) for p in peers_of(1, range(2), 2)] == [(0, SHARED)]
    with pytest.raises(ValueError, match="3 ranks do not make 2"):
        peers_of(0, range(3), 2)


def test_groups_that_are_not_in_step_are_not_compared_with_one_another():
    found = {rank: peers_of(rank, range(4), 2, in_step=False) for rank in range(4)}
    assert {rank: [(p.rank, p.fields) for p in peers] for rank, peers in found.items()} == {
        0: [(1, FIELDS)],
        1: [(0, FIELDS)],
        2: [(3, FIELDS)],
        3: [(2, FIELDS)],
    }
    assert peers_of(0, range(2), 2, in_step=False) == []


# ------------------------------------------------------------ thread


class Run:
    """A checker over `pair`, and what it did."""

    def __init__(self) -> None:
        self.ranks, both, self.board = pair(every=1)
        self.other = both[1]
        self.stopped, self.ended = threading.Event(), threading.Event()
        self.checker = Checker(both[0], self.stopped.set, self.ended.set)


@pytest.fixture
def run():
    made = Run()
    yield made
    made.checker.close()


def test_the_thread_names_the_difference_once_and_stops_the_server(run, caplog):
    for ids in (("a", "a"), ("b", "c")):
        for rank, rid in zip(run.ranks, ids, strict=True):
            rank.decide(rid)
    run.other.turn(0.0)
    run.checker.start()
    assert run.stopped.wait(5)
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "decision 1 (iteration 2): request ids differs: rank 0: " in record.message
    assert record.message.endswith("The server is stopped.")
    assert not run.ended.is_set()


def test_a_rank_stops_when_another_one_has_found_a_difference(run, caplog):
    run.board.put("stop", b"ranks decided differently at decision 3")
    run.checker.start()
    assert run.stopped.wait(5)
    assert "another rank found that ranks decided differently at decision 3" in caplog.text


def test_a_board_that_fails_ends_the_check_only(run, caplog):
    run.board.get = lambda key: 1 / 0
    run.checker.start()
    assert run.ended.wait(5)
    assert not run.stopped.is_set() and "not compared any more" in caplog.text


def test_closing_ends_the_thread(run):
    run.checker.start()
    run.checker.close()
    assert not run.checker._thread.is_alive()


# ------------------------------------------------------------ where decisions are told


def test_the_pure_part_imports_neither_torch_nor_sglang():
    modules = ["checker", "exchange", "log", "peers", "row"]
    code = "import sys\n" + "".join(f"import zos_sglang.ranks.{name}\n" for name in modules)
    code += "assert not {'torch', 'sglang'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


class Told:
    """Writes into the log of the loop or lane what it is told."""

    def __init__(self, say):
        self.say = say

    def launching(self, batch, action, reason, reserved):
        self.say(f"{action}: {reason}, {reserved}")

    def resting(self, action):
        self.say(f"resting: {action}")

    def processed(self, result):
        self.say(f"tokens of {result.name}")


def test_the_loop_tells_a_decision_before_it_launches_and_tokens_once_they_are_home():
    loop, log = loop_over(["A", "B", None], [OVERLAPPED, FIRST_TOKEN])
    loop.ranks = Told(log.append)
    loop.run()
    assert log[log.index("launch: overlapped, 0") + 1] == "launch A"
    at = log.index("launch: first-token, 0")
    assert log[at + 1 : at + 5] == ["process A' a", "tokens of a", "between", "launch B"]
    assert log[-4:] == ["resting: idle", "process B' b", "tokens of b", "end"]


def test_the_loop_tells_that_it_is_paused():
    loop, log = loop_over("AB", paused=(2, 3))
    loop.ranks = Told(log.append)
    loop.run()
    assert log.count("resting: paused") == 2


def test_the_lane_tells_a_step_with_its_window_before_it_runs():
    port = Recorder()
    port.refuses = port.port_refuses
    executing = Executing(port)
    lane = Lane(port, executing, executing, LaneAccount(), window=4)
    lane.ranks = Told(port.say)
    assert lane.enter(lane_batch(20, 20), None) is not None
    lane.settle()
    lane.ride()
    told = port.log.index("lane step: overlapped, 4")
    reserved = next(i for i, said in enumerate(port.log) if said.startswith("reserve"))
    assert reserved < told < port.log.index("step", told)
