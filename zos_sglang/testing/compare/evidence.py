"""Proof that a scenario reached the code it is there for.

Equal answers prove nothing if the guard, the path or the event in question never happened. So
every scenario names what must have happened in our server, and fails if it did not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zos_sglang.testing.compare.lane import Counters, LaneEvidence, lane_counters
from zos_sglang.testing.compare.records import Records

#: Counts of the rank-consensus check.
RANKS = ("decisions", "agreed", "blocks", "differences")
RUNNING = re.compile(r"#running-req: (\d+)")


@dataclass(frozen=True)
class Evidence:
    """What must (or must never) have happened while a scenario ran.

    reasons, paths: counters of our server that must have grown; never: reasons that must not.
    They hold for ZOS_MODE=overlap. log: lines of the server's log. seen: counts taken from the
    answers, by label. log and seen must be non-zero on both servers. batch: requests that must
    have run together at least once (from the server's log; 0 = not asked). lane: what the resident
    lane must have done; only mode resident is judged by it.
    """

    reasons: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    seen: Mapping[str, Callable[[Records], int]] = field(default_factory=dict)
    batch: int = 4
    lane: LaneEvidence = field(default_factory=LaneEvidence)


def counters(zos: Mapping[str, Any] | None) -> Counters:
    """Our server's counters as "reasons.NAME", "paths.NAME", "lane.NAME" and, where ranks are compared,
    "ranks.NAME"; empty for a stock server."""
    if zos is None:
        return {}
    found = {
        f"{group}.{name}": int(count)
        for group in ("reasons", "paths")
        for name, count in zos.get(group, {}).items()
    }
    ranks = zos.get("ranks", {})
    return found | lane_counters(zos) | {f"ranks.{name}": int(ranks[name]) for name in RANKS if name in ranks}


def growth(before: Counters, after: Counters) -> Counters:
    """What happened between two readings, zeros left out."""
    grown = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in grown.items() if count}


def peak_batch(log: str) -> int:
    """Most requests that the log shows decoding together."""
    return max((int(n) for n in RUNNING.findall(log)), default=0)


def collect(evidence: Evidence, records: Records, log: str, zos: Counters) -> Counters:
    """Everything that was asked for, counted; the keys are what people read."""
    found = {f"{name} (log)": log.count(name) for name in evidence.log}
    found |= {label: count(records) for label, count in evidence.seen.items()}
    if evidence.batch:
        found["batch"] = peak_batch(log)
    for key in (*(f"reasons.{n}" for n in evidence.reasons), *(f"paths.{n}" for n in evidence.paths)):
        found[key] = zos.get(key, 0)
    return found


def missing(
    evidence: Evidence, found: Counters, zos: Counters, *, side: str, our_counters: bool
) -> list[str]:
    """Sentences on what did not happen on one side; `our_counters` = it is ours in mode overlap."""
    faults = []
    for key, count in found.items():
        if key == "batch":
            if count < evidence.batch:
                faults.append(f"{side}: at most {count} requests ran together, {evidence.batch} wanted")
        elif count == 0 and (our_counters or not key.startswith(("reasons.", "paths."))):
            faults.append(f"{side}: {key} fired zero times")
    if our_counters:
        for name in evidence.never:
            if count := zos.get(f"reasons.{name}", 0):
                faults.append(f"{side}: {name} fired {count} times, must be zero here")
    return faults
