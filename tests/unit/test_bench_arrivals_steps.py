"""The server's side of a run of arrivals, on made-up step records."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from tests.unit.made_records import MS, records
from zos_sglang.observe.names import AFTER_IDLE, LANE_OPENING
from zos_sglang.testing.bench.arrivals_steps import HttpProcess, prefills_of, steps_of


def test_what_the_thread_does_outside_forwards_is_shared_out_over_the_decode_steps() -> None:
    found = steps_of(records(4, forward=["extend", *["decode"] * 3], cpu=500_000, cpu_forward=200_000))
    assert found is not None
    assert (found["decode"], found["prefill"], found["cpu_us"]) == (3, 1, 400)


def test_a_server_that_computes_nothing_on_its_thread_has_no_forward_to_take_out() -> None:
    found = steps_of(records(2, cpu=500_000))
    assert found is not None and found["cpu_us"] == 500


def test_a_larger_batch_counts_for_more_tokens() -> None:
    made = records(4, rows=[1, 1, 1, 8])
    made["t_output"] = MS * np.array([10, 11, 12, 17])
    found = steps_of(made)
    assert found is not None
    assert (found["rows"], found["itl_ms"]["p50"], found["itl_ms"]["mean"]) == (2.75, 5, 4.2)


def test_a_prefill_between_two_decode_steps_makes_their_distance() -> None:
    made = records(3, forward=["decode", "extend", "decode"], rows=[4, 2, 6])
    made["t_output"] = MS * np.array([10, 18, 20])
    found = steps_of(made)
    assert found is not None
    assert (found["itl_ms"]["p50"], found["prompts"]) == (10, 2)


def test_an_idle_server_is_no_time_between_tokens() -> None:
    made = records(5, forward=["decode", "decode", "extend", "decode", "decode"])
    made["t_output"] = MS * np.array([10, 11, 900, 901, 902])
    made["flags"][2] = AFTER_IDLE
    found = steps_of(made)
    assert found is not None and found["itl_ms"]["p99"] == 1


def test_steps_are_told_apart_by_what_the_thread_had_to_do() -> None:
    made = records(6, forward=["extend", "decode", "decode", "decode", "extend", "decode"], cpu=0, gpu=-1)
    made["cpu"] = 1000 * np.array([900, 300, 200, 100, 1100, 500])
    made["flags"][[1, 2]] = LANE_OPENING
    made["t_launch"], made["t_launched"] = MS, MS + 1000 * np.array([700, 80, 60, 40, 900, 80])
    made["gpu"][[0, 3]] = 5_000_000, 2_000_000
    found = steps_of(made)
    assert found is not None
    kinds = found["kinds"]
    assert {name: kind["steps"] for name, kind in kinds.items()} == {
        "prefill": 2,
        "behind": 2,
        "opening": 1,
        "decode": 1,
    }
    assert [kind["cpu"] for kind in kinds.values()] == [1000, 400, 200, 100]
    assert [kind["launch"] for kind in kinds.values()] == [800, 80, 60, 40]
    assert [kind["gpu"] for kind in kinds.values()] == [5000, None, None, 2000]


def test_each_prefill_is_told_by_itself_from_the_first_ones_intake_on() -> None:
    made = records(3, forward=["extend", "decode", "extend"], tokens=[512, 4, 256])
    made["t_intake"], made["t_launch"] = MS * np.array([10, 18, 20]), MS * np.array([11, 19, 21])
    made["t_launched"], made["t_ready"] = MS * np.array([14, 19, 23]), [0, 0, 26 * MS]
    made["t_output"] = MS * np.array([17, 20, 27])
    assert prefills_of(made) == {
        "tokens": [512, 256],
        "launch_ms": [1, 11],
        "launched_ms": [4, 13],
        "ready_ms": [None, 16],
        "output_ms": [7, 17],
    }


def test_no_prefill_is_none_to_tell() -> None:
    assert prefills_of(records(2)) is None and prefills_of(None) is None


def test_times_that_nobody_took_are_in_no_median() -> None:
    made = records(3)
    made["t_launch"], made["t_launched"] = [0, MS, MS], [MS, 0, MS + 50_000]
    found = steps_of(made)
    assert found is not None and found["kinds"]["decode"]["launch"] == 50
    assert found["kinds"]["prefill"] == {"steps": 0} | dict.fromkeys(
        ("cpu", "prepare", "launch", "output", "gpu")
    )


@pytest.mark.parametrize("made", [None, records(0), records(1)])
def test_without_two_decode_steps_there_are_no_figures(made: np.ndarray | None) -> None:
    assert steps_of(made) is None


def test_the_http_process_is_charged_by_the_token() -> None:
    watched = HttpProcess(os.getpid())
    begun, until = watched.seconds(), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    found = watched.cost(begun, 1000, 1.0)
    # The kernel counts in steps of 10 ms.
    assert found is not None and 70 <= found["us_a_token"] < 1000
    assert found["cpu_share"] == pytest.approx(found["us_a_token"] / 1000, abs=1e-3)


def test_nobody_watches_a_server_without_a_process() -> None:
    assert HttpProcess(None).cost(0.0, 1000, 1.0) is None
