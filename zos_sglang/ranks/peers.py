"""Whom a rank compares with: the next one in a ring, so that a few comparisons cover all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from zos_sglang.ranks.exchange import Peer
from zos_sglang.ranks.row import FIELDS, SHARED


def peers_of(rank: int, ranks: Sequence[int], groups: int = 1, *, in_step: bool = True) -> list[Peer]:
    """The peers of `rank`.

    Args:
        rank: one of `ranks`.
        ranks: the tensor-parallel group, in order.
        groups: into how many attention groups, each of neighbours, DP attention splits it. Inside a group
            everything must be equal; the first ranks of the groups compare what all have in common.
        in_step: whether the groups decide alike at all; else they are not compared with one another.

    Raises:
        ValueError: the group cannot be split so.
    """
    size, left = divmod(len(ranks), groups)
    if left:
        raise ValueError(f"{len(ranks)} ranks do not make {groups} equal groups")
    begin = ranks.index(rank) // size * size
    group, leaders = ranks[begin : begin + size], ranks[::size]
    found = [Peer(_next(group, rank), FIELDS)] if size > 1 else []
    if in_step and groups > 1 and rank in leaders:
        found.append(Peer(_next(leaders, rank), SHARED))
    return found


def _next(ring: Sequence[int], rank: int) -> int:
    return ring[(ring.index(rank) + 1) % len(ring)]
