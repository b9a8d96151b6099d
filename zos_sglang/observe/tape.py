"""What an iteration of the loop leaves behind: one row of whole numbers, written in place.

Rows are kept as they are and made into records for many steps at a time (`split`, `complete`): what a step
costs is the stores into its row. Rows are made beforehand, as many as there are iterations until then.
"""

from __future__ import annotations

import numpy as np

from zos_sglang.overlap.watch import ASKS, SAMPLED

# Behind the places that the loop stamps itself (`overlap.watch`).
#: The iteration: its begin and end, and what of it, ns, is nobody's.
BEGIN, END, EXCLUDED = range(ASKS + 1, ASKS + 4)
#: Durations, ns: work that depends on the sample before; processing, of results before the last one; waiting
#: for results, and what of it lies in processing; by thread clock, where details are asked for: waiting and
#: the forward.
DEPENDS_NS, PROCESS_NS, WAITED, WAITED_THERE, CPU_WAITED, CPU_FORWARD = range(EXCLUDED + 1, EXCLUDED + 7)
#: The result that was processed: number of its launch (0: none; `NOBODYS`: not one of ours), how it was known
#: to be there and when, and how long it was waited for.
RESULT, READY, T_READY, WAIT = range(CPU_FORWARD + 1, CPU_FORWARD + 5)
#: The launch: its number (0: none), and what it was. Words are their numbers in `names`.
#: From ROWS to FLAGS most launches are like the one before.
STEP, CAUSE, BLOCKED = range(WAIT + 1, WAIT + 4)
ROWS, TOKENS, WAITING, MODE, RIDE, REASON, KIND = range(BLOCKED + 1, BLOCKED + 8)
BARRIER, REFUSAL, DEPARTURE, DEPTH, FLAGS = range(KIND + 1, KIND + 6)
WIDTH = FLAGS + 1

NOBODYS = -1

#: Bits of SAMPLED.
BY_EVENTS, BY_CLOCK = 1, 2


def blank(*, asks: bool, detail: bool) -> np.ndarray:
    """A row in which nothing happened yet, int64 [WIDTH]."""
    row = np.zeros(WIDTH, np.int64)
    row[BLOCKED] = -1
    row[ASKS] = asks
    row[SAMPLED] = BY_CLOCK if detail else 0
    return row


def stamps_of(row: np.ndarray) -> memoryview:
    """A row to be written in place: the same memory, and a third of the time of an array's element."""
    return row.data.cast("B").cast("q")
