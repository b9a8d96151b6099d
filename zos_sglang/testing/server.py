"""Start, watch and stop one real SGLang server, stock or ours, over HTTP."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

HOST = "127.0.0.1"
PLATFORM = "zos_cpu"
_TAIL_LINES = 40
#: SGLang's flags that multiply its ranks, each with all its names.
_SIZES = (
    ("--tp", "--tp-size", "--tensor-parallel-size"),
    ("--dp", "--dp-size", "--data-parallel-size"),
    ("--pp", "--pp-size", "--pipeline-parallel-size"),
)
#: Below what the kernel hands out, and below what SGLang takes for its own ranks (22000 and up).
_PORTS = range(12000, 21000)
#: Ports that this process has given out. Several servers choose theirs before the first one binds its own.
_given: set[int] = set()
#: Variable with the file that a measurement waits for once its server is ready.
TURN = "BENCH_AFTER"
#: Seconds for which a server keeps an idle connection. SGLang's five are httpx's as well: a client that came
#: back after exactly five found its connection open and had it closed on its request.
KEEP_ALIVE_S = 60


class ServerFailed(RuntimeError):
    """The server died or never became ready; the message carries the tail of its own log."""


def cpu_args() -> list[str]:
    """SGLang flags for a small model on a plain CPU: float32, small pools, quick start."""
    return [
        *("--device", "cpu"),
        *("--dtype", "float32"),  # bfloat16 answers depend on what else is in the batch
        *("--max-total-tokens", "32768"),  # else it sizes its pool to most of the machine's memory
        *("--max-running-requests", "128"),
        "--sleep-on-idle",  # a waiting server must not take a core from the one under test
        "--skip-server-warmup",  # readiness is asked of /health_generate, which generates a token
    ]


def cpu_env(ranks: int = 1) -> dict[str, str]:
    """Environment that makes SGLang find and use the plain-CPU platform of this package.

    Args:
        ranks: scheduler processes of the server, see `ranks_of`.
    """
    entry = str(Path(__file__).parent / "platform_entry")
    inherited = os.environ.get("PYTHONPATH")
    # Without it SGLang wants a NUMA node for each rank. It binds nothing where sgl-kernel is missing.
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else {}
    return {
        **bind,
        "SGLANG_PLATFORM": PLATFORM,
        "PYTHONPATH": os.pathsep.join([entry, inherited] if inherited else [entry]),
        # More threads wait for each other in a spin loop and starve the other processes of a
        # server; on a busy two-core machine a step took ten times as long.
        "OMP_NUM_THREADS": "1",
    }


def ranks_of(args: Sequence[str]) -> int:
    """How many scheduler processes SGLang starts with these flags: tensor, data and pipeline ranks.

    With DP attention the tensor ranks are the data ranks.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in _SIZES:
        parser.add_argument(*names, type=int, default=1, dest=names[0])
    parser.add_argument("--enable-dp-attention", action="store_const", const=True, dest="shared")
    found = vars(parser.parse_known_args(list(args))[0])
    if found.pop("shared"):
        del found["--dp"]
    return math.prod(found.values())


def cuda_available() -> bool:
    """Whether this machine has a CUDA device that torch can use."""
    import torch

    return torch.cuda.is_available()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago, and that no connection is given by chance.

    Never the same one twice in a process.
    A server binds its port only after its model is loaded. A port that the kernel hands out by itself
    (32768 and up) may by then belong to a socket of the server's own processes.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            if port not in _given:
                probe.bind((HOST, port))
                _given.add(port)
                return port
    raise ServerFailed(f"no free port from {_PORTS.start} to {_PORTS.stop - 1}")


class ServerProcess:
    """One real server as a child process; a context manager that starts and stops it.

    `mode` None is stock (`python -m sglang.launch_server`), anything else is ours with
    `--zos-mode MODE`. `args` and `env` come after, and so beat, the CPU defaults, which are
    added when `cpu` is true (default: no CUDA device). Both output streams go to file `log`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        mode: str | None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log: Path,
        port: int | None = None,
        start_timeout_s: float = 480,
        cpu: bool | None = None,
    ) -> None:
        self.model, self.mode, self.log = str(model), mode, Path(log)
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.start_timeout_s = start_timeout_s
        self._cpu = not cuda_available() if cpu is None else cpu
        self._args, self._env = list(args), dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._family: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        """Process id of the launcher. Raises ServerFailed if the server was never started."""
        if self._process is None:
            raise ServerFailed("the server was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the launcher runs, or any process that it started and that was seen by now."""
        if self._process is None:
            return False
        self._note_children()
        return self._process.poll() is None or any(map(_runs, self._family.values()))

    @property
    def command(self) -> list[str]:
        """The command line that `start` runs."""
        module = "sglang.launch_server" if self.mode is None else "zos_sglang.launch_server"
        command = [sys.executable, "-m", module, "--model-path", self.model]
        command += ["--host", HOST, "--port", str(self.port)]
        if self.mode is not None:
            command += ["--zos-mode", self.mode]
        return command + (cpu_args() if self._cpu else []) + self._args

    def launch(self) -> None:
        """Start the process and return at once; `start` then waits for it."""
        # A ZOS_MODE of the caller's shell would turn the stock reference into ours.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ZOS_")}
        ours = {"SGLANG_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S), **inherited}
        env = {**ours, **(cpu_env(ranks_of(self._args)) if self._cpu else {}), **self._env}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*dying_with_us(), *self.command],
                env=env,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start(self) -> None:
        """Start, unless launched already, and wait until the server has generated a token.

        With BENCH_AFTER=FILE in the environment it then makes FILE.ready and waits for FILE: measurements
        that share a machine can start their servers together and use them one after the other.

        Raises ServerFailed with the server's own last lines as soon as it dies, or after
        `start_timeout_s` seconds; nothing is left running then.
        """
        if self._process is None or self._process.poll() is not None:
            self.launch()
        try:
            self._wait_ready(time.monotonic() + self.start_timeout_s)
            self._freeze_gc()
            if turn := os.environ.get(TURN):
                ready_file(turn).touch()
                while not Path(turn).exists():
                    time.sleep(0.5)
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, deadline: float) -> None:
        assert self._process is not None
        with httpx.Client(timeout=20, trust_env=False) as client:
            while time.monotonic() < deadline:
                if (code := self._process.poll()) is not None:
                    raise ServerFailed(self._failure(f"exited with code {code} at start-up"))
                self._note_children()
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health_generate").status_code == 200:
                        return
                time.sleep(0.1)
        raise ServerFailed(self._failure(f"not ready after {self.start_timeout_s:.0f} s"))

    def _freeze_gc(self) -> None:
        """What SGLang does after its warm-up. Without one it asks itself before it listens, and fails.

        A full collection of what the imports left takes half a second on a slow host; servers at work never
        make one.
        """
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{self.url}/freeze_gc", timeout=20, trust_env=False)

    def _failure(self, what: str) -> str:
        tail = "\n".join(self.log_text().splitlines()[-_TAIL_LINES:])
        return f"server {what}: {' '.join(self.command)}\n--- {self.log} ---\n{tail}"

    def _note_children(self) -> None:
        # Remembered while the launcher lives: once it is dead, its children have another parent.
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children(recursive=True):
                self._family.setdefault(child.pid, child)

    def stop(self, grace_s: float = 0) -> None:
        """Kill the whole process tree; with `grace_s`, SIGTERM first and wait so many seconds."""
        if self._process is None:
            return
        self._note_children()
        if grace_s and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        family = {*self._family.values(), *_session_members(self.pid)}
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=10)
        self._family.clear()

    def log_text(self) -> str:
        """Everything the server has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ready_file(turn: str | Path) -> Path:
    """What a measurement makes that waits for its turn, the file `turn`; see `ServerProcess.start`."""
    return Path(f"{turn}.ready")


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it, parents first; none if it has gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def each_of_tree(pid: int, action: Callable[[psutil.Process], None]) -> None:
    """Stop, wake or kill a process and all below it. Compilers come and go in a server that starts."""
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            action(process)


def dying_with_us() -> list[str]:
    """Prefix of a command that is killed when we are, even by SIGKILL; it becomes the command.

    SGLang's own children follow their parent the same way. Linux ties this to the thread that
    starts the child, so only the main thread, which lives as long as the process, may use it.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    setpriv = shutil.which("setpriv")  # of util-linux
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv and main_thread else []


def _session_members(session: int) -> list[psutil.Process]:
    """Processes of the session that `start` opened; finds orphans whose launcher died early."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session:
                members.append(process)
    return members


def main(argv: list[str] | None = None) -> None:
    """`python -m zos_sglang.testing.server MODEL [FLAG ...]`: our server in the foreground.

    Adds the CPU defaults where there is no CUDA device; becomes the server, so Ctrl-C ends it.
    """
    model, *flags = sys.argv[1:] if argv is None else argv
    cpu = not cuda_available()
    command = [sys.executable, "-m", "zos_sglang.launch_server", "--model-path", model]
    # People get SGLang's own warm-up: what it does behind it fails in the log without.
    defaults = [flag for flag in cpu_args() if flag != "--skip-server-warmup"] if cpu else []
    command += [*defaults, *flags]
    os.execve(sys.executable, command, {**os.environ, **(cpu_env(ranks_of(flags)) if cpu else {})})


if __name__ == "__main__":
    main()
