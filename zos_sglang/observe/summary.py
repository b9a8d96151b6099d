"""What a stretch of step records says, for people: shares, costs, distributions. Microseconds throughout."""

from __future__ import annotations

from typing import Any

import numpy as np

from zos_sglang.observe.adjacent import difference, pairs, size_class
from zos_sglang.observe.names import COLUMNS, Forward, Path, Work, code, word
from zos_sglang.overlap.guards import Reason

US = 1000
PERCENTILES = (50, 90, 99)
#: Intervals that a cost needs on either side of the comparison.
ENOUGH = 8
#: Steps that overlapped with nothing are shown apart: no share of overlap should be made of them.
ALONE = str(Reason.NOTHING_PENDING)

_OVERLAPPED = (code("path", Path.OVERLAP), code("path", Path.OVERLAP_BLOCKED))
_LANE = (code("path", Path.RESIDENT), code("path", Path.RESIDENT_BLOCKED))


def summarise(records: np.ndarray) -> dict[str, Any]:
    """Shares, costs and distributions of records of dtype `STEP`, in order of `step`. Ready for JSON.

    `interval_us`, `tpot_us` and costs see adjacent steps only (`adjacent.pairs`), the first two decode steps.
    """
    before, after = pairs(records)
    decode = after["forward"] == code("forward", Forward.DECODE)
    first, second = before[decode], after[decode]
    intervals = difference(second["t_forward"], first["t_forward"])
    return {
        "steps": int(records.size),
        "seconds": _seconds(records),
        "paths": paths(records),
        "forwards": _words(records, "forward"),
        "modes": _words(records, "mode"),
        "reasons": reasons(records),
        "blocks": blocks(records),
        "refusals": _words(records, "refusal"),
        "departures": _words(records, "departure"),
        "barriers": _words(records, "barrier"),
        "interval_us": distribution(intervals),
        "interval_by_path_us": _by_path(first, second),
        "wait_us": distribution(_known(records["wait"])),
        "gpu_us": distribution(_known(records["gpu"])),
        "tpot_us": tpot(first, second),
        "cpu_us": cpu(records),
    }


def paths(records: np.ndarray) -> dict[str, dict[str, Any]]:
    """Steps and share by path; those with nothing pending under a name of their own. Shares sum to 1."""
    alone = (records["reason"] == code("reason", Reason.NOTHING_PENDING)) & ~np.isin(records["path"], _LANE)
    found = {}
    for name, mine in (
        *((str(path), (records["path"] == code("path", path)) & ~alone) for path in Path),
        (ALONE, alone),
    ):
        if count := int(np.count_nonzero(mine)):
            found[name] = {"steps": count, "share": _share(count, records.size)}
    return found


def reasons(records: np.ndarray) -> list[dict[str, Any]]:
    """Every reason but `overlapped`, the commonest first, with what it costs a step (`cost`)."""
    found = []
    for reason, count in _words(records, "reason").items():
        if reason != Reason.OVERLAPPED:
            cost_us, compared = cost(records, reason)
            found.append(
                {
                    "reason": reason,
                    "steps": count,
                    "share": _share(count, records.size),
                    "cost_us": cost_us,
                    "compared": compared,
                }
            )
    return sorted(found, key=lambda entry: -entry["steps"])


def cost(records: np.ndarray, reason: str) -> tuple[float | None, int]:
    """What `reason` costs: its median interval minus that of overlapped steps of the same kind and size.

    Returns:
        Microseconds, a mean over the size classes that allow the comparison, weighted by the steps that had
        the reason; and how many of those there were. None and 0 where no class has `ENOUGH` of both.
    """
    before, after = pairs(records)
    classes = size_class(after["rows"])
    with_it = after["reason"] == code("reason", reason)
    without = (after["reason"] == code("reason", Reason.OVERLAPPED)) & np.isin(after["path"], _OVERLAPPED)
    total, compared = 0.0, 0
    kinds = set(zip(after["forward"][with_it].tolist(), classes[with_it].tolist(), strict=True))
    for forward, size in kinds:
        kind = (after["forward"] == forward) & (classes == size)
        slow, fast = (
            difference(after["t_forward"][kind & mine], before["t_forward"][kind & mine])
            for mine in (with_it, without)
        )
        if min(slow.size, fast.size) >= ENOUGH:
            total += slow.size * (float(np.median(slow)) - float(np.median(fast))) / US
            compared += int(slow.size)
    return (round(total / compared, 1), compared) if compared else (None, 0)


def blocks(records: np.ndarray) -> list[dict[str, Any]]:
    """What held steps up although they overlapped, the commonest first."""
    found = []
    for block, count in _words(records, "block").items():
        blocked = _known(records["blocked"][records["block"] == code("block", block)])
        found.append(
            {
                "block": block,
                "steps": count,
                "share": _share(count, records.size),
                "blocked_us": distribution(blocked),
            }
        )
    return sorted(found, key=lambda entry: -entry["steps"])


def tpot(before: np.ndarray, after: np.ndarray) -> dict[str, Any] | None:
    """Time per output token as clients see it: distances of outputs, one a request and token.

    Beside the percentiles `spread`: P99 minus P50.
    """
    known = (after["t_output"] > 0) & (before["t_output"] > 0)
    gaps = after["t_output"][known] - before["t_output"][known]
    rows = np.maximum(after["rows"][known], 1)
    # Speculation gives several tokens a step and request.
    tokens = np.maximum(after["tokens"][known], rows)
    found = distribution(gaps * rows / tokens, tokens)
    return None if found is None else found | {"spread": round(found["p99"] - found["p50"], 1)}


def cpu(records: np.ndarray) -> dict[str, dict[str, Any] | None]:
    """The thread's CPU by class of work; `forward` where the device is the thread itself; `total`."""
    found = {str(work): distribution(_known(records[f"cpu_{work}"])) for work in Work}
    forward = records["cpu_forward"][records["cpu_forward"] > 0]
    return found | {"forward": distribution(forward), "total": distribution(_known(records["cpu"]))}


def distribution(nanoseconds: np.ndarray, weights: np.ndarray | None = None) -> dict[str, Any] | None:
    """`count`, `mean` and percentiles in microseconds; None of nothing. `weights` count a value that often.

    A percentile is a value that occurred: the least with that share of the weight at or below it.
    """
    if not nanoseconds.size:
        return None
    order = np.argsort(nanoseconds, kind="stable")
    values = nanoseconds[order]
    weight = np.ones(values.size) if weights is None else weights[order].astype(float)
    upto = np.cumsum(weight)
    places = np.searchsorted(upto, np.array(PERCENTILES) / 100 * upto[-1], side="left")
    return {
        "count": int(upto[-1]),
        "mean": round(float(values @ weight) / float(upto[-1]) / US, 1),
        **{
            f"p{share}": round(float(values[min(place, values.size - 1)]) / US, 1)
            for share, place in zip(PERCENTILES, places.tolist(), strict=True)
        },
    }


def _by_path(before: np.ndarray, after: np.ndarray) -> dict[str, dict[str, Any]]:
    found = {}
    for path in Path:
        mine = (after["path"] == code("path", path)) & (before["path"] == after["path"])
        intervals = distribution(difference(after["t_forward"][mine], before["t_forward"][mine]))
        if intervals is not None:
            found[str(path)] = intervals
    return found


def _words(records: np.ndarray, column: str) -> dict[str, int]:
    """How many records have each word of a column, the words that occur."""
    counts = np.bincount(records[column], minlength=len(COLUMNS[column]) + 1)
    return {str(word(column, number)): int(counts[number]) for number in np.flatnonzero(counts) if number}


def _known(durations: np.ndarray) -> np.ndarray:
    return durations[durations >= 0]


def _share(count: int, of: int) -> float:
    return round(count / of, 4) if of else 0.0


def _seconds(records: np.ndarray) -> float:
    times = records["t_intake"][records["t_intake"] > 0]
    return round((int(times[-1]) - int(times[0])) / 1e9, 3) if times.size else 0.0
