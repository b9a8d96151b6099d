"""scripts/bench_grammar.py: what it asks, what it makes of the runs, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fake_bench import FakeServer
from zos_sglang.testing.bench import grammar, grammar_cli
from zos_sglang.testing.bench.client import BenchClient, Wave

PLAN = grammar.Plan(("stock", "resident"), (0.0, 2.0, 100.0), 64, 2, 16, 40, 384, 0)


def run(share: float, mode: str, step: float, *, repeat: int = 0, rss: int | None = None) -> Any:
    found: dict[str, Any] = {
        "repeat": repeat,
        "share": share,
        "mode": mode,
        "digest": f"{share}",
        "steps": 30,
    }
    lane = {"share": 1.0 - share / 100} if mode == "resident" else None
    found |= {"grammar_rows": grammar.rows_of(share, 64), "lane": lane, "scheduler_rss": rss}
    return found | {"wall_us": {"median": step}, "cpu_us": {"median": step / 2}}


def runs(resident_at_2: float = 105.0) -> list[Any]:
    return [
        run(share, mode, step * (1 + repeat), repeat=repeat, rss=(100 + repeat) * 2**20)
        for repeat in range(2)
        for share, mode, step in (
            (0.0, "stock", 200.0),
            (0.0, "resident", 100.0),
            (2.0, "stock", 300.0),
            (2.0, "resident", resident_at_2),
        )
    ]


def test_a_few_percent_of_a_small_batch_are_one_row() -> None:
    assert [grammar.rows_of(share, 64) for share in (0, 0.1, 2, 25, 100)] == [0, 1, 1, 16, 64]
    assert grammar.rows_of(2, 256) == 5


def test_only_the_first_rows_are_asked_for_a_grammar_too_long_to_end() -> None:
    asked = grammar.parameters(PLAN, 2.0)
    assert len(asked) == 64 and asked[1:] == [{}] * 63
    assert json.loads(asked[0]["json_schema"])["minItems"] == 40
    assert grammar.parameters(PLAN, 0.0) == [{}] * 64


def test_every_row_is_greedy_and_of_the_waves_length_and_no_grammar_is_forgotten() -> None:
    sent: list[Any] = []

    class Client(BenchClient):
        def post(self, path: str, body: dict[str, Any]) -> Any:
            sent.append((path, body))
            return [{"output_ids": [1] * 40} for _ in body["input_ids"]]

    with Client("http://nowhere") as client:
        grammar._wave(client, PLAN, [[5]] * 64, 2.0)
    ((path, body),) = sent
    assert path == "/generate"
    assert {(p["temperature"], p["max_new_tokens"], p["ignore_eos"]) for p in body["sampling_params"]} == {
        (0, 40, True)
    }
    assert ["json_schema" in p for p in body["sampling_params"]] == [True] + [False] * 63


def test_ratios_are_taken_within_a_repeat() -> None:
    summary = grammar.summarise(runs(), ("stock", "resident"))
    rows = {(row["share"], row["mode"]): row for row in summary["rows"]}
    assert summary["base"] == "stock"
    assert rows[2.0, "resident"]["over_none"]["per_repeat"] == [1.05, 1.05]
    assert rows[2.0, "resident"]["over_base"]["per_repeat"] == [0.35, 0.35]
    assert rows[2.0, "stock"]["over_none"]["median"] == 1.5 and rows[2.0, "stock"]["in_lane"] is None
    assert rows[2.0, "resident"]["in_lane"] == 0.98
    assert summary["answers"] == {"0": "equal", "2": "equal"}
    assert summary["memory"] == {"steps": 120, "mib_before": 100.0, "mib_after": 101.0}


@pytest.mark.parametrize(("step", "met"), [(105.0, True), (111.0, False)])
def test_the_target_is_that_of_the_lane_at_two_percent(step: float, met: bool) -> None:
    assert grammar.target_met(grammar.summarise(runs(step), ("stock", "resident"))) is met
    assert grammar.target_met(grammar.summarise([run(0.0, "stock", 1.0)], ("stock",))) is None


def test_answers_that_differ_from_stocks_fail() -> None:
    found = runs()
    found[3]["digest"] = "other"
    summary = grammar.summarise(found, ("stock", "resident"))
    assert summary["answers"]["2"] == "different" and grammar_cli.exit_code(summary) == 1
    assert grammar_cli.exit_code(grammar.summarise(runs(), ("stock", "resident"))) == 0


def test_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = grammar.summarise(runs(), ("stock", "resident"))
    grammar_cli.print_summary(summary)
    shown = capsys.readouterr().out
    assert "1.050 (1.050 to 1.050)" in shown and "2 % (1)" in shown and "at most 1.1: yes" in shown
    pytest.importorskip("matplotlib")
    grammar_cli.draw(summary, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_share_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grammar_cli.main(["--shares", "0,120", "--out", "x"])
    assert "no list of percentages" in capsys.readouterr().err


def test_a_server_that_is_gone_has_no_memory() -> None:
    assert grammar.scheduler_memory(2**22 - 3) is None


class Server(FakeServer):
    """A made-up server that is asked for grammars."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.constrained: list[tuple[str, int, bool]] = []

    def wave(self, input_ids: Any, output_tokens: int, more: Any = (), *, flush: bool = True) -> Wave:
        self.constrained.append((self.mode, sum("json_schema" in extra for extra in more), flush))
        return super().wave(input_ids, output_tokens)


def test_every_share_is_measured_in_every_mode_in_alternating_order(tmp_path: Path) -> None:
    server = Server(tmp_path / "log")
    found = grammar.measure(server, PLAN, lambda: 5 * 2**20, lambda _: None)  # type: ignore[arg-type]
    measured = server.constrained[6:]
    first = [("stock", 0), ("resident", 0), ("stock", 1), ("resident", 1), ("stock", 64), ("resident", 64)]
    assert [(mode, rows) for mode, rows, _ in measured[:6]] == first
    assert [mode for mode, _, _ in measured[6:8]] == ["resident", "stock"]
    assert not any(flush for _, _, flush in server.constrained)
    assert [(run["mode"], run["grammar_rows"]) for run in found[:6]] == first
    summary = grammar.summarise(found, PLAN.modes)
    assert set(summary["answers"].values()) == {"equal"} and grammar.target_met(summary)
    assert {row["in_lane"] for row in summary["rows"] if row["mode"] == "resident"} == {1.0}
