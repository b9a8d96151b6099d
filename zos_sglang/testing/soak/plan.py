"""What a soak asks: questions with a known answer, and a seeded stream of requests for parts of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

#: The grammar that some questions carry; any model's vocabulary can spell it.
REGEX = "[a-d]{3,40}x[0-9]{2,30}"
#: Ids below this are special tokens in some vocabularies.
_FIRST_ID = 8

Cut = Literal["none", "abort", "hang up"]


@dataclass(frozen=True)
class Scale:
    """Sizes of a soak. Lengths are inclusive ranges of tokens; `pool` (tokens) is too small for the load."""

    users: int = 40
    running: int = 16
    queued: int = 23
    pool: int = 1500
    chunk: int = 128
    questions: int = 40
    prefixes: int = 3
    prefix: tuple[int, int] = (16, 64)
    tail: tuple[int, int] = (4, 80)
    long_tail: tuple[int, int] = (200, 400)
    output: tuple[int, int] = (4, 400)
    #: Seconds a request may wait, or run, before the server ends it.
    timeout_s: float = 8
    #: Answers are the canary oracle's: it knows neither grammars, nor `ignore_eos`, nor copies.
    oracle: bool = False


#: One H200, under the KV canary: admission over-commits, and many are retracted.
GPU = Scale(
    users=160,
    running=64,
    queued=90,
    pool=12_000,
    chunk=512,
    questions=64,
    prefix=(64, 256),
    tail=(8, 192),
    long_tail=(600, 1200),
    output=(16, 400),
    oracle=True,
)


@dataclass(frozen=True)
class Question:
    """A greedy prompt; `params` are sampling parameters besides the length."""

    ids: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """One request.

    `tokens` limits its answer, `cut` is what the client does to it after `after_s` seconds, `copies` is `n`.
    """

    rid: str
    question: int
    tokens: int
    stream: bool
    cut: Cut
    after_s: float
    priority: int
    copies: int = 1


def questions(scale: Scale, vocab: int, seed: int) -> list[Question]:
    """The fixed set: with and without a shared prefix, a few longer than a chunk, some with a grammar."""
    source = random.Random(f"questions/{seed}")

    def ids(length: tuple[int, int]) -> tuple[int, ...]:
        return tuple(source.randrange(_FIRST_ID, vocab) for _ in range(source.randint(*length)))

    prefixes = [ids(scale.prefix) for _ in range(scale.prefixes)]
    found = []
    for number in range(scale.questions):
        shared = source.choice(prefixes) if number % 2 else ()
        tail = ids(scale.long_tail if number % 8 == 7 else scale.tail)
        params: dict[str, Any] = {"ignore_eos": number % 3 == 0}
        if number % 10 == 5:
            params = {"regex": REGEX}
        if scale.oracle:
            params = {}
        found.append(Question(shared + tail, params))
    return found


class Source:
    """Draws requests; the same ones in the same order for the same seed."""

    def __init__(self, scale: Scale, seed: int) -> None:
        self.scale = scale
        self.random = random.Random(f"asks/{seed}")
        self.drawn = 0
        self._seed = seed

    def pause_s(self) -> float:
        """How long a user thinks before the next request."""
        return self.random.expovariate(8)

    def draw(self) -> Ask:
        """The next request of whoever asks."""
        pick = self.random
        self.drawn += 1
        cut: Cut = pick.choices(("none", "abort", "hang up"), (76, 14, 10))[0]
        return Ask(
            # Never a start of another: an abort ends every request whose id begins so.
            rid=f"soak-{self._seed}-{self.drawn:08}",
            question=pick.randrange(self.scale.questions),
            tokens=pick.randint(*self.scale.output),
            stream=pick.random() < 0.4,
            cut=cut,
            after_s=pick.choice((0.0, 0.01, pick.uniform(0, 0.3), pick.uniform(0, 3))),
            priority=pick.randrange(4),
            copies=2 if not self.scale.oracle and cut != "abort" and pick.random() < 0.05 else 1,
        )
