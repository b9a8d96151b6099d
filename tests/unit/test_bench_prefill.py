"""scripts/bench_prefill.py: its loads, figures, verdicts and runs, on a made-up server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zos_sglang.overlap.guards import PrefillRule
from zos_sglang.testing.bench import prefill_cli
from zos_sglang.testing.bench.arrivals import Outcome, Request
from zos_sglang.testing.bench.arrivals_load import Report
from zos_sglang.testing.bench.arrivals_stream import Answer
from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.bench.plots import PlotError
from zos_sglang.testing.bench.prefill import Load, Streams, figures
from zos_sglang.testing.bench.prefill_plot import draw
from zos_sglang.testing.bench.prefill_run import CONTENDERS, NAME, Bench, Plan
from zos_sglang.testing.bench.prefill_summary import TARGETS, Target, judge, summarise
from zos_sglang.testing.bench.prefill_table import print_summary, verdict_line
from zos_sglang.testing.bench.store import ResumeError, Store, load
from zos_sglang.testing.bench.zos import Budget
from zos_sglang.testing.slow_device import Pace

LOAD = Load("burst", Streams(count=2, prompt=4, output=6), count=3, shortest=8, longest=16, output=2)

# ------------------------------------------------------------------ loads


def test_a_load_asks_for_the_same_each_time_and_for_something_else_with_another_seed() -> None:
    assert LOAD.requests() == LOAD.requests()
    assert LOAD.requests() != replace(LOAD, seed=1).requests()


def test_streams_come_first_and_the_burst_together_later() -> None:
    requests = LOAD.requests()
    assert [one.due_s for one in requests] == [0, 0, 1.0, 1.0, 1.0]
    assert [one.output for one in requests] == [6, 6, 2, 2, 2]
    assert [LOAD.is_burst(one.index) for one in requests] == [False, False, True, True, True]
    assert [len(one.ids) for one in requests] == [4, 4, *LOAD.lengths()]


def test_prompts_of_a_burst_have_the_lengths_that_were_asked_for() -> None:
    lengths = replace(LOAD, count=200).lengths()
    assert (min(lengths), max(lengths)) == (8, 16)
    assert set(replace(LOAD, shortest=16).lengths()) == {16}


def test_no_prompt_of_a_burst_is_a_stream_s_even_where_they_are_alike() -> None:
    alike = Load("burst", Streams(2, 8, 4), count=2, shortest=8, longest=8)
    texts = [tuple(one.ids) for one in alike.requests()]
    assert len(set(texts)) == 4


def test_room_is_asked_for_all_requests_together() -> None:
    assert LOAD.tokens == 2 * (4 + 6) + sum(LOAD.lengths()) + 3 * 2


# ------------------------------------------------------------------ figures


def outcome(index: int, sent: float, times: list[tuple[float, int]]) -> Outcome:
    """An answer of the given arrivals, pairs (seconds, tokens)."""
    found = Outcome(index, sent=sent, late=0.0)
    found.fill(Answer(ids=[index] * sum(tokens for _, tokens in times), events=times))
    return found


def outcomes(slow: float = 0.0) -> list[Outcome]:
    """Two streams and a burst at 10.0 that is over at 11.0; first tokens after 0.2, 0.4 and 0.6 s."""
    streams = [outcome(0, 9.0, [(9.5, 1), (9.9, 1), (10.3, 1), (10.9, 2), (12.0, 1)])]
    streams.append(outcome(1, 9.0, [(9.6, 1), (9.8, 1), (10.8, 1), (11.5, 3)]))
    first = [10.2 + slow, 10.4 + slow, 10.6 + slow]
    return streams + [outcome(2 + i, 10.0, [(when, 1), (11.0 + slow, 1)]) for i, when in enumerate(first)]


def test_latencies_are_the_bursts_and_gaps_the_streams_within_its_time() -> None:
    found = figures(LOAD, outcomes())
    assert found["window_s"] == 1.0
    assert found["ttft_ms"] == {"p50": 400, "p90": 560, "p99": 596, "mean": 400, "max": 600}
    # 10.3, 10.9 (two tokens at once) and 10.8 end inside; 9.9 and 12.0 do not.
    assert found["gap_ms"]["max"] == pytest.approx(1000) and found["gap_ms"]["p50"] == pytest.approx(600)
    assert found["itl_ms"]["p50"] == pytest.approx((300 + 400) / 2)
    assert found["covered"] is True


def test_rates_count_what_was_done_in_the_bursts_time() -> None:
    found = figures(LOAD, outcomes())
    assert found["output_tokens_per_s"] == 4 + 6  # four of the streams, six of the burst
    assert found["tokens_per_s"] == 10 + sum(LOAD.lengths())


def test_streams_that_end_too_soon_or_begin_too_late_are_noted() -> None:
    early, late = outcomes(), outcomes()
    early[0] = outcome(0, 9.0, [(9.5, 5), (10.9, 1)])
    late[0] = outcome(0, 9.0, [(10.1, 5), (11.5, 1)])
    assert figures(LOAD, early)["covered"] is False and figures(LOAD, late)["covered"] is False


def test_a_failed_request_leaves_no_times_to_compare() -> None:
    broken = outcomes()
    broken[3] = Outcome(3, sent=10.0, late=0.0, error="HTTP 503")
    found = figures(LOAD, broken)
    assert (found["failed"], found["errors"]) == (1, ["request 3: HTTP 503"])
    assert found["ttft_ms"] is None and found["tokens_per_s"] is None
    assert found["digests"][3] is None and found["digests"][2] is not None


# ------------------------------------------------------------------ verdicts


def run_of(rule: str, ttft: float, rate: float, repeat: int = 0, **more: Any) -> dict[str, Any]:
    percentiles = dict.fromkeys(("p50", "p90", "p99", "mean", "max"), ttft)
    return {
        **{"load": "burst", "rule": rule, "repeat": repeat, "requests": 2, "failed": 0, "errors": []},
        **{"tokens_per_s": rate, "output_tokens_per_s": rate, "window_s": 1.0, "covered": True},
        **{what: percentiles for what in ("ttft_ms", "e2e_ms", "itl_ms", "gap_ms")},
        **{"digests": ["a", "b"], "client": {"in_the_way": False}},
        "counts": {"paths": {"prefill": 4}, "reasons": {"first-token": 3, "nothing-pending": 9}},
        **more,
    }


def three(ttft: float, rate: float, repeat: int = 0, **more: Any) -> list[dict[str, Any]]:
    """`never` at 2.0 s and 100/s, `always` at 1.0 s and 80/s, and first-token as it is told."""
    return [
        run_of("never", 2.0, 100, repeat),
        run_of("always", 1.0, 80, repeat),
        run_of("first-token", ttft, rate, repeat, **more),
    ]


@pytest.mark.parametrize(
    ("ttft", "rate", "met"),
    [(1.0, 100, 5), (1.05, 98, 5), (1.06, 98, 2), (1.05, 97, 3), (0.5, 200, 5), (2.0, 80, 0)],
)
def test_targets_are_ttft_over_always_and_throughput_over_never(ttft: float, rate: float, met: int) -> None:
    targets = summarise(three(ttft, rate))["targets"]
    assert len(targets) == len(TARGETS) == 5
    assert sum(verdict["met"] for verdict in targets) == met


def test_the_median_of_the_repeats_decides_and_quartiles_on_both_sides_are_noise() -> None:
    runs = [run for repeat, ttft in enumerate((1.0, 1.04, 1.5)) for run in three(ttft, 100, repeat)]
    verdict = summarise(runs)["targets"][0]
    assert verdict["met"] and not verdict["clear"]
    assert verdict["ratio"]["per_repeat"] == [1.0, 1.04, 1.5]
    assert "met, within the noise" in verdict_line(verdict)
    calm = summarise([run for repeat in range(3) for run in three(1.2, 100, repeat)])["targets"][0]
    assert not calm["met"] and calm["clear"] and verdict_line(calm).endswith("MISSED")


def test_ratios_are_taken_within_a_repeat() -> None:
    slow = [{**run, "tokens_per_s": run["tokens_per_s"] / 10} for run in three(1.0, 99, repeat=1)]
    rows = {row["rule"]: row for row in summarise([*three(1.0, 99), *slow])["rows"]}
    assert rows["first-token"]["over_never"]["tokens_per_s"]["per_repeat"] == [0.99, 0.99]
    assert rows["first-token"]["tokens_per_s"]["min"] == pytest.approx(9.9)
    assert "over_never" not in rows["never"]


def test_without_the_other_rule_there_is_no_verdict() -> None:
    assert judge("burst", Target("tokens_per_s", "never", 0.98, more=True), [{"first-token": {}}]) is None
    assert summarise(three(1.0, 100)[1:])["targets"] == summarise(three(1.0, 100))["targets"][:3]


def test_a_row_says_how_many_prefills_waited() -> None:
    rows = {row["rule"]: row for row in summarise(three(1.0, 100))["rows"]}
    assert (rows["always"]["waited"], rows["always"]["prefills"]) == (3, 4)


def test_other_answers_than_nevers_in_the_same_repeat_are_counted() -> None:
    runs = three(1.0, 100) + three(1.0, 100, repeat=1, digests=["a", "c"])
    rows = {row["rule"]: row["answers"] for row in summarise(runs)["rows"]}
    assert rows["first-token"] == {"compared": 4, "differing": 1, "first_requests": [1]}
    assert rows["always"]["differing"] == 0
    assert rows["never"] == {"compared": 2, "differing": 0, "first_requests": []}


# ------------------------------------------------------------------ runs

TTFT_S = {"stock": 0.2, "never": 0.2, "always": 0.1, "first-token": 0.1}


class FakeServer:
    """A server and its clients: first tokens take `TTFT_S`; `liar` answers otherwise under that rule."""

    def __init__(self, *, liar: str | None = None, fails: bool = False, deaf: bool = False) -> None:
        self.liar, self.fails, self.deaf = liar, fails, deaf
        self.mode, self.rule = "overlap", "first-token"
        self.calls: list[str] = []
        self.played: list[tuple[str, list[Request]]] = []

    @property
    def contender(self) -> str:
        return "stock" if self.mode == "stock" else self.rule

    def switch(self, mode: str) -> None:
        self.mode = mode
        self.calls.append(mode)

    def set_rule(self, rule: str) -> None:
        self.rule = self.rule if self.deaf else rule
        self.calls.append(rule)

    def flush(self) -> None:
        self.calls.append("flush")

    def zos(self) -> dict[str, Any]:
        waits = {"first-token": len(self.played)} if self.contender == "first-token" else {}
        return {"prefill_rule": self.rule, "paths": {"prefill": 3 * len(self.played)}, "reasons": waits}

    def play(self, requests: list[Request], _output: int) -> list[Report]:
        self.played.append((self.contender, requests))
        found = []
        for one in requests:
            wrong = self.liar == self.contender and one.index == 3
            if self.fails:
                found.append(Outcome(one.index, sent=one.due_s, late=0.0, error="no"))
                continue
            assert one.output is not None
            begin = one.due_s + (TTFT_S[self.contender] if LOAD.is_burst(one.index) else 0.5)
            made = Outcome(one.index, sent=one.due_s, late=0.0)
            times = [(begin + 0.25 * n, 1) for n in range(one.output)]
            made.fill(Answer(ids=[int(wrong)] * one.output, events=times))
            found.append(made)
        return [Report(found, cpu_s=0.1, wall_s=1.0, lags=[0.0])]


PLAN = Plan(CONTENDERS, (LOAD, replace(LOAD, name="chunked", shortest=16)), repeats=2)
HEAD = {
    **{"kind": prefill_cli.KIND, "commit": "abc", "date": "today", "command": "bench_prefill.py"},
    **{"versions": {"sglang": "0.5.23"}, "machine": {"cpu": "c", "gpu": None}},
}


def store(out: Path, *, resume: bool = False, **changed: Any) -> Store:
    identity = {"model": "tiny", "exact": True}
    return Store(out / NAME, {**HEAD, **changed}, identity, summarise, resume=resume)


def bench(server: FakeServer, budget: Budget | None = None) -> Bench:
    return Bench(server, server, budget or Budget(None), lambda _line: None)  # type: ignore[arg-type]


def measured(out: Path, server: FakeServer | None = None, plan: Plan = PLAN) -> dict[str, Any]:
    bench(server or FakeServer()).measure(plan, store(out))
    return load(out / NAME, prefill_cli.KIND)


def test_every_contender_meets_the_same_prompts_and_another_is_first_in_each_repeat(tmp_path: Path) -> None:
    server = FakeServer()
    data = measured(tmp_path, server)
    assert data["complete"] and len(data["runs"]) == 2 * 2 * 4
    timed = [name for name, _ in server.played[8:]]
    second = [*CONTENDERS[1:], CONTENDERS[0]]
    assert timed == [*CONTENDERS, *CONTENDERS, *second, *second]
    assert all(requests == server.played[0][1] for _, requests in server.played[:4])
    assert not any(row["answers"]["differing"] for row in data["summary"]["rows"])
    assert prefill_cli.exit_code(data) == 0


def test_a_rule_is_set_before_our_loop_takes_over_and_the_cache_is_empty() -> None:
    server = FakeServer()
    bench(server).run(LOAD, "always", "resident")
    bench(server).run(LOAD, "stock", "resident")
    assert server.calls == ["always", "resident", "flush", "stock", "flush"]


def test_a_server_that_keeps_its_rule_ends_the_measurement() -> None:
    with pytest.raises(BenchError, match="keeps the prefill rule first-token instead of never"):
        bench(FakeServer(deaf=True)).run(LOAD, "never", "overlap")


def test_a_run_counts_what_the_server_did_in_it_alone(tmp_path: Path) -> None:
    data = measured(tmp_path)
    assert {run["counts"]["paths"]["prefill"] for run in data["runs"]} == {3}


def test_a_wrong_answer_is_found_and_is_a_failure_where_answers_are_exact(tmp_path: Path) -> None:
    data = measured(tmp_path, FakeServer(liar="first-token"))
    rows = {row["rule"]: row["answers"] for row in data["summary"]["rows"] if row["load"] == "burst"}
    assert rows["first-token"] == {"compared": 10, "differing": 2, "first_requests": [3, 3]}
    assert rows["always"]["differing"] == 0
    assert prefill_cli.exit_code(data) == 1
    data["identity"]["exact"] = False
    assert prefill_cli.exit_code(data) == 0


def test_a_warm_up_that_fails_ends_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="warm-up, burst, stock: 5 requests failed"):
        measured(tmp_path, FakeServer(fails=True))


def test_an_interrupted_measurement_goes_on_with_the_repeats_that_are_missing(tmp_path: Path) -> None:
    ticks = iter((0.0, 1.0, 100.0))  # made, before the first repeat, before the second
    first = bench(FakeServer(), Budget(50, clock=lambda: next(ticks)))
    first.measure(PLAN, store(tmp_path))
    data = load(tmp_path / NAME, prefill_cli.KIND)
    assert not data["complete"] and {run["repeat"] for run in data["runs"]} == {0}

    server = FakeServer()
    bench(server).measure(PLAN, store(tmp_path, resume=True))
    data = load(tmp_path / NAME, prefill_cli.KIND)
    assert data["complete"] and len(data["runs"]) == 16 and len(data["calls"]) == 2
    assert len(server.played) == 8 + 8  # warm-ups anew, then only the second repeat
    assert {row["repeats"] for row in data["summary"]["rows"]} == {2}


def test_another_version_is_neither_continued_nor_compared(tmp_path: Path) -> None:
    measured(tmp_path)
    with pytest.raises(ResumeError, match=r"versions: .*0\.5\.23.* then, .*0\.5\.24.* now"):
        store(tmp_path, resume=True, versions={"sglang": "0.5.24"})


# ------------------------------------------------------------------ what is shown


def test_tables_and_verdicts_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(measured(tmp_path))
    shown = capsys.readouterr().out
    assert "burst: TTFT P50 of first-token over always: 1.000" in shown
    assert "chunked: all tokens/s of first-token over never: " in shown
    assert "100.0 / 100.0 / 100.0" in shown and "2 of 6" in shown


def test_what_a_reader_must_know_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = measured(tmp_path)
    data["runs"][0] |= {"covered": False, "errors": ["request 2: HTTP 503"]}
    data["runs"][1]["client"]["in_the_way"] = True
    print_summary(data)
    shown = capsys.readouterr().out
    assert "burst, stock, repeat 0: request 2: HTTP 503" in shown
    assert "in 1 runs the streams did not decode all the while" in shown
    assert "clients were busy" in shown


def test_the_plot_is_drawn_from_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured(tmp_path)
    assert prefill_cli.main(["--plot-only", str(tmp_path)]) == 0
    assert (tmp_path / "bench_prefill.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_whole_repeat_there_is_no_plot(tmp_path: Path) -> None:
    with pytest.raises(PlotError, match="no figures"):
        draw({"identity": {"model": "m"}, "runs": [], "summary": summarise([])}, tmp_path / "x.png")
    assert prefill_cli.exit_code({"identity": {"exact": True}, "summary": summarise([])}) == 2


# ------------------------------------------------------------------ flags


def test_the_defaults_compare_stock_and_all_rules_on_both_loads() -> None:
    args = prefill_cli.parser().parse_args([])
    assert args.rules == ("stock", *PrefillRule) and args.loads == ("burst", "chunked")


@pytest.mark.parametrize(
    "flags",
    [
        *(("--rules", "never"), ("--rules", "never,sometimes"), ("--loads", "x"), ("--chunk", "0")),
        *(("--virtual-gpu", "5"), ("--virtual-gpu", "-1:5")),
    ],
)
def test_bad_flags_are_refused(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefill_cli.parser().parse_args(flags)
    assert f"argument {flags[0]}" in capsys.readouterr().err


def test_a_virtual_gpu_is_part_of_what_was_measured(tmp_path: Path) -> None:
    args = prefill_cli.parser().parse_args(["--virtual-gpu", "4000:25000"])
    assert args.virtual_gpu == Pace(us=4000, prefill_us=25000)
    environment = prefill_cli._device(args.virtual_gpu, tmp_path)
    assert environment["SLOW_DEVICE_PREFILL_US"] == "25000.0"
    assert (tmp_path / "slow-device-1.0.dist-info").is_dir()


def test_a_result_is_not_overwritten_and_a_model_too_short_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(
        json.dumps({"vocab_size": 384, "max_position_embeddings": 4096})
    )
    common = ["--model", str(tmp_path / "m"), "--out", str(tmp_path)]
    assert prefill_cli.main(common) == 2
    assert "chunked needs 16402 positions, the model has 4096" in capsys.readouterr().err
    (tmp_path / NAME).write_text("{}")
    assert prefill_cli.main([*common, "--long-in", "2048"]) == 2
    assert "--resume continues it" in capsys.readouterr().err
