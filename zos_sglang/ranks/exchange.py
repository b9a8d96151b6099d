"""Hands this rank's rows round and compares them with those of other ranks; a turn never waits.

Rows go to a board (a key-value store that all ranks reach) in chunks, each under a key of its own: as soon
as `every` rows are together, or when nothing has been added for a while: then a launch may hang, and the row
that tells why must get out. Chunks older than `KEPT` are taken off the board.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from zos_sglang.ranks.row import FIELDS, Difference, Row, decode, encode, first_difference

#: Chunks of a rank that stay on the board. At the pace of the thread that is most of a minute.
KEPT = 1024
#: Rows that go into one chunk at most.
_CHUNK = 4096
#: Own rows that may wait for a peer.
MOST_KEPT_ROWS = 1 << 16
#: Where the first rank to find a difference writes what it found.
STOP = "stop"
#: Chunks that a turn reads from one peer.
_READ_A_TURN = 64


class CannotCompareError(RuntimeError):
    """Rows are missing on the way, or no rows; the comparison ends, and says nothing against any rank."""


class Board(Protocol):
    """A key-value store that outlives a hanging rank."""

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """What stands there, or None. Does not wait for it."""

    def remove(self, key: str) -> None:
        """Take a key off the board, if it is there."""


@dataclass
class Peer:
    """Another rank, and which fields must be equal there.

    `chunk`: the next one to read; `agreed`: rows compared; both grow.
    """

    rank: int
    fields: Sequence[str] = FIELDS
    chunk: int = 0
    agreed: int = 0
    #: Rows read and not compared yet, because this rank has none of that number so far.
    ahead: list[bytes] = field(default_factory=list)


class Exchange:
    """One rank's half of the comparison. Not thread-safe: one thread calls `turn`.

    Args:
        board: where rows are handed round.
        rank: this one.
        peers: whom to compare with. If every rank compares with one other in a ring, all are compared.
        every: rows of a block; blocks are what is published and counted.
        take: rows since the last call, see `DecisionLog.take`.
        patience_s: seconds without a new row after which an incomplete block goes out.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        peers: Sequence[Peer],
        every: int,
        take: Callable[[], list[Row]],
        *,
        patience_s: float = 2.0,
    ) -> None:
        self.board = board
        self.rank = rank
        self.peers = list(peers)
        self.every = every
        self.take = take
        self.patience_s = patience_s
        self.differences = 0
        self.chunks = 0
        self._pending: list[bytes] = []
        self._last_row_s = 0.0
        #: Own rows that some peer has not been compared in, and the number of the first one.
        self._kept: list[bytes] = []
        self._first = 0

    def turn(self, now_s: float) -> tuple[Peer, Difference] | None:
        """Publish what is due and compare what is there; the first difference, when it is found.

        Raises:
            CannotCompareError: rows are missing, or another rank's cannot be read.
        """
        if self.differences:
            return None
        self._take(now_s)
        quiet = now_s - self._last_row_s >= self.patience_s
        while len(self._pending) >= self.every or (quiet and self._pending):
            self._publish()
        for peer in self.peers:
            if (found := self._compare(peer)) is not None:
                self.differences += 1
                self.board.put(STOP, found.sentence(self.rank, peer.rank).encode())
                return peer, found
        self._forget()
        return None

    def told_to_stop(self) -> str | None:
        """What another rank found, once it has found something."""
        told = self.board.get(STOP)
        return None if told is None else told.decode(errors="replace")

    @property
    def agreed(self) -> int:
        """Rows in which all peers agree with this rank."""
        return min((peer.agreed for peer in self.peers), default=0)

    @property
    def blocks(self) -> int:
        """Whole blocks among them."""
        return self.agreed // self.every

    @property
    def waiting(self) -> int:
        """Own rows that are not compared with every peer yet."""
        return len(self._kept)

    def key(self, rank: int, chunk: int) -> str:
        """Where a chunk stands on the board."""
        return f"{rank}/{chunk}"

    def _take(self, now_s: float) -> None:
        rows = self.take()
        if not rows:
            return
        expected = self._first + len(self._kept)
        if rows[0].number != expected:
            raise CannotCompareError(f"decision {expected} of this rank is lost")
        lines = [encode(row) for row in rows]
        self._last_row_s = now_s
        self._pending += lines
        self._kept += lines

    def _publish(self) -> None:
        whole = len(self._pending) - len(self._pending) % self.every or len(self._pending)
        count = min(whole, _CHUNK)
        lines, self._pending = self._pending[:count], self._pending[count:]
        self.board.put(self.key(self.rank, self.chunks), b"\n".join(lines))
        if self.chunks >= KEPT:
            self.board.remove(self.key(self.rank, self.chunks - KEPT))
        self.chunks += 1

    def _compare(self, peer: Peer) -> Difference | None:
        for _ in range(_READ_A_TURN):
            if peer.agreed - self._first >= len(self._kept):
                return None  # nothing of ours to hold against it
            if not peer.ahead:
                chunk = self.board.get(self.key(peer.rank, peer.chunk))
                if chunk is None:
                    return None
                peer.chunk += 1
                peer.ahead = chunk.split(b"\n")
            if (found := self._compare_rows(peer)) is not None:
                return found
        return None

    def _compare_rows(self, peer: Peer) -> Difference | None:
        start = peer.agreed - self._first
        mine = self._kept[start : start + len(peer.ahead)]
        theirs, peer.ahead = peer.ahead[: len(mine)], peer.ahead[len(mine) :]
        if mine != theirs:
            for a, b in zip(mine, theirs, strict=True):
                found = None if a == b else first_difference(decode(a), _readable(b, peer), peer.fields)
                if found is not None:
                    return found
                peer.agreed += 1
            return None
        peer.agreed += len(mine)
        return None

    def _forget(self) -> None:
        """Drop rows that every peer agreed in."""
        done = self.agreed - self._first
        if done > 0:
            del self._kept[:done]
            self._first += done
        if len(self._kept) > MOST_KEPT_ROWS:
            late = min(self.peers, key=lambda peer: peer.agreed).rank
            raise CannotCompareError(f"rank {late} has not shown its decisions for {len(self._kept)} of ours")


def _readable(line: bytes, peer: Peer) -> Row:
    """Another rank's row. Raises CannotCompareError where it is none: no decision differs by that."""
    try:
        return decode(line)
    except (ValueError, TypeError, RecursionError):
        raise CannotCompareError(f"rank {peer.rank} shows something that is no decision") from None
