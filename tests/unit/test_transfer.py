"""The stand-in for Mooncake's engine moves memory, into registered memory only; the balancer's requests."""

from __future__ import annotations

import asyncio
import time

import httpx
import numpy as np
import pytest

from zos_sglang.testing.balancer import Balancer, application, with_room
from zos_sglang.testing.transfer.mooncake.engine import DELAY_VARIABLE, TransferEngine


def engine() -> TransferEngine:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made


@pytest.fixture
def target() -> np.ndarray:
    return np.zeros(1000, dtype=np.int64)


@pytest.fixture
def peer(target: np.ndarray) -> tuple[TransferEngine, str]:
    made = engine()
    assert made.register_memory(target.ctypes.data, target.nbytes) == 0
    return made, f"127.0.0.1:{made.get_rpc_port()}"


def test_pieces_arrive_where_they_belong(peer, target):
    source = np.arange(1000, dtype=np.int64)
    here, there = source.ctypes.data, target.ctypes.data
    moved = engine().batch_transfer_sync_write(
        peer[1], [here + 80, here + 800], [there, there + 4000], [160, 8]
    )
    assert moved == 0
    assert target[:20].tolist() == list(range(10, 30)) and target[500] == 100
    assert np.count_nonzero(target) == 21


def test_memory_that_is_not_registered_is_not_written_and_the_connection_goes_on(peer, target):
    source, sender = np.ones(1000, dtype=np.int64), engine()
    here, there = source.ctypes.data, target.ctypes.data
    assert sender.transfer_sync_write(peer[1], here, there + target.nbytes - 8, 16) == -1
    peer[0].unregister_memory(there)
    assert sender.transfer_sync_write(peer[1], here, there, 8) == -1
    assert not target.any()
    assert peer[0].batch_register_memory([there], [target.nbytes]) == 0
    assert sender.transfer_sync_write(peer[1], here, there, 8) == 0 and target[0] == 1


def test_a_peer_that_is_not_there_is_an_error_and_not_an_exception():
    assert engine().send_probe("127.0.0.1:1") == -1


def test_a_probe_finds_a_peer_that_is_there(peer):
    assert engine().send_probe(peer[1]) == 0


def test_a_delay_makes_a_transfer_slow(monkeypatch, peer):
    monkeypatch.setenv(DELAY_VARIABLE, "0.1")
    sender, begun = engine(), time.monotonic()
    assert sender.send_probe(peer[1]) == 0 and time.monotonic() - begun >= 0.1


def test_a_request_gets_one_room_and_the_bootstrap_address():
    found = with_room({"text": "a", "stream": True}, 77)
    assert (found["bootstrap_host"], found["bootstrap_port"], found["stream"]) == ("127.0.0.1", 77, True)
    assert 0 <= found["bootstrap_room"] < 2**62
    assert with_room({"input_ids": [1, 2, 3]}, 77)["bootstrap_port"] == 77


@pytest.mark.parametrize("body", [{"text": ["a", "b"]}, {"input_ids": [[1], [2, 3]]}])
def test_a_request_of_several_prompts_gets_a_room_for_each(body):
    found = with_room(body, 77)
    assert found["bootstrap_port"] == [77, 77] and len(set(found["bootstrap_room"])) == 2


def test_a_decode_server_that_does_not_answer_is_named_in_the_balancers_answer():
    nobody = "http://127.0.0.1:1"

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(application(Balancer(nobody, nobody, 77)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post("/generate", json={"text": "a"})

    answer = asyncio.run(ask())
    assert answer.status_code == 502 and "the decode server did not answer: ConnectError" in answer.text
