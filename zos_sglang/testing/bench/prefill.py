"""Prompts that arrive together while streams decode, and the figures of one run of them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from zos_sglang.testing.bench.arrivals import Outcome, Request, distribution
from zos_sglang.testing.bench.client import prompts

_KEPT_ERRORS = 5


@dataclass(frozen=True)
class Streams:
    """The requests that decode when the prompts arrive. Lengths are tokens."""

    count: int = 8
    prompt: int = 64
    output: int = 512


@dataclass(frozen=True)
class Load:
    """What one run asks for: streams at once, and `settle_s` later `count` prompts together.

    Lengths of prompts are `shortest` to `longest` tokens, at random; each is answered with `output` tokens.
    `vocab` is how many token ids there are.
    """

    name: str
    streams: Streams
    count: int
    shortest: int
    longest: int
    output: int = 16
    settle_s: float = 1.0
    vocab: int = 384
    seed: int = 0

    def requests(self) -> list[Request]:
        """The same requests for the same load, the streams first; `is_burst` tells them apart."""
        streams = self.streams
        early = prompts(streams.count, streams.prompt, self.vocab, self.seed)
        # Other ids than the streams', also where lengths and counts agree.
        late = prompts(self.count, self.longest, self.vocab, self.seed + 1)
        asked = [(0.0, ids, streams.output) for ids in early]
        asked += [
            (self.settle_s, ids[:length], self.output)
            for ids, length in zip(late, self.lengths(), strict=True)
        ]
        return [Request(index, due, ids, output) for index, (due, ids, output) in enumerate(asked)]

    def lengths(self) -> list[int]:
        """Tokens of each prompt of the burst."""
        source = random.Random(f"prefill/{self.name}/{self.seed}/{self.count}")
        return [source.randint(self.shortest, self.longest) for _ in range(self.count)]

    def is_burst(self, index: int) -> bool:
        """Whether the request of this index came with the burst."""
        return index >= self.streams.count

    @property
    def tokens(self) -> int:
        """KV slots that all requests need together."""
        streams = self.streams
        return (
            streams.count * (streams.prompt + streams.output) + sum(self.lengths()) + self.count * self.output
        )


@dataclass(frozen=True)
class Window:
    """From the first prompt of the burst to the last token of its answers, seconds of the monotonic clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def has(self, when: float) -> bool:
        return self.begin < when <= self.end


def figures(load: Load, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of a run; those of times are None where a request failed.

    `ttft_ms` and `e2e_ms` are of the burst's requests, `itl_ms` and `gap_ms` of the streams inside the
    window: for each token, a gap spread over the tokens that ended it; and for each gap. Rates count what was
    done inside the window: `output_tokens_per_s` all generated tokens, `tokens_per_s` the burst's prompts
    too. `covered`: all streams decoded from before the window until after it.
    """
    ordered = sorted(outcomes, key=lambda one: one.index)
    errors = [f"request {one.index}: {one.error}" for one in ordered if one.error is not None]
    found: dict[str, Any] = {
        "requests": len(ordered),
        "failed": len(errors),
        "errors": errors[:_KEPT_ERRORS],
        "digests": [one.digest for one in ordered],
    }
    if errors:
        return {**found, **dict.fromkeys(TIMES)}
    burst = [one for one in ordered if load.is_burst(one.index)]
    return {**found, **_times(load, burst, [one for one in ordered if not load.is_burst(one.index)])}


#: What a run without errors has on top.
TIMES = (
    *("window_s", "tokens_per_s", "output_tokens_per_s", "ttft_ms", "e2e_ms", "itl_ms", "gap_ms"),
    *("covered", "late_ms"),
)


def _times(load: Load, burst: Sequence[Outcome], streams: Sequence[Outcome]) -> dict[str, Any]:
    window = Window(min(one.sent for one in burst), max(one.last for one in burst))
    inside = [arrival for one in streams for arrival in _gaps(one) if window.has(arrival[0])]
    written = sum(tokens for _, _, tokens in inside) + sum(one.tokens for one in burst)
    read = sum(load.lengths())
    values = (
        round(window.seconds, 4),
        round((read + written) / window.seconds, 2),
        round(written / window.seconds, 2),
        distribution([one.ttft for one in burst]),
        distribution([one.e2e for one in burst]),
        distribution([gap / tokens for _, gap, tokens in inside for _ in range(tokens)]),
        distribution([gap for _, gap, _ in inside]),
        all(one.sent + one.ttft <= window.begin and one.last >= window.end for one in streams),
        distribution([one.late for one in burst]),
    )
    return dict(zip(TIMES, values, strict=True))


def _gaps(one: Outcome) -> Iterator[tuple[float, float, int]]:
    """When each gap of an answer ended, how long it was (s), and how many tokens ended it."""
    ends: Iterator[float] = accumulate(one.gaps, initial=one.sent + one.ttft)
    next(ends)
    sizes: array[int] = one.sizes
    yield from zip(ends, one.gaps, sizes, strict=True)
