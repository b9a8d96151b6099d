"""Every wait between the streams, and which barrier a step used."""

from types import SimpleNamespace

import pytest

from zos_sglang.overlap.streams import Barrier, Streams


class Recorder:
    def __init__(self, name, log, handle=None):
        self.name, self.log = name, log
        if handle is not None:
            self.cuda_stream = handle

    def wait_stream(self, other):
        self.log.append((self.name, "stream", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "event", event))


def streams(log, handles=(None, None, None), **options):
    options = {"barrier_enabled": True, "force_coarse": False, **options}
    names = ("schedule", "forward", "copy")
    return Streams(*(Recorder(n, log, h) for n, h in zip(names, handles, strict=True)), **options)


def test_each_wait_is_between_the_right_two_streams():
    log = []
    s = streams(log)
    s.forward_waits_for_schedule()
    s.copy_waits_for_forward()
    assert log == [("forward", "stream", "schedule"), ("copy", "stream", "forward")]


@pytest.mark.parametrize(
    ("options", "event", "kind", "wait"),
    [
        ({}, "read", Barrier.FINE, [("schedule", "event", "read")]),
        ({}, None, Barrier.COARSE, [("schedule", "stream", "forward")]),
        ({"force_coarse": True}, "read", Barrier.COARSE, [("schedule", "stream", "forward")]),
        ({"barrier_enabled": False}, "read", Barrier.OFF, []),
        ({"barrier_enabled": False}, None, Barrier.OFF, []),
    ],
)
def test_the_barrier_is_fine_with_an_event_coarse_without_and_off_where_programs_run_in_order(
    options, event, kind, wait
):
    log = []
    assert streams(log, **options).war_barrier(event) is kind
    assert log == wait


@pytest.mark.parametrize(
    ("handles", "shared"),
    [
        ((1, 2, 3), []),
        ((1, 1, 3), ["schedule and forward"]),
        ((1, 2, 1), ["schedule and copy"]),
        ((5, 5, 5), ["schedule and forward", "schedule and copy", "forward and copy"]),
        ((None, None, None), []),
    ],
)
def test_streams_that_share_a_handle_are_named(handles, shared):
    assert streams([], handles).aliases() == shared


def test_streams_of_a_device_without_handles_are_no_aliases():
    nothing = SimpleNamespace()
    assert Streams(nothing, nothing, nothing, barrier_enabled=False, force_coarse=False).aliases() == []
