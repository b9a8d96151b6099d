"""More than a server can take, at once, in every mode: throughput, the longest wait, the slowest steps."""

from __future__ import annotations

import re
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zos_sglang.observe.columns import from_columns
from zos_sglang.observe.names import AFTER_IDLE, PAUSED, code
from zos_sglang.observe.record import KEPT
from zos_sglang.testing.bench.arrivals import Load, Outcome, distribution, figures
from zos_sglang.testing.bench.arrivals_load import Clients, cost
from zos_sglang.testing.bench.check import Check
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.counters import gained
from zos_sglang.testing.bench.stats import base_of, order_of, ratio
from zos_sglang.testing.server import ServerProcess

#: All requests of a run arrive within milliseconds.
_AT_ONCE = 100_000.0
_RETRACTED = re.compile(r"KV cache pool is full\. Retract requests\. #retracted_reqs: (\d+)")
_REFUSED = "queue is full"
#: Requests of a warm-up, at most.
_WARM_UP = 128
#: What is asked: throughput of stock at least, longest wait and P99 of a step at most.
THROUGHPUT, WAIT, STEP = 0.95, 1.10, 1.25


@dataclass(frozen=True)
class Case:
    """One way to overload a server: `count` streams at once, and the flags that make it too much.

    `retracts`, `refuses`: what must happen, or the load was none.
    """

    name: str
    what: str
    count: int
    prompt: int
    output: int
    args: tuple[str, ...]
    retracts: bool = False
    refuses: bool = False

    def load(self, vocab: int, seed: int) -> Load:
        """The requests of one run."""
        return Load(_AT_ONCE, self.count, self.prompt, self.output, vocab, seed)


def cases(streams: int = 2000, running: int = 64) -> tuple[Case, ...]:
    """The cases for a server that runs so many requests at once."""
    rows = ("--max-running-requests", str(running))
    prompt, output = 16, 96
    # A quarter of what the running ones want in the end, and admission that hopes for the best.
    pool = running * (prompt + output) // 4
    return (
        Case("streams", f"{streams} streams at once", streams, prompt, 24, rows),
        Case(
            "exhausted",
            f"a pool for a quarter of {running} running requests",
            4 * running,
            prompt,
            output,
            (*rows, "--max-total-tokens", str(pool), "--schedule-conservativeness", "0.1"),
            retracts=True,
        ),
        Case(
            "refused",
            f"a queue of {running}, {max(8 * running, streams // 4)} streams at once",
            max(8 * running, streams // 4),
            prompt,
            output,
            (*rows, "--max-queued-requests", str(running)),
            refuses=True,
        ),
    )


class Overload:
    """Runs one case on one started server. `say` gets a line a run."""

    def __init__(
        self,
        server: ServerProcess,
        client: BenchClient,
        clients: Clients,
        vocab: int,
        say: Callable[[str], None],
    ) -> None:
        self.server, self.client, self.clients, self.vocab, self.say = server, client, clients, vocab, say
        client.post("/set_internal_state", {"server_args": {"zos_report_steps": KEPT}})

    def measure(self, case: Case, modes: Sequence[str], repeats: int) -> dict[str, Any]:
        """All runs of a case, modes in alternating order, after a short warm-up each. Raises BenchError."""
        for mode in modes:
            self.run(replace(case, count=min(case.count, _WARM_UP)), mode, seed=1_000_003)
        runs = [
            {"repeat": repeat, **self.run(case, mode, seed=repeat)}
            for repeat in range(repeats)
            for mode in order_of(modes, repeat)
        ]
        return {"case": case.name, "what": case.what, "runs": runs, "summary": summarise(runs, modes)}

    def run(self, case: Case, mode: str, seed: int) -> dict[str, Any]:
        """One load in one mode, from an empty prefix cache."""
        client = self.client
        client.switch(mode)
        client.flush()
        before, logged = client.zos(), len(self.server.log_text())
        reports = self.clients.play(case.load(self.vocab, seed).requests(), case.output)
        after = client.zos()
        outcomes = [outcome for report in reports for outcome in report.outcomes]
        steps = from_columns(after["steps"]["last"])
        found = {
            "mode": mode,
            **of_clients(outcomes),
            "step_ms": step_times(steps[steps["step"] > before["steps"]["launches"]], mode),
            "retracted": sum(map(int, _RETRACTED.findall(self.server.log_text()[logged:]))),
            "client": cost(reports),
            "lane": gained(before, after).get("lane"),
        }
        self.say(_line(case, found))
        return found


def of_clients(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the clients saw; requests that a full queue refused are no failures."""
    refused = [one for one in outcomes if one.error is not None and _REFUSED in one.error]
    taken = [one for one in outcomes if one not in refused]
    found = figures(taken)
    kept = ("requests", "failed", "errors", "tokens", "span_s", "tokens_per_s", "mean_in_flight", "ttft_ms")
    return {
        **{name: found[name] for name in (*kept, "e2e_ms", "itl_ms")},
        "refused": len(refused),
        "oldest_wait_s": round(max((one.ttft for one in taken if one.error is None), default=0.0), 3),
    }


def step_times(steps: np.ndarray, mode: str) -> dict[str, float] | None:
    """Wall time of the iterations of a mode, in ms; those behind an idle moment or a pause are left out."""
    mine = steps[(steps["mode"] == code("mode", mode)) & ((steps["flags"] & (AFTER_IDLE | PAUSED)) == 0)]
    walls = mine["wall"][mine["wall"] > 0]
    return distribution([value / 1e9 for value in walls.tolist()])


def summarise(runs: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Per mode: medians, and ratios to stock in the same repeat."""
    base = base_of(modes)

    def values(mode: str, get: Callable[[Mapping[str, Any]], float]) -> list[float]:
        return [get(run) for run in runs if run["mode"] == mode]

    wanted: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "tokens_per_s": lambda run: run["tokens_per_s"] or 0.0,
        "oldest_wait_s": lambda run: run["oldest_wait_s"],
        "step_p99_ms": lambda run: (run["step_ms"] or {"p99": 0.0})["p99"],
    }
    found: dict[str, dict[str, Any]] = {}
    for mode in modes:
        found[mode] = {name: round(statistics.median(values(mode, get)), 3) for name, get in wanted.items()}
        if mode != base:
            found[mode]["ratios"] = {
                name: ratio(values(mode, get), [max(value, 1e-9) for value in values(base, get)])
                for name, get in wanted.items()
            }
    return found


def checks_of(case: Case, result: Mapping[str, Any]) -> list[Check]:
    """What must hold of a case."""
    runs = result["runs"]
    failed = sum(run["failed"] for run in runs)
    checks = [
        Check(f"{case.name}: nobody failed", failed == 0, [run["errors"] for run in runs if run["failed"]])
    ]
    if case.retracts:
        retracted = [run["retracted"] for run in runs]
        checks.append(Check(f"{case.name}: requests were retracted", min(retracted) > 0, retracted))
    if case.refuses:
        refused = [run["refused"] for run in runs]
        checks.append(Check(f"{case.name}: the queue's limit refused", min(refused) > 0, refused))
    for mode, seen in result["summary"].items():
        if ratios := seen.get("ratios"):
            words = f"{case.name}, {mode}: {{}} {{}} {{:g}} of stock's"
            for name, least, limit in (
                ("tokens_per_s", True, THROUGHPUT),
                ("oldest_wait_s", False, WAIT),
                ("step_p99_ms", False, STEP),
            ):
                median = ratios[name]["median"]
                ok = median >= limit if least else median <= limit
                checks.append(
                    Check(words.format(name, "at least" if least else "at most", limit), ok, median)
                )
    return checks


def many_files() -> None:
    """Let this process and its children open as many sockets as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _line(case: Case, run: Mapping[str, Any]) -> str:
    steps = run["step_ms"] or {}
    return (
        f"  {case.name} {run['mode']}: {run['requests']} answered, {run['refused']} refused, "
        f"{run['failed']} failed, {run['tokens_per_s']} tokens/s, oldest waited {run['oldest_wait_s']} s, "
        f"step P99 {steps.get('p99')} ms, {run['retracted']} retracted"
    )
