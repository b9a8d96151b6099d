"""What running processes hold of the machine, as /proc tells it."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_SHM = "/dev/shm/"


@dataclass
class Holdings:
    """Of some processes together.

    Attributes:
        listening: addresses of TCP and UDP sockets that take connections or datagrams, `host:port`.
        unix: how many Unix sockets have a name, by the kind of name (digits and hex replaced).
        shared: files in /dev/shm that are mapped or open, and still have a name there.
        written: ordinary files that are open for writing.
    """

    listening: set[str] = field(default_factory=set)
    unix: Counter[str] = field(default_factory=Counter)
    shared: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)


def holdings(processes: Iterable[psutil.Process]) -> Holdings:
    """What these processes hold now; one that ends meanwhile holds nothing."""
    found = Holdings()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            _sockets(process, found)
            _files(process.pid, found)
    return found


def _sockets(process: psutil.Process, found: Holdings) -> None:
    for one in process.net_connections("inet"):
        # A UDP socket has no state; without a peer it takes what comes.
        if one.status == psutil.CONN_LISTEN or (one.status == psutil.CONN_NONE and not one.raddr):
            found.listening.add(f"{one.laddr.ip}:{one.laddr.port}")
    found.unix += Counter(
        without_numbers(str(one.laddr)) for one in process.net_connections("unix") if one.laddr
    )


def _files(pid: int, found: Holdings) -> None:
    folder = Path(f"/proc/{pid}")
    for line in (folder / "maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if path.startswith(_SHM) and not path.endswith("(deleted)"):
            found.shared.add(path)
    for number in os.listdir(folder / "fd"):
        with contextlib.suppress(FileNotFoundError):
            path = os.readlink(folder / "fd" / number)
            flags = re.search(r"^flags:\s*(\d+)", (folder / "fdinfo" / number).read_text(), re.MULTILINE)
            if path.startswith(_SHM) and not path.endswith("(deleted)"):
                found.shared.add(path)
            elif flags and int(flags[1], 8) & (os.O_WRONLY | os.O_RDWR) and os.path.isfile(path):
                found.written.add(path)


def without_numbers(name: str) -> str:
    """A name in which what differs from run to run (numbers, hex, random words of tempfile) is `#`."""
    # tempfile's, and multiprocessing's semaphores and folders (sem.mp-, pymp-).
    name = re.sub(r"(?<=tmp|mp-)[a-z0-9_]{8}", "#", name)
    return re.sub(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*|\d+", "#", name)
