"""Confidential computing, by the flag that SGLang reads: results come home through its worker thread."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tests.server.conftest import STRICT, entry_points
from zos_sglang.testing.distribution import distribution

pytestmark = pytest.mark.server

#: Counts upstream's copies in the server, and says when its thread has ended.
PLUGIN = """
import logging
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

WORKER = "sglang.srt.managers.async_d2h_copy_worker.AsyncD2HCopyWorker"
copies = [0]

def count(*_, **__):
    copies[0] += 1

def stopped(result, worker, *_, **__):
    logging.getLogger(__name__).warning("copies %d, alive %s", copies[0], worker._thread.is_alive())

def register():
    HookRegistry.register(WORKER + ".submit", count, HookType.BEFORE)
    HookRegistry.register(WORKER + ".shutdown", stopped, HookType.AFTER)
"""


@pytest.fixture(scope="module")
def client(serve, client_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "watch_plugin.py").write_text(PLUGIN)
    found = distribution(folder, "watches", "1.0", entry_points("watch_plugin"))
    env = {**STRICT, **found, "SGLANG_FORCE_CONFIDENTIAL_COMPUTE": "1", "ZOS_DEBUG_FUTURE_MAP": "1"}
    return client_of(serve("overlap", env))


def test_every_mode_gives_the_answers_of_stock(client):
    assert "using async D2H copy worker" in client.server.log_text()
    client.set_state(zos_mode="stock")
    answers = client.wave()
    for mode in ("overlap", "resident", "sync"):
        client.set_state(zos_mode=mode)
        assert client.wave() == answers
    zos = client.zos()
    assert zos["own_launch"] and zos["reasons"]["overlapped"] > 0 and zos["paths"]["fallbacks"] == 0
    assert zos["lane"]["steps"] > 20 and zos["lane"]["faults"] == 0


@pytest.mark.parametrize("mode", ["overlap", "resident"])
def test_log_probabilities_come_home_whole(client, mode):
    def probabilities(mode):
        client.set_state(zos_mode=mode)
        assert client.http.post("/flush_cache", params={"timeout": 10}).status_code == 200
        answer = client.generate("with probabilities", 8, return_logprob=True)
        return [tuple(one[:2]) for one in answer["meta_info"]["output_token_logprobs"]]

    wanted = probabilities("stock")
    assert len(wanted) == 8 and probabilities(mode) == wanted


def test_sigterm_lets_an_answer_end_and_stops_the_worker(client):
    """Last: the server ends."""
    client.set_state(zos_mode="resident")
    ended, before = [], client.zos()["steps"]["launches"]
    reader = threading.Thread(target=lambda: ended.append(client.generate("the last one", 150)), daemon=True)
    reader.start()
    deadline = time.monotonic() + 60
    while client.zos()["steps"]["launches"] < before + 2:
        assert time.monotonic() < deadline, "it never ran"
    client.server._process.send_signal(signal.SIGTERM)
    reader.join(timeout=60)
    assert ended[0]["meta_info"]["completion_tokens"] == 150
    assert client.server._process.wait(timeout=60) == 0
    log = client.server.log_text()
    assert "zos-sglang: exit:" in log and "Scheduler hit an exception" not in log
    (line,) = [line for line in log.splitlines() if "copies " in line and "alive" in line]
    assert line.endswith("alive False") and int(line.split("copies ")[1].split(",")[0]) > 200
