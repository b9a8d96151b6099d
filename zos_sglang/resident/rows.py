"""The rows of one opening of the lane, as result processing needs them: what must be looked at, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

#: A request that does not stream still reports every so many tokens: upstream's default of
#: SGLANG_FORCE_STREAM_INTERVAL.
FORCED_INTERVAL = 50


class RowTable:
    """Rows in batch order, with everything that stays fixed while they ride.

    Args:
        reqs: the requests.
        pending: per row, tokens sampled for it whose results are not processed yet (0 or 1).
        stop_ids: every id that may end one of the rows. A hit is a candidate only: upstream's own check
            decides, with `ignore_eos` and whatever else it knows.
        watched: rows that upstream's check must see on every step (stop strings, reasoning, grammars).
        constrained: rows with a grammar: what they may sample depends on their last token.
        forced_interval: the interval in force, see `FORCED_INTERVAL`.
    """

    __slots__ = (
        "_due",
        "_forced",
        "appends",
        "constrained",
        "first_limit",
        "largest_id",
        "limits",
        "reqs",
        "stop_ids",
        "streams",
        "timed",
        "times",
        "watched",
    )

    def __init__(
        self,
        reqs: Sequence[Any],
        pending: Sequence[int],
        stop_ids: frozenset[int],
        watched: Iterable[int],
        forced_interval: int = FORCED_INTERVAL,
        *,
        constrained: Iterable[int] = (),
    ) -> None:
        self.reqs = list(reqs)
        self.stop_ids = stop_ids
        self.watched = tuple(watched)
        self.constrained = tuple(constrained)
        self.appends = [req.output_ids.append for req in reqs]
        self.times = [req.time_stats for req in reqs]
        #: Whether the time stamp of a token feeds upstream's metrics or traces.
        self.timed = any(t.enable_metrics or t.trace_ctx.tracing_enable for t in self.times)
        self.streams = tuple(i for i, req in enumerate(reqs) if req.stream)
        self.largest_id = min((req.vocab_size for req in reqs if req.vocab_size is not None), default=None)
        self._forced = forced_interval
        have = [len(req.output_ids) + p for req, p in zip(reqs, pending, strict=True)]
        #: Per row, the steps after which its length limit is reached.
        self.limits = [req.sampling_params.max_new_tokens - n for req, n in zip(self.reqs, have, strict=True)]
        self.first_limit = min(self.limits)
        quiet: dict[int, list[int]] = {}
        for row, n in enumerate(have):
            if not reqs[row].stream:
                quiet.setdefault((-n) % forced_interval, []).append(row)
        self._due = {phase: tuple(sorted([*rows, *self.streams])) for phase, rows in quiet.items()}

    def __len__(self) -> int:
        return len(self.reqs)

    def keep(self, rows: Sequence[int]) -> Self:
        """The table of these rows alone, ascending. Steps count on; what may end a row stays a candidate."""
        place = {old: new for new, old in enumerate(rows)}
        kept = type(self).__new__(type(self))
        kept.reqs, kept.appends, kept.times, kept.limits = (
            [column[row] for row in rows] for column in (self.reqs, self.appends, self.times, self.limits)
        )
        kept.watched, kept.constrained, kept.streams = (
            tuple(place[row] for row in column if row in place)
            for column in (self.watched, self.constrained, self.streams)
        )
        kept.stop_ids, kept.largest_id = self.stop_ids, self.largest_id
        kept.timed, kept._forced = self.timed, self._forced
        kept.first_limit = min(kept.limits)
        kept._due = {
            phase: tuple(place[row] for row in column if row in place) for phase, column in self._due.items()
        }
        return kept

    def due(self, step: int) -> tuple[int, ...]:
        """Rows, ascending, whose output upstream's streamer must be offered after step `step` (from 1)."""
        return self._due.get(step % self._forced, self.streams)

    def candidates(self, step: int, tokens: Sequence[int]) -> set[int]:
        """Rows that may end with step `step`, whose sample is `tokens` (one id a row)."""
        found = set(self.watched)
        stop_ids = self.stop_ids
        if not stop_ids.isdisjoint(tokens):
            found.update(i for i, token in enumerate(tokens) if token in stop_ids)
        if step >= self.first_limit:
            found.update(i for i, limit in enumerate(self.limits) if step >= limit)
        if min(tokens) < 0 or (self.largest_id is not None and max(tokens) >= self.largest_id):
            found.update(range(len(tokens)))
        return found
