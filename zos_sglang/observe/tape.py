"""What an iteration of the loop leaves behind: one row of whole numbers, written in place.

Rows are kept as they are and made into records for many steps at a time (`split`, `complete`): what a step
costs is the stores into its row. Rows are made beforehand, as many as there are iterations until then.
"""

from __future__ import annotations

import numpy as np

from zos_sglang.observe.names import AFTER_IDLE, PAUSED
from zos_sglang.overlap.watch import ASKS, PROCESS, SAMPLED, STEP, WAIT_FROM, WAIT_TO

# Behind the places that the loop stamps itself (`overlap.watch`).
#: The iteration: its begin and end, and what of it, ns, is nobody's.
BEGIN, END, EXCLUDED = range(STEP + 1, STEP + 4)
#: Durations, ns: work that depends on the sample before; processing, of results before the last one; waiting
#: for results, and what of it lies in processing; by thread clock, where details are asked for: waiting and
#: the forward.
DEPENDS_NS, PROCESS_NS, WAITED, WAITED_THERE, CPU_WAITED, CPU_FORWARD = range(EXCLUDED + 1, EXCLUDED + 7)
#: The result that was processed: number of its launch (0: none; `NOBODYS`: not one of ours), how it was known
#: to be there and when, and how long it was waited for.
RESULT, READY, T_READY, WAIT = range(CPU_FORWARD + 1, CPU_FORWARD + 5)
#: The launch, whose number is STEP (0: none), and what it was. Words are their numbers in `names`.
#: From ROWS to FLAGS most launches are like the one before; ROWS is -1 where nothing was said (`describe`).
CAUSE, BLOCKED = range(WAIT + 1, WAIT + 3)
ROWS, TOKENS, WAITING, MODE, RIDE, REASON, KIND = range(BLOCKED + 1, BLOCKED + 8)
BARRIER, REFUSAL, DEPARTURE, DEPTH, FLAGS = range(KIND + 1, KIND + 6)
WIDTH = FLAGS + 1

NOBODYS = -1

#: A wait shorter than this (ns) is none: the result was there, the call itself takes as long.
LEAST_NS = 20_000

#: Bits of SAMPLED.
BY_EVENTS, BY_CLOCK = 1, 2


def blank(*, asks: bool, detail: bool) -> np.ndarray:
    """A row in which nothing happened yet, int64 [WIDTH]."""
    row = np.zeros(WIDTH, np.int64)
    row[BLOCKED] = row[ROWS] = -1
    row[ASKS] = asks
    row[SAMPLED] = BY_CLOCK if detail else 0
    return row


def stamps_of(row: np.ndarray) -> memoryview:
    """A row to be written in place: the same memory, and a third of the time of an array's element."""
    return row.data.cast("B").cast("q")


def describe(rows: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Give launches that nobody was told of the words of the one before, in place.

    Args:
        rows: of the tape, in order.
        before: the words of the last launch in front of them, int64 [FLAGS + 1 - ROWS].

    Returns:
        The words of the last launch so far.
    """
    launches = rows[:, STEP] > 0
    silent = launches & (rows[:, ROWS] < 0)
    places = np.arange(1, len(rows) + 1)
    told = np.maximum.accumulate(np.where(launches & ~silent, places, 0))
    if silent.any():
        words = np.concatenate((before[None], rows[:, ROWS : FLAGS + 1]))[told[silent]]
        words[:, FLAGS - ROWS] &= ~(AFTER_IDLE | PAUSED)
        rows[silent, ROWS : FLAGS + 1] = words
    return rows[told[-1] - 1, ROWS : FLAGS + 1].copy() if len(told) and told[-1] else before


def count_waits(rows: np.ndarray, waited: int, there: int) -> None:
    """Count the waits for results, in place.

    Args:
        rows: of the tape.
        waited, there: how a result is known to be there that was waited for, and one that was not.
    """
    some = rows[:, WAIT_TO] > 0
    if not some.any():
        return
    took = np.where(some, rows[:, WAIT_TO] - rows[:, WAIT_FROM], 0)
    rows[:, WAITED] += took
    rows[:, WAITED_THERE] += np.where(rows[:, PROCESS] > 0, took, 0)
    rows[:, WAIT] += took
    asked = some & (rows[:, READY] == 0)
    rows[asked, READY] = np.where(took[asked] >= LEAST_NS, waited, there)
    rows[asked, T_READY] = rows[asked, WAIT_TO]
