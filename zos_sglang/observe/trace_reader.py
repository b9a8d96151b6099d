"""Reads a trace back into step records; takes what is whole of one that is not."""

from __future__ import annotations

import json
from binascii import Error as NotBase64
from binascii import a2b_base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.names import CODES, COLUMNS
from zos_sglang.observe.record import STEP
from zos_sglang.observe.trace_events import FORMAT, META

#: Of a record, as JSON gives it back.
_LAYOUT = [list(one) for one in STEP.descr]


@dataclass
class Trace:
    """What a file holds.

    Attributes:
        records: of dtype `STEP`, in order of steps.
        meta: args of the event `META`.
        notes: what a reader of the numbers must know: torn, full, steps missing.
        ended: the trace was closed in order, or is full; False: the process died, or still runs.
    """

    records: np.ndarray
    meta: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    ended: bool = False

    @property
    def asynchronous(self) -> bool:
        """Whether the device worked on its own."""
        return bool(self.facts.get("asynchronous"))

    @property
    def facts(self) -> dict[str, Any]:
        """What the trace says about its server; nothing, where it says nothing readable."""
        found = self.meta.get("facts")
        return found if isinstance(found, dict) else {}


def read(path: str | Path) -> Trace:
    """Read a trace. Raises ToolError with one sentence for what is none, or cannot be read."""
    notes: list[str] = []
    meta: dict[str, Any] | None = None
    packed: list[bytes] = []
    names: set[str] = set()
    for event in _events(Path(path), notes):
        args = event.get("args")
        if not isinstance(args, dict):
            continue
        if event.get("name") == META:
            meta = args
        elif event.get("ph") == "i":
            names.add(str(event.get("name")))
        elif (record := args.get("record")) is not None:
            packed.append(_unpacked(record, path))
    if meta is None:
        raise ToolError(f"{path}: not a trace of zos-sglang (ZOS_TRACE writes one)")
    records = _as_ours(b"".join(packed), meta, path)
    records = records[np.argsort(records["step"], kind="stable")]
    missing = int(np.maximum(np.diff(records["step"]) - 1, 0).sum())
    if missing:
        notes.append(f"{missing} steps are missing between the first and the last")
    if "trace full" in names:
        notes.append("the trace reached its size limit (ZOS_TRACE_MB); later steps are not in it")
    return Trace(records, meta, notes, ended=bool(names & {"trace full", "trace ends"}))


def _events(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Elements of the array, a line at a time: a trace may be larger than memory for its objects."""
    try:
        with path.open("rb") as file:
            first = file.readline()
            if not first.strip():
                raise ToolError(f"{path}: " + ("empty" if not first else "not a trace"))
            if first.strip() != b"[":
                yield from _foreign(first + file.read(), path)
                return
            bad, torn, closed = 0, False, False
            for line in file:
                text = line.strip().removesuffix(b",")
                if not text:  # blanks behind the end, for the next append
                    continue
                if closed := text == b"]":
                    continue
                event = _parsed(text)
                torn = event is None
                bad += torn
                if event is not None:
                    yield event
    except OSError as error:
        raise ToolError(f"{path}: cannot be read: {error.strerror}") from error
    if not closed:
        notes.append("the trace is cut off at its end; everything before was recovered")
        bad -= torn
    if bad:
        notes.append(f"{bad} damaged lines of the trace were left out")


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):  # of JSON, and of UTF-8
        return None
    return event if isinstance(event, dict) else None


def _foreign(content: bytes, path: Path) -> list[dict[str, Any]]:
    """Events of JSON that another program has written: an array, or an object with `traceEvents`."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{path}: not a trace: no JSON") from error
    if isinstance(found, dict):
        found = found.get("traceEvents")
    if not isinstance(found, list):
        raise ToolError(f"{path}: not a trace: no list of events")
    return [event for event in found if isinstance(event, dict)]


def _unpacked(record: Any, path: str | Path) -> bytes:
    try:
        return a2b_base64(record, strict_mode=True)
    except (NotBase64, TypeError, ValueError) as error:
        raise ToolError(f"{path}: a step's record is damaged") from error


def _as_ours(packed: bytes, meta: dict[str, Any], path: str | Path) -> np.ndarray:
    """Records of the file in this version's numbers: words keep their meaning when enumerations grow."""
    other = ToolError(f"{path}: written by a version of zos-sglang whose records this one does not know")
    try:
        # Compared, not built: numpy reads a language of its own in a type's text.
        if meta["format"] != FORMAT or meta["layout"] != _LAYOUT or len(packed) % STEP.itemsize:
            raise other
        records = np.frombuffer(packed, STEP).copy()
        for name in COLUMNS:
            table = np.array([0, *(CODES[name].get(word, 255) for word in meta["columns"][name])], "u1")
            if records[name].max(initial=0) >= len(table):
                raise other
            records[name] = table[records[name]]
            if (records[name] == 255).any():
                raise other
    except (KeyError, TypeError, ValueError) as error:
        raise other from error
    return records
