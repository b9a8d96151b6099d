"""A rough day for SGLang's KV canary: arrivals at random, aborts, shared prefixes, a pool too small.

The canary checks every KV write and every input token on the device. Its token oracle replaces
sampling by a hash of request id and position, so every answer is known beforehand and checked too.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from zos_sglang.testing.bench.ending import run_until_ended
from zos_sglang.testing.server import ServerProcess

FLAGS = ("--kv-canary", "raise", "--sampling-backend", "token_oracle")
ARGS = (*FLAGS, "--load-format", "dummy")
ENV = {
    "SGLANG_KV_CANARY_ENABLE_WRITE_INPUT_ASSERT": "1",
    "SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE": "1",
}
#: Makes the oracle hand out wrong tokens: a run that must fail, or the canary proves nothing.
POISON = {
    "SGLANG_KV_CANARY_PERTURB_NEXT_TOKEN_SWAP_PROB": "0.05",
    "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS": "50",
}

_VIOLATION = re.compile(r"kv_canary violation|canary violation detected")
_STATS = re.compile(r"\[canary\] step=(\d+) protected_tokens=(\d+) sweep_passes=(\d+) violations=(\d+)")
_RETRACTED = re.compile(r"KV cache pool is full\. Retract requests\. #retracted_reqs: (\d+)")
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Load:
    """What is sent until `tokens` output tokens have arrived or `limit_s` seconds are over.

    `vocab` is the model's number of token ids. Lengths are inclusive ranges of tokens; `aborts` is the share
    of requests cut off on their way.
    """

    vocab: int = 0
    tokens: int = 200_000
    limit_s: float = 150
    concurrency: int = 96
    prefixes: int = 4
    prefix_length: tuple[int, int] = (64, 256)
    tail_length: tuple[int, int] = (8, 192)
    output_length: tuple[int, int] = (16, 400)
    aborts: float = 0.1
    seed: int = 0


@dataclass
class Tally:
    """What came back."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefix_hits: int = 0
    wrong: list[str] = field(default_factory=list)
    broken: str | None = None


def oracle_token(rid: str, position: int, vocab: int) -> int:
    """The token that SGLang's `HashOracle` puts at `position` (from 0) of request `rid`."""
    key = int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest(), "little")
    x = key ^ position
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) % vocab


def oracle_answer(rid: str, prompt: int, wanted: int, vocab: int) -> list[int]:
    """The whole answer to a prompt of `prompt` tokens: `wanted` tokens, or up to the first EOS."""
    tokens = []
    for position in range(prompt, prompt + wanted):
        tokens.append(oracle_token(rid, position, vocab))
        if tokens[-1] == vocab - 1:
            break
    return tokens


def play(server: ServerProcess, load: Load) -> dict[str, Any]:
    """Send the load; what came back and what the server's log says of it.

    A server that died, or gave a wrong answer, shows in the result, not as an exception.
    """
    start = time.monotonic()
    tally = run_until_ended(_Player(server.url, load).run())
    log = server.log_text()
    stats = _STATS.findall(log)
    retracted = [int(count) for count in _RETRACTED.findall(log)]
    return {
        **vars(tally),
        "seconds": round(time.monotonic() - start, 1),
        "retractions": len(retracted),
        "retracted_requests": sum(retracted),
        "canary_steps": int(stats[-1][0]) if stats else 0,
        "protected_tokens": int(stats[-1][1]) if stats else 0,
        "sweep_passes": int(stats[-1][2]) if stats else 0,
        "violations": max((int(found[3]) for found in stats), default=0) + len(_VIOLATION.findall(log)),
    }


class _Player:
    def __init__(self, url: str, load: Load) -> None:
        self.load = load
        self.source = random.Random(load.seed)
        self.tally = Tally()
        self.deadline = time.monotonic() + load.limit_s
        self.prefixes = [self._ids(load.prefix_length) for _ in range(load.prefixes)]
        self.http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(load.limit_s + 60, connect=20),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=load.concurrency),
            trust_env=False,
        )

    async def run(self) -> Tally:
        async with self.http:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.load.concurrency):
                        group.create_task(self._user())
                healthy = await self.http.get("/health_generate")
                if healthy.status_code != 200:
                    self.tally.broken = f"/health_generate answered {healthy.status_code}"
            except* httpx.HTTPError as errors:
                self.tally.broken = repr(errors.exceptions[0])
        return self.tally

    async def _user(self) -> None:
        load, tally = self.load, self.tally
        while tally.output_tokens < load.tokens and time.monotonic() < self.deadline:
            await asyncio.sleep(self.source.expovariate(20))
            await self._request(f"canary-{load.seed}-{tally.requests}")

    async def _request(self, rid: str) -> None:
        load, tally = self.load, self.tally
        tally.requests += 1
        prompt = [*self.source.choice(self.prefixes), *self._ids(load.tail_length)]
        wanted = self.source.randint(*load.output_length)
        abort = (
            asyncio.create_task(self._abort(rid, self.source.uniform(0, 0.5)))
            if self.source.random() < load.aborts
            else None
        )
        body = {
            "rid": rid,
            "input_ids": prompt,
            # Without ignore_eos: admission simulates such requests exactly and never has to retract one.
            "sampling_params": {"temperature": 0, "max_new_tokens": wanted},
        }
        try:
            reply = await self.http.post("/generate", json=body)
        finally:
            if abort is not None:
                await abort
        self._judge(rid, len(prompt), wanted, reply, may_abort=abort is not None)

    async def _abort(self, rid: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self.http.post("/abort_request", json={"rid": rid})

    def _judge(self, rid: str, prompt: int, wanted: int, reply: httpx.Response, *, may_abort: bool) -> None:
        tally = self.tally
        answer = reply.json()
        meta = answer.get("meta_info", {})
        ids = answer.get("output_ids", [])
        kind = (meta.get("finish_reason") or {}).get("type")
        expected = oracle_answer(rid, prompt, wanted, self.load.vocab)
        if ids != expected[: len(ids)]:
            first = next(i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1])
            tally.wrong.append(f"{rid}: token {first} is {ids[first]}, not {expected[first]}")
        if ids == expected and kind == ("length" if len(ids) == wanted else "stop"):
            tally.finished += 1
        elif may_abort and (kind == "abort" or reply.status_code != 200):
            tally.aborted += 1
        else:
            tally.wrong.append(f"{rid}: {len(ids)} of {wanted} tokens, {kind}, HTTP {reply.status_code}")
        tally.output_tokens += len(ids)
        tally.prompt_tokens += prompt
        cached = meta.get("cached_tokens") or 0
        tally.cached_tokens += cached
        tally.prefix_hits += cached > 0

    def _ids(self, length: tuple[int, int]) -> list[int]:
        count = self.source.randint(*length)
        return [self.source.randrange(8, self.load.vocab) for _ in range(count)]
