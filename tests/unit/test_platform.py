"""The plain-CPU platform, its attention, and the process that runs a server."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from zos_sglang.testing import server
from zos_sglang.testing.cpu_attention import RowwiseAttention
from zos_sglang.testing.cpu_platform import PlainCpuPlatform, activate
from zos_sglang.testing.server import ServerFailed, ServerProcess, cpu_env

LIST_PLATFORMS = (
    "from importlib.metadata import entry_points;"
    "print([(e.name, e.dist.name) for e in entry_points(group='sglang.srt.platforms')])"
)


def test_the_platform_stays_away_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert activate() is None


def test_the_named_platform_gives_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "zos_cpu")
    assert activate() == "zos_sglang.testing.cpu_platform.PlainCpuPlatform"


@pytest.mark.parametrize("found", [True, False])
def test_only_the_path_of_cpu_env_shows_the_platform_to_sglang(found: bool) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (cpu_env() if found else {})
    shown = subprocess.run(
        [sys.executable, "-c", LIST_PLATFORMS], env=env, capture_output=True, text=True, check=True
    )
    # A distribution of its own: SGLang skips the plugins of one whose platform is not selected.
    assert ("('zos_cpu', 'zos-cpu-platform')" in shown.stdout) is found
    assert "'zos-sglang'" not in shown.stdout


@pytest.mark.parametrize(
    ("chosen", "used"),
    [(None, "torch_native"), ("intel_amx", "torch_native"), ("flex_attention", "flex_attention")],
)
def test_attention_needs_no_kernel_package_unless_a_flag_says_so(chosen: str | None, used: str) -> None:
    args = SimpleNamespace(attention_backend=chosen)
    PlainCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == used


class Step:
    """One decode step of rows with these lengths, over a KV pool in scattered order."""

    def __init__(self, lengths: list[int], heads: int, kv_heads: int, width: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.cache = torch.randn(2, 600, kv_heads, width, generator=generator)
        self.query = torch.randn(len(lengths), heads, width, generator=generator)
        self.table = torch.randperm(600, generator=generator)[: 8 * 64].view(8, 64).int()
        self.rows, self.lengths = torch.arange(len(lengths)), torch.tensor(lengths)

    def run(self, backend_class: type, only: int | None = None, window: int | None = None) -> Any:
        pick = slice(None) if only is None else slice(only, only + 1)
        rows, lengths, query = self.rows[pick], self.lengths[pick], self.query[pick]
        pool = SimpleNamespace(req_to_token=self.table)
        runner = SimpleNamespace(device="cpu", req_to_token_pool=pool, token_to_kv_pool=None)
        backend = backend_class(runner)
        mode = SimpleNamespace(is_decode=lambda: True)
        backend.init_forward_metadata(
            SimpleNamespace(forward_mode=mode, req_pool_indices=rows, seq_lens=lengths)
        )
        return backend._run_sdpa_forward_decode(
            query,
            torch.empty_like(query),
            *self.cache,
            self.table,
            rows,
            lengths,
            None,
            scaling=0.25,
            enable_gqa=query.shape[1] != self.cache.shape[2],
            causal=False,
            is_cross_attn=False,
            sliding_window_size=window,
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_decode_attention_gives_what_upstreams_gives(heads: int, kv_heads: int) -> None:
    step = Step([1, 64, 17, 40], heads, kv_heads)
    torch.testing.assert_close(
        step.run(RowwiseAttention), step.run(TorchNativeAttnBackend), rtol=1e-5, atol=1e-6
    )


def test_a_sliding_window_is_left_to_upstream() -> None:
    step = Step([30, 64], 4, 2)
    windowed = step.run(RowwiseAttention, window=8)
    assert torch.equal(windowed, step.run(TorchNativeAttnBackend, window=8))
    assert not torch.equal(windowed, step.run(RowwiseAttention))


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    step = Step([1, 64, 17, 40, 33], 4, 2)
    together = step.run(RowwiseAttention)
    for row in range(5):
        assert torch.equal(step.run(RowwiseAttention, only=row)[0], together[row])


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
    script = Script(code, tmp_path / "log", start_timeout_s=3)
    with pytest.raises(ServerFailed, match=r"(?s)not ready after 3 s.*still loading"):
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
    child = int(script.log_text().split()[0])
    gone = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert gone


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
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def until(done: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
