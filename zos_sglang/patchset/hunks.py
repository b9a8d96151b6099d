"""Unified diffs, read and applied strictly: every hunk at its line, every replaced line as it was.

`patch` looks around for a place that fits, and a hunk without context fits anywhere. Here a hunk stands where
its header says, or the whole file is refused. All of it is bytes: nothing is decoded and encoded again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from zos_sglang.patchset.errors import PatchError

_HEADER = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@[^\n]*\n?")
_NO_NEWLINE = b"\\ No newline at end of file"
_ABSENT = "/dev/null"


@dataclass(frozen=True)
class Hunk:
    """One replaced stretch: lines `old` (with their ends) at index `old_at` become `new` at `new_at`."""

    old_at: int
    new_at: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FilePatch:
    """What one patch does to one file; `creates` where the file is new."""

    path: str
    creates: bool
    hunks: tuple[Hunk, ...]

    def apply(self, before: bytes | None) -> bytes:
        """The file after the patch; `before` is None where there is no file.

        Raises:
            PatchError: the lines to replace are not there.
        """
        return self._replace(before, self.creates, [(h.old_at, h.old, h.new_at, h.new) for h in self.hunks])

    def unapply(self, after: bytes) -> bytes | None:
        """The file before the patch, None where the patch creates it.

        Raises:
            PatchError: the lines that the patch put in are not there.
        """
        before = self._replace(after, False, [(h.new_at, h.new, h.old_at, h.old) for h in self.hunks])
        return None if self.creates else before

    def _replace(
        self,
        text: bytes | None,
        creates: bool,
        stretches: list[tuple[int, tuple[bytes, ...], int, tuple[bytes, ...]]],
    ) -> bytes:
        if creates != (text is None):
            raise PatchError(f"{self.path}: {'there is a file already' if creates else 'no such file'}")
        lines = split_lines(text or b"")
        made: list[bytes] = []
        done = 0
        for at, out, into, put in stretches:
            made += lines[done:at]
            if at < done or tuple(lines[at : at + len(out)]) != out or len(made) != into:
                raise PatchError(f"{self.path}: line {at + 1} is not what the patch replaces")
            made += put
            done = at + len(out)
        return b"".join(made + lines[done:])


def split_lines(text: bytes) -> list[bytes]:
    """Lines with their ends; only a line feed ends a line, as for `patch`."""
    return re.findall(rb"[^\n]*\n|[^\n]+", text)


def parse(text: bytes, name: str) -> tuple[FilePatch, ...]:
    """Read a patch file.

    Raises:
        PatchError: it is no unified diff that creates or changes files below `sglang/`.
    """
    lines = split_lines(text)
    found: list[FilePatch] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith(b"--- "):
            raise PatchError(f"{name}: line {at + 1}: expected `--- a/PATH`")
        if at + 1 == len(lines) or not lines[at + 1].startswith(b"+++ "):
            raise PatchError(f"{name}: line {at + 2}: expected `+++ b/PATH`")
        old, new = _path(lines[at], name), _path(lines[at + 1], name)
        if new is None or old not in (None, new):
            raise PatchError(f"{name}: line {at + 2}: patches create or change files, nothing else")
        hunks, at = _hunks(lines, at + 2, name)
        found.append(FilePatch(new, old is None, hunks))
    if not found:
        raise PatchError(f"{name}: holds no patch")
    if len({patch.path for patch in found}) < len(found):
        raise PatchError(f"{name}: patches a file twice")
    return tuple(found)


def _path(line: bytes, name: str) -> str | None:
    """The path of a `---` or `+++` line without its `a/` or `b/`, None for /dev/null."""
    try:
        word = line[4:].decode().split("\t")[0].strip()
    except UnicodeDecodeError:
        raise PatchError(f"{name}: a path that is not UTF-8") from None
    if word == _ABSENT:
        return None
    path = PurePosixPath(word)
    if path.parts[:1] not in (("a",), ("b",)) or path.parts[1:2] != ("sglang",) or len(path.parts) < 3:
        raise PatchError(f"{name}: {word!r} does not lie below a/sglang or b/sglang")
    if ".." in path.parts or "\0" in word:
        raise PatchError(f"{name}: {word!r} leaves the folder")
    return str(PurePosixPath(*path.parts[1:]))


def _hunks(lines: list[bytes], at: int, name: str) -> tuple[tuple[Hunk, ...], int]:
    """The hunks from line index `at` on, and the index behind them."""
    hunks: list[Hunk] = []
    while at < len(lines) and not lines[at].startswith(b"--- "):
        header = _HEADER.fullmatch(lines[at])
        if header is None:
            raise PatchError(f"{name}: line {at + 1}: expected a hunk header `@@ -L,N +L,N @@`")
        first_old, count_old, first_new, count_new = (int(v) if v is not None else 1 for v in header.groups())
        old: list[bytes] = []
        new: list[bytes] = []
        at += 1
        while len(old) < count_old or len(new) < count_new:
            line = lines[at] if at < len(lines) else b""
            at += 1
            if line[:1] not in (b" ", b"-", b"+") or not line.endswith(b"\n"):
                raise PatchError(f"{name}: line {at}: the hunk ends before its count")
            bare = at < len(lines) and lines[at].startswith(_NO_NEWLINE)
            body = line[1:-1] if bare else line[1:]
            if line[:1] in b" -":
                old.append(body)
            if line[:1] in b" +":
                new.append(body)
            at += bare
        if (len(old), len(new)) != (count_old, count_new):
            raise PatchError(f"{name}: line {at}: the hunk is longer than its count")
        hunks.append(Hunk(_index(first_old, count_old), _index(first_new, count_new), tuple(old), tuple(new)))
    if not hunks:
        raise PatchError(f"{name}: line {at + 1}: a file without hunks")
    return tuple(hunks), at


def _index(first: int, count: int) -> int:
    """A header's line number as an index: an empty range names the line before it."""
    return first if count == 0 else max(first - 1, 0)
