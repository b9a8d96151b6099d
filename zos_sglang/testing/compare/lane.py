"""What the resident decode lane did during a scenario, and whether that was what it is there for.

Read from the block `lane` of our server's account. Equal answers of a server whose lane never opened would
say nothing about the lane, so each scenario says what it expects, and a whole suite must have left the lane
for every reason that requests can cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Counters = dict[str, int]

NUMBERS = (
    *("decode_steps", "opened", "steps", "row_steps", "wasted_row_steps", "windows", "faults"),
    *("masked_steps", "grammar_row_steps", "rows_left"),
)
GROUPS = ("left", "refused")
#: Departures that clients can cause. An exit ends the server and a fault is a bug: unit tests cause those.
SUITE_DEPARTURES = ("intake", "finish", "length-limit", "pool-full")
#: Departures for the sake of single rows, which may also go while the rest rides on.
ROW_DEPARTURES = ("finish", "length-limit")
#: Refusals that the full suite causes on purpose.
SUITE_REFUSALS = ("logprobs", "penalties", "hidden-states", "admission-open", "abort-pending")


@dataclass(frozen=True)
class LaneEvidence:
    """What a scenario expects of the lane in mode resident.

    floor: smallest share of the decode steps that must have ridden; 0 asks for a single step, None for
    nothing, because chance decides whether a batch without refused requests remains. closed: the lane
    stays closed on this server, for this reason, and no step may ride. refused, left: reasons that must
    have been counted at least once during the scenario; rows that went while the rest rode on count, too.
    masked: rows with a grammar must have ridden.
    """

    floor: float | None = 0.5
    closed: str | None = None
    masked: bool = False
    refused: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def lane_counters(zos: Mapping[str, Any]) -> Counters:
    """The account as "lane.NAME", "lane.left.REASON", "lane.refused.REASON"; empty without a lane block."""
    lane = zos.get("lane", {})
    found = {f"lane.{name}": int(lane[name]) for name in NUMBERS if name in lane}
    for group in GROUPS:
        found |= {f"lane.{group}.{reason}": int(n) for reason, n in lane.get(group, {}).items()}
    return found


def block(grown: Counters) -> dict[str, Any]:
    """The lane's part of what happened, for people and for JSON.

    `share` is that of the decode steps in mode resident; None where there were none.
    """
    found: dict[str, Any] = {name: grown.get(f"lane.{name}", 0) for name in NUMBERS}
    decode = found["decode_steps"]
    found["share"] = round(found["steps"] / decode, 4) if decode else None
    for group in GROUPS:
        prefix = f"lane.{group}."
        found[group] = {k.removeprefix(prefix): n for k, n in sorted(grown.items()) if k.startswith(prefix)}
    return found


def missing_from_lane(wanted: LaneEvidence, grown: Counters, before: Counters) -> list[str]:
    """Sentences on what the lane did not do. `before` are the server's counters when the scenario began."""
    seen = block(grown)
    if wanted.closed is not None:
        faults = [f"ours: {seen['steps']} steps rode a lane that must stay closed"] if seen["steps"] else []
        if not before.get(f"lane.refused.{wanted.closed}"):
            faults.append(f"ours: the lane was not closed for {wanted.closed}")
        return faults
    if wanted.floor is not None and not seen["steps"]:
        return [f"ours: none of {seen['decode_steps']} decode steps rode the lane"]
    faults = []
    if wanted.floor and (seen["share"] or 0.0) < wanted.floor:
        faults.append(
            f"ours: {percent(seen)} of {seen['decode_steps']} decode steps rode the lane, "
            f"{wanted.floor:.0%} wanted"
        )
    if wanted.masked and not seen["grammar_row_steps"]:
        faults.append(f"ours: no row with a grammar rode the lane in {seen['steps']} steps")
    left = [r for r in wanted.left if not (r in ROW_DEPARTURES and seen["rows_left"])]
    for group, reasons in (("left", left), ("refused", wanted.refused)):
        faults += [f"ours: the lane was never {group} for {r}" for r in reasons if not seen[group].get(r)]
    return faults


def total(parts: Iterable[Counters]) -> Counters:
    """The sum of counters, name by name."""
    summed: Counters = {}
    for part in parts:
        for name, n in part.items():
            summed[name] = summed.get(name, 0) + n
    return summed


def missing_from_suite(summed: Counters) -> list[str]:
    """Reasons that a whole suite should have caused and did not, as sentences."""
    seen = block(summed)
    return [f"the suite never left the lane for {r}" for r in SUITE_DEPARTURES if not seen["left"].get(r)] + [
        f"the suite was never refused for {r}" for r in SUITE_REFUSALS if not seen["refused"].get(r)
    ]


def percent(seen: Mapping[str, Any]) -> str:
    """The share of a block in words; never rounded up to all."""
    return "-" if seen["share"] is None else f"{int(seen['share'] * 1000) / 10:g} %"


def line(grown: Counters) -> str:
    """A scenario's cell of the table."""
    seen = block(grown)
    return f"{percent(seen)} of {seen['decode_steps']}, opened {seen['opened']}"


def summary(summed: Counters) -> str:
    """Two lines on the whole suite: shares and openings, then every reason seen."""
    seen = block(summed)
    reasons = [
        f"{group}: " + (", ".join(f"{r} {n}" for r, n in seen[group].items()) or "none") for group in GROUPS
    ]
    return (
        f"lane: {percent(seen)} of {seen['decode_steps']} decode steps, opened {seen['opened']}, "
        f"{seen['windows']} windows, {seen['rows_left']} rows left while others rode on, "
        f"{seen['wasted_row_steps']} of {seen['row_steps']} row-steps in vain\n"
        f"lane {'; '.join(reasons)}"
    )
