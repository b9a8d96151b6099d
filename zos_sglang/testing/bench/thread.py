"""The scheduler's thread of a server: how often it slept and was moved in a run, and on which core it is.

A thread that sleeps may wake up on another core, with cold caches, or beside a busy one that shares it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import psutil

from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.server import tree

#: How SGLang calls the process.
_TITLE = "sglang::scheduler"
#: What is counted, the file below /proc/PID that counts it, and how it is called there.
_COUNTED = {
    "moved": ("sched", "nr_migrations"),
    "slept": ("status", "voluntary_ctxt_switches"),
    "pushed_off": ("status", "nonvoluntary_ctxt_switches"),
}


class SchedulerThread:
    """The main thread of one process, which is where SGLang's scheduler runs.

    Args:
        pid: its process id; None: nobody watches.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid

    @classmethod
    def of_server(cls, launcher: int | None) -> SchedulerThread:
        """That of the first scheduler below a launcher's process; nobody's where there is none."""
        for process in tree(launcher) if launcher is not None else []:
            with contextlib.suppress(psutil.Error):  # compilers come and go in a server that starts
                if _TITLE in " ".join(process.cmdline()):
                    return cls(process.pid)
        return cls(None)

    def pin(self, core: int) -> None:
        """Let it run on this core alone. Raises BenchError."""
        if self._pid is None:
            raise BenchError("--pin: no process of the server is called sglang::scheduler")
        try:
            os.sched_setaffinity(self._pid, {core})
        except OSError as error:
            raise BenchError(f"--pin {core}: {error.strerror}") from error

    def seen(self) -> dict[str, int]:
        """What this kernel has counted of it so far, by name."""
        if self._pid is None:
            return {}
        found = {
            name: _count(Path(f"/proc/{self._pid}") / file, key) for name, (file, key) in _COUNTED.items()
        }
        return {name: count for name, count in found.items() if count is not None}

    def since(self, before: Mapping[str, int]) -> dict[str, int] | None:
        """How often it was moved to another core, slept, and was pushed off its core since `seen()`.

        Without what the kernel does not tell; None where nobody watches.
        """
        return {name: count - before[name] for name, count in self.seen().items() if name in before} or None


def _count(file: Path, key: str) -> int | None:
    try:
        found = re.search(rf"(?m)^(?:se\.)?{key}\s*:\s*(\d+)", file.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None
