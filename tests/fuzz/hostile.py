"""What damaged or malicious input is made of, chosen by a string of bytes.

A target reads hypothesis' bytes as choices, as LibFuzzer's `FuzzedDataProvider` does: one draw an input
instead of dozens, which is most of what an input costs. Smaller bytes make a simpler input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

#: Would run, load or draw something if a page showed it as it is.
MARKUP = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "'\"><svg onload=alert(1)>",
    "<!--",
    "&lt;b&gt;",
    "javascript:alert(1)",
)
TEXTS = (
    *("", " ", "\0", "\n", "\r\n", "%s{}[bold]", "../../etc/passwd", "/dev/null", "a" * 5000),
    *("\u202e\u0301", "\ud800", "\U0001f600", *MARKUP),
)
NUMBERS = (
    *(0, -1, 1, 255, 256, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")),
)


class Choices:
    """Choices by the bytes of one input; where they end, the first choice."""

    def __init__(self, content: bytes) -> None:
        self._bytes = content
        self._at = 0

    def below(self, limit: int) -> int:
        """A number from 0 up to, but not, `limit`."""
        count = 1 if limit <= 256 else 2 if limit <= 65536 else 8
        found = int.from_bytes(self.take(count), "big")
        return found % limit

    def take(self, count: int) -> bytes:
        """So many bytes, or what is left."""
        found = self._bytes[self._at : self._at + count]
        self._at += count
        return found

    def pick(self, some: Sequence[T]) -> T:
        return some[self.below(len(some))]

    def one_in(self, count: int) -> bool:
        """Sometimes; never where the bytes have ended."""
        return self.below(count) == count - 1

    def text(self) -> str:
        return self.pick(TEXTS) if self.below(4) else self.take(self.below(12)).decode("utf-8", "replace")

    def number(self) -> Any:
        if self.below(2):
            return self.pick(NUMBERS)
        return int.from_bytes(self.take(self.below(9)), "big", signed=True)

    def value(self, depth: int = 0) -> Any:
        """Anything that JSON can hold."""
        kind = self.below(7 if depth < 2 else 5)
        if kind < 2:
            return self.text()
        if kind < 4:
            return self.number()
        if kind == 4:
            return self.pick((None, True, False))
        some = [self.value(depth + 1) for _ in range(self.below(4))]
        return some if kind == 5 else {self.text(): one for one in some}

    def cut(self, content: bytes) -> bytes:
        """`content` with one stretch replaced, doubled, dropped, or all behind it gone."""
        at = self.below(len(content) + 1)
        end = min(len(content), at + self.below(40))
        how = self.below(4)
        if how == 0:
            return content[:at]
        if how == 1:
            return content[:at] + content[at:end] * 2 + content[end:]
        return content[:at] + (self.take(self.below(6)) if how == 2 else b"") + content[end:]

    def moved_line(self, content: bytes) -> bytes:
        """`content` with a line dropped, doubled, or put elsewhere."""
        lines = content.split(b"\n")
        at, to, how = self.below(len(lines)), self.below(len(lines)), self.below(3)
        line = lines[at] if how == 1 else lines.pop(at)
        if how:
            lines.insert(to, line)
        return b"\n".join(lines)

    def replaced(self, document: Any) -> Any:
        """A JSON document with one value anywhere in it replaced, dropped, or a key renamed. Not in place."""
        how = self.below(4)
        if isinstance(document, dict) and document and how:
            key = self.pick(sorted(document))
            rest = {k: v for k, v in document.items() if k != key}
            if how == 1:
                return {**rest, self.text(): document[key]} if self.below(2) else rest
            return {**document, key: self.replaced(document[key])}
        if isinstance(document, list) and document and how:
            at = self.below(len(document))
            put = [] if how == 1 else [self.replaced(document[at])]
            return [*document[:at], *put, *document[at + 1 :]]
        return self.value()


def nested(depth: int) -> bytes:
    """A list in a list in a list, as JSON: readers that recurse run out of stack."""
    return b"[" * depth + b"]" * depth


def dumped(document: Any) -> bytes:
    """JSON as bytes; halves of surrogate pairs and all."""
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
