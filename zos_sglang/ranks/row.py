"""One decision as one line, and the first field in which two of them differ.

A row is a tuple of plain values in the order of `FIELDS`: first what has happened since the row before (a
difference there is the cause of what follows), then what was decided.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zos_sglang.overlap.guards import Reason


class Row(NamedTuple):
    """What one rank decided. Field names are what people read, with blanks for underscores."""

    #: Counts rows from 0; rows of one number belong together. Not compared.
    number: int
    #: CRC of every token processed since the row before, in order.
    tokens: int
    lane_openings: int
    lane_windows: int
    last_lane_refusal: str | None
    last_departure_from_the_lane: str | None
    free_KV_slots: int
    #: Iterations of the event loop; ranks receive requests once in each, so they count alike.
    iteration: int
    action: str
    forward_mode: str
    is_extend_in_batch: bool
    rows: int
    request_ids: str
    #: Of a prefill: what the prefix cache did not hold.
    new_tokens: int
    overlap: str
    #: Decode steps that the lane has slots for; 0 outside.
    reserved_steps: int

    @property
    def overlap_in_all_groups(self) -> str:
        """`overlap` without what a rank decides by its own requests: a grammar that waits is one group's."""
        return Reason.OVERLAPPED if self.overlap == Reason.GRAMMAR_SYNC else self.overlap


FIELDS = Row._fields[1:]
#: What ranks of different attention groups have in common under DP attention.
SHARED = ("action", "is_extend_in_batch", "overlap_in_all_groups")

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(row: Row) -> bytes:
    """A row as one line, without its end."""
    return _encode(row).encode()


def decode(line: bytes) -> Row:
    """The row of a line. Raises ValueError, TypeError for anything that `encode` did not make."""
    return Row(*json.loads(line))


@dataclass(frozen=True)
class Difference:
    """The first field in which two rows of one number differ, with both values."""

    number: int
    iteration: int
    field: str
    mine: Any
    theirs: Any

    def sentence(self, rank: int, peer: int) -> str:
        """For people; the lower rank first."""
        values = sorted([(rank, self.mine), (peer, self.theirs)])
        told = ", ".join(f"rank {who}: {value!r}" for who, value in values)
        return (
            f"ranks decided differently at decision {self.number} (iteration {self.iteration}): "
            f"{self.field.replace('_', ' ')} differs: {told}"
        )


def first_difference(mine: Row, theirs: Row, fields: Sequence[str] = FIELDS) -> Difference | None:
    """The first of `fields` in which two rows differ, or None."""
    for name in fields:
        a, b = getattr(mine, name), getattr(theirs, name)
        if a != b:
            return Difference(mine.number, mine.iteration, name, a, b)
    return None
