"""`ScheduleBatch.copy` at a fifth of its cost, with the same fields and our own mark.

Upstream's copy builds a dataclass of some hundred fields with keywords, on every step. Which of them it
keeps is asked of upstream's own method once, so an added field is kept here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import itemgetter
from typing import Any

from sglang.srt.managers.schedule_batch import ScheduleBatch

from zos_sglang.overlap.event_loop import copied
from zos_sglang.overlap.guards import DUE_MARK


def kept_fields() -> tuple[str, ...]:
    """The fields that upstream's copy takes over as they are (all but `reqs`, whose list it copies)."""
    marks: dict[str, Any] = {field.name: object() for field in fields(ScheduleBatch)}
    marks["reqs"] = []
    source: Any = object.__new__(ScheduleBatch)
    source.__dict__.update(marks)
    copied = vars(source.copy())
    return tuple(name for name, mark in marks.items() if copied[name] is mark)


def make_snapshot() -> Callable[[ScheduleBatch], ScheduleBatch]:
    """`snapshot(batch)`: what `batch.copy()` returns. Falls back to it for subclasses of the batch.

    The mark of a batch (`first_token`) goes with it: it belongs to the launch, and the batch lives on.
    """
    if hasattr(ScheduleBatch.copy, "__wrapped__"):
        return copied  # somebody hooks it: their hook must run
    names = kept_fields()
    values_of = itemgetter(*names)
    blank = dict(vars(ScheduleBatch(reqs=[])))

    def snapshot(batch: ScheduleBatch) -> ScheduleBatch:
        if type(batch) is not ScheduleBatch:
            return copied(batch)
        new: Any = object.__new__(ScheduleBatch)
        state = new.__dict__
        state.update(blank)
        state.update(zip(names, values_of(batch.__dict__), strict=True))
        state["reqs"] = batch.reqs[:]
        if DUE_MARK in batch.__dict__:
            state[DUE_MARK] = batch.__dict__[DUE_MARK]
        return new

    return snapshot
