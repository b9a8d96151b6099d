"""Happens-before by brute force: a graph of everything that a program does, and a search for a path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from zos_sglang.testing.races.detector import HOST


class Touch(NamedTuple):
    """An operation of its own on a stream, or a moment of the host, that touches one buffer."""

    where: str
    buffer: str
    writes: bool


class Record(NamedTuple):
    event: int
    stream: str


class Wait(NamedTuple):
    """`where` may be the host."""

    where: str
    event: int


Statement = Touch | Record | Wait


@dataclass
class Graph:
    """One node for each statement, in program order; an edge where one must be over before the other."""

    program: list[Statement]
    before: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        last: dict[str, int] = {}
        #: The host statement that submits each device node is its own moment in the host's program.
        host_done: list[int] = []
        recorded: dict[int, int] = {}
        for node, statement in enumerate(self.program):
            edges: set[int] = set(host_done)
            where = statement.stream if isinstance(statement, Record) else statement.where
            if where in last:
                edges.add(last[where])
            if isinstance(statement, Wait) and statement.event in recorded:
                edges.add(recorded[statement.event])
            if isinstance(statement, Record):
                recorded[statement.event] = node
            last[where] = node
            if where == HOST:
                host_done.append(node)
            self.before.append(edges)

    def reaches(self, a: int, b: int) -> bool:
        """Whether `a` is over before `b`, a later statement."""
        seen, open_ = set(), [b]
        while open_:
            node = open_.pop()
            if node == a:
                return True
            if node not in seen and node > a:
                seen.add(node)
                open_ += self.before[node]
        return False

    def races(self) -> Iterator[tuple[int, int]]:
        touches = [(n, s) for n, s in enumerate(self.program) if isinstance(s, Touch)]
        for (i, a), (j, b) in combinations(touches, 2):
            if a.buffer == b.buffer and (a.writes or b.writes) and not self.reaches(i, j):
                yield i, j
