"""The server's side of a run of arrivals, on made-up step records."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from tests.unit.made_records import MS, records
from zos_sglang.observe.names import AFTER_IDLE
from zos_sglang.testing.bench.arrivals_steps import HttpProcess, steps_of


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
