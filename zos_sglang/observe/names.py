"""The closed enumerations of a step record, as numbers and as words.

A record holds small numbers. 0 is "none" in every column; a member's number is its place in the tuple here,
counted from 1. Nothing has an `other`: a member that upstream or we add without a name here fails a test.
"""

from __future__ import annotations

from enum import StrEnum

from zos_sglang.modes import MODES as SWITCHABLE
from zos_sglang.overlap.guards import Reason
from zos_sglang.overlap.streams import Barrier
from zos_sglang.resident.eligibility import Departure, Refusal


class Path(StrEnum):
    """How a step went through the scheduler.

    `SYNC`: a result was pending and was processed before this launch, or the loop never overlaps.
    `OVERLAP`: launched while the result before was pending (or none was, reason `nothing-pending`).
    `RESIDENT`: a step of the lane. `*_BLOCKED`: overlapped, but the scheduler's thread was held up: `Block`.
    """

    SYNC = "sync"
    OVERLAP = "overlap"
    OVERLAP_BLOCKED = "overlap-blocked"
    RESIDENT = "resident"
    RESIDENT_BLOCKED = "resident-blocked"


class Block(StrEnum):
    """What held up a step that overlapped, the first that holds."""

    HOST_LENGTHS = "host-lengths"
    COPY = "copy"
    CPU_BOUND = "cpu-bound"


class Ready(StrEnum):
    """How the time at which a result was there is known.

    `WAITED`: exactly, the thread waited for it. `AT_*`: it was there when asked at the begin of the
    iteration, at the launch, or when processing began, so the time is an upper bound. `UNSEEN`: nobody of
    ours processed the result.
    """

    WAITED = "waited"
    AT_BEGIN = "at-begin"
    AT_LAUNCH = "at-launch"
    AT_PROCESS = "at-process"
    UNSEEN = "unseen"


class Forward(StrEnum):
    """Upstream's forward modes, by its names in lower case."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND_V2 = "draft_extend_v2"
    PREBUILT = "prebuilt"
    SPLIT_PREFILL = "split_prefill"
    DLLM_EXTEND = "dllm_extend"


class Work(StrEnum):
    """The four classes of the scheduler's CPU time.

    `PREPARE`: intake, selection, inputs to the device, launch. `READBACK`: queueing the copy to the host,
    and what a wait for it burns. `PROCESS`: results, output. `DEPENDS`: preparation that needs the sample
    of the step before (delayed sampling, lengths on the host).
    """

    PREPARE = "prepare"
    READBACK = "readback"
    PROCESS = "process"
    DEPENDS = "depends"


#: The mode column: the switchable modes, and upstream's loop of a server without overlap.
MODES: tuple[str, ...] = (*SWITCHABLE, "normal")

COLUMNS: dict[str, tuple[str, ...]] = {
    "mode": MODES,
    "path": tuple(Path),
    "reason": tuple(Reason),
    "block": tuple(Block),
    "forward": tuple(Forward),
    "barrier": tuple(Barrier),
    "refusal": tuple(Refusal),
    "departure": tuple(Departure),
    "ready": tuple(Ready),
}

#: By column: a word's number. Words are strings, so a `Reason` finds its number too.
CODES: dict[str, dict[str, int]] = {
    column: {str(word): place for place, word in enumerate(words, 1)} for column, words in COLUMNS.items()
}

# Bits of the column `flags`.
AFTER_IDLE = 1
MIDDLE_CHUNK = 2
DELAYED_SAMPLING = 4
EMBEDDING = 8
LANE_OPENING = 16
DETAIL = 32
PAUSED = 64


def code(column: str, word: str) -> int:
    """The number of a word. Raises KeyError for a word that is not of this column."""
    return CODES[column][word]


def word(column: str, number: int) -> str | None:
    """The word of a number; None for 0. Raises IndexError for a number beyond the column."""
    return str(COLUMNS[column][number - 1]) if number else None
