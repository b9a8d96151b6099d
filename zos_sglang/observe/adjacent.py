"""Which two records may be held against each other.

The distance of two launches says something about the loop only if one iteration lies between them: an idle
server, a pause, another mode or another kind of batch in between would count as slowness.
"""

from __future__ import annotations

import numpy as np

from zos_sglang.observe.names import AFTER_IDLE, PAUSED

#: Flags of a record whose distance to the one before means nothing.
_BROKEN = AFTER_IDLE | PAUSED


def pairs(records: np.ndarray, same_rows: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Adjacent steps of the same kind: consecutive numbers, same mode, same forward mode, no idle gap.

    Args:
        records: dtype `STEP`, in order of `step`.
        same_rows: the same number of requests too.

    Returns:
        The first and the second of each pair, two arrays of one length.
    """
    before, after = records[:-1], records[1:]
    fits = after["step"] == before["step"] + 1
    for name in ("mode", "forward", *(("rows",) if same_rows else ())):
        fits &= after[name] == before[name]
    fits &= (after["flags"] & _BROKEN) == 0
    return before[fits], after[fits]


def size_class(rows: np.ndarray | int) -> np.ndarray:
    """The power of two at or above `rows`: steps of one class cost about the same."""
    return (1 << np.ceil(np.log2(np.maximum(rows, 1))).astype(np.int64)).astype(np.int64)


def difference(later: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """`later` - `earlier` (ns, int64) where both times are known (not 0)."""
    known = (later > 0) & (earlier > 0)
    return later[known] - earlier[known]
