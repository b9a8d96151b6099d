"""A JSON array on disk that is whole after every write, whatever happens to the process that writes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

#: Kept free below the limit for the last events: that the trace is full, or ends.
RESERVE = 1024
#: Blanks written behind the closing bracket at a time, for later appends to overwrite. A write into pages
#: that are there is shorter, so a kill tears it less often (a process that only writes: 1 in 100, else 8).
BLANKS = 64 * 1024
_OPEN, _NEXT, _CLOSE = b"[\n", b",\n", b"\n]\n"


class TraceFile:
    """Appends to the array. Each append is one write over the closing bracket that ends with a new one.

    The file appears under its name with its first elements in it, so it is never seen empty. A process that
    is killed inside a write can tear it only where the write crosses a page of memory; the reader then takes
    all elements but the torn one.

    Args:
        path: replaced if it is there. A link is replaced, not followed.
        limit_bytes: the file never grows beyond.
        first: elements to begin with, one or more, each one line of JSON. Written whatever the limit.

    Raises OSError.
    """

    def __init__(self, path: str | Path, limit_bytes: int, first: Sequence[str]) -> None:
        self.path, self.limit_bytes = Path(path), limit_bytes
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._size = 0
        # Its name can be guessed, so what stands there may be somebody's link to a file of ours.
        beside.unlink(missing_ok=True)
        self._fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            self._end = self._write(0, _OPEN + _joined(first))
            beside.replace(self.path)
        except OSError:
            os.close(self._fd)
            beside.unlink(missing_ok=True)
            raise

    def append(self, elements: Sequence[str], last: bool = False) -> bool:
        """Add elements; False, and nothing added, if the file would grow beyond its limit.

        `last` elements may use the reserve. Raises OSError if it cannot be written; the file is then as it
        was before, as far as the disk allows.
        """
        body = _NEXT + _joined(elements)
        room = self.limit_bytes - (0 if last else RESERVE)
        if self._end + len(body) + len(_CLOSE) > room:
            return False
        try:
            needed = self._end + len(body) + len(_CLOSE)
            if needed > self._size:
                self._blank(min(needed + BLANKS, self.limit_bytes))
            self._end = self._write(self._end, body)
        except OSError:
            with contextlib.suppress(OSError):
                self._write(self._end, b"")
                os.ftruncate(self._fd, self._end + len(_CLOSE))
            raise
        return True

    def close(self) -> None:
        """Cut the blanks off and give the file descriptor back; once."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end + len(_CLOSE))
        os.close(self._fd)

    def _blank(self, size: int) -> None:
        at = self._end + len(_CLOSE)
        self._put(at, b" " * (size - at))

    def _write(self, at: int, body: bytes) -> int:
        """Put `body` and the closing bracket at `at`; returns where the bracket stands."""
        self._put(at, body + _CLOSE)
        return at + len(body)

    def _put(self, at: int, content: bytes) -> None:
        written = os.pwrite(self._fd, content, at)
        while written < len(content):  # a full disk takes a part, and fails on the rest
            written += os.pwrite(self._fd, content[written:], at + written)
        self._size = max(self._size, at + len(content))


def _joined(elements: Sequence[str]) -> bytes:
    return ",\n".join(elements).encode()
