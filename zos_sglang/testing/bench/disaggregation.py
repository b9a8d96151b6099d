"""Disaggregated servers on one CPU machine against one colocated stock server: answers, and time per token.

One prefill server, one decode server and a balancer run throughout; the modes are switched live, so every
row is measured on the same three processes, one after the other. `stock` is SGLang's own loop in them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from zos_sglang.testing.bench.command import measured
from zos_sglang.testing.bench.ending import COULD_NOT
from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.disaggregation import Disaggregated
from zos_sglang.testing.models import make_tiny
from zos_sglang.testing.server import ServerProcess

MODES = (("stock", "stock"), ("sync", "sync"), ("overlap", "overlap"), ("overlap", "resident"))
ARGS = ("--chunked-prefill-size", "128", "--max-running-requests", "32")


def answer(client: httpx.Client, prompt: str, tokens: int) -> tuple[str, float]:
    """A greedy answer, and the seconds it took."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    begun = time.perf_counter()
    reply = client.post("/generate", json={"text": prompt, "sampling_params": sampling})
    reply.raise_for_status()
    return reply.json()["text"], time.perf_counter() - begun


def wave(url: str, requests: int, tokens: int) -> tuple[list[str], dict[str, float]]:
    """Concurrent requests, every fourth with a prompt of several chunks: answers and times."""
    prompts = [f"request {i} " + "and more words " * (60 if i % 4 == 0 else 2) for i in range(requests)]
    begun = time.perf_counter()
    with (
        httpx.Client(base_url=url, timeout=300, trust_env=False) as client,
        ThreadPoolExecutor(requests) as pool,
    ):
        done = list(pool.map(lambda prompt: answer(client, prompt, tokens), prompts))
    seconds = time.perf_counter() - begun
    times = {"seconds": round(seconds, 3), "median_answer_s": round(median(s for _, s in done), 3)}
    return [text for text, _ in done], {**times, "tokens_per_s": round(requests * tokens / seconds, 1)}


def switch(pair: Disaggregated, modes: tuple[str, str]) -> None:
    for server, mode in zip(pair.servers.values(), modes, strict=True):
        state = {"server_args": {"zos_mode": mode}}
        httpx.post(
            f"{server.url}/set_internal_state", json=state, timeout=60, trust_env=False
        ).raise_for_status()


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows, and what the servers counted."""
    model = make_tiny("qwen3", Path(".cache/tiny-qwen3"))
    rows = []
    with ServerProcess(model, mode=None, args=ARGS, log=folder / "colocated.log") as server:
        wave(server.url, given.requests, 4)
        right, times = wave(server.url, given.requests, given.tokens)
    rows.append({"servers": "colocated", "prefill": "stock", "decode": "stock", **times})
    with Disaggregated(model, ("overlap", "resident"), folder=folder, args=ARGS, real=given.real) as pair:
        wave(pair.url, given.requests, 4)
        for _ in range(given.repeats):
            for modes in MODES:
                switch(pair, modes)
                answers, times = wave(pair.url, given.requests, given.tokens)
                equal = sum(a == b for a, b in zip(answers, right, strict=True))
                row = {"servers": "disaggregated", "prefill": modes[0], "decode": modes[1], **times}
                rows.append({**row, "answers_equal": f"{equal}/{len(right)}"})
                print(rows[-1], flush=True)
        counted = {role: pair.zos(role) for role in ("prefill", "decode")}
    kept = ("reasons", "paths", "lane")
    return {
        "transfer": "mooncake over TCP" if given.real else "stand-in over TCP",
        "rows": rows,
        "counted": {role: {name: block[name] for name in kept} for role, block in counted.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--real", action="store_true", help="the installed mooncake moves the KV")
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu_disaggregation.json"))
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = measured("compare_disaggregation", lambda: measure(given, Path(folder)))
    if found is None:
        return COULD_NOT
    write_json(given.out, {**provenance("compare_disaggregation", argv), **found})
    compared = [row for row in found["rows"] if "answers_equal" in row]
    return int(any(row["answers_equal"] != f"{given.requests}/{given.requests}" for row in compared))
