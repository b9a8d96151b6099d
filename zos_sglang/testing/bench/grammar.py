"""What structured output costs: steps of batches in which a share of the rows has a grammar.

The batch is the same one for every share, only the sampling parameters of the first rows change. The grammar
is a JSON schema that no answer of the wave's length can end, so that all rows decode to the last step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from zos_sglang.testing.bench.client import BenchClient, Wave, prompts
from zos_sglang.testing.bench.counters import gained, lane_figures
from zos_sglang.testing.bench.measure import samples, timings
from zos_sglang.testing.bench.stats import base_of, judge_digests, order_of, ratio, spread

#: Most that a step with a few grammar rows may take, over a step without, and which share that is.
TARGET, TARGET_SHARE = 1.10, 2.0


@dataclass(frozen=True)
class Plan:
    """What is measured. `shares` are percent of the rows."""

    modes: tuple[str, ...]
    shares: tuple[float, ...]
    batch: int
    repeats: int
    prompt: int
    output: int
    vocab: int
    seed: int


def schema(tokens: int) -> str:
    """An array of records, too long to end within `tokens` tokens.

    Names are from a list, not strings of bounded length: inside of one, xgrammar takes 10 ms and more for the
    mask of one token in a hundred (large vocabulary), whatever the scheduler does.
    """
    record = {
        "type": "object",
        "properties": {
            "name": {"enum": ["apple", "banana", "cherry", "elder", "fig", "grape", "lemon", "plum"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
            "open": {"type": "boolean"},
        },
        "required": ["name", "count", "open"],
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": record, "minItems": tokens})


def rows_of(share: float, batch: int) -> int:
    """Rows with a grammar: at least one, unless the share is 0."""
    return 0 if not share else max(1, round(share * batch / 100))


def parameters(plan: Plan, share: float) -> list[dict[str, Any]]:
    """What is special about each row."""
    constrained = rows_of(share, plan.batch)
    return [{"json_schema": schema(plan.output)}] * constrained + [{}] * (plan.batch - constrained)


def measure(
    client: BenchClient, plan: Plan, memory: Callable[[], int | None], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One run for each wave: step times, answers, and what the lane did.

    `memory()`: resident memory of the server's scheduler, bytes. Raises BenchError, TooFewSteps.
    """
    asked = prompts(plan.batch, plan.prompt, plan.vocab, plan.seed)
    runs = []
    for mode in plan.modes:  # warm every path and graph, and compile the grammar
        client.switch(mode)
        for share in plan.shares:
            _wave(client, plan, asked, share)
    for repeat in range(plan.repeats):
        for share in plan.shares:
            for place, mode in enumerate(order_of(plan.modes, repeat)):
                client.switch(mode)
                client.reset_records()
                before = client.zos()
                wave = _wave(client, plan, asked, share)
                after = client.zos()
                steps = plan.output - 1 if mode == "resident" else 0
                grown = gained(before, after)
                figures = lane_figures(grown, plan.batch, steps) if steps else None
                runs.append(
                    {
                        "repeat": repeat,
                        "share": share,
                        "grammar_rows": rows_of(share, plan.batch),
                        "mode": mode,
                        **timings(wave, place, samples(after, mode, plan.batch), plan.batch),
                        "lane": figures,
                        "scheduler_rss": memory(),
                    }
                )
        say(f"  repeat {repeat + 1} of {plan.repeats}")
    return runs


def _wave(client: BenchClient, plan: Plan, asked: list[list[int]], share: float) -> Wave:
    # A flush forgets compiled grammars, and their rows would join the batch later than the others.
    return client.wave(asked, plan.output, parameters(plan, share), flush=False)


def scheduler_memory(launcher: int) -> int | None:
    """Resident memory, bytes, of the largest process under the server's launcher; None if there is none."""
    try:
        family = psutil.Process(launcher).children(recursive=True)
        return max((each.memory_info().rss for each in family), default=None)
    except psutil.Error:
        return None


def summarise(runs: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> dict[str, Any]:
    """One row a share and mode, ratios taken within a repeat; the verdict on the answers of each share."""
    base = base_of(modes)
    cells: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["repeat"]):
        cells.setdefault((run["share"], run["mode"]), []).append(run)
    rows = []
    for (share, mode), mine in cells.items():
        steps = _steps(mine)
        none, other = cells.get((0.0, mode)), cells.get((share, base))
        lanes = [run["lane"] for run in mine if run["lane"] is not None]
        rows.append(
            {
                "share": share,
                "grammar_rows": mine[0]["grammar_rows"],
                "mode": mode,
                "step_us": spread(steps),
                "cpu_us": spread([run["cpu_us"]["median"] for run in mine]),
                "over_none": ratio(steps, _steps(none)) if none else None,
                "over_base": ratio(steps, _steps(other)) if other else None,
                "in_lane": min(one["share"] for one in lanes) if lanes else None,
            }
        )
    answers = {}
    for share in dict.fromkeys(share for share, _ in cells):
        by_mode = {mode: [run["digest"] for run in cells[share, mode]] for mode in modes}
        answers[f"{share:g}"] = judge_digests(by_mode, base)
    return {"base": base, "rows": rows, "answers": answers, "memory": _memory(runs)}


def _steps(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    return [run["wall_us"]["median"] for run in runs]


def _memory(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The scheduler's memory after the first repeat and after the last, and the steps between."""
    seen = [run["scheduler_rss"] for run in runs if run["scheduler_rss"] is not None]
    last_of_first = max((i for i, run in enumerate(runs) if run["repeat"] == 0), default=None)
    if len(seen) < len(runs) or last_of_first is None:
        return None
    return {
        "steps": sum(run["steps"] for run in runs[last_of_first + 1 :]),
        "mib_before": round(seen[last_of_first] / 2**20, 1),
        "mib_after": round(seen[-1] / 2**20, 1),
    }


def target_met(summary: Mapping[str, Any]) -> bool | None:
    """Whether the step of mode resident keeps what we aim at; None where it was not measured."""
    found = [
        row["over_none"]["median"]
        for row in summary["rows"]
        if row["mode"] == "resident" and row["share"] == TARGET_SHARE and row["over_none"]
    ]
    return found[0] <= TARGET if found else None
