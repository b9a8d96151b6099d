"""What a process holds is seen, and what it does not hold is not."""

from __future__ import annotations

import os
import socket
import tempfile
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil

from zos_sglang.testing.holdings import holdings, without_numbers


def mine():
    return holdings([psutil.Process()])


def test_a_port_counts_while_it_takes_connections() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
        assert address not in mine().listening
        one.listen()
        assert address in mine().listening
    assert address not in mine().listening


def test_an_udp_port_counts_without_a_peer() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        assert f"127.0.0.1:{one.getsockname()[1]}" in mine().listening


def test_a_named_unix_socket_counts(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as one:
        before = sum(mine().unix.values())
        one.bind(f"{short}/s")
        one.listen()
        assert sum(mine().unix.values()) == before + 1


def test_shared_memory_counts_until_it_loses_its_name() -> None:
    one = SharedMemory(create=True, size=100)
    path = f"/dev/shm/{one.name.lstrip('/')}"
    try:
        assert path in mine().shared
    finally:
        one.unlink()
    assert path not in mine().shared
    one.close()


def test_a_file_counts_if_it_is_open_for_writing(tmp_path: Path) -> None:
    path = tmp_path / "f"
    with path.open("w"):
        assert str(path) in mine().written
    with path.open():
        assert str(path) not in mine().written


def test_a_process_that_has_ended_holds_nothing() -> None:
    child = psutil.Popen(["true"])
    os.waitpid(child.pid, 0)
    assert holdings([child]) == holdings([])


def test_names_of_two_runs_are_alike() -> None:
    assert without_numbers("/tmp/tmpab12_x9z/x-123") == without_numbers("/tmp/tmpzz34_y8w/x-9")
    assert without_numbers("/dev/shm/sem.mp-0030ekkj") == without_numbers("/dev/shm/sem.mp-zz_84hes")
    assert without_numbers("a/5c1f0a7e-90b2") == without_numbers("a/1111111111")
