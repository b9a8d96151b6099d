"""KV slots taken ahead of time, so that no step inside the window allocates.

A window covers `steps` further steps of every row. All rows use it at the same pace, so one number, `used`,
says what is in use; the rest goes back in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class KvPool(Protocol):
    """The allocator and the page table behind it."""

    page_size: int

    def free_slots(self) -> int:
        """Slots that can be had without evicting anything."""

    def make_room(self, slots: int) -> None:
        """Evict prefixes that no one uses until so many slots are free, as far as there are any."""

    def take(self, count: int) -> Any:
        """`count` slots (page size 1) or `count` pages, on the device."""

    def give_back(self, taken: Any) -> None:
        """Slots or pages that `take` returned."""

    def write(self, taken: Any, steps: int) -> None:
        """Write the slots of the next `steps` steps of every row of the open batch into `req_to_token`."""

    def pick(self, taken: Any, indices: list[int]) -> Any:
        """Some of the pages of `taken`."""


def new_pages(lengths: np.ndarray, steps: int, page_size: int) -> np.ndarray:
    """Per row, the pages that `steps` more tokens begin. `lengths` int64 [rows] are the tokens so far."""
    found: np.ndarray = (lengths + steps - 1) // page_size - (lengths - 1) // page_size
    return found


def slots_of(lengths: np.ndarray, steps: int, page_size: int) -> int:
    """The slots that `steps` more tokens of every row take from the pool, whole pages."""
    if page_size == 1:
        return steps * len(lengths)
    return int(new_pages(lengths, min(steps, page_size), page_size).sum()) * page_size


def affordable(lengths: np.ndarray, wanted: int, page_size: int, free: int) -> int:
    """The most steps, up to `wanted`, whose slots fit into `free` slots; 0 if not even one does."""
    if page_size == 1:
        return min(wanted, free // len(lengths))
    # One new page a row at most, which is what the page table kernel handles.
    steps = min(wanted, page_size)
    while steps and slots_of(lengths, steps, page_size) > free:
        steps //= 2
    return steps


def has_room(pool: KvPool, lengths: np.ndarray) -> bool:
    """Whether rows of these lengths find a slot each for one more step, after evicting if need be."""
    slots = slots_of(lengths, 1, pool.page_size)
    if pool.free_slots() < slots:
        pool.make_room(slots)
    return pool.free_slots() >= slots


@dataclass
class Window:
    """One reservation. `lengths`, int64 [rows], are the rows' lengths when it was made."""

    pool: KvPool
    lengths: np.ndarray
    steps: int
    used: int = 0
    taken: Any = field(default=None, repr=False)

    @classmethod
    def reserve(cls, pool: KvPool, lengths: np.ndarray, wanted: int) -> Window | None:
        """Slots for up to `wanted` steps and at least one, or None if there is no room."""
        page = pool.page_size
        steps = affordable(lengths, wanted, page, pool.free_slots())
        if steps < 1:
            # A server that has run for a while has no free slots: all belong to the prefix tree, and stock
            # evicts as it goes, for one step at a time. More would drop prefixes that stock keeps.
            if wanted < 1 or not has_room(pool, lengths):
                return None
            steps = affordable(lengths, wanted, page, pool.free_slots())
        window = cls(pool, lengths, steps)
        window.taken = pool.take(slots_of(lengths, steps, page) // page)
        try:
            pool.write(window.taken, steps)
        except Exception:
            pool.give_back(window.taken)
            raise
        return window

    @property
    def left(self) -> int:
        return self.steps - self.used

    def give_back(self) -> None:
        """Return what no step used. The window is spent afterwards."""
        taken, self.taken = self.taken, None
        page = self.pool.page_size
        if self.left == 0 or taken is None:
            return
        if page == 1:
            self.pool.give_back(taken[self.used * len(self.lengths) :])
            return
        needs = new_pages(self.lengths, self.steps, page) > 0
        begun = new_pages(self.lengths, self.used, page) > 0 if self.used else np.zeros_like(needs)
        unused = np.flatnonzero(~begun[needs]).tolist()
        if unused:
            self.pool.give_back(self.pool.pick(taken, unused))
