"""The live mode switch: nothing is lost, nothing changes in the answers, `off` is stock again."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.conftest import STRICT

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def client(serve, client_of):
    return client_of(serve("overlap", {**STRICT, "ZOS_DEBUG_FUTURE_MAP": "1"}))


@pytest.fixture(scope="module")
def answers(client):
    return client.wave()


def test_every_mode_gives_the_answers_of_stock(client, answers):
    for mode in ("stock", "sync", "overlap", "resident"):
        assert client.set_state(zos_mode=mode).json() == [True]
        assert client.zos()["mode"] == mode
        assert client.wave() == answers


def test_switching_while_requests_run_changes_no_answer(client, answers):
    before = client.zos()["paths"]["mode-switches"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.wave)
        for mode in ("sync", "resident", "stock", "overlap", "resident", "overlap") * 3:
            time.sleep(0.03)
            assert client.set_state(zos_mode=mode).status_code == 200
        assert running.result() == answers
    assert client.zos()["paths"]["mode-switches"] == before + 18
    assert client.zos()["paths"]["fallbacks"] == 0


def test_pausing_by_retraction_works_in_every_mode(client, answers):
    for mode in ("sync", "stock", "overlap", "resident"):
        client.set_state(zos_mode=mode)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.wave)
            time.sleep(0.1)
            assert client.http.post("/pause_generation", json={"mode": "retract"}).status_code == 200
            # A switch that is asked for while the engine is paused happens when it goes on.
            client.set_state(zos_mode="overlap")
            assert client.http.post("/continue_generation", json={}).status_code == 200
            assert running.result() == answers
        assert client.zos()["mode"] == "overlap"


def test_the_prefill_rule_changes_while_requests_run_and_changes_no_answer(client, answers):
    client.set_state(zos_mode="overlap")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.wave)
        for rule in ("always", "never", "first-token") * 3:
            time.sleep(0.03)
            assert client.set_state(zos_consecutive_prefill=rule).json() == [True]
            assert client.zos()["prefill_rule"] == rule
        assert running.result() == answers
    assert client.zos()["paths"]["fallbacks"] == 0


def test_an_unknown_prefill_rule_is_refused_and_the_one_in_effect_stays(client):
    before = client.zos()["prefill_rule"]
    refused = client.set_state(zos_consecutive_prefill="sometimes")
    assert refused.status_code == 400
    assert "never, always, first-token" in refused.json()["error"]["message"]
    assert client.zos()["prefill_rule"] == before


def test_an_unknown_mode_is_refused_and_the_server_goes_on(client, answers):
    refused = client.set_state(zos_mode="overlapp")
    assert refused.status_code == 400
    assert "overlap" in refused.json()["error"]["message"]
    assert client.wave() == answers


def test_off_gives_every_callable_back_for_good(client, answers):
    client.set_state(zos_mode="resident")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.wave)
        time.sleep(0.1)
        assert client.set_state(zos_mode="off").json() == [True]
        assert running.result() == answers
    assert client.zos() is None
    assert "every callable is SGLang's own again" in client.server.log_text()
    refused = client.set_state(zos_mode="overlap")
    assert refused.status_code == 400
    assert "restart" in refused.json()["error"]["message"]
    assert client.wave() == answers
