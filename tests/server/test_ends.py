"""Every way in which a server ends, as docs/exit.md promises. All on one port: each start is a next start.

`ENDS_OF=stock` runs what does not depend on us against SGLang's own server, to see whether it is so there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.conftest import Client
from zos_sglang.observe.trace_reader import read
from zos_sglang.testing.distribution import distribution
from zos_sglang.testing.holdings import Holdings, holdings
from zos_sglang.testing.server import ServerProcess, free_port

pytestmark = pytest.mark.server

MODE = None if os.environ.get("ENDS_OF") == "stock" else "resident"
#: SGLang's launcher takes stacks and core dumps after a crash, up to more than a minute.
QUICK = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
#: From the death of one process to that of all. SGLang looks once a second.
ALL_GONE_S = 15.0

#: How names of SGLang's own in /dev/shm begin. They stay when a process is killed, and SGLang ends its
#: processes by killing them, together with Python's tracker that would remove the semaphores.
STAY = ("sem.mp-", "sglang_loads_", "sgl_shm_")

#: A device that never answers from some moment on, and what happens then: by the id of a request, as it is
#: selected while the step of another one is in flight.
PLUGIN = """
import sys
from zos_sglang.testing import slow_device

def never(plan, scheduler, *_, **__):
    batch = plan.batch_to_run
    rids = [] if batch is None else [r.rid for r in batch.reqs]
    if not {"crash", "exit", "hang"} & set(rids):
        return
    device = slow_device.VirtualEvent.device
    device.busy_until = device.now() + 3600 * 10**9
    if "crash" in rids:
        raise RuntimeError("a fault while the device is stuck")
    if "exit" in rids:
        scheduler.gracefully_exit = True

def crash(result, manager, recv, *_, **__):
    if "detokenizer" in recv.rids:
        raise RuntimeError("a fault of the detokenizer")

def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    slow_device.register()
    if "sglang.srt.managers.scheduler" in sys.modules:
        HookRegistry.register(
            "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run", never, HookType.AFTER)
    if "sglang.srt.managers.detokenizer_manager" in sys.modules:
        HookRegistry.register(
            "sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out",
            crash, HookType.AFTER)
"""


class Running:
    """A server with one stream open, and what its processes hold."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.client = Client(server)
        self.last: dict[str, Any] | None = None
        self.failed: Exception | None = None
        self._begun = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def stream(self, tokens: int = 2000) -> None:
        """Open the stream and wait for its first tokens: from here on a step is in flight."""
        self._tokens = tokens
        self._reader.start()
        assert self._begun.wait(60), self.server.log_text()[-3000:]

    def _read(self) -> None:
        params = {"temperature": 0, "max_new_tokens": self._tokens, "ignore_eos": True}
        body = {"text": "a stream", "stream": True, "sampling_params": params}
        try:
            with self.client.http.stream("POST", "/generate", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.last = json.loads(line[6:])
                        if len(self.last.get("output_ids", "12345")) > 4:
                            self._begun.set()
        except httpx.HTTPError as error:
            self.failed = error

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """The server's processes by what SGLang calls them; the launcher is `main`."""
        main = psutil.Process(self.server.pid)
        found = {"main": main}
        for one in main.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # short-lived ones
                title = " ".join(one.cmdline())
                for name in ("scheduler", "detokenizer"):
                    if f"sglang::{name}" in title:
                        found[name] = one
        return found

    def held(self) -> Holdings:
        main = psutil.Process(self.server.pid)
        return holdings([main, *main.children(recursive=True)])

    def send(self, rid: str) -> None:
        """A request that is not waited for."""
        body = {"text": rid, "rid": rid, "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
        with contextlib.suppress(httpx.HTTPError):
            self.client.http.post("/generate", json=body, timeout=0.5)

    def gone(self, within_s: float) -> float:
        """Wait until no process of the server is left; seconds that it took."""
        begun = time.monotonic()
        while self.server.alive:
            if time.monotonic() - begun > within_s:
                pytest.fail(f"alive after {within_s} s:\n{self.server.log_text()[-4000:]}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def check_released(self, held: Holdings) -> None:
        """No stream is open, no shared memory has its name, and the port may be bound again."""
        self._reader.join(timeout=10)
        assert not self._reader.is_alive(), "the client still waits"
        assert left_shared(held) == []
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.server.port))


def killed(process: psutil.Process, within_s: float) -> None:
    """Wait until a process is dead; who has started it may not have collected it yet."""
    end = time.monotonic() + within_s
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, f"alive after {within_s} s"
            time.sleep(0.05)


def left_shared(held: Holdings) -> list[str]:
    """Shared memory that still has its name, and that SGLang would not leave by itself."""
    left = [path for path in held.shared if os.path.exists(path)]
    return [path for path in left if not os.path.basename(path).startswith(STAY)]


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path, port: int) -> Iterator[Callable[..., Running]]:
    made: list[ServerProcess] = []

    def go(env: dict[str, str] | None = None, plugin: bool = False, args: tuple[str, ...] = ()) -> Running:
        found = dict(QUICK)
        if plugin:
            (tmp_path / "ends_plugin.py").write_text(PLUGIN)
            entry = "[sglang.srt.plugins]\nends = ends_plugin:register\n"
            found |= distribution(tmp_path, "ends", "1.0", entry)
        server = ServerProcess(
            tiny_model, mode=MODE, env=found | (env or {}), args=args, log=tmp_path / "log", port=port
        )
        made.append(server)
        server.start()
        return Running(server)

    yield go
    for server in made:
        server.stop()


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("main", signal.SIGKILL),
        ("scheduler", signal.SIGKILL),
        ("scheduler", signal.SIGTERM),
        ("detokenizer", signal.SIGKILL),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_the_end_of_one_process_is_the_end_of_all(
    start: Callable[..., Running], victim: str, number: signal.Signals
) -> None:
    running = start()
    running.stream()
    held = running.held()
    running.processes[victim].send_signal(number)
    took = running.gone(ALL_GONE_S)
    print(f"{victim} {number.name}: {took:.1f} s, exit code {running.server._process.poll()}")
    running.check_released(held)
    assert running.failed is not None, "a stream that was cut looks like one that ended"


def test_a_detokenizer_that_crashes_ends_the_server(start: Callable[..., Running]) -> None:
    running = start(plugin=True)
    running.stream()
    held = running.held()
    running.send("detokenizer")
    running.gone(ALL_GONE_S)
    running.check_released(held)
    assert "a fault of the detokenizer" in running.server.log_text()


def test_a_fault_while_the_device_is_stuck_ends_the_server_and_waits_for_nothing(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    running = start({"ZOS_TRACE": str(trace)} if MODE else {}, plugin=True)
    running.stream()
    held = running.held()
    running.send("crash")
    took = running.gone(ALL_GONE_S)
    print(f"crash: {took:.1f} s")
    running.check_released(held)
    log = running.server.log_text()
    assert "a fault while the device is stuck" in log
    assert "zos-sglang: exit:" not in log, "the exception path drains nothing"
    if MODE:
        found = read(trace)
        assert found.ended
        assert len(found.records)


@pytest.mark.skipif(MODE is None, reason="stock has no such time-out")
def test_a_graceful_exit_gives_a_stuck_device_its_time_and_no_more(start: Callable[..., Running]) -> None:
    running = start({"ZOS_EXIT_TIMEOUT_S": "1"}, plugin=True)
    running.stream()
    scheduler = running.processes["scheduler"]
    begun = time.monotonic()
    running.send("exit")
    scheduler.wait(timeout=30)
    took = time.monotonic() - begun
    print(f"exit: {took:.1f} s")
    assert "exit: 1 results were not ready within ZOS_EXIT_TIMEOUT_S=1" in running.server.log_text()
    assert 1 <= took < 10, "ten seconds is what it gets by default"


def test_a_stuck_device_does_not_outlive_a_failed_health_check_and_sigterm(
    start: Callable[..., Running],
) -> None:
    running = start({"SGLANG_HEALTH_CHECK_TIMEOUT": "2"}, plugin=True)
    running.stream()
    held = running.held()
    running.send("hang")
    assert running.client.http.get("/health_generate", timeout=60).status_code == 503
    scheduler = running.processes["scheduler"]
    running.processes["main"].send_signal(signal.SIGTERM)
    # SGLang gives the scheduler 15 s to exit, which it cannot, and kills it. Its HTTP server then waits for
    # the client of the open stream, which gives up a minute after the last token.
    killed(scheduler, 40)
    took = running.gone(120)
    print(f"hang: {took:.1f} s")
    running.check_released(held)


def test_a_client_that_stops_reading_holds_up_nobody_nor_the_end(start: Callable[..., Running]) -> None:
    running = start()
    client = running.client
    alone = client.generate("others", 24)["text"]
    params = {"max_new_tokens": 400, "ignore_eos": True}
    much = {"return_logprob": True, "top_logprobs_num": 20}  # megabytes: no socket buffer takes all of it
    asked = {"text": "deaf", "stream": True, "sampling_params": params, **much}
    body = json.dumps(asked).encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", running.server.port))
        deaf.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        # Its own request ends in the scheduler too: a result waits for no client.
        deadline = time.monotonic() + 60
        while _running(client) or time.monotonic() < deadline - 59:
            assert time.monotonic() < deadline
            assert client.generate("others", 24)["text"] == alone
    assert client.generate("others", 24)["text"] == alone
    # Ctrl-C lets open streams end, then the server.
    running.stream(tokens=300)
    held = running.held()
    running.processes["main"].send_signal(signal.SIGINT)
    took = running.gone(60)
    print(f"SIGINT: {took:.1f} s, exit code {running.server._process.poll()}, {running.failed}")
    running.check_released(held)
    assert running.last is not None
    assert running.last["meta_info"]["completion_tokens"] == 300


def _running(client: Client) -> int:
    """Requests that the scheduler has, as it tells routers."""
    (load,) = client.http.get("/v1/loads").json()["loads"]
    found: int = load["num_running_reqs"] + load["num_waiting_reqs"]
    return found
