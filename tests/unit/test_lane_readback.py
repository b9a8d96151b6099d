"""Tokens on their way home: which slot, on which stream, and how long it stays."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from zos_sglang.resident.readback import SMALLEST_DEPTH, Readback


class Event:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def record(self):
        self.log.append(f"record {self.name}")


def readback(depth=3, capacity=4):
    """A ring whose slot `n` holds 10 n, 10 n + 1, ..., and what its readback does in which order."""
    log: list[str] = []
    ring = torch.arange(depth)[:, None] * 10 + torch.arange(capacity)
    names = iter(range(depth))

    @contextmanager
    def copy_context():
        log.append("enter")
        yield
        log.append("leave")

    return (
        Readback(ring, lambda: log.append("wait"), copy_context, lambda: Event(log, next(names))),
        ring,
        log,
    )


def test_the_copy_stream_waits_and_the_event_is_recorded_behind_the_copy():
    home, _, log = readback()
    home.queue(2)
    assert log == ["wait", "enter", "record 0", "leave"]


def test_steps_take_the_slots_in_turn_each_with_its_own_event():
    home, _, _ = readback(depth=3)
    got = [(tokens[0].item(), event.name) for tokens, event in (home.queue(1) for _ in range(7))]
    assert got == [(0, 0), (10, 1), (20, 2), (0, 0), (10, 1), (20, 2), (0, 0)]


def test_only_the_rows_of_the_step_are_read():
    home, _, _ = readback()
    assert home.queue(3)[0].tolist() == [0, 1, 2]
    assert home.queue(1)[0].tolist() == [10]


def test_what_came_home_stays_when_the_ring_is_written_again():
    home, ring, _ = readback()
    tokens, _ = home.queue(2)
    ring[0] = 99
    assert tokens.tolist() == [0, 1]


@pytest.mark.parametrize("depth", [3, 4, 8])
def test_a_slot_stays_for_as_long_as_two_more_steps_are_queued(depth):
    """Whatever the depth: the host reads step N before step N + 2 is launched."""
    home, ring, _ = readback(depth=depth)
    tokens, _ = home.queue(4)
    before = tokens.tolist()
    ring += 1000
    home.queue(4)
    home.queue(4)
    assert tokens.tolist() == before


def test_a_ring_too_small_for_two_steps_under_way_is_refused():
    assert SMALLEST_DEPTH == 3
    with pytest.raises(ValueError, match="2 slots"):
        readback(depth=2)


def test_the_hosts_side_is_pageable_without_a_cuda_device_and_as_wide_as_the_ring():
    home, ring, _ = readback(depth=5, capacity=7)
    assert home.host.shape == ring.shape and home.host.dtype == torch.int64 and not home.host.is_pinned()
