"""The model over a workload, and its command."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import pytest

from zos_sglang.__main__ import main
from zos_sglang.observe.model import PREDICTED
from zos_sglang.observe.simulate import simulate
from zos_sglang.observe.workload import Workload

#: One batch that runs for long.
STEADY = {"requests": 8, "max_running": 8, "prompt": 8, "output": 3000}


@pytest.mark.parametrize("mode", PREDICTED)
@pytest.mark.parametrize(
    "costs",
    [
        {"gpu": 3000.0, "cpu": 2000.0},
        {"gpu": 1500.0, "cpu": 2000.0, "cpu_row": 30.0},
        {"gpu": 3000.0, "cpu": 2000.0, "serial": 0.4, "gpu_row": 10.0},
        {"gpu": 500.0, "cpu": 2000.0, "serial": 0.1, "cpu_lane": 900.0},
        {"gpu": 2000.0, "cpu": 1000.0, "d2h": 1500.0},
        {"gpu": 2000.0, "cpu": 1000.0, "d2h": 2500.0, "depth": 2},
    ],
)
def test_without_jitter_it_is_the_model(mode: str, costs: dict[str, float]) -> None:
    found = simulate(Workload(**STEADY, **costs), mode)
    assert found.interval_us and found.predicted_us
    # Where the copy sets the pace, steps come in groups: the mean is the model's.
    assert found.interval_us["mean"] == pytest.approx(found.predicted_us.low, rel=0.005)


def test_the_published_example() -> None:
    load = Workload(**STEADY, gpu=30_000.0, cpu=8_000.0, serial=0.75, d2h=1_000.0)
    serial, ahead = (simulate(load, mode).interval_us for mode in ("sync", "overlap"))
    assert serial and 37_000 <= serial["p50"] <= 39_000
    assert ahead and 30_000 <= ahead["p50"] <= 31_000


@pytest.mark.parametrize("mode", PREDICTED)
def test_every_token_is_made(mode: str) -> None:
    load = Workload(requests=300, rate=50, spread=1.5, output=30, jitter=0.5, ranks=3, depth=2)
    found = simulate(load, mode, seed=5)
    assert found.requests == 300
    assert found.ttft_us and found.ttft_us["count"] == 300
    assert found.ttft_us["p50"] > 0
    # All tokens but the first of each come from decode steps.
    made = round(found.rows_mean * found.decode_steps) - found.rows_wasted
    assert made == pytest.approx(found.tokens - 300, abs=0.01 * found.decode_steps + 1)


def test_a_seed_decides_everything() -> None:
    load = Workload(requests=200, rate=100, spread=0.5, jitter=0.3, ranks=4, output=20)
    assert simulate(load, "overlap", 3) == simulate(load, "overlap", 3)
    assert simulate(load, "overlap", 3) != simulate(load, "overlap", 4)


def test_overlap_computes_rows_that_nobody_wants() -> None:
    load = Workload(requests=100, output=20)
    assert simulate(load, "sync").rows_wasted == 0
    assert simulate(load, "overlap").rows_wasted == 100
    assert simulate(Workload(requests=100, output=20, depth=3), "overlap").rows_wasted == 300


def test_many_ranks_wait_for_the_slowest() -> None:
    one, many = (
        simulate(Workload(**STEADY, gpu=3000.0, cpu=2000.0, jitter=0.3, ranks=ranks), "sync").interval_us
        for ranks in (1, 32)
    )
    assert one and many and many["p50"] > one["p50"] * 1.1


def test_the_lane_is_left_when_the_batch_changes() -> None:
    steady = simulate(Workload(**STEADY), "resident")
    assert steady.lane_steps >= steady.decode_steps - 3
    busy = simulate(Workload(requests=200, rate=100, output=20, spread=1.0), "resident")
    assert 0 < busy.lane_steps < busy.decode_steps
    assert simulate(Workload(**STEADY), "overlap").lane_steps == 0


def test_a_server_with_nothing_to_do_is_idle() -> None:
    found = simulate(Workload(requests=20, rate=0.5, output=10), "overlap")
    assert found.seconds > 10
    assert found.gpu_busy < 0.05
    assert found.interval_us and found.interval_us["p99"] < 10_000


def test_it_is_fast() -> None:
    start = time.process_time()
    found = simulate(Workload(requests=20_000, output=128, max_running=256), "overlap")
    assert found.decode_steps > 9_000
    assert time.process_time() - start < 5


def test_one_token_each_needs_no_decode_step() -> None:
    found = simulate(Workload(requests=5, output=1), "overlap")
    assert (found.decode_steps, found.tokens, found.tpot_us, found.interval_us) == (0, 5, None, None)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--requests", "50", "--output", "20", "--jitter", "0.2", "--seed", "7"]
    assert main([*words, "--modes", "overlap,sync", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    load = Workload(requests=50, output=20, jitter=0.2)
    assert found["workload"] == asdict(load)
    expected = [asdict(simulate(load, mode, 7)) for mode in ("overlap", "sync")]
    assert found["outcomes"] == json.loads(json.dumps(expected))


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "20", "--output", "10"]) == 0
    shown = capsys.readouterr().out
    for word in ("sync", "overlap", "resident", "over sync", "thread busy"):
        assert word in shown


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--modes", "lane"], "no simulation of mode 'lane'"),
        (["--gpu", "-1"], "gpu must be a number that is not negative"),
        (["--cpu", "nan"], "cpu must be a number that is not negative"),
        (["--ranks", "0"], "ranks must be at least 1"),
        (["--serial", "2"], "serial is a share"),
        (["--seed", "-1"], "seed must not be negative"),
        (["--gpu", "0", "--cpu", "0", "--cpu-lane", "0", "--d2h", "0", "--gpu-token", "0"], "takes no time"),
    ],
)
def test_a_bad_workload_gets_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    shown = capsys.readouterr().err
    assert complaint in shown and shown.count("\n") == 1
