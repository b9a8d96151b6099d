"""A small model of DeepSeek's shape: multi-head latent attention and experts."""

from __future__ import annotations

import pytest

from tests.server.conftest import CACHE, STRICT
from zos_sglang.testing.models import make_tiny

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def client(serve, client_of):
    model = make_tiny("deepseek", CACHE / "tiny-deepseek")
    return client_of(serve("overlap", {**STRICT, "ZOS_DEBUG_FUTURE_MAP": "1"}, model=model))


def test_every_mode_gives_the_answers_of_stock(client):
    client.set_state(zos_mode="stock")
    answers = client.wave()
    assert len(set(answers)) == len(answers)
    for mode in ("overlap", "sync", "resident"):
        client.set_state(zos_mode=mode)
        assert client.wave() == answers
    zos = client.zos()
    assert zos["reasons"]["overlapped"] > 20 and zos["paths"]["fallbacks"] == 0


def test_on_a_cpu_its_decode_steps_ride_and_no_barrier_is_needed(client):
    zos = client.zos()
    assert zos["lane"]["refused"] == {} and zos["lane"]["steps"] > 20 and zos["lane"]["faults"] == 0
    assert zos["paths"]["barrier-off"] > 0
    assert zos["paths"]["barrier-fine"] == zos["paths"]["barrier-coarse"] == 0
