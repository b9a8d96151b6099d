"""The ends of a server: SIGTERM with open streams, and a step that takes far too long."""

import contextlib
import json
import signal
import threading
import time

import httpx
import pytest

from tests.server.conftest import STRICT, entry_points
from zos_sglang.testing.distribution import distribution

pytestmark = pytest.mark.server


def read_stream(client, number, begun, out):
    """One streaming request; sets `begun` at its first chunk; the finish reason of the last goes to `out`."""
    body = {
        "text": f"stream {number}",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 150, "ignore_eos": True},
    }
    last = None
    with client.http.stream("POST", "/generate", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                last = json.loads(line[6:])
                begun.set()
    out[number] = last["meta_info"]["finish_reason"]["type"], last["meta_info"]["completion_tokens"]


def test_sigterm_lets_open_streams_end_and_exits_cleanly(serve, client_of):
    server = serve("overlap", STRICT)
    client = client_of(server)
    ended: dict[int, tuple[str, int]] = {}
    begun = [threading.Event() for _ in range(6)]
    readers = [
        threading.Thread(target=read_stream, args=(client, n, begun[n], ended), daemon=True) for n in range(6)
    ]
    for reader in readers:
        reader.start()
    assert all(event.wait(60) for event in begun)
    server._process.send_signal(signal.SIGTERM)
    for reader in readers:
        reader.join(timeout=120)
    assert ended == {n: ("length", 150) for n in range(6)}
    assert server._process.wait(timeout=90) == 0
    assert "zos-sglang: exit:" in server.log_text()
    assert "Scheduler hit an exception" not in server.log_text()


EXIT_PLUGIN = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def exit_in_the_middle(plan, scheduler, *_, **__):
    batch = plan.batch_to_run
    if batch is not None and any(r.rid == "exit" and len(r.output_ids) == 4 for r in batch.reqs):
        scheduler.gracefully_exit = True

def register():
    target = "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run"
    HookRegistry.register(target, exit_in_the_middle, HookType.AFTER)
"""


def test_an_exit_with_a_step_in_flight_processes_that_step(serve, client_of, tmp_path):
    """Upstream asks for an exit when no request is left; here a plugin asks in the middle of an answer."""
    (tmp_path / "exit_plugin.py").write_text(EXIT_PLUGIN)
    server = serve("overlap", distribution(tmp_path, "exits", "1.0", entry_points("exit_plugin")))
    body = {"text": "on", "rid": "exit", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    with contextlib.suppress(httpx.HTTPError):  # the server ends under the request
        client_of(server).http.post("/generate", json=body, timeout=20)
    deadline = time.monotonic() + 60
    while "zos-sglang: exit:" not in server.log_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "zos-sglang: exit: 1 results drained" in server.log_text()


def test_a_stall_is_reported_with_what_is_in_flight_and_the_request_survives(serve, client_of):
    server = serve("overlap", {"ZOS_STALL_TIMEOUT_S": "1"})
    client = client_of(server)
    assert client.http.post("/slow_down", json={"forward_sleep_time": 2.5}).status_code == 200
    slow = client.generate("slow", max_new_tokens=2)
    client.http.post("/slow_down", json={"forward_sleep_time": None})
    assert slow["meta_info"]["completion_tokens"] == 2
    log = server.log_text()
    assert "zos-sglang: no progress for" in log
    for part in ("phase launch", "pending:", "current: ", "forward stream:", "last decisions:", "prepare"):
        assert part in log, part
    assert client.zos()["paths"]["stalls"] >= 1
    assert client.generate("after", max_new_tokens=2)["meta_info"]["completion_tokens"] == 2
