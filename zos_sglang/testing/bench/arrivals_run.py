"""The runs of scripts/bench_arrivals.py against one server, modes switched live, every run kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.arrivals import Load, figures
from zos_sglang.testing.bench.arrivals_load import Clients, cost
from zos_sglang.testing.bench.arrivals_steps import HttpProcess, records_since, steps_of
from zos_sglang.testing.bench.arrivals_summary import summarise
from zos_sglang.testing.bench.client import BenchClient, BenchError
from zos_sglang.testing.bench.counters import gained
from zos_sglang.testing.bench.stats import base_of, order_of
from zos_sglang.testing.bench.store import Store
from zos_sglang.testing.bench.thread import SchedulerThread
from zos_sglang.testing.bench.zos import Budget, OutOfTime

NAME = "bench_arrivals.json"
#: A warm-up is another load at the highest rate, with at most so many requests.
_WARM_UP, _WARM_UP_SEED = 64, 1_000_003
_LANE = "resident"


@dataclass(frozen=True)
class Plan:
    """What to run: every load in every mode, `repeats` times, the order of the modes alternating."""

    modes: tuple[str, ...]
    loads: tuple[Load, ...]
    repeats: int

    @property
    def base(self) -> str:
        return base_of(self.modes)

    def missing(self, store: Store, load: Load) -> list[int]:
        """The repeats of a load that the store lacks."""
        return store.missing(self.repeats, [{"rate": load.rate, "mode": mode} for mode in self.modes])


def open_store(
    path: Path, head: dict[str, Any], identity: dict[str, Any], plan: Plan, *, resume: bool = False
) -> Store:
    """`bench_arrivals.json`, begun or continued. Raises ResumeError."""
    store = Store(path, head, identity, partial(summarise, modes=plan.modes, base=plan.base), resume=resume)
    # A later call may want more repeats.
    store.data["settings"] = head["settings"]
    return store


class Bench:
    """One started server and its clients.

    Args:
        say: gets one line a run.
        pid: the launcher's process id.
        pin: the core that the scheduler's thread is to keep to; None: any. Raises BenchError.
    """

    def __init__(
        self,
        client: BenchClient,
        clients: Clients,
        budget: Budget,
        say: Callable[[str], None] = print,
        *,
        pid: int | None = None,
        pin: int | None = None,
    ) -> None:
        self.client, self.clients, self.budget, self.say = client, clients, budget, say
        self.http, self.thread = HttpProcess(pid), SchedulerThread.of_server(pid)
        if pin is not None:
            self.thread.pin(pin)
        self._seconds: dict[Load, float] = {}

    def measure(self, plan: Plan, store: Store) -> None:
        """Warm up, then what is missing; stops early with all kept when the time is over.

        A rate's runs of one repeat are kept together, or not at all: they are compared with each other.
        Raises BenchError.
        """
        try:
            if any(plan.missing(store, load) for load in plan.loads):
                self._warm_up(plan, store)
            for repeat in range(plan.repeats):
                for load in plan.loads:
                    if repeat in plan.missing(store, load):
                        store.add(self._repeat(plan, load, repeat))
            store.finish()
        except OutOfTime:
            self.say("  --limit-s: stopping here; the same command with --resume goes on")
            store.save()

    def _repeat(self, plan: Plan, load: Load, repeat: int) -> list[dict[str, Any]]:
        return [
            {"repeat": repeat, "place": place, **self.run(load, mode)}
            for place, mode in enumerate(order_of(plan.modes, repeat))
        ]

    def _warm_up(self, plan: Plan, store: Store) -> None:
        most = max(plan.loads, key=lambda load: load.rate)
        load = replace(most, count=min(most.count, _WARM_UP), seed=_WARM_UP_SEED)
        for mode in plan.modes:
            run = self.run(load, mode)
            if run["failed"]:
                raise BenchError(f"warm-up, mode {mode}: {run['failed']} requests failed: {run['errors']}")
            # Of a measurement that is cut short these may be all there is.
            kept = {
                name: run[name] for name in ("mode", "requests", "tokens_per_s", "ttft_ms", "itl_ms", "steps")
            }
            store.data.setdefault("warmups", []).append(kept)

    def run(self, load: Load, mode: str) -> dict[str, Any]:
        """One load in one mode, from an empty prefix cache. Raises BenchError, OutOfTime."""
        self.budget.spend(self._seconds.get(load, load.count / load.rate))
        self.client.switch(mode)
        self.client.flush()
        before, spent, begin = self.client.zos(), self.http.seconds(), time.monotonic()
        seen_before = self.thread.seen()
        reports = self.clients.play(load.requests(), load.output)
        self._seconds[load] = time.monotonic() - begin
        seen = figures([outcome for report in reports for outcome in report.outcomes])
        http = self.http.cost(spent, seen["tokens"], seen["span_s"])
        thread = self.thread.since(seen_before)
        growth = gained(before, self.client.zos())
        found = {
            "rate": load.rate,
            "mode": mode,
            **seen,
            "client": cost(reports),
            "steps": steps_of(records_since(self.client, before)),
            "http": http,
            "thread": thread,
            "lane": lane_of(growth, decoded_tokens=load.count * (load.output - 1)) if mode == _LANE else None,
            "counts": {name: growth[name] for name in ("paths", "reasons") if name in growth},
        }
        self.say(_line(found))
        return found


def lane_of(growth: dict[str, Any], decoded_tokens: int) -> dict[str, Any] | None:
    """The lane's counters of a run, with the share of decode steps and of decoded tokens that were its own.

    `decoded_tokens` are those that took a decode step: all but each request's first. None without a lane.
    """
    lane = growth.get("lane")
    if lane is None:
        return None
    steps, decoded = lane.get("decode_steps", 0), lane.get("row_steps", 0) - lane.get("wasted_row_steps", 0)
    return {
        **lane,
        "share": round(lane["steps"] / steps, 4) if steps else None,
        "token_share": round(decoded / decoded_tokens, 4) if decoded_tokens else None,
    }


def _line(run: dict[str, Any]) -> str:
    itl, ttft = run["itl_ms"] or {}, run["ttft_ms"] or {}
    words = [
        f"  {run['rate']:g}/s {run['mode']}: {run['requests']} requests",
        f"{run['tokens_per_s']} tokens/s",
        f"ITL P50 {itl.get('p50')} P99 {itl.get('p99')} ms",
        f"TTFT P99 {ttft.get('p99')} ms",
    ]
    if run["failed"]:
        words.append(f"{run['failed']} FAILED: {run['errors'][0]}")
    if run["client"]["in_the_way"]:
        client = run["client"]
        lag = (client["lag_ms"] or {}).get("p99")
        words.append(f"clients late or busy: loop lag P99 {lag} ms, {client['busiest']:.2f} of a core")
    return ", ".join(words)
