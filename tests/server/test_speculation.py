"""Speculative decoding with SGLang's own NGRAM worker: our loop relays drafts and lengths as SGLang's does.

On the plain-CPU platform, which has the kernels that the worker needs in plain torch.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.conftest import STRICT

pytestmark = pytest.mark.server

REGEX = "[a-f]{4,10}(-[0-9]{2,6}){2,8}"
ARGS = ("--speculative-num-draft-tokens", "4", "--max-running-requests", "16")


@pytest.fixture(scope="module", params=["NGRAM", "NGRAM_BARRIER"])
def client(request, serve, client_of):
    """NGRAM waits for a grammar; the other is the same worker with upstream's barrier inside verify."""
    found = client_of(serve("overlap", STRICT, ("--speculative-algorithm", request.param, *ARGS)))
    found.waits = request.param == "NGRAM"
    return found


@pytest.fixture(scope="module")
def answers(client):
    client.set_state(zos_mode="stock")
    client.wave()  # from here on the drafts are those that the texts have been seen with
    found = client.wave()
    client.set_state(zos_mode="overlap")
    return found


def structured(client):
    """Answers under a grammar, some of them beside plain ones."""

    def ask(number):
        params = {"temperature": 0, "max_new_tokens": 40}
        if number % 3 != 2:
            params["regex"] = REGEX
        body = {"text": f"structured {number}", "sampling_params": params}
        return client.http.post("/generate", json=body).json()["text"]

    with ThreadPoolExecutor(9) as pool:
        return list(pool.map(ask, range(9)))


def test_the_answers_are_those_of_stock_and_drafts_are_accepted(client, answers):
    before = client.zos()["reasons"]["overlapped"]
    assert client.wave() == answers
    zos = client.zos()
    assert zos["own_launch"] and zos["paths"]["fallbacks"] == 0
    assert zos["reasons"]["overlapped"] > before
    meta = client.generate("request 3", 17)["meta_info"]
    assert meta["completion_tokens"] == 17 and meta["spec_verify_ct"] < 16


def test_a_grammar_waits_only_where_the_worker_cannot_advance_it(client, answers):
    client.set_state(zos_mode="stock")
    wanted = structured(client)
    assert all(re.fullmatch(REGEX, text) for n, text in enumerate(wanted) if n % 3 != 2 and len(text) < 40)
    client.set_state(zos_mode="overlap")
    before = client.zos()["reasons"]["grammar-sync"]
    assert structured(client) == wanted
    syncs = client.zos()["reasons"]["grammar-sync"] - before
    assert (syncs > 0) is client.waits


def test_the_lane_refuses_speculation_by_name(client, answers):
    client.set_state(zos_mode="resident")
    assert client.wave() == answers
    lane = client.zos()["lane"]
    assert lane["refused"] == {"speculation": 1} and lane["steps"] == 0
    assert "the resident lane stays closed (speculation): speculative decoding" in client.server.log_text()
    client.set_state(zos_mode="overlap")
