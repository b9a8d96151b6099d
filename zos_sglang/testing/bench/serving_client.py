"""`python -m sglang.bench_serving` as a child process, run after run.

To import it takes ten seconds, a run often less. So one process imports it once and forks for each run: the
child is what `python -m sglang.bench_serving ARGUMENTS` is after its imports, and ends with the run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.server import dying_with_us

MODULE = "sglang.bench_serving"
_TAIL_LINES = 15
_IMPORT_TIMEOUT_S = 300.0
#: Nothing may be looked up in the network, proxies must not come between, and spinning threads would
#: disturb the server. Imports of torch need no more than one thread either.
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "OMP_NUM_THREADS": "1",
}


class Runs(Protocol):
    """Something that runs SGLang's benchmark."""

    def run(self, arguments: Sequence[str], log: Path, timeout_s: float) -> float:
        """One run; its output goes to `log`. Returns the seconds of CPU it took, to make its prompts too.

        Raises BenchError if it fails, or takes too long.
        """


def client_env() -> dict[str, str]:
    """The environment of the benchmark: ours without the plugin's variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ZOS_")}
    return {**inherited, **_ENV}


class FreshRuns:
    """A new interpreter for each run: what one would type by hand."""

    def run(self, arguments: Sequence[str], log: Path, timeout_s: float) -> float:
        before = _cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN))
        with log.open("w") as sink:
            try:
                done = subprocess.run(
                    [*dying_with_us(), sys.executable, "-m", MODULE, *arguments],
                    env=client_env(),
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s + _IMPORT_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise BenchError(_failure(f"did not end within {timeout_s:.0f} s", log)) from None
        _check(done.returncode, log)
        return _cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN)) - before


class ForkedRuns:
    """One process that has imported the benchmark and forks for each run. A context manager.

    `log` gets what the imports say.
    """

    def __init__(self, log: Path, module: str = MODULE) -> None:
        self.log, self.module = log, module
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ForkedRuns:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as sink:
            self._process = subprocess.Popen(
                [*dying_with_us(), sys.executable, "-m", __name__, self.module],
                env=client_env(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        # The group: a run may be at work.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def ready(self) -> None:
        """Wait until the benchmark is imported. Raises BenchError."""
        self._answer(_IMPORT_TIMEOUT_S, "be imported", self.log)

    def run(self, arguments: Sequence[str], log: Path, timeout_s: float) -> float:
        assert self._process is not None and self._process.stdin is not None
        job = {"arguments": list(arguments), "log": str(log)}
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise BenchError(_failure("is gone", self.log)) from None
        answer = self._answer(timeout_s, "end", log)
        _check(answer["code"], log)
        return float(answer["cpu_s"])

    def _answer(self, timeout_s: float, what: str, log: Path) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            there, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not there:
                raise BenchError(_failure(f"did not {what} within {timeout_s:.0f} s", log))
            piece = os.read(self._process.stdout.fileno(), 4096)
            if not piece:
                raise BenchError(_failure("died", self.log))
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer


def _cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _check(code: int, log: Path) -> None:
    if code:
        raise BenchError(_failure(f"ended with code {code}", log))


def _failure(what: str, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join([f"{MODULE} {what}; the end of {log.name}:", *lines[-_TAIL_LINES:]])


# ------------------------------------------------------------------ in the process that forks


def main() -> None:
    """Import the benchmark, say so, then fork for each line of stdin and answer with the exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print must not be taken for an answer
    module = sys.argv[1]
    importlib.import_module(module)
    print(json.dumps({"code": 0}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(module, job)
        _, status, usage = os.wait4(child, 0)
        answer = {"code": os.waitstatus_to_exitcode(status), "cpu_s": _cpu_s(usage)}
        print(json.dumps(answer), file=answers, flush=True)


def _run(module: str, job: dict[str, Any]) -> None:
    """One run, in the forked process; never returns."""
    code: Any = 1
    try:
        sink = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.argv = [module, *job["arguments"]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
