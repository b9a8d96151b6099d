"""What all runs of scripts/bench_prefill.py say: medians, ratios within each repeat, targets, answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zos_sglang.overlap.guards import PrefillRule, Reason
from zos_sglang.testing.bench.paired import Run, differing_requests, spread_of, value_of
from zos_sglang.testing.bench.stats import ratio, spread

#: The runs of one load in one repeat, by contender.
Repeat = dict[str, Run]

_OF_EACH = ("p50", "p90", "p99", "mean", "max")
#: Names of all compared figures.
METRICS = (
    *("tokens_per_s", "output_tokens_per_s"),
    *(f"{what}.{which}" for what in ("ttft_ms", "e2e_ms", "itl_ms", "gap_ms") for which in _OF_EACH),
)
_WAITS = (Reason.CONSECUTIVE_PREFILL, Reason.FIRST_TOKEN)


@dataclass(frozen=True)
class Target:
    """What `first-token` must reach: a figure over another rule's, at most or (`more`) at least `bound`."""

    metric: str
    over: str
    bound: float
    more: bool

    def met(self, value: float) -> bool:
        return value >= self.bound if self.more else value <= self.bound


ALWAYS, NEVER, OURS = PrefillRule.ALWAYS.value, PrefillRule.NEVER.value, PrefillRule.FIRST_TOKEN.value
TARGETS = (
    *(Target(f"ttft_ms.{which}", ALWAYS, 1.05, more=False) for which in ("p50", "p90", "p99")),
    *(Target(metric, NEVER, 0.98, more=True) for metric in ("tokens_per_s", "output_tokens_per_s")),
)


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """`rows`, one per load and contender, and `targets`, one verdict per load and target."""
    rows, targets = [], []
    for load in dict.fromkeys(run["load"] for run in runs):
        repeats = _repeats(runs, load)
        contenders = dict.fromkeys(rule for repeat in repeats for rule in repeat)
        rows += [_row(load, rule, repeats) for rule in contenders]
        targets += [verdict for target in TARGETS if (verdict := judge(load, target, repeats))]
    return {"rows": rows, "targets": targets}


def _repeats(runs: Sequence[Run], load: str) -> list[Repeat]:
    found: dict[int, Repeat] = {}
    for run in sorted((run for run in runs if run["load"] == load), key=lambda run: run["repeat"]):
        found.setdefault(run["repeat"], {})[run["rule"]] = run
    return list(found.values())


def _row(load: str, rule: str, repeats: Sequence[Repeat]) -> dict[str, Any]:
    mine = [repeat[rule] for repeat in repeats if rule in repeat]
    return {
        "load": load,
        "rule": rule,
        "repeats": len(mine),
        "requests": sum(run["requests"] for run in mine),
        "failed": sum(run["failed"] for run in mine),
        **{metric: spread_of(mine, metric) for metric in METRICS},
        "window_s": spread_of(mine, "window_s"),
        **{
            f"over_{base}": {metric: compare(repeats, rule, base, metric) for metric in METRICS}
            for base in (NEVER, ALWAYS)
            if base != rule
        },
        "prefills": sum(_prefills(run) for run in mine),
        "waited": sum(_waited(run) for run in mine),
        "not_covered": sum(run["covered"] is False for run in mine),
        "answers": _answers(repeats, rule),
    }


def compare(repeats: Sequence[Repeat], rule: str, base: str, metric: str) -> dict[str, Any] | None:
    """A contender's figure over another's, repeat by repeat, with quartiles; None where there is no pair."""
    pairs = [
        (value, other)
        for repeat in repeats
        if rule in repeat and base in repeat
        if (value := value_of(repeat[rule], metric)) and (other := value_of(repeat[base], metric))
    ]
    if not pairs:
        return None
    found = ratio([value for value, _ in pairs], [other for _, other in pairs])
    quartiles = spread(found["per_repeat"], 4)
    return {**found, "q1": quartiles["q1"], "q3": quartiles["q3"]}


def judge(load: str, target: Target, repeats: Sequence[Repeat]) -> dict[str, Any] | None:
    """Whether the median ratio reaches a target; None where the two rules were not both measured.

    `clear`: both quartiles are on the same side as the median, so that noise would hardly turn it round.
    """
    found = compare(repeats, OURS, target.over, target.metric)
    if found is None:
        return None
    sides = {target.met(found[name]) for name in ("q1", "median", "q3")}
    return {
        "load": load,
        "metric": target.metric,
        "over": target.over,
        "bound": target.bound,
        "more": target.more,
        "ratio": found,
        "met": target.met(found["median"]),
        "clear": len(sides) == 1,
    }


def _prefills(run: Run) -> int:
    """Launches that held a prompt or a part of one; SGLang's own loop counts none."""
    paths = run["counts"].get("paths", {})
    return sum(paths.get(name, 0) for name in ("prefill", "mixed"))


def _waited(run: Run) -> int:
    """Launches that let the prefill before them be processed first."""
    reasons = run["counts"].get("reasons", {})
    return sum(reasons.get(str(reason), 0) for reason in _WAITS)


def _answers(repeats: Sequence[Repeat], rule: str) -> dict[str, Any]:
    """Pairs of answers to one request, and how many differ: against `never`'s in the same repeat.

    `never`'s own are compared with those of its first repeat: what differs there differs for other reasons.
    """
    pairs = [
        (repeat[rule]["digests"], (repeats[0] if rule == NEVER else repeat)[NEVER]["digests"])
        for repeat in repeats[rule == NEVER :]
        if rule in repeat and NEVER in repeat and NEVER in repeats[0]
    ]
    both = [(a, b) for mine, other in pairs for a, b in zip(mine, other, strict=True) if a and b]
    differing = [index for mine, other in pairs for index in differing_requests(mine, other)]
    return {"compared": len(both), "differing": len(differing), "first_requests": differing[:10]}
