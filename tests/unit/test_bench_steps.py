"""scripts/bench_steps.py: what it holds records against, and that a wrong record does not pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.made_records import steady
from zos_sglang.observe.columns import from_columns, to_columns
from zos_sglang.observe.names import code
from zos_sglang.testing.bench.client import BenchError, Wave
from zos_sglang.testing.bench.steps import Plan, check, over_floor, record, row, told

FLOOR = {"us": 2000.0, "mean_len": 132.0}
PROMPT = 32


def wave(mode: str, floor: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A steady batch whose device takes 2 ms and whose thread takes 1 ms a step."""
    found = steady(200, gpu=2.0, cpu=1.0, overlap=mode != "sync")
    found["mode"] = code("mode", mode)
    if mode == "resident":
        found["path"] = code("path", "resident")
    for name, value in fields.items():
        found[name] = value
    kept = {"floor": floor, "records": to_columns(found), "signs": []}
    return {"batch": 4, "mode": mode, "prompt": PROMPT, **kept}


def failed(found: dict[str, Any], *, asynchronous: bool = True) -> list[str]:
    return [one.what for one in check(found, asynchronous=asynchronous) if not one.ok]


@pytest.mark.parametrize("mode", ["sync", "stock", "overlap", "resident"])
def test_records_of_a_steady_batch_pass(mode: str) -> None:
    assert failed(wave(mode, FLOOR)) == []


def test_a_mode_whose_signs_say_the_opposite_does_not_pass() -> None:
    sync = wave("sync")
    assert any("sign" in what for what in failed({**sync, "mode": "overlap"}))


def test_a_device_without_samples_does_not_pass() -> None:
    assert "batch 4, overlap: at least 8 device times" in failed(wave("overlap", gpu=-1))


def test_a_lane_whose_device_waits_does_not_pass() -> None:
    assert "batch 4, resident: the device is idle 20 us at most" in failed(wave("resident", gpu_gap=90_000))


@pytest.mark.parametrize("us", [1700.0, 2300.0])
def test_device_times_that_are_not_the_floors_do_not_pass(us: float) -> None:
    assert "batch 4, resident: device time 0.97 to 1.08 times the floor" in failed(
        wave("resident", FLOOR | {"us": us})
    )


def test_the_floor_is_held_against_steps_of_its_own_kv_length() -> None:
    growing = wave("resident", FLOOR | {"mean_len": 182.0}, gpu=(1500 + 10 * np.arange(200)) * 1000)
    assert over_floor(from_columns(growing["records"]), growing) == pytest.approx(2990 / 2000, abs=0.01)


def test_a_forward_computed_by_the_thread_does_not_pass_where_a_device_computes() -> None:
    found = failed(wave("overlap", cpu_forward=500_000))
    assert "batch 4, overlap: no forward is computed by the thread" in found


def test_where_the_thread_is_the_device_no_sign_may_claim_to_know() -> None:
    assert failed(wave("overlap"), asynchronous=False) != []
    assert failed(wave("overlap", cpu_forward=500_000), asynchronous=False) == []


def test_the_table_shows_step_device_and_ratio_to_the_floor() -> None:
    assert row(wave("resident", FLOOR))[:4] == ["4", "resident", "2000", "2000"]
    assert row(wave("resident", FLOOR))[-1] == "1.000"
    assert row(wave("overlap"))[-1] == "-"


def test_verdicts_are_counted_by_sign() -> None:
    signs = [{"sign": "token-time", "verdict": "with"}, {"sign": "token-time", "verdict": "cannot-tell"}]
    assert told([{"signs": signs}])["token-time"] == {"with": 1, "without": 0, "cannot-tell": 1}


class Server:
    """Keeps records of `kept` decode steps of each wave."""

    def __init__(self, kept: int, faults: int = 0) -> None:
        self.kept, self.faults, self.launches = kept, faults, 0
        self.records: np.ndarray = steady(1, gpu=2.0, cpu=1.0)

    def post(self, path: str, body: dict[str, Any]) -> list[bool]:
        return [True]

    def switch(self, mode: str) -> None:
        self.mode = mode

    def wave(self, asked: list[list[int]], tokens: int) -> Wave:
        self.records = steady(self.kept, gpu=2.0, cpu=1.0)
        self.records["step"] += self.launches
        self.launches += self.kept
        return Wave([[0] * tokens for _ in asked], 0.1)

    def zos(self) -> dict[str, Any]:
        last = to_columns(self.records)
        return {"mode": self.mode, "steps": {"launches": self.launches, "last": last, "faults": self.faults}}


def plan(output: int) -> Plan:
    return Plan("tiny", "torch_native", ("overlap",), (4,), 32, output, 384)


def test_a_wave_is_kept_with_its_setting() -> None:
    (found,) = record(Server(63), plan(64))  # type: ignore[arg-type]
    assert (found["batch"], found["mode"], found["output"]) == (4, "overlap", 64)
    assert len(found["records"]["step"]) == 63


@pytest.mark.parametrize(("server", "message"), [(Server(62), "62 of 63"), (Server(63, 1), "failed 1 times")])
def test_steps_without_a_record_are_an_error(server: Server, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        list(record(server, plan(64)))  # type: ignore[arg-type]


def test_more_steps_than_a_server_keeps_are_refused() -> None:
    with pytest.raises(BenchError, match="--output-tokens 5000"):
        list(record(Server(1), plan(5000)))  # type: ignore[arg-type]
