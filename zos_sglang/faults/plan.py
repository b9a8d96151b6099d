"""What `ZOS_FAULT` says: which step of ours is to fail, at which call, once or from then on.

    on                      nothing fails yet; faults may be asked for while the server runs
    launch:3,readback:10+   the third launch; every readback from the tenth on
    advance@1:5             the fifth step of the lane in tensor-parallel rank 1; without @ in all ranks

Over HTTP, where SGLang takes numbers only, one fault is one number (`to_code`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: The steps by name, and what fails there. A code depends on the order: add at the end.
POINTS = {
    "guard": "the decision whether a launch may overlap",
    "launch": "the inputs of a launch, before its forward",
    "relay": "handing a launch's tokens to the next step",
    "readback": "queueing the copy of a launch's tokens to the host",
    "barrier": "the write-after-read barrier behind a launch",
    "snapshot": "our copy of a launched batch",
    "lane-build": "building the resident lane",
    "capture": "capturing a CUDA graph of the lane's",
    "judge": "judging whether a batch may ride the lane",
    "open": "loading a batch into the lane",
    "advance": "a step of the lane, with its advance kernel",
    "reservation": "reserving KV slots for the lane",
    "lane-readback": "queueing the copy of a lane step's tokens to the host",
    "mask": "filling the masks of the lane's grammars",
    "processing": "reading a result of the lane",
    "stream-output": "finding what of a result of the lane is to be sent",
    "mode-switch": "making the event loop of a mode",
    "mode-off": "giving everything back to SGLang",
    "recording": "taking down a step",
    "trace": "writing a trace",
    "metrics": "adding records to the metrics",
    "report": "our block of /server_info",
    "leave": "letting rows go while the rest of a batch rides on",
}

ON = "on"
#: In `POST /set_internal_state`.
KEY = "zos_fault"
#: Highest call that can be named, and how many ranks.
MOST_CALLS, MOST_RANKS = 1_000_000, 1000
#: In the number of a fault, what one rank is away from the next.
_RANK = 1000 * 2 * (MOST_CALLS + 1)

_ONE = re.compile(r"(?P<point>[a-z-]+)(?:@(?P<rank>[0-9]{1,3}))?(?::(?P<at>[0-9]{1,7})(?P<always>\+)?)?")


@dataclass(frozen=True, slots=True)
class Fault:
    """`point` fails at its call number `at` (from 1), and, if `always`, at every later one.

    `rank`: in this tensor-parallel rank alone; None: in every one, each counting its own calls.
    """

    point: str
    at: int = 1
    always: bool = False
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"@{self.rank}"
        return f"{self.point}{where}:{self.at}{'+' * self.always}"


def parse(text: str) -> tuple[Fault, ...]:
    """The faults that `text` names; none for `on`.

    Raises:
        ValueError: whose text says what is wrong and what is allowed.
    """
    words = [word.strip() for word in text.split(",")]
    if words == [ON]:
        return ()
    return tuple(_one(word) for word in words)


def _one(word: str) -> Fault:
    found = _ONE.fullmatch(word)
    if found is None or found["point"] not in POINTS:
        raise ValueError(f"{word!r} is no fault. Allowed: {allowed()}")
    at = int(found["at"] or 1)
    if not 1 <= at <= MOST_CALLS:
        raise ValueError(f"{word!r}: a call from 1 to {MOST_CALLS}")
    rank = None if found["rank"] is None else int(found["rank"])
    return Fault(found["point"], at, found["always"] is not None, rank)


def allowed() -> str:
    """What `ZOS_FAULT` takes, in words."""
    words = f"{ON}, or POINT:CALL or POINT:CALL+ with commas between, POINT@RANK for one rank alone"
    return f"{words}; points: {', '.join(POINTS)}"


def to_code(fault: Fault | None) -> int:
    """A fault as a whole number; None, for none, as 0."""
    if fault is None:
        return 0
    whose = 0 if fault.rank is None else fault.rank + 1
    place = list(POINTS).index(fault.point) + 1
    return whose * _RANK + (place * (MOST_CALLS + 1) + fault.at) * 2 + fault.always


def from_code(code: int) -> Fault | None:
    """The fault of a number.

    Raises:
        ValueError: it is none.
    """
    if code == 0:
        return None
    whose, rest = divmod(code, _RANK)
    place, at = divmod(rest // 2, MOST_CALLS + 1)
    if not (0 <= whose <= MOST_RANKS and 1 <= place <= len(POINTS) and at >= 1):
        raise ValueError(f"{code} is no fault's number")
    return Fault(list(POINTS)[place - 1], at, bool(rest % 2), whose - 1 if whose else None)
