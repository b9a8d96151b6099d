"""`mooncake.engine` of this name's real package, as far as SGLang's KV transfer needs it, over plain TCP.

SGLang's Mooncake backend does all of its bookkeeping itself (bootstrap, rooms, chunks, status) and asks the
engine only to copy memory into another process. The real engine does that over TCP too, but its wheel
needs libibverbs; this one needs sockets. For tests on one machine: no authentication, 127.0.0.1 only.

Wire, native byte order, one write after the other on a connection: int64 `n`, then n pairs of int64
(address in the receiver, length), then the bytes; the receiver answers with one byte, 0 for done.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

#: Seconds that each batch of writes takes longer: makes a fast machine's transfers as slow as real ones.
DELAY_VARIABLE = "TEST_TRANSFER_DELAY_S"

_DONE, _OUT_OF_BOUNDS = b"\x00", b"\x01"


class TransferEngine:
    """One process's end: registered memory that peers write into, and a connection to each peer."""

    def __init__(self) -> None:
        self._memory: dict[int, int] = {}
        self._peers = threading.local()
        self._listener: socket.socket | None = None
        self._delay_s = float(os.environ.get(DELAY_VARIABLE, "0"))

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        """Listen on a port of 127.0.0.1; 0 for success, as all calls here."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="test-transfer", daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        assert self._listener is not None
        port: int = self._listener.getsockname()[1]
        return port

    def register_memory(self, address: int, length: int) -> int:
        self._memory[address] = length
        return 0

    def unregister_memory(self, address: int) -> int:
        self._memory.pop(address, None)
        return 0

    def batch_register_memory(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        self._memory.update(zip(addresses, lengths, strict=True))
        return 0

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        for address in addresses:
            self._memory.pop(address, None)
        return 0

    def transfer_sync_write(self, session: str, source: int, target: int, length: int) -> int:
        return self.batch_transfer_sync_write(session, [source], [target], [length])

    def batch_transfer_sync_write(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Copy own memory into that of `session` ("host:port"); returns when it is there. -1: it is not."""
        if self._delay_s:
            time.sleep(self._delay_s)
        head = [len(targets)]
        for target, length in zip(targets, lengths, strict=True):
            head += [int(target), int(length)]
        try:
            peer = self._peer(session)
            peer.sendall(struct.pack(f"{len(head)}q", *head))
            for source, length in zip(sources, lengths, strict=True):
                peer.sendall(ctypes.string_at(int(source), int(length)))
            return 0 if _receive(peer, 1) == _DONE else -1
        except OSError:
            vars(self._peers).pop(session, None)
            return -1

    def send_probe(self, session: str) -> int:
        return self.batch_transfer_sync_write(session, [], [], [])

    def _peer(self, session: str) -> socket.socket:
        known = vars(self._peers)
        if session not in known:
            host, _, port = session.rpartition(":")
            known[session] = socket.create_connection((host, int(port)), timeout=30)
        peer: socket.socket = known[session]
        return peer

    # ------------------------------------------------------------ the receiving end

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while True:
                (count,) = struct.unpack("q", _receive(connection, 8))
                pairs = struct.unpack(f"{2 * count}q", _receive(connection, 16 * count))
                answer = _DONE
                for address, length in zip(pairs[::2], pairs[1::2], strict=True):
                    data = _receive(connection, length)
                    if self._registered(address, length):
                        ctypes.memmove(address, data, length)
                    else:
                        answer = _OUT_OF_BOUNDS
                connection.sendall(answer)
        except OSError:
            connection.close()

    def _registered(self, address: int, length: int) -> bool:
        memory = list(self._memory.items())
        return any(start <= address and address + length <= start + size for start, size in memory)


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise ConnectionError("the peer has closed")
        data += piece
    return bytes(data)
