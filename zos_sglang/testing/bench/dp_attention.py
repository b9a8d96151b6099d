"""Bursts of streaming prompts on two ranks with DP attention: the consecutive-prefill rules compared.

One server; the rules take turns, each for one burst at a time, in another order every repeat. A burst asks
both ranks for the same number of answers at once, each prompt about as long as one prefill, so prefill
follows prefill. Compared inside a repeat, where the rules ran within seconds of each other.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import httpx

from zos_sglang.overlap.guards import PrefillRule
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.command import measured
from zos_sglang.testing.bench.ending import COULD_NOT
from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.bench.stats import rotated, spread
from zos_sglang.testing.dp_server import RANKS, DpServer
from zos_sglang.testing.models import make_tiny

RULES = tuple(PrefillRule)
BASE = PrefillRule.NEVER
#: One prompt fills a prefill; a long one takes three. The flag is shared by the ranks.
CHUNK_TOKENS = 512
ARGS = (
    *("--chunked-prefill-size", str(CHUNK_TOKENS * RANKS)),
    *("--json-model-override-args", "{}"),  # all layers
    *("--disable-radix-cache", "--log-level", "warning"),
)
NEW_TOKENS = 8


def prompt(chance: random.Random, tokens: int) -> list[int]:
    return [chance.randrange(300) for _ in range(tokens)]


def burst(url: str, prompts: Sequence[list[int]]) -> dict[str, float]:
    """Ask for all at once; TTFT (ms) and generated tokens per second of this burst."""
    limits = httpx.Limits(max_connections=None)
    with (
        httpx.Client(base_url=url, timeout=120, trust_env=False, limits=limits) as client,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        begun = time.perf_counter()

        def ask(number: int) -> float:
            params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            body = {"input_ids": prompts[number], "routed_dp_rank": number % RANKS, "stream": True}
            first = None
            with client.stream("POST", "/generate", json={**body, "sampling_params": params}) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    if first is None and line.startswith("data: {"):
                        first = time.perf_counter()
            assert first is not None
            return (first - begun) * 1e3

        ttft = list(pool.map(ask, range(len(prompts))))
        seconds = time.perf_counter() - begun
    ninth = quantiles(ttft, n=10, method="inclusive")[-1]
    return {
        "ttft_mean_ms": fmean(ttft),
        "ttft_p90_ms": ninth,
        "ttft_first_ms": min(ttft),
        "tokens_per_s": len(prompts) * NEW_TOKENS / seconds,
    }


def set_rule(url: str, rule: PrefillRule) -> None:
    with BenchClient(url) as client:
        client.set_rule(rule)


def measure(server: DpServer, repeats: int, requests: int, long: int) -> dict[str, Any]:
    """All repeats: samples by rule, and every rank's decisions by rule.

    Args:
        requests: prompts a burst; `long` of them take three prefills.
    """
    chance = random.Random(1)
    samples: dict[str, list[dict[str, float]]] = {rule.value: [] for rule in PrefillRule}
    reasons: dict[str, dict[str, int]] = {rule.value: {} for rule in PrefillRule}
    for repeat in range(-1, repeats):  # the first one warms up
        lengths = [CHUNK_TOKENS * 3 if i < long else CHUNK_TOKENS - 8 for i in range(requests)]
        prompts = [prompt(chance, length) for length in lengths]
        for rule in map(PrefillRule, rotated(RULES, repeat)):
            set_rule(server.url, rule)
            before = server.states()[0]["reasons"]
            found = burst(server.url, prompts)
            first, second = (state["reasons"] for state in server.states())
            if first != second:
                raise RuntimeError(f"the ranks decided differently: {first}, {second}")
            if repeat < 0:
                continue
            samples[rule.value].append({name: round(value, 2) for name, value in found.items()})
            counts = reasons[rule.value]
            for name, count in first.items():
                if count > before[name]:
                    counts[name] = counts.get(name, 0) + count - before[name]
    return {"samples": samples, "reasons": reasons}


def summarise(samples: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """By rule and quantity: the spread of the values, and of the ratios to the base in the same repeat."""
    out: dict[str, Any] = {}
    for rule, bursts in samples.items():
        out[rule] = {}
        for name in bursts[0]:
            values = [one[name] for one in bursts]
            base = [one[name] for one in samples[BASE.value]]
            ratios = [value / other for value, other in zip(values, base, strict=True)]
            out[rule][name] = {"value": spread(values, 1), "to_never": spread(ratios)}
    return out


def main(argv: list[str] | None = None) -> int:
    """Command line; writes the result file and prints one line a rule."""
    parser = argparse.ArgumentParser(prog="bench_dp_attention.py", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--requests", type=int, default=12, help="prompts a burst, over both ranks")
    parser.add_argument("--long", type=int, default=2, help="of them so many of three chunks")
    parser.add_argument("--model", type=Path, default=Path(".cache/tiny-qwen3"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu_dp_attention.json"))
    args = parser.parse_args(argv)
    load = os.getloadavg()
    found = measured("bench_dp_attention", lambda: _measure(args))
    if found is None:
        return COULD_NOT
    result = {
        **provenance("dp-attention"),
        "settings": {"repeats": args.repeats, "requests": args.requests, "long": args.long},
        "load_average": {
            "before": [round(n, 2) for n in load],
            "after": [round(n, 2) for n in os.getloadavg()],
        },
        "summary": summarise(found["samples"]),
        **found,
    }
    write_json(args.out, result)
    for rule, row in result["summary"].items():
        cells = (f"{name} {row[name]['value']['median']} ({row[name]['to_never']['median']})" for name in row)
        print(f"{rule:12} {', '.join(cells)}  {result['reasons'][rule]}")
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model, log = make_tiny("qwen3", args.model), Path(folder) / "server.log"
        with DpServer(model, mode="overlap", args=ARGS, log=log) as server:
            return measure(server, args.repeats, args.requests, args.long)


if __name__ == "__main__":
    sys.exit(main())
