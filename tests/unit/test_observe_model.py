"""The time of a step in each mode, predicted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit.made_records import MS, steady
from zos_sglang.observe.model import Step, gpu, inputs, predict, serial, what_if
from zos_sglang.observe.names import MODES, code


@pytest.mark.parametrize(
    ("step", "without", "ahead"),
    [
        # The published example, milliseconds: 30 of GPU, 6 to 8 of CPU, 1 of readback. The 6 are taken as S,
        # the 8 as C.
        (Step(gpu=30, cpu=8, cpu_serial=6, d2h=1), (37, 39), (30, 31)),
        # Its numbers at batch 1 come with no parts; chosen are G 10, S 5, C 7, D 1.
        (Step(gpu=10, cpu=7, cpu_serial=5, d2h=1), (16, 18), (10, 11)),
    ],
)
def test_the_published_example(step: Step, without: tuple[int, int], ahead: tuple[int, int]) -> None:
    assert predict(step, "sync") == without
    assert predict(step, "overlap") == ahead


def test_modes_that_behave_alike_are_predicted_alike() -> None:
    step = Step(gpu=3, cpu=2, cpu_lane=1)
    assert predict(step, "normal") == predict(step, "sync") == (5, 5)
    assert predict(step, "stock") == predict(step, "overlap") == (3, 3)
    for mode in MODES:
        if mode != "off":
            assert predict(step, mode)
    with pytest.raises(ValueError, match="no model of mode 'off'"):
        predict(step, "off")


def test_the_slower_of_thread_and_device_sets_the_pace() -> None:
    slow_thread = Step(gpu=2, cpu=5, cpu_lane=1, d2h=0.1)
    assert predict(slow_thread, "overlap") == (5, 5.1)
    assert predict(slow_thread, "resident") == (2, 2.1)
    assert predict(Step(gpu=2, cpu=5, cpu_serial=1), "sync") == (5, 7)


def test_a_slow_copy_is_hidden_by_depth() -> None:
    step = Step(gpu=2, cpu=2, d2h=4)
    assert predict(step, "overlap") == (4, 8)
    assert predict(step, "overlap", depth=3) == (2, 6)


def test_what_is_not_known_is_not_predicted() -> None:
    assert predict(Step(gpu=None, cpu=2, cpu_lane=2), "sync") is None
    assert predict(Step(gpu=3, cpu=2), "resident") is None


@pytest.mark.parametrize("cpu", [0.8, 2.4, 4.0])
@pytest.mark.parametrize("measured", [True, False])
def test_either_loop_predicts_the_other(cpu: float, measured: bool) -> None:
    source = steady(200, gpu=3, cpu=cpu, overlap=measured)
    target = steady(200, gpu=3, cpu=cpu, overlap=not measured)
    interval = float(np.median(np.diff(target["t_forward"]))) / 1000
    (step,) = inputs(source).values()
    found = predict(step, "sync" if measured else "overlap")
    assert found is not None
    assert found.low == pytest.approx(interval, rel=0.001)


def test_inputs_are_by_forward_and_size_class() -> None:
    small, large = steady(20, gpu=2, cpu=1, rows=3), steady(20, gpu=4, cpu=1, rows=64)
    found = inputs(np.concatenate([small, large]))
    decode = code("forward", "decode")
    assert {key: step.gpu for key, step in found.items()} == {(decode, 4): 2000, (decode, 64): 4000}


def test_the_devices_time_comes_from_the_best_samples() -> None:
    loop = steady(20, gpu=5, cpu=2, gpu_gap=900_000)
    assert gpu(loop) == 5000
    loop["gpu_gap"][3], loop["gpu"][3] = 1000, 4 * MS
    assert gpu(loop) == 4000
    lane = steady(20, gpu=3, cpu=1, path="resident", mode="resident")
    assert gpu(np.concatenate([loop, lane])) == 3000


def test_without_events_the_lane_tells_the_devices_time() -> None:
    lane = steady(50, gpu=3, cpu=1, path="resident", mode="resident")
    lane["gpu"] = -1
    assert gpu(lane) == 3000
    loop = steady(50, gpu=3, cpu=1)
    loop["gpu"] = -1
    assert gpu(loop) is None


def test_a_result_that_held_the_launch_back_counts_once() -> None:
    made = steady(40, gpu=3, cpu=2, overlap=False)
    expected = serial(made)
    # The same iterations with the result processed between selection and launch.
    made["t_select"][1:] = made["t_process"][:-1]
    assert serial(made) == pytest.approx(expected)


def test_the_readback_is_queued_while_the_device_works() -> None:
    made = steady(40, gpu=3, cpu=2)
    before = serial(made)
    made["cpu_readback"] = 100_000
    assert before is not None
    assert serial(made) == pytest.approx(before - 100)


def test_the_devices_own_work_on_the_thread_is_no_work_of_the_scheduler() -> None:
    made = steady(40, gpu=3, cpu=2, overlap=False, cpu_forward=500_000)
    (step,) = inputs(made).values()
    assert step.cpu == pytest.approx(1500)


def test_what_if_is_json_with_what_was_measured() -> None:
    both = np.concatenate([steady(50, gpu=3, cpu=2), steady(50, gpu=3, cpu=2, overlap=False)])
    both["step"] = np.arange(1, 101)
    found = json.loads(json.dumps(what_if(both), allow_nan=False))["decode 4"]
    assert found["measured"] == {"overlap": 3000.0, "sync": 4925.0}
    assert found["predicted"]["overlap"] == [3000.0, 3050.0]
    assert found["predicted"]["sync"][0] == 4925.0
    assert found["predicted"]["resident"] is None
