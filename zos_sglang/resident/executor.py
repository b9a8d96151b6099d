"""What the lane needs from whatever runs its decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zos_sglang.resident.eligibility import Refusal


class Executor(Protocol):
    """Decode steps of one fixed row set, with all that changes from step to step on the device.

    A step runs as a whole (`step`), or in two parts (`begin`, `finish`) where what may be sampled depends on
    the result before. One batch keeps to one way, until `keep` makes another of it.

    The forward stream is current during `open`, `step`, `begin`, `finish`, `keep`, `refresh` and `floor_us`.
    Nothing here waits for the device, apart from `floor_us`.
    """

    #: Device tensor, int64 [depth, capacity]. Step `n`, counted over all openings (the result of the last
    #: one may still be under way), leaves its tokens in slot `n % depth`.
    ring: Any
    #: Whether `step` replays CUDA graphs (upstream reports it with every result).
    graphs: bool

    def refuses(self, batch: Any) -> Refusal | None:
        """Why this executor cannot run `batch`, or None. Reads host values only."""

    def open(self, batch: Any) -> None:
        """Load a batch that upstream prepared for its next decode step.

        `batch.input_ids` (int64 [rows], device) are that step's input tokens, `batch.seq_lens` count the
        token whose KV it writes, `batch.out_cache_loc` are the slots it writes.
        """

    def step(self) -> None:
        """Queue the next step: model, sampling, tokens into the ring.

        The first one after `open` runs on what `open` loaded. Each later one moves on first: input token from
        the last sample, length and position plus one, slot from `req_to_token`, which the lane has written
        (reserved) beforehand.
        """

    def begin(self) -> None:
        """Queue the next step up to its logits. `finish` must follow before anything else is queued."""

    def finish(self) -> None:
        """Queue the rest: masks as the rows' grammars are now, sampling, tokens into the ring.

        What only this step needed is let go.
        """

    def refresh(self) -> None:
        """Entries of `req_to_token` below the rows' lengths may have changed since `open`: read anew."""

    def keeping(self, rows: Sequence[int]) -> bool:
        """Whether `keep` can go on with these rows alone. Changes nothing."""

    def keep(self, batch: Any, kept: Any) -> None:
        """Let the other rows go: `batch` holds the rest by now, `kept` are its rows as they were, ascending,
        int64 on the device.

        A step has been queued since `open`. `refresh` follows before the next one. `last_tokens` are the
        rest's from here on, even if this fails.
        """

    def held(self) -> list[Any]:
        """What the steps queued so far may still read."""

    def last_tokens(self) -> Any:
        """The newest sample, int64 [rows], on the device; valid until the next is queued."""

    def floor_us(self, replays: int) -> float:
        """Mean microseconds of the bare model step as loaded, repeated back to back. Synchronises."""

    def close(self) -> list[Any]:
        """Let the batch go; returns what a step in flight may still read."""
