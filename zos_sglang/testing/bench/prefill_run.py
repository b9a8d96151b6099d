"""The runs of scripts/bench_prefill.py against one server; rules and modes are switched live."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zos_sglang.overlap.guards import PrefillRule
from zos_sglang.testing.bench.arrivals_load import Clients, cost
from zos_sglang.testing.bench.arrivals_steps import prefills_of, records_since, steps_of
from zos_sglang.testing.bench.client import BenchClient, BenchError
from zos_sglang.testing.bench.counters import gained
from zos_sglang.testing.bench.prefill import Load, figures
from zos_sglang.testing.bench.stats import rotated
from zos_sglang.testing.bench.store import Store
from zos_sglang.testing.bench.zos import Budget, OutOfTime

NAME = "bench_prefill.json"
STOCK = "stock"
#: What is compared: SGLang's own loop, and ours under each rule.
CONTENDERS = (STOCK, *(rule.value for rule in PrefillRule))


@dataclass(frozen=True)
class Plan:
    """What to run: every load under every contender, `repeats` times. `mode` is ours, for the rules."""

    contenders: tuple[str, ...]
    loads: tuple[Load, ...]
    repeats: int
    mode: str = "overlap"

    @property
    def keys(self) -> list[dict[str, str]]:
        """What one repeat consists of."""
        return [{"load": load.name, "rule": name} for load in self.loads for name in self.contenders]


class Bench:
    """One started server and its clients. `say` gets one line a run."""

    def __init__(
        self, client: BenchClient, clients: Clients, budget: Budget, say: Callable[[str], None] = print
    ) -> None:
        self.client, self.clients, self.budget, self.say = client, clients, budget, say

    def measure(self, plan: Plan, store: Store) -> None:
        """Warm up, then the repeats that are missing; stops early with all kept when the time is over.

        Raises BenchError.
        """
        missing = store.missing(plan.repeats, plan.keys)
        try:
            seconds = self._warm_up(plan) if missing else 0.0
            for repeat in missing:
                self.budget.spend(seconds)
                begin = time.monotonic()
                store.add(self._repeat(plan, repeat))
                seconds = time.monotonic() - begin
            store.finish()
        except OutOfTime:
            self.say("  --limit-s: stopping here; the same command with --resume goes on")
            store.save()

    def _warm_up(self, plan: Plan) -> float:
        """Every run once, untimed: the first of a shape compiles and allocates. Returns its seconds."""
        begin = time.monotonic()
        for run in self._repeat(plan, repeat=0, name="warm-up"):
            if run["failed"]:
                raise BenchError(
                    f"warm-up, {run['load']}, {run['rule']}: {run['failed']} requests failed: {run['errors']}"
                )
        return time.monotonic() - begin

    def _repeat(self, plan: Plan, repeat: int, name: str = "") -> list[dict[str, Any]]:
        """Every load under every contender, in the order of this repeat."""
        runs = []
        for load in plan.loads:
            for place, rule in enumerate(rotated(plan.contenders, repeat)):
                run = self.run(load, rule, plan.mode)
                self.say(f"  {name or f'repeat {repeat + 1} of {plan.repeats}'}, {_line(run)}")
                runs.append({"load": load.name, "rule": rule, "repeat": repeat, "place": place, **run})
        return runs

    def run(self, load: Load, rule: str, mode: str) -> dict[str, Any]:
        """One load under one contender, from an empty prefix cache. Raises BenchError."""
        self._become(rule, mode)
        self.client.flush()
        before = self.client.zos()
        reports = self.clients.play(load.requests(), load.output)
        growth = gained(before, self.client.zos())
        records = records_since(self.client, before)
        return {
            "load": load.name,
            "rule": rule,
            **figures(load, [outcome for report in reports for outcome in report.outcomes]),
            "client": cost(reports),
            "steps": steps_of(records),
            "prefills": prefills_of(records),
            "machine_load": round(os.getloadavg()[0], 2),
            "counts": {name: growth[name] for name in ("paths", "reasons") if name in growth},
        }

    def _become(self, rule: str, mode: str) -> None:
        """Have the server run by this contender."""
        if rule == STOCK:
            self.client.switch(STOCK)
            return
        self.client.set_rule(rule)
        self.client.switch(mode)
        in_effect = self.client.zos()["prefill_rule"]
        if in_effect != rule:
            raise BenchError(f"the server keeps the prefill rule {in_effect} instead of {rule}")


def _line(run: dict[str, Any]) -> str:
    words = [f"{run['load']}, {run['rule']}: "]
    if run["failed"]:
        return f"{words[0]}{run['failed']} FAILED: {run['errors'][0]}"
    ttft, itl = run["ttft_ms"], run["itl_ms"] or {}
    words[0] += f"TTFT P50 {ttft['p50']:.0f} P99 {ttft['p99']:.0f} ms"
    words += [f"{run['tokens_per_s']:.0f} tokens/s", f"ITL of the streams P99 {itl.get('p99')} ms"]
    if not run["covered"]:
        words.append("streams DID NOT LAST: raise --stream-tokens or --settle-s")
    if run["client"]["in_the_way"]:
        words.append("clients late or busy")
    return ", ".join(words)
