"""Which accesses to a buffer nothing orders, whatever happened to run first.

The host and each stream have a vector clock. A launch starts after everything that the host did before it;
a wait takes over the clock that an event was recorded with; a synchronisation takes it to the host. Two
accesses to one buffer, at least one of them a write, race unless one is in the other's clock: then no wait
orders them, even if they ran in the right order this time. Accesses are kept as in FastTrack (Flanagan and
Freund, PLDI 2009): per buffer the last write, and the last read of each stream since.

What a CUDA program gets from the driver is modelled as far as the lane uses it: operations of one stream run
in order; a wait counts what was recorded when it was queued; an event that was never recorded counts as done.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = "host"
#: How far each stream, and the host, had got: name to tick.
Clock = dict[str, int]
#: More of them say nothing new.
MOST_RACES = 200


class Op(NamedTuple):
    """One launch, or one moment of the host's program. `clock` is all that is ordered before it, and it."""

    where: str
    tick: int
    order: int
    clock: Clock
    label: str

    def is_before(self, other: Op) -> bool:
        return other.clock.get(self.where, 0) >= self.tick


class Access(NamedTuple):
    op: Op
    writes: bool
    label: str

    def __str__(self) -> str:
        kind = "write" if self.writes else "read"
        inside = f" in {self.op.label!r}" if self.op.label else ""
        return f"{kind} {self.label!r}{inside} on {self.op.where} (#{self.op.tick})"


class Race(NamedTuple):
    """Two accesses to `buffer`; the host's program has `first` before `second`."""

    buffer: Hashable
    first: Access
    second: Access

    @property
    def missing(self) -> str:
        """The edge that would order them."""
        a, b = self.first.op, self.second.op
        covered = b.clock.get(a.where, 0)
        if b.where == HOST:
            return f"the host must synchronise with {a.where} up to #{a.tick}; it did up to #{covered}"
        return f"{b.where} must wait for an event of {a.where} at #{a.tick}; it waited for #{covered}"

    def __str__(self) -> str:
        return f"race on {self.buffer}: {self.first}, then {self.second}; {self.missing}"


@dataclass
class _Buffer:
    written: Access | None = None
    read: dict[str, Access] = field(default_factory=dict)


class Detector:
    """Owns the clocks, and what was found.

    Calls come from the host's thread, `access` also from the threads of streams; the accesses of one buffer
    arrive in an order that the waits allow, as on any device that keeps them. Then at least one race is
    found on every buffer that has one, and none elsewhere.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self.accesses = 0
        self._clocks: dict[str, Clock] = {HOST: {HOST: 1}}
        self._events: dict[Hashable, Clock] = {}
        self._buffers: dict[Hashable, _Buffer] = {}
        self._order = 0
        self._lock = threading.Lock()

    # ------------------------------------------------------------ order

    def launch(self, stream: str, label: str = "") -> Op:
        """The host queues an operation on a stream."""
        clock = self._clocks.setdefault(stream, {})
        _join(clock, self._clocks[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        self._order += 1
        op = Op(stream, clock[stream], self._order, dict(clock), label)
        # What the host does from here on is not before the operation.
        self._clocks[HOST][HOST] += 1
        return op

    def reached(self, stream: str) -> Clock:
        """What has happened once `stream` has run everything that is queued on it now."""
        return dict(self._clocks.setdefault(stream, {}))

    def join(self, where: str, clock: Clock) -> None:
        """Whatever `where` (a stream or the host) does next comes after all of `clock`."""
        _join(self._clocks.setdefault(where, {}), clock)

    def record(self, event: Hashable, stream: str) -> None:
        """Record an event on a stream; recording it again moves it."""
        self._events[event] = self.reached(stream)

    def wait(self, stream: str, event: Hashable) -> None:
        """Let a stream wait for what an event was last recorded behind."""
        self.join(stream, self._events.get(event, {}))

    def synchronize(self, event: Hashable) -> None:
        """Let the host wait for it."""
        self.wait(HOST, event)

    # ------------------------------------------------------------ access

    def access(self, buffer: Hashable, where: Op | str, *, writes: bool, label: str) -> None:
        """An operation, or the host now (`HOST`), reads or writes a buffer. The name of a stream launches."""
        self.access_all((buffer,), where, writes=writes, label=label)

    def access_all(self, buffers: Iterable[Hashable], where: Op | str, *, writes: bool, label: str) -> None:
        """The same for several buffers at once."""
        with self._lock:
            if isinstance(where, str):
                where = self._now() if where == HOST else self.launch(where)
            mine = Access(where, writes, label)
            for buffer in buffers:
                self.accesses += 1
                held = self._buffers.get(buffer)
                if held is None:
                    held = self._buffers[buffer] = _Buffer()
                self._meet(buffer, held, mine)

    def forget(self, buffer: Hashable) -> None:
        """Its memory has another owner, and whoever handed it out saw to it that the last one is done."""
        with self._lock:
            self._buffers.pop(buffer, None)

    def report(self) -> str:
        """Every kind of race once, with how often it was found; empty if there is none."""
        kinds: dict[tuple[str, ...], list[Race]] = {}
        for race in self.races:
            sides = (race.first, race.second)
            key = tuple(f"{s.label} {s.op.label} {s.op.where} {s.writes}" for s in sides)
            kinds.setdefault(key, []).append(race)
        return "\n".join(f"{races[0]} ({len(races)}x)" for races in kinds.values())

    def _meet(self, buffer: Hashable, held: _Buffer, mine: Access) -> None:
        if held.written is not None:
            self._compare(buffer, held.written, mine)
        if mine.writes:
            for other in held.read.values():
                self._compare(buffer, other, mine)
            held.written, held.read = mine, {}
        else:
            held.read[mine.op.where] = mine

    def _now(self) -> Op:
        self._order += 1
        clock = self._clocks[HOST]
        return Op(HOST, clock[HOST], self._order, dict(clock), "")

    def _compare(self, buffer: Hashable, a: Access, b: Access) -> None:
        if a.op is b.op or a.op.is_before(b.op) or b.op.is_before(a.op) or len(self.races) >= MOST_RACES:
            return
        first, second = sorted((a, b), key=lambda access: access.op.order)
        self.races.append(Race(buffer, first, second))


def _join(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        if tick > clock.get(name, 0):
            clock[name] = tick
