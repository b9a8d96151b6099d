"""The four signs, each by itself, with and without overlap."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.made_records import MS, steady
from zos_sglang.observe.model import Step
from zos_sglang.observe.names import code
from zos_sglang.observe.signs import SLOW_THREAD, Delivery, Finding, Sign, Verdict, delivery, judge


def by_sign(records: np.ndarray, **known: Any) -> dict[Sign, Finding]:
    return {finding.sign: finding for finding in judge(records, **known)}


def verdicts(records: np.ndarray) -> set[Verdict]:
    return {finding.verdict for finding in judge(records)}


@pytest.mark.parametrize("sign", Sign)
@pytest.mark.parametrize(("overlap", "verdict"), [(True, Verdict.WITH), (False, Verdict.WITHOUT)])
def test_each_sign_alone_tells_the_loops_apart(sign: Sign, overlap: bool, verdict: Verdict) -> None:
    made = steady(100, gpu=2.6, cpu=2, overlap=overlap)
    if not overlap:  # an idle device's first event is stamped as the forward is called
        launch = made["t_launched"] - made["t_forward"]
        made["gpu"] += launch
        made["gpu_gap"] -= launch
    found = by_sign(made)[sign]
    assert found.verdict is verdict
    assert found.note is None
    # Without noise the value is the expectation, except that with overlap the intake counts in "ready".
    expected = found.expected_with if overlap else found.expected_without
    if not (overlap and sign is Sign.READY_TO_LAUNCH):
        assert found.value == pytest.approx(expected, rel=0.001)


@settings(max_examples=60, deadline=None)
@given(
    gpu=st.floats(0.5, 20),
    part=st.floats(0.2, 0.95),
    overlap=st.booleans(),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 1000),
)
def test_no_sign_is_wrong_on_any_steady_loop(
    gpu: float, part: float, overlap: bool, noise: float, seed: int
) -> None:
    made = steady(80, gpu=gpu, cpu=gpu * part, d2h=0.02, overlap=overlap)
    shift = np.random.default_rng(seed).normal(0, noise * gpu * part * MS / 8, 80).astype(np.int64)
    for name in ("t_forward", "t_output"):
        made[name] += shift
    wrong = Verdict.WITHOUT if overlap else Verdict.WITH
    assert wrong not in verdicts(made)


def test_units_and_signs_of_the_values() -> None:
    ahead, serial = (by_sign(steady(100, gpu=3, cpu=2, overlap=overlap)) for overlap in (True, False))
    assert [found.unit for found in ahead.values()] == ["ratio", "us", "ratio", "us"]
    assert ahead[Sign.CPU_OVER_WALL].value == pytest.approx(2 / 3)
    assert ahead[Sign.INTERVAL_OVER_GPU].value == pytest.approx(1)
    assert ahead[Sign.TOKEN_TIME].value == pytest.approx(3000)
    assert (ahead[Sign.READY_TO_LAUNCH].value or 0) < 0
    # 1 ms of processing, 3/8 ms from selection to forward.
    assert serial[Sign.READY_TO_LAUNCH].value == pytest.approx(1375)


def test_token_time_carries_its_distribution() -> None:
    made = steady(200, gpu=3, cpu=2)
    made["t_output"][100:] += 500_000
    detail = by_sign(made)[Sign.TOKEN_TIME].detail
    assert detail == {"p50": 3000.0, "p90": 3000.0, "p99": 3000.0, "spread": 0.0}


def test_a_slow_thread_is_said_to_be_one() -> None:
    found = by_sign(steady(100, gpu=1, cpu=3))[Sign.READY_TO_LAUNCH]
    assert (found.value or 0) > 0
    assert (found.verdict, found.note) == (Verdict.CANNOT_TELL, SLOW_THREAD)
    # Without overlap the thread waited for each result, so the distance is exact and tells.
    serial = by_sign(steady(100, gpu=1, cpu=3, overlap=False))[Sign.READY_TO_LAUNCH]
    assert (serial.verdict, serial.note) == (Verdict.WITHOUT, SLOW_THREAD)


def test_expectations_too_close_cannot_tell() -> None:
    found = by_sign(steady(100, gpu=30, cpu=0.5, d2h=0.01, overlap=False))
    assert found[Sign.INTERVAL_OVER_GPU].verdict is Verdict.CANNOT_TELL
    assert found[Sign.INTERVAL_OVER_GPU].note == "with and without are too close together"
    assert found[Sign.READY_TO_LAUNCH].verdict is Verdict.WITHOUT


@pytest.mark.parametrize("count", [0, 1, 20])
def test_too_few_steps_cannot_tell(count: int) -> None:
    found = judge(steady(30, gpu=3, cpu=2)[:count])
    assert {one.verdict for one in found} == {Verdict.CANNOT_TELL}
    assert all("are needed" in (one.note or "") for one in found)


def test_a_device_on_the_thread_cannot_tell() -> None:
    assert verdicts(steady(100, gpu=3, cpu=2, overlap=False, cpu_forward=MS)) == {Verdict.CANNOT_TELL}


def test_without_device_times_only_readiness_tells() -> None:
    made = steady(100, gpu=3, cpu=2, overlap=False)
    made["gpu"] = -1
    found = by_sign(made)
    assert found[Sign.READY_TO_LAUNCH].verdict is Verdict.WITHOUT
    assert found[Sign.INTERVAL_OVER_GPU].note == "an input is unknown"
    known = {(code("forward", "decode"), 4): Step(gpu=3000, d2h=50)}
    assert {one.verdict for one in judge(made, known)} == {Verdict.WITHOUT}


def test_results_that_nobody_saw_leave_the_devices_gap() -> None:
    for overlap, verdict in ((True, Verdict.WITH), (False, Verdict.WITHOUT)):
        made = steady(100, gpu=3, cpu=2, overlap=overlap, ready="unseen")
        assert by_sign(made)[Sign.READY_TO_LAUNCH].verdict is verdict


def test_a_wait_that_spins_is_no_work() -> None:
    made = steady(100, gpu=3, cpu=2, overlap=False)
    plain = by_sign(made)[Sign.CPU_OVER_WALL]
    made["cpu"] = made["wall"]
    assert by_sign(made)[Sign.CPU_OVER_WALL] == plain


def test_the_newest_mode_is_judged() -> None:
    old, new = steady(200, gpu=3, cpu=2), steady(60, gpu=3, cpu=2, overlap=False)
    new["step"] += 200
    assert verdicts(np.concatenate([old, new])) == {Verdict.WITHOUT}


def test_the_lane_is_judged_by_its_own_cpu() -> None:
    lane = steady(100, gpu=3, cpu=1, mode="resident", path="resident")
    assert verdicts(lane) == {Verdict.WITH}


def test_bursts_are_told_from_a_slow_device() -> None:
    made = steady(200, gpu=3, cpu=1)
    assert delivery(made) is Delivery.SLOW_GPU
    # Every second result is held until the next one is out.
    made["t_output"][:-1:2] = made["t_output"][1::2] - 1000
    assert delivery(made) is Delivery.BURSTS
    found = by_sign(made)[Sign.TOKEN_TIME]
    assert (found.verdict, found.note) == (Verdict.CANNOT_TELL, "output comes in bursts")
    assert by_sign(made)[Sign.INTERVAL_OVER_GPU].verdict is Verdict.WITH


def test_a_loop_that_launches_in_bursts_because_results_are_held_is_told_too() -> None:
    """One step ahead, results shown in pairs: two launches follow them, then the loop waits for two."""
    made = steady(200, gpu=3, cpu=1)
    for name in ("t_forward", "t_output"):
        made[name][::2] += 2 * MS
    assert delivery(made) is Delivery.BURSTS
    assert by_sign(made)[Sign.TOKEN_TIME].note == "output comes in bursts"
    # The same times from a device whose steps differ: nothing was held.
    made["gpu"] = np.where(np.arange(200) % 2, 1, 5) * MS
    assert delivery(made) is Delivery.STEADY
    # Nor is it known where the device's time is not.
    made["gpu"] = -1
    assert delivery(made) is Delivery.STEADY
    assert delivery(made, 3000) is Delivery.BURSTS


def test_a_late_result_now_and_then_is_no_burst() -> None:
    made = steady(200, gpu=3, cpu=1)
    for name in ("t_forward", "t_output"):
        made[name][::5] += 2 * MS
    assert delivery(made) is Delivery.STEADY


def test_a_slow_thread_is_no_slow_device_and_no_burst() -> None:
    assert delivery(steady(200, gpu=1, cpu=3)) is Delivery.STEADY
    assert delivery(steady(0, gpu=1, cpu=3)) is Delivery.STEADY


@pytest.mark.parametrize("count", [1, 60])
def test_findings_are_json(count: int) -> None:
    found = judge(steady(60, gpu=3, cpu=2)[:count])
    text = json.dumps([asdict(one) for one in found], allow_nan=False)
    assert [entry["sign"] for entry in json.loads(text)] == list(Sign)
