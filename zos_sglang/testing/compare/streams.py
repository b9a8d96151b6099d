"""Reads server-sent events into records and notes every breach of stream order.

A reader is fed each event in turn; `finish` closes it. Faults are absolute (no second server is
needed to see them): an answer that does not continue what was sent before, a token count with a
hole in it, anything after the finish reason, a stream that ends without [DONE].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from zos_sglang.testing.compare.records import Record

DONE = "[DONE]"
LOGPROB_LISTS = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
)


def data_of(line: str) -> str | None:
    """Payload of one line of an event stream, None for blank lines and comments."""
    return line[5:].strip() if line.startswith("data:") else None


class NativeStream:
    """Events of SGLang's own /generate, cumulative or (`incremental`) as differences."""

    def __init__(self, record: Record, *, incremental: bool = False) -> None:
        self.record = record
        self.incremental = incremental
        self.done = False
        self.final: dict[str, Any] = {}
        record.token_ids = []

    def feed(self, payload: str) -> None:
        """Take one event's payload."""
        record = self.record
        if self.done:
            record.faults.append("an event after [DONE]")
            return
        if payload == DONE:
            self.done = True
            return
        event = json.loads(payload)
        if "error" in event:
            record.error = str(event["error"].get("message", event["error"]))
            return
        if record.finish is not None:
            record.faults.append(f"{len(event['output_ids'])} token ids after the finish reason")
        self._extend(event)
        meta = event["meta_info"]
        seen = len(record.token_ids or [])
        if meta.get("completion_tokens") != seen:
            record.faults.append(
                f"{meta.get('completion_tokens')} tokens announced, {seen} received: a chunk is missing"
            )
        record.boundaries.append(seen)
        record.finish = meta["finish_reason"]
        self._keep_logprobs(meta)
        self.final = event

    def _extend(self, event: dict[str, Any]) -> None:
        record = self.record
        assert record.token_ids is not None
        event.setdefault("text", "")  # a server without a tokenizer sends none
        if self.incremental:
            record.text += event["text"]
            record.token_ids.extend(event["output_ids"])
            return
        if event["output_ids"][: len(record.token_ids)] != record.token_ids:
            record.faults.append(f"token ids do not continue the first {len(record.token_ids)}")
        if not event["text"].startswith(record.text):
            record.faults.append(f"text does not continue the first {len(record.text)} characters")
        record.text, record.token_ids = event["text"], list(event["output_ids"])

    def _keep_logprobs(self, meta: dict[str, Any]) -> None:
        # Incremental events carry only the new positions; join them before comparing.
        if not self.incremental or not self.final:
            return
        for key in LOGPROB_LISTS:
            before = self.final["meta_info"].get(key)
            if before is not None and meta.get(key) is not None:
                meta[key] = before + meta[key]

    def finish(self, *, cut: bool = False) -> None:
        """Close the stream; `cut` says that the client itself hung up."""
        if not cut:
            _check_end(self.record, self.done)


class OpenAIStream:
    """Events of /v1/completions and /v1/chat/completions; one record per choice."""

    def __init__(self, choice: Callable[[int], Record], first: Record) -> None:
        self.choice = choice
        self.first = first
        self.seen: dict[int, Record] = {}
        self.done = False
        self.usage: dict[str, Any] | None = None

    def feed(self, payload: str) -> None:
        """Take one event's payload."""
        if self.done:
            self.first.faults.append("an event after [DONE]")
            return
        if payload == DONE:
            self.done = True
            return
        event = json.loads(payload)
        if "error" in event:
            self.first.error = str(event["error"])
            return
        for piece in event.get("choices", []):
            self._take(piece)
        if event.get("usage") is not None:
            self.usage = event["usage"]

    def _take(self, piece: dict[str, Any]) -> None:
        index = piece["index"]
        if index not in self.seen:
            self.seen[index] = self.choice(index)
        record = self.seen[index]
        delta = piece["delta"].get("content") if "delta" in piece else piece.get("text")
        if record.finish is not None:
            record.faults.append(f"{len(delta or '')} characters after the finish reason")
        record.text += delta or ""
        for key, values in (piece.get("logprobs") or {}).items():
            # Events are joined by chance, so only the whole list is comparable.
            record.logprobs = record.logprobs or {}
            record.logprobs[key] = record.logprobs.get(key, []) + (values or [])
        if piece.get("finish_reason") is not None:
            record.finish = {"type": piece["finish_reason"], "matched": piece.get("matched_stop")}
        record.boundaries.append(len(record.text))

    def finish(self, *, cut: bool = False) -> None:
        """Close the stream; `cut` says that the client itself hung up."""
        if cut:
            return
        for record in self.seen.values() or [self.first]:
            _check_end(record, self.done)


def _check_end(record: Record, done: bool) -> None:
    if record.error is not None:
        return
    if record.finish is None:
        record.faults.append("the stream ended without a finish reason")
    if not done:
        record.faults.append("the stream ended without [DONE]")
