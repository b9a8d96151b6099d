"""Memory and file descriptors of a server's processes, its pool and its queue, at moments when it is idle."""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

_MB = 1 << 20


@dataclass(frozen=True)
class Process:
    """One process: `rss_mb` resident memory, `fds` open descriptors, `threads`.

    `kinds` counts the descriptors by what they are, so that a leak has a name.
    """

    rss_mb: float
    fds: int
    threads: int
    kinds: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One idle moment, `minute` after the start of the soak; `gpu_mb` is the device's memory in use."""

    minute: float
    processes: dict[str, Process]
    used_tokens: int
    waiting: int
    running: int
    gpu_mb: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def processes_of(pid: int) -> dict[str, Process]:
    """The processes of the server that was started as `pid`, by SGLang's own names for them."""
    found: dict[str, Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        for process in (launcher, *launcher.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                words = process.cmdline()
                name = "launcher" if process.pid == pid else (words or ["?"])[0].split()[0].split("/")[-1]
                while name in found:
                    name += "+"
                memory = process.memory_info().rss / _MB
                kinds = descriptors_of(process.pid)
                found[name] = Process(
                    round(memory, 1), process.num_fds(), process.num_threads(), dict(sorted(kinds.items()))
                )
    return found


def descriptors_of(pid: int) -> Counter[str]:
    """Open descriptors of a process by kind: socket, pipe, anon_inode:[eventfd], file."""
    kinds: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                target = str(entry.readlink())
                kinds["file" if target.startswith("/") else target.split(":[", maxsplit=1)[0]] += 1
    return kinds


def gpu_memory_mb() -> int | None:
    """Memory in use on the first GPU as its driver says; None without one."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return int(done.stdout.split()[0])
    return None


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Growth per unit of x of the straight line nearest to the points; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Per process: MB and descriptors a minute over the second half of the samples, and their last values.

    The first half is warming up: caches of the allocators, of compiled grammars, of connections. The device's
    memory is the process `gpu`, without descriptors.
    """
    late = samples[len(samples) // 2 :] if len(samples) > 3 else samples
    found: dict[str, dict[str, float]] = {}
    for name in late[-1].processes if late else ():
        seen = [(sample.minute, sample.processes[name]) for sample in late if name in sample.processes]
        found[name] = {
            "rss_mb": seen[-1][1].rss_mb,
            "rss_mb_per_minute": round(slope([(at, process.rss_mb) for at, process in seen]), 3),
            "fds": seen[-1][1].fds,
            "fds_per_minute": round(slope([(at, float(process.fds)) for at, process in seen]), 3),
        }
    device = [(sample.minute, float(sample.gpu_mb)) for sample in late if sample.gpu_mb is not None]
    if device:
        found["gpu"] = {
            "rss_mb": device[-1][1],
            "rss_mb_per_minute": round(slope(device), 3),
            "fds": 0,
            "fds_per_minute": 0.0,
        }
    return found


def sample_of(minute: float, pid: int, load: Mapping[str, Any]) -> Sample:
    """A sample; `load` is one rank's entry of /v1/loads."""
    return Sample(
        minute=round(minute, 2),
        processes=processes_of(pid),
        used_tokens=int(load["num_used_tokens"]),
        waiting=int(load["num_waiting_reqs"]),
        running=int(load["num_running_reqs"]),
        gpu_mb=gpu_memory_mb(),
    )
