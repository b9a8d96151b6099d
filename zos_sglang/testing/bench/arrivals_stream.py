"""What one streamed answer of /generate says, read from the raw bytes after the run.

During the run a client keeps only bytes and times: reading JSON then would delay the next event.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_PREFIX, _DONE, _END = b"data:", b"[DONE]", b"\n\n"
#: Hex digits kept of an answer's digest.
DIGITS = 16


class StreamError(ValueError):
    """The stream is not a whole, consistent answer; the message says why."""


@dataclass
class Answer:
    """One answer. `events` are pairs (seconds, tokens that the event brought), in order."""

    ids: list[int] = field(default_factory=list)
    events: list[tuple[float, int]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The first hex digits of SHA-256 over the token ids."""
        return hashlib.sha256(json.dumps(self.ids, separators=(",", ":")).encode()).hexdigest()[:DIGITS]

    def arrivals(self) -> list[tuple[float, int]]:
        """Pairs (seconds, tokens) by instant: events that one read brought share its time."""
        found: list[tuple[float, int]] = []
        for when, tokens in self.events:
            if found and found[-1][0] == when:
                found[-1] = (when, found[-1][1] + tokens)
            else:
                found.append((when, tokens))
        return found


def payloads(reads: Iterable[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """Payload of every event, with the time (s) of the read that completed it.

    Raises StreamError if the bytes end amid an event.
    """
    found: list[tuple[float, bytes]] = []
    rest = b""
    for when, data in reads:
        *events, rest = (rest + data).split(_END)
        found += [(when, event[len(_PREFIX) :].strip()) for event in events if event.startswith(_PREFIX)]
    if rest.strip():
        raise StreamError("the stream ends amid an event")
    return found


def read_answer(reads: Iterable[tuple[float, bytes]], wanted: int, *, incremental: bool) -> Answer:
    """The answer of `wanted` tokens in `reads`, pairs (seconds, bytes).

    `incremental`: events carry the new token ids only (`--incremental-streaming-output`), else all so far.
    Raises StreamError on a server's error, a hole, another length, or a stream without an end.
    """
    answer, ended, finish = Answer(), False, None
    for when, payload in payloads(reads):
        if ended:
            raise StreamError("an event after [DONE]")
        if payload == _DONE:
            ended = True
            continue
        event = _event(payload)
        finish = event["meta_info"]["finish_reason"]
        before = len(answer.ids)
        _extend(answer.ids, event, incremental)
        if len(answer.ids) > before:
            answer.events.append((when, len(answer.ids) - before))
    if not ended:
        raise StreamError("the stream ends without [DONE]")
    if len(answer.ids) != wanted or (finish or {}).get("type") != "length":
        raise StreamError(f"{len(answer.ids)} tokens of {wanted}, finish reason {finish}")
    return answer


def _event(payload: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(payload)
    except ValueError:
        raise StreamError(f"an event that is no JSON: {payload[:120]!r}") from None
    if "error" in event:
        raise StreamError(f"the server reports an error: {event['error']}")
    if "output_ids" not in event or "meta_info" not in event:
        raise StreamError(f"an event without token ids: {payload[:120]!r}")
    return event


def _extend(ids: list[int], event: dict[str, Any], incremental: bool) -> None:
    fresh = event["output_ids"]
    if not incremental:
        if fresh[: len(ids)] != ids:
            raise StreamError(f"token ids do not continue the first {len(ids)}")
        ids[:] = fresh
        return
    ids += fresh
    # The count is of this event's moment; with cumulative ids it may lag behind their shared list.
    counted = event["meta_info"]["completion_tokens"]
    if counted != len(ids):
        raise StreamError(f"{counted} tokens announced, {len(ids)} received: an event is missing")
