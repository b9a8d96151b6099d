"""Requests that arrive at random times, and the figures of one run of them.

Arrivals are an open loop: when a request is sent does not depend on the answers before it.
"""

from __future__ import annotations

import random
import statistics
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from zos_sglang.testing.bench.arrivals_stream import Answer
from zos_sglang.testing.bench.client import prompts

PERCENTILES = (50, 90, 99)
#: Latencies of a run, in milliseconds.
LATENCIES = ("ttft_ms", "itl_ms", "gap_ms", "e2e_ms")
_KEPT_ERRORS = 5


@dataclass(frozen=True)
class Request:
    """One request: when it is due, in seconds after the start of the run, and its prompt's token ids.

    `output` is how many tokens it asks for, None for as many as the others of its run.
    """

    index: int
    due_s: float
    ids: list[int]
    output: int | None = None


@dataclass(frozen=True)
class Load:
    """What arrives in one run. `rate` is requests a second, lengths are tokens, `vocab` token ids."""

    rate: float
    count: int
    prompt: int = 256
    output: int = 256
    vocab: int = 384
    seed: int = 0

    def requests(self) -> list[Request]:
        """The same requests at the same times for the same load; the first one is due at once."""
        due = schedule(self.rate, self.count, self.seed)
        asked = prompts(self.count, self.prompt, self.vocab, self.seed)
        return [Request(i, when, ids) for i, (when, ids) in enumerate(zip(due, asked, strict=True))]


def schedule(rate: float, count: int, seed: int) -> list[float]:
    """`count` arrival times (s) of a Poisson process of `rate` a second, the first at 0."""
    source = random.Random(f"arrivals/{seed}/{rate}/{count}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + source.expovariate(rate))
    return times


def count_of(rate: float, most: int, seconds: float) -> int:
    """How many requests a run has: `seconds` of arrivals, at most `most`, at least one."""
    return max(1, min(most, round(rate * seconds)))


@dataclass
class Outcome:
    """What became of one request. Times are seconds of the system's monotonic clock, samples are seconds.

    `late` is how long after its due time it was sent, `ttft` and `e2e` count from then. `gaps` are the times
    from arrival to arrival, `sizes` the tokens that ended each, `itl` the gaps again for each token: a gap
    spread over its tokens. The tokens of the first arrival have no gap. A `burst` is an arrival of more than
    one token.
    """

    index: int
    sent: float
    late: float
    error: str | None = None
    digest: str | None = None
    tokens: int = 0
    last: float = 0.0
    ttft: float = 0.0
    e2e: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    sizes: array[int] = field(default_factory=lambda: array("i"))
    itl: array[float] = field(default_factory=lambda: array("d"))
    events: int = 0
    full_events: int = 0
    arrivals: int = 0
    bursts: int = 0
    largest: int = 0

    def fill(self, answer: Answer) -> None:
        """Take in a whole answer."""
        arrivals = answer.arrivals()
        self.digest, self.tokens = answer.digest, len(answer.ids)
        self.ttft, self.last = arrivals[0][0] - self.sent, arrivals[-1][0]
        self.e2e = self.last - self.sent
        for (before, _), (when, tokens) in pairwise(arrivals):
            self.gaps.append(when - before)
            self.sizes.append(tokens)
            self.itl.extend([(when - before) / tokens] * tokens)
        self.events, self.arrivals = len(answer.events), len(arrivals)
        self.full_events = sum(tokens > 1 for _, tokens in answer.events)
        self.bursts = sum(tokens > 1 for _, tokens in arrivals)
        self.largest = max(tokens for _, tokens in arrivals)


def percentile(ordered: Sequence[float], per_cent: float) -> float:
    """A percentile of sorted values (not empty), interpolated linearly between the two nearest."""
    place = (len(ordered) - 1) * per_cent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """P50, P90, P99, mean and maximum in milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {f"p{q}": percentile(ordered, q) for q in PERCENTILES}
    found |= {"mean": statistics.fmean(ordered), "max": ordered[-1]}
    return {name: round(value * 1000, 4) for name, value in found.items()}


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of a run, over the requests that were answered in full; `digests` by index of request."""
    good = [one for one in outcomes if one.error is None]
    errors = [f"request {one.index}: {one.error}" for one in outcomes if one.error is not None]
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "failed": len(errors),
        "errors": errors[:_KEPT_ERRORS],
        "tokens": sum(one.tokens for one in good),
        "span_s": None,
        "tokens_per_s": None,
        "mean_in_flight": None,
    }
    if good:
        span = max(one.last for one in good) - min(one.sent for one in outcomes)
        found["span_s"] = round(span, 4)
        found["tokens_per_s"] = round(found["tokens"] / span, 2)
        found["mean_in_flight"] = round(sum(one.e2e for one in good) / span, 2)
    return {
        **found,
        "ttft_ms": distribution([one.ttft for one in good]),
        "itl_ms": distribution([value for one in good for value in one.itl]),
        "gap_ms": distribution([value for one in good for value in one.gaps]),
        "e2e_ms": distribution([one.e2e for one in good]),
        "late_ms": distribution([one.late for one in outcomes]),
        **{
            name: sum(getattr(one, name) for one in good)
            for name in ("events", "full_events", "arrivals", "bursts")
        },
        "largest_arrival": max((one.largest for one in good), default=0),
        "digests": [one.digest for one in sorted(outcomes, key=lambda one: one.index)],
    }
