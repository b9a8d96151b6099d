"""Requests of every kind at once, at seeded times: what makes ranks decide something."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

REQUESTS = 36
SEED = 5
PREFIX = "The ranks of one server read the same requests "
#: The first ones come together, ask for more than the pool holds, and so are retracted.
_BURST = 16
#: Every so many requests is aborted by its client while it runs.
_ABORTED = 6


def play(url: str, seed: int) -> dict[str, tuple[Any, ...]]:
    """Play the requests of `seed`; text, finish reason and length of those that end by themselves.

    Half of them stream, some share a prefix, some end on a stop string; no answer of those that are aborted.
    """
    chance, client = random.Random(seed), httpx.Client(base_url=url, timeout=300, trust_env=False)
    bodies = {f"{seed}-{i}": _body(i, chance) for i in range(REQUESTS)}
    starts = {name: chance.uniform(0, 2.0) * (i >= _BURST) for i, name in enumerate(bodies)}
    begun = time.monotonic()

    def ask(name: str) -> tuple[Any, ...] | None:
        time.sleep(max(0.0, begun + starts[name] - time.monotonic()))
        body = {"rid": f"{name}-{begun}", **bodies[name]}
        if int(name.split("-")[1]) % _ABORTED == _ABORTED - 1:
            threading.Timer(0.4, client.post, ("/abort_request",), {"json": {"rid": body["rid"]}}).start()
            _answer(client, body)
            return None
        return _answer(client, body)

    with client, ThreadPoolExecutor(REQUESTS) as pool:
        found = dict(zip(bodies, pool.map(ask, bodies), strict=True))
    return {name: answer for name, answer in found.items() if answer is not None}


def _body(i: int, chance: random.Random) -> dict[str, Any]:
    # A few prompts are long enough for several chunks; the rest are short, so that many run together.
    length = 30 if i % 12 == 7 and i > _BURST else chance.randint(1, 5)
    words = " ".join(chance.choice(("alpha", "beta", "gamma", "delta")) for _ in range(length))
    aborted = i % _ABORTED == _ABORTED - 1
    burst = i < _BURST
    tokens = 100 if burst else chance.choice((1, 8, 40, 60, 80))
    params: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": 200 if aborted else tokens,
        "ignore_eos": i % 2 == 0 or aborted or burst,
    }
    if i % 5 == 1 and not burst:
        params["stop"] = ["e", "th"]
    return {"text": (PREFIX if i % 3 == 0 else "") + words, "sampling_params": params, "stream": i % 2 == 1}


def _answer(client: httpx.Client, body: dict[str, Any]) -> tuple[Any, ...]:
    """Text, finish reason and tokens."""
    if not body["stream"]:
        answer = client.post("/generate", json=body)
        answer.raise_for_status()
        last = answer.json()
    else:
        with client.stream("POST", "/generate", json=body) as stream:
            lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        last = httpx.Response(200, text=lines[-2]).json()
    meta = last["meta_info"]
    return last["text"], meta["finish_reason"], meta["completion_tokens"]
