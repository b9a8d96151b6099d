"""The race detector: programs known to race and known not to, and any program against brute force."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.race_oracle import Graph, Record, Statement, Touch, Wait
from zos_sglang.testing.races.detector import HOST, Detector, Op

SCHEDULE, FORWARD, COPY = "schedule", "forward", "copy"


def write(detector: Detector, where: str, buffer: str = "b", label: str = "w") -> None:
    detector.access(buffer, where, writes=True, label=label)


def read(detector: Detector, where: str, buffer: str = "b", label: str = "r") -> None:
    detector.access(buffer, where, writes=False, label=label)


def wait(detector: Detector, stream: str, other: str) -> None:
    detector.record(other, other)
    detector.wait(stream, other)


# ------------------------------------------------------------ clean programs


def test_operations_of_one_stream_are_in_order():
    d = Detector()
    for _ in range(3):
        write(d, FORWARD)
        read(d, FORWARD)
    assert d.races == [] and d.accesses == 6


def test_a_launch_comes_after_what_the_host_did_before_it():
    d = Detector()
    write(d, HOST)
    read(d, COPY)
    assert d.races == []


def test_an_event_orders_what_follows_the_wait_behind_what_was_before_the_record():
    d = Detector()
    write(d, SCHEDULE)
    wait(d, FORWARD, SCHEDULE)
    read(d, FORWARD)
    assert d.races == []


def test_order_passes_through_a_third_stream_and_through_the_host():
    d = Detector()
    write(d, SCHEDULE)
    wait(d, FORWARD, SCHEDULE)
    wait(d, COPY, FORWARD)
    read(d, COPY)
    d.record("copied", COPY)
    d.synchronize("copied")
    write(d, HOST)
    assert d.races == []


def test_two_reads_never_race():
    d = Detector()
    read(d, FORWARD)
    read(d, COPY)
    read(d, HOST)
    assert d.races == []


def test_other_buffers_are_other_buffers():
    d = Detector()
    write(d, FORWARD, "a")
    write(d, COPY, "b")
    assert d.races == []


def test_memory_that_the_allocator_waited_for_starts_anew():
    d = Detector()
    read(d, FORWARD)
    d.forget("b")
    write(d, SCHEDULE)
    assert d.races == []


# ------------------------------------------------------------ programs that race


def test_without_a_wait_a_read_on_another_stream_races_with_the_write():
    d = Detector()
    write(d, SCHEDULE, label="lengths")
    read(d, FORWARD, label="model")
    [race] = d.races
    assert (race.first.op.where, race.first.label) == (SCHEDULE, "lengths")
    assert (race.second.op.where, race.second.label) == (FORWARD, "model")
    assert race.missing == "forward must wait for an event of schedule at #1; it waited for #0"


def test_a_write_races_with_every_read_that_it_overtakes():
    d = Detector()
    read(d, FORWARD)
    read(d, COPY)
    write(d, SCHEDULE)
    assert {race.first.op.where for race in d.races} == {FORWARD, COPY}


def test_what_follows_the_record_is_not_covered_by_the_wait():
    d = Detector()
    write(d, SCHEDULE, "a")
    d.record("e", SCHEDULE)
    write(d, SCHEDULE, "b")
    d.wait(FORWARD, "e")
    read(d, FORWARD, "a")
    read(d, FORWARD, "b")
    [race] = d.races
    assert race.buffer == "b"
    assert race.missing == "forward must wait for an event of schedule at #2; it waited for #1"


def test_an_event_recorded_again_no_longer_means_the_first_place_for_later_waits_only():
    d = Detector()
    d.record("e", SCHEDULE)
    d.wait(FORWARD, "e")
    write(d, SCHEDULE)
    d.record("e", SCHEDULE)
    read(d, FORWARD)
    assert len(d.races) == 1


def test_waiting_for_an_event_that_was_never_recorded_orders_nothing():
    d = Detector()
    write(d, SCHEDULE)
    d.wait(FORWARD, "never")
    read(d, FORWARD)
    assert len(d.races) == 1


def test_the_host_must_wait_before_it_reads_what_a_copy_brings():
    d = Detector()
    write(d, COPY, label="readback")
    read(d, HOST, label="tolist")
    [race] = d.races
    assert race.missing == "the host must synchronise with copy up to #1; it did up to #0"


def test_the_host_must_wait_before_it_rewrites_pinned_memory_that_a_copy_reads():
    d = Detector()
    read(d, COPY, label="copy to the device")
    write(d, HOST, label="next step's numbers")
    [race] = d.races
    assert race.first.op.where == COPY and race.second.op.where == HOST


def test_a_late_operation_races_with_a_host_write_that_ran_before_it_did():
    """The operation was launched first: that it runs only now does not put the host's write before it."""
    d = Detector()
    op = d.launch(COPY, "copy to the device")
    write(d, HOST, label="next step's numbers")
    d.access("b", op, writes=False, label="pinned")
    [race] = d.races
    assert (race.first.op.where, race.second.op.where) == (COPY, HOST)
    assert "'pinned' in 'copy to the device' on copy" in str(race)


def test_the_report_names_each_kind_of_race_once_with_its_count():
    d = Detector()
    for buffer in range(3):
        write(d, SCHEDULE, str(buffer), "table")
        read(d, FORWARD, str(buffer), "attention")
    [line] = d.report().splitlines()
    assert "write 'table' on schedule" in line and "read 'attention' on forward" in line and "(3x)" in line


# ------------------------------------------------------------ against brute force

STREAM = st.sampled_from([SCHEDULE, FORWARD, COPY])
ANYWHERE = st.sampled_from([SCHEDULE, FORWARD, COPY, HOST])
EVENT = st.integers(0, 2)
STATEMENT = st.one_of(
    st.builds(Touch, ANYWHERE, st.sampled_from("ab"), st.booleans()),
    st.builds(Touch, ANYWHERE, st.sampled_from("ab"), st.booleans()),
    st.builds(Record, EVENT, STREAM),
    st.builds(Wait, ANYWHERE, EVENT),
)


def run(program: list[Statement], graph: Graph, random: Random) -> Detector:
    """Run a program in a random order that its waits allow."""
    d = Detector()
    late: dict[int, Op] = {}
    over: set[int] = set()

    def finish(node: int) -> None:
        if node in over:
            return
        for earlier in sorted(graph.before[node]):
            finish(earlier)
        over.add(node)
        if (op := late.pop(node, None)) is not None:
            s = program[node]
            d.access(s.buffer, op, writes=s.writes, label=str(node))

    for node, statement in enumerate(program):
        match statement:
            case Touch(where, buffer, writes) if where == HOST:
                finish(node)
                d.access(buffer, HOST, writes=writes, label=str(node))
            case Touch(where):
                late[node] = d.launch(where)
            case Record(event, stream):
                d.record(event, stream)
            case Wait(where, event):
                d.wait(where, event)
                if where == HOST:
                    finish(node)
        for other in random.sample(sorted(late), random.randint(0, len(late))):
            finish(other)
    for node in range(len(program)):
        finish(node)
    return d


@settings(max_examples=400)
@given(st.lists(STATEMENT, max_size=25), st.integers(0, 2**32))
def test_exactly_the_buffers_that_brute_force_finds_are_reported(program, seed):
    graph = Graph(program)
    wanted = set(graph.races())
    d = run(program, graph, Random(seed))
    found = {tuple(sorted((int(r.first.label), int(r.second.label)))) for r in d.races}
    assert found <= wanted, "a race that is none"
    assert {r.buffer for r in d.races} == {program[i].buffer for i, _ in wanted}


@pytest.mark.parametrize("racy", [True, False])
def test_brute_force_itself_knows_a_race(racy):
    program: list[Statement] = [Touch(SCHEDULE, "a", True), Record(0, SCHEDULE)]
    program += [] if racy else [Wait(FORWARD, 0)]
    program += [Touch(FORWARD, "a", False)]
    assert list(Graph(program).races()) == ([(0, len(program) - 1)] if racy else [])
