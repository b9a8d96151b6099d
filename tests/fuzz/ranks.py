"""The board through which ranks compare: whatever stands there, the comparison ends in order."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz import hostile
from tests.fuzz.hostile import Choices
from tests.fuzz.runner import Target
from zos_sglang.ranks.exchange import CannotCompareError, Exchange, Peer
from zos_sglang.ranks.row import FIELDS, SHARED, Row, encode

ROWS = 4


def _row(number: int) -> Row:
    return Row(
        *(number, 7 * number, 1, 1, None, "finish", 4096 - number, number, "launch", "DECODE", False, 3),
        *("5c1f0a7e (a1 b2)", 0, "overlapped", 32),
    )


MINE = [_row(number) for number in range(ROWS)]
LINES = [encode(row) for row in MINE]


class Board:
    """A dictionary."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.keys[key] = value

    def get(self, key: str) -> bytes | None:
        return self.keys.get(key)

    def remove(self, key: str) -> None:
        self.keys.pop(key, None)


def make(choices: Choices) -> tuple[list[bytes], bool, bytes]:
    """What another rank put on the board (its rows, damaged), which fields count, the stop sign."""
    lines = list(LINES)
    for _ in range(choices.below(3)):
        at, how = choices.below(ROWS), choices.below(6)
        if how <= 1:
            fields = json.loads(LINES[at])
            fields[choices.below(len(fields))] = choices.value()
            lines[at] = hostile.dumped(fields)
        elif how == 2:
            lines[at] = hostile.dumped(choices.replaced(json.loads(LINES[at])))
        elif how == 3:
            lines[at] = choices.cut(lines[at])
        elif how == 4:
            lines[at] = b"[" * choices.pick([3, 900, 100_000])
        else:
            lines[at] = choices.take(choices.below(20))
    chunk = b"\n".join(lines)
    if choices.one_in(6):
        chunk = choices.moved_line(chunk)
    shared, told = bool(choices.below(2)), choices.take(choices.below(9))
    at = choices.below(len(chunk) + 1)
    return ([chunk[:at], chunk[at:]] if choices.one_in(6) else [chunk]), shared, told


def check(given: tuple[list[bytes], bool, bytes]) -> str:
    """Raises what a turn lets through besides its promise."""
    chunks, shared, told = given
    board = Board()
    for number, chunk in enumerate(chunks):
        board.put(f"1/{number}", chunk)
    waiting: list[Row] = list(MINE)

    def take() -> list[Row]:
        found = list(waiting)
        waiting.clear()
        return found

    exchange = Exchange(board, 0, [Peer(1, SHARED if shared else FIELDS)], 2, take)
    try:
        found: Any = None
        for turn in range(3):
            found = found or exchange.turn(float(turn))
    except CannotCompareError as error:
        assert "rank 1" in str(error)
        return "cannot compare"
    assert found is None or found[1].sentence(0, 1).startswith("ranks decided differently at decision")
    board.put("stop", told)
    assert isinstance(exchange.told_to_stop(), str)
    return "difference" if found else "agreed" if exchange.agreed == ROWS else "waits"


TARGET = Target("ranks", "what other ranks put on the board of ZOS_CHECK_RANKS", make, check)
