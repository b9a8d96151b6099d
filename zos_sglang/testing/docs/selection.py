"""Numbers picked out of result files by a small language, as it stands in comments of the documentation.

    (nothing)                           all numbers of the file, without raw samples and provenance
    summary/rows[batch=16 mode=stock]   all numbers below a place
    A over B, A minus B                 ratio and difference of two places with one number each
    sum(A), max(A), min(A), geomean(A)  one number of many
    abs(A)                              each number without its sign

Places are keys with `/` between; `*` is any key, `[key=value ...]` keeps the elements of a list that have
these values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

#: Where samples, texts and provenance lie: a number found there proves nothing.
_SAMPLES = (
    "raw",
    "raw_cpu_ns",
    "raw_wall_ns",
    "per_repeat",
    "digests",
    "digest",
    "warmups",
    "runs",
    "points",
)
_ORIGIN = (
    "args",
    "identity",
    "versions",
    "machine",
    "date",
    "commit",
    "command",
    "code",
    "server",
    "servers",
)
_RAW = frozenset((*_SAMPLES, *_ORIGIN, "env", "cells"))
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FUNCTIONS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "geomean": lambda values: math.exp(sum(map(math.log, values)) / len(values)),
}


class SelectionError(ValueError):
    """A comment that picks nothing, or cannot be read; the message quotes it."""


@dataclass(frozen=True)
class Value:
    """A number, and whether its place says that it counts microseconds, milliseconds or seconds."""

    number: float
    unit: str = ""


def select(wanted: str, file: str, results: Path) -> list[Value]:
    """The values of a term; `file` is where its places are. Raises SelectionError."""
    if between := re.search(r" (over|minus) ", wanted):
        sides = wanted[: between.start()], wanted[between.end() :]
        first, second = (select(side.strip(), file, results) for side in sides)
        if len(first) != 1 or len(second) != 1:
            raise SelectionError(f"{wanted!r}: one number is wanted on each side of {between.group(1)!r}")
        if between.group(1) == "over":
            return [Value(first[0].number / second[0].number)]
        return [Value(first[0].number - second[0].number, first[0].unit)]
    if call := re.fullmatch(r"(\w+)\((.*)\)", wanted):
        name, inner = call.groups()
        if name == "abs":
            return [Value(abs(v.number), v.unit) for v in select(inner.strip(), file, results)]
        if name not in _FUNCTIONS:
            raise SelectionError(f"{wanted!r}: there is no function {name}")
        values = select(inner.strip(), file, results)
        return [Value(_FUNCTIONS[name]([v.number for v in values]), values[0].unit)]
    found = [
        value for keys, node in _at(_load(results / file), _steps(wanted)) for value in _numbers(node, keys)
    ]
    if not found:
        raise SelectionError(f"{file} {wanted} picks no number")
    return found


@cache
def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SelectionError(f"{path.name}: {error}") from None


def _steps(place: str) -> list[tuple[str, dict[str, str]]]:
    """Keys of a place, each with the filter behind it."""
    found = []
    for step in re.findall(r"(?:[^/\[]|\[[^]]*\])+", place):
        key, _, rest = step.partition("[")
        pairs = re.findall(r"([\w.]+)=([^\s\]]+)", rest)
        found.append((key.strip(), dict(pairs)))
    return found


def _at(node: Any, steps: Sequence[tuple[str, dict[str, str]]]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What lies at a place, with the keys that lead there."""
    if not steps:
        yield (), node
        return
    (key, wanted), rest = steps[0], steps[1:]
    if key == "*":
        named = node.items() if isinstance(node, dict) else enumerate(node)
        inside = [(str(name), child) for name, child in named]
    else:
        inside = [(key, node[key])] if isinstance(node, dict) and key in node else []
    for name, child in inside:
        kept = [child]
        if wanted:
            kept = [one for one in child if all(_same(one.get(k), v) for k, v in wanted.items())]
        for one in kept:
            for keys, found in _at(one, rest):
                yield (name, *keys), found


def _same(value: Any, text: str) -> bool:
    """Whether a value of a file is what stands in a comment or a table: 4.0 is 4."""
    if isinstance(value, int | float) and _NUMBER.fullmatch(text):
        return bool(value == float(text))
    return str(value) == text


def _numbers(node: Any, keys: tuple[str, ...]) -> Iterator[Value]:
    """Numbers below a node, those in short texts too."""
    if isinstance(node, dict):
        for key, child in node.items():
            if key not in _RAW and not (key == "repeats" and isinstance(child, list)):
                yield from _numbers(child, (*keys, key))
    elif isinstance(node, list):
        for child in node:
            yield from _numbers(child, keys)
    elif isinstance(node, bool) or node is None:
        return
    elif isinstance(node, int | float):
        yield Value(float(node), _unit(keys))
    else:
        texts = (str(node), keys[-1] if keys else "")
        yield from (Value(float(n)) for text in texts for n in _NUMBER.findall(text))


def _unit(keys: tuple[str, ...]) -> str:
    """`us`, `ms` or `s` where a key on the way ends so."""
    for key in reversed(keys):
        word = re.split(r"[_.]", key)
        for unit in ("us", "ms", "s"):
            if unit in word:
                return unit
    return ""
