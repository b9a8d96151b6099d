"""The overload benchmark's figures and verdicts, on made-up runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.made_records import records
from zos_sglang.observe.names import AFTER_IDLE
from zos_sglang.testing.bench.arrivals import Outcome, Request
from zos_sglang.testing.bench.arrivals_load import body_of
from zos_sglang.testing.bench.overload import cases, checks_of, of_clients, step_times, summarise
from zos_sglang.testing.bench.overload_cli import endless, parser

CASES = {case.name: case for case in cases(streams=2000, running=64)}


def run(mode: str, repeat: int, tokens_per_s: float, wait_s: float = 2.0, p99: float = 5.0, **more) -> dict:
    seen = {"tokens_per_s": tokens_per_s, "oldest_wait_s": wait_s, "step_ms": {"p99": p99}, **more}
    return {"mode": mode, "repeat": repeat, "failed": 0, "errors": [], "refused": 0, "retracted": 0, **seen}


def verdict(case: str, runs: list[dict]) -> dict[str, bool]:
    result = {"runs": runs, "summary": summarise(runs, ("stock", "resident"))}
    return {check.what: check.ok for check in checks_of(CASES[case], result)}


def failing(case: str, runs: list[dict]) -> list[str]:
    return [what for what, ok in verdict(case, runs).items() if not ok]


PAIR = [run("stock", 0, 100.0), run("resident", 0, 101.0)]


def test_a_mode_as_good_as_stock_passes():
    assert failing("streams", PAIR) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tokens_per_s": 94.0}, "tokens_per_s"),
        ({"wait_s": 2.3}, "oldest_wait_s"),
        ({"p99": 6.4}, "step_p99_ms"),
    ],
)
def test_less_throughput_a_longer_wait_and_slower_steps_are_each_named(change, word):
    worse = run("resident", 0, **{"tokens_per_s": 100.0, **change})
    found = failing("streams", [PAIR[0], worse])
    assert len(found) == 1 and word in found[0]


def test_a_load_that_did_not_do_what_it_is_there_for_proves_nothing():
    assert failing("exhausted", PAIR) == ["exhausted: requests were retracted"]
    assert failing("refused", PAIR) == ["refused: the queue's limit refused"]


def test_a_failed_request_fails_the_case():
    assert failing("streams", [PAIR[0], {**PAIR[1], "failed": 1, "errors": ["request 3: ..."]}]) == [
        "streams: nobody failed"
    ]


def test_ratios_are_taken_within_a_repeat():
    runs = [run("stock", 0, 100), run("resident", 0, 200), run("stock", 1, 10), run("resident", 1, 20)]
    assert summarise(runs, ("stock", "resident"))["resident"]["ratios"]["tokens_per_s"]["per_repeat"] == [
        2,
        2,
    ]


def test_who_was_refused_did_not_fail_and_does_not_count_for_the_wait():
    refused = Outcome(0, 0.0, 0.0, error='HTTP 503: {"error":{"message":"The request queue is full."}}')
    broken = Outcome(1, 0.0, 0.0, error="ClientError()")
    good = replace(Outcome(2, 0.0, 0.0), tokens=4, last=3.0, ttft=1.5, e2e=3.0)
    found = of_clients([refused, broken, good])
    assert (found["refused"], found["failed"], found["requests"]) == (1, 1, 2)
    assert found["oldest_wait_s"] == 1.5


def test_step_times_are_those_of_the_mode_without_what_follows_an_idle_moment():
    made = records(5, mode="resident")
    made["wall"] = [1_000_000, 2_000_000, 3_000_000, 4_000_000, 900_000_000]
    made["flags"][4] = AFTER_IDLE
    found = step_times(made, "resident")
    assert found is not None and found["max"] == 4.0
    assert step_times(made, "stock") is None


def test_every_case_is_more_than_its_server_takes():
    for case in CASES.values():
        flags = dict(zip(case.args[::2], case.args[1::2], strict=True))
        running = int(flags["--max-running-requests"])
        assert case.count > running + int(flags.get("--max-queued-requests", 0))
        if case.retracts:
            assert int(flags["--max-total-tokens"]) * 2 < running * (case.prompt + case.output)
    assert CASES["streams"].count == 2000


def test_requests_may_be_retracted_and_still_have_their_full_length(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    body = json.loads(body_of(Request(0, 0.0, [1, 2]), 5, endless(tmp_path)))
    params = body["sampling_params"]
    assert params["ignore_eos"] is False and params["logit_bias"] == {"7": -100.0}
    assert params["max_new_tokens"] == 5


def test_a_case_that_does_not_exist_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--out", "x.json", "--case", "nothing"])
    assert "exhausted" in capsys.readouterr().err
