"""The tools of the tests with DP attention: the watchdog, the delays, the benchmark's summary."""

import time
from types import SimpleNamespace

import pytest

from zos_sglang.testing import dp_jitter
from zos_sglang.testing.bench.dp_attention import summarise
from zos_sglang.testing.dp_jitter import Jitter
from zos_sglang.testing.dp_server import DpServer, Hung, watched
from zos_sglang.testing.server import cpu_env, ranks_of

SERVER = SimpleNamespace(stacks=lambda folder: f"the stacks in {folder}")


def test_work_that_moves_is_let_be():
    limit_s = 2.0  # a busy machine may hold up a thread for a while

    def work(alive):
        begun = time.monotonic()
        while time.monotonic() < begun + 1.5 * limit_s:
            time.sleep(0.05)
            alive()

    watched(SERVER, "folder", work, limit_s)


def test_work_that_stands_still_is_a_hang_and_shows_the_stacks():
    with pytest.raises(Hung, match=r"(?s)nothing moved for 0 s.*the stacks in folder"):
        watched(SERVER, "folder", lambda alive: time.sleep(30), 0.3)


def test_an_error_of_the_work_is_no_hang():
    with pytest.raises(ZeroDivisionError):
        watched(SERVER, "folder", lambda alive: 1 / 0, 5.0)


def test_delays_are_those_of_the_seed(monkeypatch):
    def delays(seed):
        slept = []
        monkeypatch.setattr(dp_jitter.time, "sleep", slept.append)
        jitter = Jitter(seed)
        for _ in range(2000):
            jitter("somewhere")
        return slept

    assert delays(1) == delays(1) != delays(2)
    assert 20 < len(delays(1)) < 100 and max(delays(1)) < 0.1


def test_a_rank_does_not_sleep_while_it_is_idle(tmp_path):
    server = DpServer("model", mode="overlap", log=tmp_path / "log", args=("--more",))
    assert "--sleep-on-idle" not in server.command and server.command[-1] == "--more"
    assert "--enable-dp-attention" in server.command
    assert cpu_env(ranks_of(server.command))["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_rules_are_compared_inside_a_repeat():
    slow_then_fast = {"never": [{"x": 10.0}, {"x": 2.0}], "first-token": [{"x": 5.0}, {"x": 1.0}]}
    found = summarise(slow_then_fast)
    assert found["first-token"]["x"]["to_never"]["median"] == 0.5
    assert found["first-token"]["x"]["to_never"]["min"] == found["first-token"]["x"]["to_never"]["max"]
    assert found["never"]["x"]["value"]["median"] == 6.0
