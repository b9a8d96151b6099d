"""Whose time it was: the thread's CPU over some iterations, split by iteration and class of work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zos_sglang.observe.tape import (
    BEGIN,
    BY_CLOCK,
    CPU_FORWARD,
    CPU_WAITED,
    DEPENDS_NS,
    END,
    EXCLUDED,
    PROCESS_NS,
    WAITED,
    WAITED_THERE,
)
from zos_sglang.overlap.watch import FORWARD_NS, PROCESS, PROCESSED, READING_NS, SAMPLED

#: Fields of a record that `charge` gives, in its order.
CHARGED = ("wall", "cpu", "cpu_prepare", "cpu_readback", "cpu_process", "cpu_depends", "cpu_forward")


def wall_of(rows: np.ndarray) -> np.ndarray:
    """Wall time of iterations, ns."""
    return np.asarray(rows[:, END] - rows[:, BEGIN] - rows[:, EXCLUDED])


def charge(rows: np.ndarray, readings: Sequence[tuple[int, int]], asynchronous: bool) -> np.ndarray:
    """What each iteration took, int64 [iterations, len(CHARGED)], ns.

    CPU goes by the shares of wall time without waits, so all parts sum to it exactly; wrong as far as the
    thread lost the processor in one stretch only. A thread that sleeps while it waits burns nothing there;
    what it burnt beyond its own time, it burnt waiting, and that is readback. What no stretch claims is
    preparation.

    Args:
        rows: of the tape, in order. Their stretches lie apart from each other and from the waits in them.
        readings: by place in the rows, what the thread burnt from the reading before to the end of the row
            in front of that place; the last one is the end.
        asynchronous: whether a launch returns before its result is there.
    """
    wall, waited = wall_of(rows), rows[:, WAITED]
    own = wall - waited
    cpu, burnt = _shares(own, waited, readings)
    forward = rows[:, FORWARD_NS]
    cpu_forward = np.zeros_like(cpu)
    clocked = (rows[:, SAMPLED] & BY_CLOCK) > 0
    if clocked.any():
        burnt = np.where(clocked, rows[:, CPU_WAITED], burnt)
        if not asynchronous:  # there a forward is a launch: preparation
            cpu_forward = np.where(clocked, rows[:, CPU_FORWARD], 0)
            own = np.where(clocked, own - forward, own)
    rest = cpu - burnt - cpu_forward
    stretches = np.stack((rows[:, READING_NS], _processing(rows), rows[:, DEPENDS_NS], forward))
    stretches[3][clocked | asynchronous] = 0
    # A signal's handler, whose time is nobody's, may have run within a stretch.
    own = np.maximum(own, stretches.sum(axis=0))
    # In floating point, for products that pass 64 bits: exact enough that no sum of parts passes the whole.
    rate = np.divide(rest, own, out=np.zeros(len(rows)), where=own > 0)
    parts = (rate * stretches).astype(np.int64)
    prepare = rest - parts.sum(axis=0)
    cpu_forward += parts[3]
    return np.stack((wall, cpu, prepare, burnt + parts[0], parts[1], parts[2], cpu_forward), axis=1)


def _processing(rows: np.ndarray) -> np.ndarray:
    last = np.maximum(rows[:, PROCESSED] - rows[:, PROCESS], 0)
    return np.asarray(last + rows[:, PROCESS_NS] - rows[:, WAITED_THERE])


def _shares(
    own: np.ndarray, waited: np.ndarray, readings: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """CPU of each iteration, and what of it was burnt waiting."""
    ends = np.array([end for end, _ in readings], np.int64)
    sizes = np.diff(ends, prepend=0)
    some = sizes > 0
    ends, sizes = ends[some], sizes[some]
    total = np.array([cpu for _, cpu in readings], np.int64)[some]
    begins = ends - sizes
    all_own, all_waited = np.add.reduceat(own, begins), np.add.reduceat(waited, begins)
    burnt = np.maximum(total - all_own, 0)
    waiting = _parts(burnt, waited, all_waited, sizes, ends)
    return waiting + _parts(total - burnt, own, all_own, sizes, ends), waiting


def _parts(
    total: np.ndarray, weights: np.ndarray, of: np.ndarray, sizes: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Totals of groups by weight within each; what the divisions leave over is the group's last one's."""
    rate = np.divide(total, of, out=np.zeros(len(total)), where=of > 0)
    parts = (np.repeat(rate, sizes) * weights).astype(np.int64)
    parts[ends - 1] += total - np.add.reduceat(parts, ends - sizes)
    return parts
