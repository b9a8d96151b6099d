"""scripts/bench_record.py: what it makes of a server's own measurements, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from zos_sglang.testing.bench import record_cost
from zos_sglang.testing.bench.client import BenchError, Wave


def run(mode: str, trace: bool, cost: float, flush: float, off: float) -> dict[str, Any]:
    return {
        "trace": trace,
        "mode": mode,
        "repeat": 0,
        "cost": {"cost_us": cost, "flush_us": flush, "off_us": off},
    }


def test_handing_on_counts_and_the_share_is_of_a_step_without_recording() -> None:
    runs = [
        run("resident", False, 8, 2, 500),
        run("resident", False, 10, 5, 500),
        run("overlap", True, 1, 0, 100),
    ]
    resident, overlap = record_cost.summarise(runs)
    assert (resident["mode"], resident["trace"]) == ("resident", False)
    assert (resident["total_us"]["min"], resident["total_us"]["max"]) == (10, 15)
    assert resident["share"]["max"] == 0.03
    assert (overlap["trace"], overlap["share"]["median"]) == (True, 0.01)


def test_what_a_look_at_a_clock_takes_is_that_of_the_fastest_run() -> None:
    looks = 0

    def clock() -> int:
        nonlocal looks
        looks += 1
        return 0

    assert 0 < record_cost.look(clock, times=10) < 1_000_000
    assert looks == 20 * 10


class Server:
    """Needs `left` waves for its measurement; never measures if `left` is None."""

    def __init__(self, left: int | None) -> None:
        self.left, self.asked = left, 0

    def wave(self, asked: list[list[int]], tokens: int) -> Wave:
        if self.left and self.asked:
            self.left -= 1
        return Wave([[0] * tokens for _ in asked], 0.1)

    def post(self, path: str, body: dict[str, Any]) -> list[bool]:
        self.asked = body["server_args"]["zos_record_cost"]
        return [True]

    def zos(self) -> dict[str, Any]:
        return {"steps": {"cost": None if self.left is None else {"running": self.left > 0, "cost_us": 3.0}}}


def test_it_sends_requests_until_the_server_has_measured() -> None:
    server = Server(3)
    assert record_cost._cost(server, 4, 500)["cost_us"] == 3.0  # type: ignore[arg-type]
    assert (server.asked, server.left) == (500, 0)


@pytest.mark.parametrize("left", [None, 10_000])
def test_a_server_that_does_not_measure_is_an_error(left: int | None) -> None:
    with pytest.raises(BenchError, match="does not measure"):
        record_cost._cost(Server(left), 4, 500)  # type: ignore[arg-type]


@pytest.mark.parametrize("modes", ["stock", "overlap,off"])
def test_only_our_loops_can_be_measured(modes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        record_cost.main(["--modes", modes])
    assert "is not one of sync, overlap, resident" in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert record_cost.main(["--model", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("bench_record: error: --model nowhere")
