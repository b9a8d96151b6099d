"""What the answer to a request must be: recorded from stock in the same server, or known beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from zos_sglang.testing.bench.canary import oracle_answer
from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.soak.plan import Ask, Question, Scale

_AT_ONCE = 8
_TRIES = 20


@dataclass(frozen=True)
class Expected:
    """Token ids of the whole answer, and the finish reasons that may stand under it."""

    ids: list[int]
    finish: frozenset[str]


class Truth(Protocol):
    """Knows answers."""

    def expected(self, ask: Ask) -> Expected:
        """The whole answer, were nobody to cut it."""


class Recorded:
    """Answers of this server in mode stock, each as long as any request may want it."""

    def __init__(self, answers: Sequence[dict[str, Any]]) -> None:
        self._ids = [list(answer["output_ids"]) for answer in answers]
        self._ends = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]

    def expected(self, ask: Ask) -> Expected:
        full = self._ids[ask.question]
        if ask.tokens < len(full):
            return Expected(full[: ask.tokens], frozenset({"length"}))
        # An answer that ends by itself exactly at its limit may say either.
        also = {"length"} if ask.tokens == len(full) else set()
        return Expected(full, frozenset({self._ends[ask.question], *also}))


class Oracle:
    """The token oracle of SGLang's KV canary: every token follows from request id and position."""

    def __init__(self, asked: Sequence[Question], vocab: int) -> None:
        self._asked, self._vocab = asked, vocab

    def expected(self, ask: Ask) -> Expected:
        ids = oracle_answer(ask.rid, len(self._asked[ask.question].ids), ask.tokens, self._vocab)
        return Expected(ids, frozenset({"stop" if ids[-1] == self._vocab - 1 else "length"}))


async def record(http: httpx.AsyncClient, asked: Sequence[Question], scale: Scale) -> Recorded:
    """Ask every question once, a few at a time. Raises BenchError if the server refuses one for good."""
    room = asyncio.Semaphore(_AT_ONCE)

    async def answer(question: Question) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": scale.output[1], **question.params}
        body = {"input_ids": list(question.ids), "sampling_params": params}
        async with room:
            for _ in range(_TRIES):
                reply = await http.post("/generate", json=body)
                if reply.status_code == 200:
                    found: dict[str, Any] = reply.json()
                    return found
                if reply.status_code != 503:
                    break  # 503: it took longer than a request may, on a machine that others use too
        raise BenchError(f"recording the answers of stock: HTTP {reply.status_code}: {reply.text[:300]}")

    return Recorded(await asyncio.gather(*map(answer, asked)))
