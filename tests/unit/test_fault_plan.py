"""What ZOS_FAULT may say, and the injector that does it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zos_sglang.faults.injector import InjectedFault, Injector
from zos_sglang.faults.plan import MOST_CALLS, MOST_RANKS, ON, POINTS, Fault, from_code, parse, to_code
from zos_sglang.settings import Settings, SettingsError

ranks = st.none() | st.integers(0, MOST_RANKS - 1)
faults = st.builds(Fault, st.sampled_from(list(POINTS)), st.integers(1, MOST_CALLS), st.booleans(), ranks)


def failures(injector, point, calls):
    """The calls of `point`, from 1, that fail."""
    found = []
    for call in range(1, calls + 1):
        try:
            injector.passes(point)
        except InjectedFault:
            found.append(call)
    return found


# ------------------------------------------------------------ the setting


@given(st.lists(faults, min_size=1))
def test_what_is_written_is_read(several):
    assert parse(",".join(map(str, several))) == tuple(several)


def test_the_first_call_is_meant_where_none_is_named():
    assert parse("launch, readback:10+") == (Fault("launch", 1), Fault("readback", 10, True))


def test_a_rank_may_be_named():
    assert parse("launch@1, mask@0:3+") == (Fault("launch", 1, rank=1), Fault("mask", 3, True, 0))


def test_on_asks_for_nothing_yet():
    assert parse(ON) == ()


@pytest.mark.parametrize(
    "text",
    [
        *("lauch:3", "launch:", "launch:0", "launch:x", "launch:3,", "on,launch"),
        *("launch@", "launch@x:3", "launch@1000", "launch:3@1"),
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"is no fault|a call from 1"):
        parse(text)


def test_the_start_is_refused_with_one_message_that_lists_the_names():
    with pytest.raises(SettingsError) as refused:
        Settings.from_env({"ZOS_MODE": "overlap", "ZOS_FAULT": "lauch:3"})
    message = str(refused.value)
    assert message.startswith("ZOS_FAULT=lauch:3: not allowed. Allowed: on, or POINT:CALL")
    assert len(message.splitlines()) == 1 and all(point in message for point in POINTS)


def test_faults_contradict_mode_off():
    with pytest.raises(SettingsError, match="ZOS_FAULT=on contradicts ZOS_MODE=off"):
        Settings.from_env({"ZOS_MODE": "off", "ZOS_FAULT": "on"})


# ------------------------------------------------------------ as a number


@given(faults)
def test_a_fault_is_its_number_also_where_numbers_have_a_point(fault):
    assert from_code(to_code(fault)) == fault
    assert int(float(to_code(fault))) == to_code(fault)


def test_none_is_0():
    assert to_code(None) == 0 and from_code(0) is None


@given(st.integers())
def test_any_other_number_is_refused_or_a_fault(code):
    try:
        fault = from_code(code)
    except ValueError:
        return
    assert to_code(fault) == code


# ------------------------------------------------------------ the injector


@given(st.sampled_from(list(POINTS)), st.integers(1, 20), st.booleans())
def test_a_point_fails_at_its_call_once_or_from_then_on(point, at, always):
    injector = Injector([Fault(point, at, always)])
    wanted = list(range(at, 25)) if always else [at]
    assert failures(injector, point, 24) == wanted
    assert injector.struck[point] == len(wanted)


def test_other_points_do_not_fail():
    assert failures(Injector([Fault("launch", 1, True)]), "readback", 5) == []


@pytest.mark.parametrize(("rank", "failed"), [(0, [5]), (1, [2])])
def test_a_fault_of_one_rank_fails_in_that_rank_alone(rank, failed):
    planned = [Fault("launch", 5, rank=0), Fault("launch", 2, rank=1), Fault("mask", 1, rank=1 - rank)]
    injector = Injector(planned, lambda: rank)
    assert failures(injector, "launch", 6) == failed and failures(injector, "mask", 6) == []


def test_arming_counts_from_anew_and_forgets_what_was_armed():
    injector = Injector([Fault("launch", 3)])
    injector.passes("launch")
    injector.arm([Fault("launch", 2), Fault("relay", 1)])
    assert failures(injector, "launch", 4) == [2] and failures(injector, "relay", 2) == [1]
    injector.arm([])
    assert failures(injector, "launch", 4) == []


def test_what_stands_in_a_callables_place_fails_before_it_or_gives_what_it_gives():
    class Owner:
        calls = 0

        def act(self, n, *, m):
            self.calls += 1
            return n + m

    owner, injector = Owner(), Injector([Fault("launch", 2)])
    injector.stand("launch", owner, "act")
    assert owner.act(1, m=2) == 3
    with pytest.raises(InjectedFault, match="launch, call 2"):
        owner.act(1, m=2)
    assert owner.calls == 1 and owner.act(2, m=2) == 4
