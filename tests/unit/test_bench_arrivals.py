"""scripts/bench_arrivals.py: schedule, parsing, percentiles, ratios, table and exit code."""

from __future__ import annotations

import hashlib
import json
import statistics
from itertools import pairwise
from typing import Any

import pytest

from zos_sglang.testing.bench import arrivals_cli
from zos_sglang.testing.bench.arrivals import (
    Load,
    Outcome,
    count_of,
    distribution,
    figures,
    percentile,
    schedule,
)
from zos_sglang.testing.bench.arrivals_load import BUSY_SHARE, Report, body_of, cost
from zos_sglang.testing.bench.arrivals_run import lane_of
from zos_sglang.testing.bench.arrivals_stream import Answer, StreamError, payloads, read_answer
from zos_sglang.testing.bench.arrivals_summary import METRICS, summarise, targets
from zos_sglang.testing.bench.arrivals_table import (
    FIGURES,
    SHOWN,
    print_summary,
    ratio_cells,
    row_cells,
)
from zos_sglang.testing.bench.paired import differing_requests
from zos_sglang.testing.bench.plots import lines_by_mode

# ------------------------------------------------------------------ schedule


def test_arrivals_are_poisson_seeded_and_start_at_once() -> None:
    times = schedule(16, 4000, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0 and min(gaps) > 0
    assert times == schedule(16, 4000, seed=3) != schedule(16, 4000, seed=4)
    # Exponential gaps: mean and standard deviation are both 1 / rate.
    assert statistics.fmean(gaps) == pytest.approx(1 / 16, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 16, rel=0.1)


def test_a_run_is_bounded_by_seconds_and_by_requests() -> None:
    assert [count_of(rate, 200, 20) for rate in (4, 16, 64)] == [80, 200, 200]
    assert count_of(0.1, 200, 1) == 1


def test_the_same_load_is_the_same_requests() -> None:
    load = Load(rate=4, count=5, prompt=7, output=3, vocab=50)
    assert load.requests() == load.requests()
    assert [len(one.ids) for one in load.requests()] == [7] * 5
    assert len({tuple(one.ids) for one in load.requests()}) == 5
    assert json.loads(body_of(load.requests()[0], 3)) == {
        "input_ids": load.requests()[0].ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
        "stream": True,
    }


# ------------------------------------------------------------------ parsing


def event(ids: list[int], count: int, finish: str | None = None) -> bytes:
    meta = {"finish_reason": finish and {"type": finish, "length": count}, "completion_tokens": count}
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
INCREMENTAL = [(1.0, event([5], 1)), (2.0, event([6, 7], 3)), (3.0, event([8], 4, "length") + DONE)]
CUMULATIVE = [
    (1.0, event([5], 1)),
    (2.0, event([5, 6, 7], 3)),
    (3.0, event([5, 6, 7, 8], 4, "length") + DONE),
]


@pytest.mark.parametrize("reads, incremental", [(INCREMENTAL, True), (CUMULATIVE, False)])
def test_both_kinds_of_events_give_the_same_answer(reads: Any, incremental: bool) -> None:
    answer = read_answer(reads, 4, incremental=incremental)
    assert answer.ids == [5, 6, 7, 8]
    assert answer.events == [(1.0, 1), (2.0, 2), (3.0, 1)]
    assert answer.digest == hashlib.sha256(b"[5,6,7,8]").hexdigest()[:16]


def test_an_event_counts_when_its_last_byte_is_there() -> None:
    data = event([5], 1) + event([6], 2, "length") + DONE
    cut = len(event([5], 1)) + 9
    answer = read_answer([(1.0, data[:cut]), (2.0, data[cut:])], 2, incremental=True)
    assert answer.events == [(1.0, 1), (2.0, 1)]
    byte_by_byte = [(float(i), data[i : i + 1]) for i in range(len(data))]
    assert len(payloads(byte_by_byte)) == 3
    assert payloads(byte_by_byte)[0][0] == len(event([5], 1)) - 1


def test_events_of_one_read_arrive_at_once() -> None:
    answer = Answer(ids=[1, 2, 3, 4], events=[(1.0, 1), (2.0, 1), (2.0, 2)])
    assert answer.arrivals() == [(1.0, 1), (2.0, 3)]


@pytest.mark.parametrize(
    "reads, incremental, message",
    [
        (INCREMENTAL[:2], True, "without"),
        ([INCREMENTAL[0], INCREMENTAL[2]], True, "4 tokens announced, 2 received"),
        ([(1.0, event([5], 1)), (2.0, event([6, 7, 8], 3, "length") + DONE)], False, "do not continue"),
        ([(1.0, event([5], 1, "length") + DONE)], True, "1 tokens of 4"),
        ([(1.0, event([5, 6, 7, 8], 4, "stop") + DONE)], True, "finish reason"),
        ([(1.0, b'data: {"error": {"message": "no"}}\n\n' + DONE)], True, "reports an error"),
        ([(1.0, b"data: {]\n\n")], True, "no JSON"),
        ([(1.0, b"data: {}\n\n")], True, "without token ids"),
        ([(1.0, event([5], 1)[:-1])], True, "amid an event"),
        ([(1.0, DONE), (2.0, DONE)], True, "after"),
    ],
)
def test_a_broken_stream_is_named(reads: Any, incremental: bool, message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read_answer(reads, 4, incremental=incremental)


# ------------------------------------------------------------------ figures


def outcome(index: int = 0, sent: float = 10.0, times: tuple[tuple[float, int], ...] = ()) -> Outcome:
    answer = Answer(ids=list(range(sum(tokens for _, tokens in times))), events=list(times))
    found = Outcome(index, sent=sent, late=0.001)
    found.fill(answer)
    return found


def test_a_gap_is_spread_over_its_tokens_and_bursts_are_counted() -> None:
    one = outcome(times=((10.5, 1), (11.0, 2), (11.0, 2), (12.0, 1)))
    assert (one.ttft, one.e2e, one.tokens) == (0.5, 2.0, 6)
    assert list(one.gaps) == [0.5, 1.0]
    assert list(one.itl) == [0.125] * 4 + [1.0]
    assert (one.events, one.full_events, one.arrivals, one.bursts, one.largest) == (4, 2, 3, 1, 4)


def test_percentiles_are_interpolated() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], q) for q in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert percentile([7.0], 99) == 7.0
    assert percentile(list(range(101)), 99) == 99
    many = [float(x * x % 977) for x in range(500)]
    assert percentile(sorted(many), 90) == pytest.approx(
        statistics.quantiles(many, n=100, method="inclusive")[89]
    )
    assert distribution([0.003, 0.001]) == {"p50": 2.0, "p90": 2.8, "p99": 2.98, "mean": 2.0, "max": 3.0}
    assert distribution([]) is None


def test_throughput_counts_from_the_first_request_to_the_last_token() -> None:
    failed = Outcome(2, sent=9.0, late=0.5, error="HTTP 500")
    found = figures(
        [outcome(1, 11.0, ((11.5, 2), (13.0, 2))), failed, outcome(0, 10.0, ((10.5, 1), (12.0, 1)))]
    )
    assert (found["requests"], found["failed"], found["tokens"]) == (3, 1, 6)
    assert (found["span_s"], found["tokens_per_s"]) == (4.0, 1.5)
    assert found["mean_in_flight"] == 1.0
    assert found["errors"] == ["request 2: HTTP 500"]
    assert found["digests"][2] is None and found["digests"][0] != found["digests"][1]
    assert found["late_ms"]["max"] == 500


def test_a_run_without_an_answer_has_no_figures() -> None:
    found = figures([Outcome(0, sent=1.0, late=0.0, error="gone")])
    assert (found["tokens_per_s"], found["itl_ms"], found["failed"]) == (None, None, 1)


def test_a_client_that_was_busy_or_late_is_reported() -> None:
    assert not cost([Report([], cpu_s=1, wall_s=10, lags=[0.001] * 100)])["in_the_way"]
    assert cost([Report([], 1, 10, []), Report([], 10 * BUSY_SHARE + 1, 10, [])])["in_the_way"]
    late = cost([Report([], cpu_s=1, wall_s=10, lags=[0.001, 0.5])])
    assert late["in_the_way"] and late["lag_ms"]["max"] == 500


def test_the_lanes_share_is_of_this_run() -> None:
    growth = {"lane": {"steps": 90, "decode_steps": 100, "row_steps": 360, "wasted_row_steps": 10}}
    found = lane_of(growth, decoded_tokens=400)
    assert found is not None and (found["share"], found["token_share"]) == (0.9, 0.875)
    assert lane_of({}, 10) is None


# ------------------------------------------------------------------ ratios


def run_of(
    mode: str, repeat: int, itl: float, digests: tuple[str | None, ...] = ("a", "b")
) -> dict[str, Any]:
    latency = {"p50": itl, "p90": itl, "p99": 2 * itl, "mean": itl, "max": 2 * itl}
    return {
        **{"rate": 16.0, "mode": mode, "repeat": repeat, "requests": 2, "failed": 0, "errors": []},
        **{"tokens_per_s": 100.0 / itl, "mean_in_flight": 3.0, "events": 10, "full_events": 1},
        **{"arrivals": 9, "bursts": 2, "largest_arrival": 3, "digests": list(digests)},
        **{"ttft_ms": latency, "itl_ms": latency, "gap_ms": latency, "e2e_ms": latency},
        "lane": {"steps": 95, "decode_steps": 100} if mode == "resident" else None,
        "client": {"busiest": 0.1, "lag_ms": {"p99": 0.5}, "in_the_way": False},
    }


MODES = ("stock", "resident")
RUNS = [
    *(run_of("stock", 0, 4.0), run_of("resident", 0, 3.0)),
    *(run_of("stock", 1, 8.0), run_of("resident", 1, 4.0, ("a", "x"))),
    *(run_of("stock", 2, 1.0), run_of("resident", 2, 0.7, (None, "b"))),
    run_of("stock", 3, 99.0),
]


def test_ratios_are_taken_within_a_repeat_and_halves_are_left_out() -> None:
    stock, resident = summarise(RUNS, MODES, "stock")["rows"]
    assert (stock["mode"], stock["over_stock"], stock["repeats"]) == ("stock", {}, 3)
    itl = resident["over_stock"]["itl_ms.p50"]
    assert itl == {"per_repeat": [0.75, 0.5, 0.7], "median": 0.7, "min": 0.5, "max": 0.75}
    assert resident["over_stock"]["tokens_per_s"]["median"] == pytest.approx(1 / 0.7, abs=1e-4)
    assert resident["itl_ms.p99"]["median"] == 6.0
    assert resident["lane_share"] == 0.95 and stock["lane_share"] is None
    assert set(resident["over_stock"]) == set(METRICS)


def test_answers_are_compared_request_by_request() -> None:
    stock, resident = summarise(RUNS, MODES, "stock")["rows"]
    assert stock["answers"] == {"compared": 4, "differing": 0, "first_requests": []}
    assert resident["answers"] == {"compared": 5, "differing": 1, "first_requests": [1]}
    assert differing_requests(["a", None, "c"], ["b", "b", "c"]) == [0]


def test_targets_are_bounds_of_the_median() -> None:
    def at(value: float) -> dict[str, Any]:
        return {"median": value}

    ratios = {"tokens_per_s": at(0.999), "itl_ms.p50": at(0.8), "itl_ms.p99": at(0.81), "ttft_ms.p99": None}
    assert targets(ratios) == {
        "tokens_per_s": False,
        "itl_ms.p50": True,
        "itl_ms.p99": False,
        "ttft_ms.p99": None,
    }


def test_a_figure_that_is_missing_gives_no_ratio() -> None:
    broken = {**run_of("resident", 0, 3.0), "itl_ms": None, "failed": 2}
    _, row = summarise([run_of("stock", 0, 4.0), broken], MODES, "stock")["rows"]
    assert row["over_stock"]["itl_ms.p50"] is None and row["over_stock"]["e2e_ms.p50"] is not None
    assert len(row_cells(row)) == len(FIGURES)
    assert "-" in ratio_cells(row)


# ------------------------------------------------------------------ table and plot


def data_of(runs: list[dict[str, Any]], *, exact: bool = False) -> dict[str, Any]:
    settings = {"model": "m", "prompt": 8, "output": 4, "exact": exact}
    return {
        "kind": "bench_arrivals",
        "settings": settings,
        "runs": runs,
        "summary": summarise(runs, MODES, "stock"),
    }


def test_the_table_says_what_the_summary_says(capsys: pytest.CaptureFixture[str]) -> None:
    slow = [run_of("stock", 0, 4.0), run_of("resident", 0, 3.6)]
    _, row = summarise(slow, MODES, "stock")["rows"]
    cells = dict(zip((name for _, name in SHOWN), ratio_cells(row)[2:], strict=True))
    assert cells["ITL P50"] == "0.900* (0.900 to 0.900)"
    assert cells["ITL mean"] == "0.900 (0.900 to 0.900)"
    figures_shown = dict(zip(FIGURES, row_cells(row), strict=True))
    assert figures_shown["ITL ms P50/P90/P99"] == "3.60 / 3.60 / 7.20"
    assert figures_shown["bursts"] == "22.22%, 3"
    assert figures_shown["answers"] == "0 of 2 differ"
    slow[1]["errors"] = ["request 1: HTTP 503"]
    print_summary(data_of(slow))
    shown = capsys.readouterr().out
    assert "0.900*" in shown and "HTTP 503" in shown and "0 of 2 differ" in shown


def test_lines_of_the_plot_go_by_rate() -> None:
    rows = [
        {"rate": rate, "mode": mode, "itl_ms.p50": None if mode == "sync" else {"median": rate}}
        for rate in (16, 4)
        for mode in ("stock", "sync")
    ]
    assert lines_by_mode(rows, "rate", "itl_ms.p50") == {"stock": [(4, {"median": 4}), (16, {"median": 16})]}


def test_the_exit_code_tells_failures_from_differences() -> None:
    equal = [run_of("stock", 0, 4.0), run_of("resident", 0, 3.0)]
    other = [run_of("stock", 0, 4.0), run_of("resident", 0, 3.0, ("a", "x"))]
    failed = [run_of("stock", 0, 4.0), {**run_of("resident", 0, 3.0), "failed": 1}]
    assert arrivals_cli.exit_code(data_of(equal, exact=True)) == 0
    assert arrivals_cli.exit_code(data_of(other, exact=False)) == 0
    assert arrivals_cli.exit_code(data_of(other, exact=True)) == 1
    assert arrivals_cli.exit_code(data_of(failed)) == 1
    assert arrivals_cli.exit_code(data_of(equal[:1])) == 2
