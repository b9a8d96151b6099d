"""Shares, costs and distributions of step records."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit.made_records import MS, records, steady
from zos_sglang.observe.names import AFTER_IDLE
from zos_sglang.observe.summary import cost, distribution, summarise


def test_shares_are_of_all_steps_and_nothing_pending_stands_apart() -> None:
    made = records(
        10,
        path=["sync"] + ["overlap"] * 6 + ["overlap-blocked"] * 2 + ["resident"],
        reason=["mode-sync"] + ["nothing-pending"] * 4 + ["overlapped"] * 5,
    )
    found = summarise(made)["paths"]
    assert {name: entry["steps"] for name, entry in found.items()} == {
        "sync": 1,
        "overlap": 2,
        "overlap-blocked": 2,
        "resident": 1,
        "nothing-pending": 4,
    }
    assert sum(entry["share"] for entry in found.values()) == pytest.approx(1)


def with_reason(slow_ms: int, fast_ms: int, rows: int = 4) -> np.ndarray:
    """Twenty steps each of grammar-sync and of overlap, launched so many milliseconds apart."""
    gaps = np.array([slow_ms] * 20 + [fast_ms] * 20) * MS
    return records(
        40,
        reason=["grammar-sync"] * 20 + ["overlapped"] * 20,
        path=["sync"] * 20 + ["overlap"] * 20,
        t_forward=MS + np.cumsum(gaps),
        rows=rows,
    )


def test_a_reason_costs_what_its_steps_take_longer() -> None:
    (found,) = summarise(with_reason(5, 3))["reasons"]
    assert found == {
        "reason": "grammar-sync",
        "steps": 20,
        "share": 0.5,
        "cost_us": 2000.0,
        "compared": 19,
    }


def test_a_cost_is_weighted_over_size_classes() -> None:
    small, large = with_reason(5, 3), with_reason(9, 3, rows=64)
    large["step"] += 100
    both = np.concatenate([small, large, large[:20]])
    both["step"][-20:] += 100
    assert cost(both, "grammar-sync") == (pytest.approx((19 * 2000 + 38 * 6000) / 57, abs=0.1), 57)


def test_a_cost_without_steps_to_compare_is_unknown() -> None:
    alone = with_reason(5, 3)
    alone["rows"][20:] = 64
    assert cost(alone, "grammar-sync") == (None, 0)
    assert cost(with_reason(5, 3)[:25], "grammar-sync") == (None, 0)


def test_steps_of_the_lane_are_no_base_for_a_cost() -> None:
    made = with_reason(5, 3)
    made["path"][20:] = 4
    assert cost(made, "grammar-sync") == (None, 0)


def test_an_idle_gap_is_no_interval() -> None:
    made = steady(100, gpu=3, cpu=2, flags=[0] * 50 + [AFTER_IDLE] + [0] * 49)
    for name in ("t_forward", "t_output"):
        made[name][50:] += 10_000 * MS
    found = summarise(made)
    assert found["interval_us"] == {"count": 98, "mean": 3000.0, "p50": 3000.0, "p90": 3000.0, "p99": 3000.0}
    assert found["tpot_us"]["p99"] == 3000.0


def test_percentiles_are_values_that_occurred() -> None:
    values = np.arange(1, 101) * 1000
    assert distribution(values) == {"count": 100, "mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert distribution(np.array([7000])) == {"count": 1, "mean": 7.0, "p50": 7.0, "p90": 7.0, "p99": 7.0}
    assert distribution(np.array([], np.int64)) is None


def test_weights_count_values_several_times() -> None:
    values, weights = np.array([3000, 1000, 2000]), np.array([1, 5, 2])
    assert distribution(values, weights) == distribution(np.repeat(values, weights))


def test_time_per_token_counts_every_request() -> None:
    sizes = [1] * 30 + [64] * 10
    made = steady(40, gpu=3, cpu=2, rows=sizes, tokens=sizes)
    made["t_output"][30:] += 2 * MS * np.arange(1, 11)
    found = summarise(made)["tpot_us"]
    assert found["count"] == 29 + 640
    assert found["p50"] == 5000.0


def test_several_tokens_a_step_share_its_time() -> None:
    found = summarise(steady(40, gpu=3, cpu=2, rows=4, tokens=12))["tpot_us"]
    assert (found["count"], found["p50"]) == (39 * 12, 1000.0)


def test_cpu_is_told_by_class_and_unknown_durations_do_not_count() -> None:
    found = summarise(steady(20, gpu=3, cpu=2, cpu_process=[-1] * 10 + [900_000] * 10))["cpu_us"]
    assert set(found) == {"prepare", "readback", "process", "depends", "forward", "total"}
    assert (found["process"]["count"], found["process"]["p50"]) == (10, 900.0)
    assert found["forward"] is None


def test_blocks_say_what_they_cost() -> None:
    (found,) = summarise(steady(50, gpu=1, cpu=3))["blocks"]
    assert (found["block"], found["steps"]) == ("cpu-bound", 49)
    # Results were there when the iteration began; the forward was called a quarter of 3 ms later.
    assert found["blocked_us"]["p50"] == 750.0


@pytest.mark.parametrize("count", [0, 1, 60])
def test_a_summary_is_json_whatever_there_is(count: int) -> None:
    found = json.loads(json.dumps(summarise(records(count)), allow_nan=False))
    assert found["steps"] == count
