"""What the counters of `/server_info` gained over a wave, and the lane's figures made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Parts of our block that count upwards since the start of the server.
_COUNTING = ("paths", "reasons", "lane")


def gained(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Growth of every count in the blocks `paths`, `reasons` and `lane`; absent blocks stay absent."""
    found = {name: _growth(before.get(name) or {}, after[name]) for name in _COUNTING if after.get(name)}
    return {name: growth if name == "lane" else _nonzero(growth) for name, growth in found.items()}


def _growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            found[name] = _nonzero(_growth(before.get(name) or {}, value))
        elif isinstance(value, int) and not isinstance(value, bool):
            found[name] = value - before.get(name, 0)
    return found


def _nonzero(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Of the names of reasons and paths most never occur."""
    return {name: count for name, count in counts.items() if count}


def lane_figures(growth: Mapping[str, Any], batch: int, decode_steps: int | None) -> dict[str, Any] | None:
    """The lane's part in a wave of `batch` rows; None where the server has no lane.

    `decode_steps` is how many steps the answers needed, all rows together; None where it is unknown because
    other modes had their turns in the wave. The share counts useful row-steps only, so waste cannot raise it.
    A lane that counts `decode_steps` itself (those of its mode, inside it and outside) is believed.
    """
    lane = growth.get("lane")
    if lane is None:
        return None
    steps, wasted = lane.get("steps", 0), lane.get("wasted_row_steps", 0)
    rows = lane.get("row_steps", steps * batch)
    wanted = lane.get("decode_steps", decode_steps)
    return {
        "steps": steps,
        "share": round(min(1.0, (rows - wasted) / (wanted * batch)), 4) if wanted else None,
        "wasted_row_steps": wasted,
        "wasted_share": round(wasted / rows, 5) if rows else None,
        "h2d_per_step": h2d_per_step(lane),
        "opened": lane.get("opened", 0),
        "refused": dict(lane.get("refused", {})),
        "left": dict(lane.get("left", {})),
    }


def h2d_per_step(lane: Mapping[str, Any]) -> float | None:
    """Host-to-device copies per lane step; None where the server does not count them, or took no step."""
    copies, steps = lane.get("h2d_copies"), lane.get("steps", 0)
    return round(copies / steps, 3) if copies is not None and steps else None
