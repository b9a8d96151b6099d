"""The runs of scripts/bench_serving.py against one server, modes switched live, whole groups kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.arrivals_run import lane_of
from zos_sglang.testing.bench.client import BenchClient, BenchError
from zos_sglang.testing.bench.counters import gained
from zos_sglang.testing.bench.serving import Lengths, Point, Target, arguments
from zos_sglang.testing.bench.serving_client import Runs
from zos_sglang.testing.bench.serving_result import read_result
from zos_sglang.testing.bench.stats import base_of, order_of
from zos_sglang.testing.bench.store import Store
from zos_sglang.testing.bench.zos import Budget, OutOfTime

#: A warm-up has prompts of its own, and at most so many requests.
_WARM_UP, _WARM_UP_SEED = 32, 1_000_003
#: What a run takes besides its requests: SGLang sleeps for one second, reads the tokenizer, makes prompts.
_OVERHEAD_S = 4.0
_LANE = "resident"


@dataclass(frozen=True)
class Plan:
    """What to run: every point in every mode, `repeats` times, the order of the modes alternating."""

    modes: tuple[str, ...]
    points: tuple[Point, ...]
    repeats: int
    lengths: Lengths
    seed: int = 0
    timeout_s: float = 120

    @property
    def base(self) -> str:
        return base_of(self.modes)

    def missing(self, store: Store) -> list[tuple[int, Point]]:
        """Repeats and points that the result file lacks, repeat by repeat."""
        lacking = {
            point: store.missing(self.repeats, [point.key(mode) for mode in self.modes])
            for point in self.points
        }
        return [
            (repeat, point)
            for repeat in range(self.repeats)
            for point in self.points
            if repeat in lacking[point]
        ]


@dataclass
class Bench:
    """One started server and what runs SGLang's benchmark against it. `out` gets a log for each run.

    `whole_texts`: whether events carry the whole text so far, so that the last one is the answer. `say` gets
    a line for each run.
    """

    client: BenchClient
    runs: Runs
    target: Target
    out: Path
    budget: Budget
    whole_texts: bool = True
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._seconds: dict[Point, float] = {}

    def measure(self, plan: Plan, store: Store) -> None:
        """Run what the result file lacks; stops early, with all whole groups kept, when the time is over.

        A group is one point in one repeat, in every mode: what is compared ran within seconds, in one server.
        Raises BenchError.
        """
        todo = plan.missing(store)
        try:
            if todo:
                self._warm_up(plan)
            for number, (repeat, point) in enumerate(todo, start=1):
                self.say(f"group {number} of {len(todo)}, repeat {repeat}: {point.name}")
                store.add(self._group(plan, repeat, point))
            store.finish()
        except OutOfTime:
            self.say("--limit-s: stopping here; the same command with --resume goes on")
        finally:
            store.save()

    def _group(self, plan: Plan, repeat: int, point: Point) -> list[dict[str, Any]]:
        """One point in every mode, if there is time for all of them."""
        self.budget.spend(len(plan.modes) * self._expected(point))
        begin, found = time.monotonic(), []
        for place, mode in enumerate(order_of(plan.modes, repeat)):
            run = self.run(plan, point, mode, plan.seed)
            self.say(line_of(run))
            found.append({**point.key(mode), "repeat": repeat, "place": place, **run})
        self._seconds[point] = (time.monotonic() - begin) / len(plan.modes)
        return found

    def _expected(self, point: Point) -> float:
        arrivals = point.requests / point.rate if point.rate else 0.0
        return self._seconds.get(point, arrivals + _OVERHEAD_S)

    def _warm_up(self, plan: Plan) -> None:
        """The first dataset's fullest point in every mode. Raises BenchError if requests fail."""
        first = [point for point in plan.points if point.dataset == plan.points[0].dataset]
        most = max(first, key=lambda point: point.requests)
        point = replace(most, requests=min(most.requests, _WARM_UP))
        for mode in plan.modes:
            self.say(f"warm-up: {point.name}, {mode}")
            run = self.run(plan, point, mode, _WARM_UP_SEED)
            if run["failed"]:
                raise BenchError(f"warm-up, mode {mode}: {run['failed']} requests failed: {run['errors']}")

    def run(self, plan: Plan, point: Point, mode: str, seed: int) -> dict[str, Any]:
        """One point in one mode, from an empty prefix cache. Raises BenchError."""
        self.client.switch(mode)
        self.client.flush()
        result, log = self.out / "run.jsonl", self.out / "run.log"
        result.unlink(missing_ok=True)
        before = self.client.zos()
        asked = arguments(point, plan.lengths, self.target, seed, result)
        cpu_s = self.runs.run(asked, log, plan.timeout_s)
        growth = gained(before, self.client.zos())
        found = read_result(result, point.requests, whole_texts=self.whole_texts)
        decoded = found["output_tokens"] - (point.requests - found["failed"])
        return {
            "mode": mode,
            **found,
            "client_cpu_s": round(cpu_s, 3),
            "lane": lane_of(growth, decoded_tokens=decoded) if mode == _LANE else None,
            "counts": {name: growth[name] for name in ("paths", "reasons") if name in growth},
        }


def line_of(run: dict[str, Any]) -> str:
    """A run in one line."""
    words = [
        f"  {run['mode']}: {run['requests_per_s']:.2f} requests/s, {run['tokens_per_s']:.0f} tokens/s",
        *(
            f"{name} P50 {run[what]['p50']:.1f} P99 {run[what]['p99']:.1f} ms"
            for what, name in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"))
        ),
    ]
    if run["failed"]:
        words.append(f"{run['failed']} FAILED: {run['errors'][:1]}")
    return ", ".join(words)
