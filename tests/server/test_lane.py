"""The resident lane in a real server: every decode step rides, and nobody who asks something waits for it."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.conftest import STRICT

pytestmark = pytest.mark.server

CHECKS = {**STRICT, "ZOS_DEBUG_FUTURE_MAP": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
#: Two ranks over gloo need a core each.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
#: Tokens that take longer than a few questions, on a fast machine too.
LONG = 1500


@pytest.fixture(scope="module")
def client(serve, client_of):
    return client_of(serve("resident", CHECKS, ("--enable-metrics",)))


@pytest.fixture(scope="module")
def answers(client):
    client.set_state(zos_mode="stock")
    found = client.wave()
    client.set_state(zos_mode="resident")
    return found


def lane(client):
    return client.settled()["lane"]


def test_all_decode_steps_ride_and_the_answers_are_those_of_stock(client, answers):
    before = lane(client)
    assert client.wave() == answers
    after = lane(client)
    rode = after["steps"] - before["steps"]
    assert rode > 20 and after["decode_steps"] - before["decode_steps"] == rode
    assert after["faults"] == 0
    # Every answer has another length: rows left, and the rest went on.
    assert after["rows_left"] - before["rows_left"] > 5


def test_whoever_asks_while_the_lane_is_open_is_answered_at_once(client, answers):
    steps = client.server.log_text().count("Decode batch")
    before, deadline = lane(client)["steps"], time.monotonic() + 60
    with ThreadPoolExecutor(1) as pool:
        long_one = pool.submit(client.generate, "a long answer", LONG)
        while lane(client)["steps"] < before + 20:
            assert time.monotonic() < deadline, "the lane never opened"
            time.sleep(0.05)
        # SGLang looks for the answer once a second.
        assert client.http.get("/health_generate").status_code == 200
        assert "sglang:num_running_reqs" in client.http.get("/metrics").text
        short = client.generate("a short answer in between", 4)
        assert not long_one.done(), "they waited for the long answer"
        assert short["meta_info"]["completion_tokens"] == 4
        assert long_one.result()["meta_info"]["completion_tokens"] == LONG
    assert lane(client)["left"]["intake"] >= 1
    assert client.server.log_text().count("Decode batch") >= steps + LONG // 40 - 1


def test_the_gauge_of_lengths_follows_a_batch_that_rides(client, answers):
    prompt = client.generate("a long answer", LONG)["meta_info"]["prompt_tokens"]
    metrics = client.http.get("/metrics").text
    shown = re.search(r"^sglang:decode_sum_seq_lens{.*} (\S+)", metrics, re.MULTILINE)
    # SGLang sets it every 40 steps.
    assert shown is not None and prompt + LONG - 41 <= float(shown[1]) <= prompt + LONG


def structured(client):
    """Answers with and without a grammar, all at once."""

    def ask(number):
        params = {"temperature": 0, "max_new_tokens": 30}
        if number % 3 != 2:
            params["regex"] = r"(red|green), [0-9]{2,9} (apples|pears)"
        body = {"text": f"structured {number}", "sampling_params": params}
        return client.http.post("/generate", json=body).json()["text"]

    with ThreadPoolExecutor(9) as pool:
        return list(pool.map(ask, range(9)))


def test_rows_with_a_grammar_ride_and_the_answers_are_those_of_stock(client, answers):
    client.set_state(zos_mode="stock")
    wanted = structured(client)
    client.set_state(zos_mode="resident")
    before = lane(client)
    assert structured(client) == wanted
    after = lane(client)
    assert after["grammar_row_steps"] > before["grammar_row_steps"] + 20
    assert (after["faults"], after["mask_faults"]) == (0, 0)


def test_the_floor_can_be_asked_for(client, answers):
    refused = client.set_state(zos_floor=0)
    assert refused.status_code == 200 and refused.json() == [False]
    assert client.set_state(zos_floor=3).json() == [True]
    client.generate("one more", 8)
    floor = client.zos()["floor"][-1]
    assert floor["batch"] == 1 and floor["us"] > 0


@pytest.mark.timeout(600)
def test_two_ranks_ride_alike(serve, client_of, answers):
    client = client_of(serve("resident", {**CHECKS, **TWO_RANKS}, ("--tp", "2")))
    assert client.wave() == answers
    assert lane(client)["share"] == 1.0


def streamed(client, text, tokens, **params):
    """The last event of a streamed answer."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": not params, **params}
    body = {"text": text, "sampling_params": params, "stream": True}
    events = client.http.post("/generate", json=body).text.split("\n\n")
    return json.loads(events[-3].removeprefix("data: "))


def test_a_first_token_that_is_there_goes_out_before_the_next_step(client, answers):
    assert client.wave() == answers
    alone = streamed(client, "a streamed answer", 9)
    stop = {"ignore_eos": False, "stop_token_ids": alone["output_ids"][:1]}
    before = client.settled()
    with ThreadPoolExecutor(1) as pool:
        long_one = pool.submit(streamed, client, "a long answer", LONG)
        while lane(client)["steps"] < before["lane"]["steps"] + 20:
            time.sleep(0.05)
        assert streamed(client, "a streamed answer", 9)["output_ids"] == alone["output_ids"]
        ended = streamed(client, "a streamed answer", 9, **stop)
        assert ended["output_ids"] == alone["output_ids"][:1]
        assert ended["meta_info"]["finish_reason"]["type"] == "stop"
        assert not long_one.done()
        assert len(long_one.result()["output_ids"]) == LONG
    after = client.settled()
    assert after["reasons"]["early-first-token"] >= before["reasons"]["early-first-token"] + 2
    # Of those that were in the batch already when they turned out to have ended.
    assert after["lane"]["refused"]["row-ended"] == before["lane"]["refused"].get("row-ended", 0) + 1
    assert after["lane"]["faults"] == 0
