"""A sink behind `Gather`: fewer calls, the same records."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.made_records import records
from zos_sglang.observe import gather
from zos_sglang.observe.gather import Gather
from zos_sglang.observe.keeper import DUE, DUE_NS


class Sink:
    """Notes the numbers of the records of each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[int]] = []
        self.time = 0
        monkeypatch.setattr(gather, "now", lambda: self.time)
        self.gather = Gather(self)

    def __call__(self, taken: np.ndarray) -> None:
        self.calls.append(taken["step"].tolist())

    def give(self, count: int, size: int = 16) -> None:
        made = records(count)
        for begin in range(0, count, size):
            self.gather(made[begin : begin + size])


def test_records_come_in_large_pieces_each_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink(monkeypatch)
    sink.give(2 * DUE)
    assert sink.calls == [list(range(1, DUE + 1)), list(range(DUE + 1, 2 * DUE + 1))]


def test_a_second_is_the_longest_that_records_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink(monkeypatch)
    sink.give(32)
    assert sink.calls == []
    sink.time += DUE_NS
    sink.gather(records(0))
    assert sink.calls == [list(range(1, 33))]


def test_a_sink_is_called_once_a_second_also_without_records(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink(monkeypatch)
    for _ in range(3):
        sink.time += DUE_NS
        sink.gather(records(0))
    assert sink.calls == [[], [], []]


def test_at_the_end_nothing_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink(monkeypatch)
    sink.give(20)
    sink.gather.flush()
    sink.gather.flush()
    assert sink.calls == [list(range(1, 21))]
