"""A server with DP attention over two ranks on the CPU, stock or ours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil

from zos_sglang.testing.dp_jitter import STACKS, stacks_of
from zos_sglang.testing.server import ServerProcess

RANKS = 2
#: One layer: a step is mostly scheduling and what the ranks tell each other.
ARGS = (
    *("--tp", str(RANKS), "--dp", str(RANKS), "--enable-dp-attention"),
    *("--chunked-prefill-size", "128"),  # shared by the ranks: 64 tokens a chunk
    *("--json-model-override-args", '{"num_hidden_layers": 1}'),
)
_STACKS_S = 1.0


class Hung(AssertionError):
    """Nothing moved for too long; the message holds every rank's stacks."""


class DpServer(ServerProcess):
    """`ServerProcess` with DP attention. A rank that sleeps when idle would hold the other one up."""

    def __init__(
        self,
        model: str | Path,
        *,
        mode: str | None,
        log: Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(model, mode=mode, args=[*ARGS, *args], env=env, log=log)

    @property
    def command(self) -> list[str]:
        return [word for word in super().command if word != "--sleep-on-idle"]

    def states(self) -> list[dict[str, Any]]:
        """Our block of every rank, all of the same step: ranks are asked in one intake."""
        answer = httpx.get(f"{self.url}/server_info", timeout=60, trust_env=False)
        return [state["zos"] for state in answer.json()["internal_states"]]

    def schedulers(self) -> dict[str, int]:
        """Process ids of the ranks by title."""
        titles = {}
        for child in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                titles[" ".join(child.cmdline()).strip()] = child.pid
        return {title: pid for title, pid in titles.items() if "scheduler" in title}

    def stacks(self, folder: Path) -> str:
        """The stacks of all threads of every rank (needs the plugin `dp_jitter`)."""
        ranks = self.schedulers()
        for pid in ranks.values():
            psutil.Process(pid).send_signal(STACKS)
        time.sleep(_STACKS_S)
        return "\n".join(f"{title}:\n{stacks_of(folder, pid).read_text()}" for title, pid in ranks.items())


def watched(
    server: DpServer, folder: Path, work: Callable[[Callable[[], None]], None], limit_s: float
) -> None:
    """Run `work(alive)` in a thread, which calls `alive()` whenever something has moved.

    Raises:
        Hung: it did not for `limit_s` seconds.
        Exception: whatever `work` raised.
    """
    moved, failed = [time.monotonic()], []

    def alive() -> None:
        moved[0] = time.monotonic()

    def run() -> None:
        try:
            work(alive)
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        if thread.is_alive() and time.monotonic() > moved[0] + limit_s:
            raise Hung(f"nothing moved for {limit_s:.0f} s\n{server.stacks(folder)}")
    if failed:
        raise failed[0]
