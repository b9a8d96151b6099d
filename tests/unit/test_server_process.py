"""The process that runs a server: launched, waited for, watched and stopped; no real server."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from zos_sglang.testing import server
from zos_sglang.testing.server import ServerFailed, ServerProcess


class Script(ServerProcess):
    """A process that behaves as `code` says in place of a server."""

    def __init__(self, code: str, log: Path, **options: Any) -> None:
        super().__init__("none", mode=None, log=log, cpu=False, **options)
        self.code = code

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code]


def test_a_server_that_dies_is_reported_in_its_own_words_at_once(tmp_path: Path) -> None:
    script = Script("import sys; sys.exit('no such model: none')", tmp_path / "log")
    started = time.monotonic()
    with pytest.raises(ServerFailed, match=r"(?s)exited with code 1.*no such model: none"):
        script.start()
    assert time.monotonic() - started < 30


def test_a_server_that_never_answers_is_stopped_and_reported(tmp_path: Path) -> None:
    code = "import time; print('still loading', flush=True); time.sleep(600)"
    script = Script(code, tmp_path / "log", start_timeout_s=5)
    with pytest.raises(ServerFailed, match=r"(?s)not ready after 5 s.*still loading"):
        script.start()
    assert not psutil.pid_exists(script.pid)


FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
"""


@pytest.mark.parametrize("end", ["time.sleep(600)", "sys.exit(1)"], ids=["alive", "dead"])
def test_no_child_outlives_the_server(tmp_path: Path, end: str) -> None:
    script = Script(FAMILY + end, tmp_path / "log", start_timeout_s=5)
    with pytest.raises(ServerFailed):
        script.start()
    assert gone(int(script.log_text().split()[0]))


def gone(pid: int) -> bool:
    """Whether a process has ended; who started it may not have collected it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("end", ["alive", "dead"])
def test_a_server_is_alive_as_long_as_any_process_of_it(tmp_path: Path, end: str) -> None:
    """The launcher ends, if it does, only when its child has been seen: later nobody can tell whose it is."""
    script = Script(FAMILY + "time.sleep(600)", tmp_path / "log")
    assert not script.alive
    script.launch()
    until(lambda: script.log_text().endswith("\n"))
    assert script.alive
    if end == "dead":
        psutil.Process(script.pid).kill()
        until(lambda: script._process is not None and script._process.poll() is not None)
    assert script.alive  # its child is
    script.stop()
    assert not script.alive


def test_a_server_keeps_an_idle_connection_for_longer_than_its_clients_do(tmp_path: Path) -> None:
    """The other way round a client's request can meet a connection that is being closed."""
    code = "import os; print(os.environ['SGLANG_TIMEOUT_KEEP_ALIVE'])"
    script = Script(code, tmp_path / "log")
    script.launch()
    until(lambda: script.log_text().endswith("\n"))
    script.stop()
    expiry = httpx.Limits().keepalive_expiry
    assert expiry is not None and float(script.log_text()) > expiry


CALLER = """
import sys
from pathlib import Path
from zos_sglang.testing.server import ServerProcess

class Sleeper(ServerProcess):
    command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]

Sleeper("none", mode=None, log=Path(sys.argv[1]), cpu=False).start()
"""


def test_the_server_dies_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(log)])
    try:
        until(lambda: log.exists() and log.read_text().endswith("\n"))
        child = int(log.read_text())
        assert psutil.pid_exists(child)
    finally:
        caller.kill()
        caller.wait()
    until(lambda: gone(child))


def until(done: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


ANSWERING = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        print("asked for", self.path, flush=True)
        self.do_GET()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Answering(Script):
    """A process that is ready at once, but for what `first` (Python) does before; it counts its launches."""

    launches = 0

    def __init__(self, log: Path, first: str = "") -> None:
        super().__init__(first + ANSWERING, log, start_timeout_s=60)

    @property
    def command(self) -> list[str]:
        return [*super().command, str(self.port)]

    def launch(self) -> None:
        self.launches += 1
        super().launch()


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    found = Answering(tmp_path / "log")
    yield found
    found.stop()


def test_start_launches_a_server_that_was_not(answering: Answering) -> None:
    answering.start()
    assert answering.launches == 1


def test_a_server_that_is_ready_freezes_what_its_imports_left(answering: Answering) -> None:
    answering.start()
    assert answering.log_text().count("asked for /freeze_gc") == 1


def test_start_waits_for_a_launched_server_and_launches_no_other(answering: Answering) -> None:
    answering.launch()
    pid = answering.pid
    answering.start()
    assert answering.launches == 1
    assert answering.pid == pid
    assert httpx.get(f"{answering.url}/health_generate", trust_env=False).status_code == 200


def test_start_launches_anew_what_has_died_meanwhile(answering: Answering) -> None:
    answering.launch()
    psutil.Process(answering.pid).kill()
    until(lambda: psutil.Process(answering.pid).status() == psutil.STATUS_ZOMBIE)
    answering.start()
    assert answering.launches == 2


def test_launch_returns_before_the_server_is_ready(tmp_path: Path) -> None:
    script = Answering(tmp_path / "log", first="import time; time.sleep(600)")
    try:
        started = time.monotonic()
        script.launch()
        assert time.monotonic() - started < 30
        assert psutil.pid_exists(script.pid)
    finally:
        script.stop()


def test_a_launched_server_that_nobody_waited_for_is_stopped(answering: Answering) -> None:
    answering.launch()
    answering.stop()
    assert not psutil.pid_exists(answering.pid)


def test_stopping_a_server_that_was_never_launched_does_nothing(answering: Answering) -> None:
    answering.stop()
    with pytest.raises(ServerFailed, match="not started"):
        _ = answering.pid


def test_stock_is_started_without_our_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOS_MODE", "overlap")
    script = Script("import os; print('ZOS_MODE' in os.environ, flush=True)", tmp_path / "log")
    with pytest.raises(ServerFailed):
        script.start()
    assert script.log_text().strip() == "False"


def test_the_mode_chooses_the_launcher(tmp_path: Path) -> None:
    stock = ServerProcess("m", mode=None, log=tmp_path / "log", cpu=True).command
    ours = ServerProcess("m", mode="sync", log=tmp_path / "log", cpu=True).command
    assert "sglang.launch_server" in stock and "--zos-mode" not in stock
    assert "zos_sglang.launch_server" in ours and ours[ours.index("--zos-mode") + 1] == "sync"


def test_flags_of_the_caller_come_after_the_defaults(tmp_path: Path) -> None:
    args = ("--max-total-tokens", "64")
    command = ServerProcess("m", mode=None, args=args, log=tmp_path / "log", cpu=True).command
    assert command[-2:] == list(args)
    assert command.index("--max-total-tokens") < len(command) - 2


def test_serve_becomes_our_server_with_the_cpu_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(server, "cuda_available", lambda: False)
    monkeypatch.setattr(os, "execve", lambda *call: seen.append(call))
    server.main(["model", "--port", "1234"])
    ((_, command, env),) = seen
    assert "zos_sglang.launch_server" in command and command[-2:] == ["--port", "1234"]
    assert env["SGLANG_PLATFORM"] == "zos_cpu" and "--device" in command


def test_a_port_is_free_and_below_those_that_the_kernel_hands_out() -> None:
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = server.free_port()
    assert 1024 < port < first_of_kernel
    with socket.socket() as probe:
        probe.bind((server.HOST, port))


def test_no_port_is_given_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started together choose all their ports before the first one is bound."""
    first = server.free_port()
    monkeypatch.setattr(server, "_PORTS", range(first, first + 1))
    with pytest.raises(ServerFailed, match="no free port"):
        server.free_port()


def test_a_port_that_somebody_holds_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind((server.HOST, 0))
        held = holder.getsockname()[1]
        monkeypatch.setattr(server, "_PORTS", range(held, held + 1))
        with pytest.raises(ServerFailed, match="no free port"):
            server.free_port()


@pytest.mark.parametrize(
    ("args", "ranks"),
    [
        ([], 1),
        (["--tp", "2"], 2),
        (["--tp-size=4", "--page-size", "16"], 4),
        (["--tensor-parallel-size", "2", "--dp-size", "2"], 4),
        (["--tp", "2", "--tp", "1"], 1),
        (["--tp", "2", "--dp", "2", "--enable-dp-attention"], 2),
    ],
)
def test_flags_tell_how_many_ranks_a_server_has(args: list[str], ranks: int) -> None:
    assert server.ranks_of(args) == ranks


def test_several_ranks_on_a_cpu_need_no_numa_node_each() -> None:
    assert server.cpu_env(2)["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in server.cpu_env()
