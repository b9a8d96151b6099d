"""Decode steps of the loop that nobody is told of have the records that they had if somebody were."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fake_scheduler import Limits, Script
from tests.unit.lane_simulation import submit
from tests.unit.recording import complete
from tests.unit.simulation import Scenario, build
from tests.unit.test_lane_mutations import OTHER, TEXT, long
from tests.unit.test_properties import EXAMPLES, scenarios
from zos_sglang.observe.columns import to_columns
from zos_sglang.observe.names import code
from zos_sglang.observe.record import Ring
from zos_sglang.observe.recorder import Recorder
from zos_sglang.overlap.watch import OUTSIDE
from zos_sglang.upstream.step_facts import make_facts

#: What a launch says of itself; the rest of a record are times, and what follows from them.
WORDS = (
    *("step", "rows", "tokens", "waiting", "mode", "reason", "forward", "barrier"),
    *("refusal", "departure", "depth", "flags"),
)


class Told(Recorder):
    """Counts the launches that it is told of; `deaf` to what would let the loop tell of fewer."""

    def __init__(self, scheduler: Any, account: Any, deaf: bool) -> None:
        super().__init__(Ring(4096), make_facts(scheduler, account), asynchronous=True, on_fault=self._failed)
        self.mode = code("mode", "overlap")
        self.deaf, self.told = deaf, 0

    def _failed(self) -> None:
        raise AssertionError("recording failed")

    def launched(  # type: ignore[override]  # noqa: PLR0917
        self,
        batch: Any,
        result: Any,
        ride: int,
        reason: Any,
        depth: int,
        barrier: Any = None,
        said: Any = None,
    ) -> None:
        self.told += ride == OUTSIDE
        super().launched(batch, result, ride, reason, depth, barrier, None if self.deaf else said)


def records_of(world: Any, account: Any, deaf: bool) -> tuple[np.ndarray, int]:
    world.watch = recorder = Told(world.scheduler, account, deaf)
    world.run().check()
    recorder.close()
    records = recorder.ring.since(0)
    complete(records)
    assert records["step"].tolist() == list(range(1, world.scheduler.serials + 1))
    return records, recorder.told


class NoLane:
    refusal = departure = None


def same(scenario: Scenario) -> tuple[np.ndarray, int]:
    """Run it both ways; the records, and how many launches the loop told of."""
    (silent, told), (all_told, every) = (
        records_of(build(scenario), NoLane(), deaf) for deaf in (False, True)
    )
    for name in WORDS:
        assert silent[name].tolist() == all_told[name].tolist(), name
    assert told <= every == len(all_told)
    return silent, told


@EXAMPLES
@given(scenarios())
def test_records_are_the_same_whatever_happens(scenario: Scenario) -> None:
    same(scenario)


@EXAMPLES
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 12), st.integers(10, 60)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from(["fine", "coarse"]),
)
def test_they_are_the_same_over_long_answers(
    asked: list[tuple[int, int, int]], rows: int, barrier: str
) -> None:
    script: Script = {}
    for rid, (tick, length, tokens) in enumerate(asked):
        script.setdefault(tick, []).append(("submit", long(rid, OTHER[:length], tokens)))
    same(Scenario(script, Limits(rows=rows + 1, barrier=barrier, capacity=400)))


def test_most_steps_of_a_steady_batch_are_not_told_of() -> None:
    records, told = same(Scenario(submit(long(1, TEXT[:5], 60), long(2, OTHER[:7], 60))))
    decode = records["forward"] == code("forward", "decode")
    assert decode.sum() > 50 and told < 6
    assert set(records["rows"][decode].tolist()) == {1, 2}, "a row that goes is told of"


def test_who_waits_behind_a_full_batch_is_in_each_record() -> None:
    script: Script = {
        1: [("submit", spec) for spec in (long(1, TEXT[:5], 40), long(2, OTHER[:5], 40))],
        9: [("submit", long(3, OTHER[:6], 5))],
        17: [("submit", long(4, OTHER[:7], 5))],
    }
    records, told = same(Scenario(script, Limits(rows=2)))
    decode = records["forward"] == code("forward", "decode")
    waiting = to_columns(records[decode])["waiting"]
    assert {0, 1, 2} <= set(waiting) and told < len(records) // 2
