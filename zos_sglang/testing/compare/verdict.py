"""Compares what two servers answered; every difference names its request, field and position.

Token ids, text, finish reasons, usage and field names must be identical. Log-probabilities,
hidden states and embeddings are floats whose last bits depend on which requests shared a batch
(stock against stock too), so they are compared within `TOLERANCE`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zos_sglang.testing.compare.records import Record, Records

# Absolute and relative. What else is in the batch moves the last digits of a float32 log-probability.
TOLERANCE = 2e-4
EXACT_FIELDS = ("status", "error", "token_ids", "text", "finish", "usage", "fields")
FLOAT_FIELDS = ("logprobs", "vectors")


@dataclass(frozen=True)
class Difference:
    """One disagreement. `where` is the first differing position inside the field ("" = whole)."""

    record: str
    field: str
    where: str
    stock: Any
    ours: Any

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where else ""
        return f"{self.record}: {self.field}{at}: stock {_short(self.stock)}, ours {_short(self.ours)}"


def compare_records(stock: Records, ours: Records) -> list[Difference]:
    """All differences of one scenario, in the order in which its requests were sent."""
    found: list[Difference] = []
    for name in [*stock, *(name for name in ours if name not in stock)]:
        if name not in ours or name not in stock:
            present = [name in stock, name in ours]
            found.append(Difference(name, "answered", "", *present))
            continue
        found.extend(_compare(stock[name], ours[name], stock, ours))
    if not found and _asked(stock) != _asked(ours):
        found.append(Difference("(all)", "order of requests", "", _asked(stock), _asked(ours)))
    return found


def _asked(records: Records) -> list[str]:
    # Further answers of one request (NAME[1]) are filed when they arrive.
    return [name for name in records if "[" not in name]


def _compare(stock: Record, ours: Record, all_stock: Records, all_ours: Records) -> list[Difference]:
    name = stock.name
    found = []
    if (difference := first_difference(stock.sent, ours.sent)) is not None:
        found.append(Difference(name, "sent", *difference))
    if stock.faults or ours.faults:
        found.append(Difference(name, "stream", "", stock.faults, ours.faults))
    if stock.loose or ours.loose:
        return found
    if stock.prefix_of is not None:
        for side, record, records in (("stock", stock, all_stock), ("ours", ours, all_ours)):
            if (why := cut_fault(record, records)) is not None:
                pair = (why, "") if side == "stock" else ("", why)
                found.append(Difference(name, "cut answer", "", *pair))
        return found
    for key in EXACT_FIELDS:
        difference = first_difference(getattr(stock, key), getattr(ours, key))
        if difference is not None:
            found.append(Difference(name, key, *difference))
    for key in FLOAT_FIELDS:
        difference = first_difference(getattr(stock, key), getattr(ours, key), TOLERANCE)
        if difference is not None:
            found.append(Difference(name, key, *difference))
    return found


def cut_fault(record: Record, records: Records) -> str | None:
    """Why `record` is no correctly aborted answer, or None. What it must be: see Record.

    An answer that reached its own length limit was complete before its abort arrived.
    """
    limit = record.sent.get("sampling_params", {}).get("max_new_tokens")
    complete = record.finish_type == "length" and record.tokens == limit
    if record.finish_type != "abort" and not complete:
        return f"finish reason {record.finish!r} instead of abort"
    full = records.get(record.prefix_of or "")
    if full is None:
        return f"no full answer {record.prefix_of!r} to compare with"
    ids, whole = record.token_ids or [], full.token_ids or []
    for position, (ours, wanted) in enumerate(zip(ids, whole, strict=False)):
        if ours != wanted:
            return f"not a prefix of the full answer: token {position} is {ours}, not {wanted}"
    if len(ids) > len(whole) and full.finish_type != "length":
        return f"{len(ids)} tokens, but the full answer ends after {len(whole)}"
    return None


def burst_fault(stock: Records, ours: Records) -> str | None:
    """A complaint if our streams come in far fewer, larger events than stock's, or None.

    Events are joined by chance when the machine is busy, so only a factor of 4 counts.
    """
    events = [
        sum(len(r.boundaries) for r in side.values() if r.prefix_of is None and not r.loose)
        for side in (stock, ours)
    ]
    if events[0] >= 40 and events[1] * 4 < events[0]:
        return f"ours: {events[1]} stream events where stock sends {events[0]}: delivered in bursts"
    return None


def first_difference(
    stock: Any, ours: Any, tolerance: float = 0.0, where: str = ""
) -> tuple[str, Any, Any] | None:
    """Position and both values of the first difference of two JSON values, or None.

    Floats may differ by `tolerance` (absolute, or relative where they exceed 1).
    """
    if isinstance(stock, dict) and isinstance(ours, dict):
        return _first_in_dicts(stock, ours, tolerance, where)
    if isinstance(stock, list) and isinstance(ours, list):
        return _first_in_lists(stock, ours, tolerance, where)
    if isinstance(stock, str) and isinstance(ours, str) and stock != ours:
        position = _common_prefix(stock, ours)
        return f"{where}[{position}]", _window(stock, position), _window(ours, position)
    return None if _same(stock, ours, tolerance) else (where, stock, ours)


def _first_in_dicts(
    stock: dict[str, Any], ours: dict[str, Any], tolerance: float, where: str
) -> tuple[str, Any, Any] | None:
    for key in [*stock, *(key for key in ours if key not in stock)]:
        if key not in stock or key not in ours:
            return f"{where}.{key}", stock.get(key, "(absent)"), ours.get(key, "(absent)")
        inner = first_difference(stock[key], ours[key], tolerance, f"{where}.{key}")
        if inner is not None:
            return inner
    return None


def _first_in_lists(
    stock: list[Any], ours: list[Any], tolerance: float, where: str
) -> tuple[str, Any, Any] | None:
    for index, (left, right) in enumerate(zip(stock, ours, strict=False)):
        inner = first_difference(left, right, tolerance, f"{where}[{index}]")
        if inner is not None:
            return inner
    if len(stock) != len(ours):
        shorter = min(len(stock), len(ours))
        return f"{where}[{shorter}]", f"{len(stock)} items", f"{len(ours)} items"
    return None


def _same(stock: Any, ours: Any, tolerance: float) -> bool:
    if isinstance(stock, float) and isinstance(ours, float) and tolerance:
        return math.isclose(stock, ours, rel_tol=tolerance, abs_tol=tolerance)
    return type(stock) is type(ours) and stock == ours


def _common_prefix(left: str, right: str) -> int:
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return min(len(left), len(right))


def _window(text: str, position: int) -> str:
    return text[max(0, position - 10) : position + 30]


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
