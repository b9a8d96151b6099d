"""Figures of scripts/bench_zos.py, made of the records of its waves: one row per point and mode.

A point is one attention backend, prompt length, output length and batch size.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zos_sglang.testing.bench.stats import geometric_mean, judge_digests, ratio, spread

#: The row of the process that was started with --disable-overlap-schedule.
SEPARATE = "separate-sync"
_WORST_FIRST = ("different", "unstable", "equal")

Point = Mapping[str, Any]


def summarise(points: Sequence[Point], base: str) -> dict[str, Any]:
    """`rows`, `geomeans` over the batch sizes and `answers` (a verdict a point); ratios over mode `base`."""
    rows = [row for point in points for row in rows_of(point, base)]
    return {
        "base": base,
        "rows": rows,
        "geomeans": geomeans(rows),
        "answers": [{**key_of(point), **judge(point, base)} for point in points if point["warmups"]],
    }


def key_of(point: Point) -> dict[str, Any]:
    return {name: point[name] for name in ("attention", "prompt", "output", "batch")}


def name_of(point: Point) -> str:
    """The point in words."""
    return ", ".join(f"{what} {value}" for what, value in key_of(point).items())


# ------------------------------------------------------------------ answers


def digests(point: Point) -> dict[int, dict[str, list[str]]]:
    """Output digests of a point by repeat and mode; warm-ups and floor waves answer repeat 0's prompts."""
    found: dict[int, dict[str, list[str]]] = {}

    def add(repeat: int, mode: str, digest: str) -> None:
        found.setdefault(repeat, {}).setdefault(mode, []).append(digest)

    for warmup in point["warmups"]:
        add(0, warmup["mode"], warmup["digest"])
    for repeat in point["repeats"]:
        for mode, wave in repeat["waves"].items():
            add(repeat["repeat"], mode, wave["digest"])
    for warmup in point["separate"]["warmups"]:
        add(0, SEPARATE, warmup["digest"])
    for wave in point["separate"]["repeats"]:
        add(wave["repeat"], SEPARATE, wave["digest"])
    return found


def judge(point: Point, base: str) -> dict[str, Any]:
    """Verdict over all repeats, and how many pairs (a mode's wave against the base's) are equal.

    Verdicts are those of `judge_digests`, the worst repeat's counts; `none` where nothing was compared.
    Digests are listed only for repeats that are not equal.
    """
    verdicts: dict[int, str] = {}
    pairs = same = 0
    for repeat, by_mode in digests(point).items():
        if base not in by_mode:
            continue
        others = [digest for mode, found in by_mode.items() if mode != base for digest in found]
        if not others and len(by_mode[base]) == 1:
            continue
        verdicts[repeat] = judge_digests(by_mode, base)
        pairs += len(others)
        same += others.count(by_mode[base][0])
    return {
        "verdict": next((word for word in _WORST_FIRST if word in verdicts.values()), "none"),
        "pairs": pairs,
        "equal_pairs": same,
        "differing": {str(r): digests(point)[r] for r, verdict in verdicts.items() if verdict != "equal"},
    }


# ------------------------------------------------------------------ rows


def rows_of(point: Point, base: str) -> list[dict[str, Any]]:
    """A row per mode with timed waves, and one for the separate synchronous process."""
    if not point["repeats"]:
        return []
    verdict = judge(point, base)["verdict"]
    modes = list(point["repeats"][0]["waves"])
    rows = [
        {**key_of(point), "mode": mode, "answers": verdict, **_figures(point, mode, base)} for mode in modes
    ]
    separate = _separate_figures(point, base)
    if separate:
        rows.append({**key_of(point), "mode": SEPARATE, "answers": verdict, **separate})
    return rows


def _figures(point: Point, mode: str, base: str) -> dict[str, Any]:
    waves, others = waves_of(point, mode), waves_of(point, base)
    return {
        "repeats": len(waves),
        "step_us": spread([wave["wall_us"]["median"] for wave in waves]),
        "step_mean_us": spread([wave["wall_us"]["mean"] for wave in waves]),
        "cpu_us": spread([wave["cpu_us"]["median"] for wave in waves]),
        "tokens_per_s": spread([wave["tokens_per_s"] for wave in waves], 1),
        **_floor(point),
        "step_over_floor": _over_floor(point, waves),
        "over_stock": _paired(waves, others, "tokens_per_s"),
        "cpu_over_stock": _paired_median(waves, others, "cpu_us"),
        "over_separate": _over_separate(point, waves),
        "lane": _lane(waves),
    }


def _separate_figures(point: Point, base: str) -> dict[str, Any] | None:
    """Its step time comes from the server's log: stock SGLang keeps no step records."""
    timed = [wave for wave in point["separate"]["repeats"] if wave["log_tokens_per_s"]]
    if not timed:
        return None
    stock = {repeat["repeat"]: repeat["waves"][base] for repeat in point["repeats"]}
    pairs = [(wave, stock[wave["repeat"]]) for wave in timed if wave["repeat"] in stock]
    return {
        "repeats": len(timed),
        "step_us": None,
        "step_mean_us": spread([wave["log_step_us"]["mean"] for wave in timed]),
        "cpu_us": None,
        "tokens_per_s": spread([wave["log_tokens_per_s"] for wave in timed], 1),
        **_floor(point),
        "step_over_floor": None,
        "over_stock": ratio([w["log_tokens_per_s"] for w, _ in pairs], [_rate(s) for _, s in pairs])
        if pairs
        else None,
        "cpu_over_stock": None,
        "over_separate": None,
        "lane": None,
    }


def waves_of(point: Point, mode: str) -> list[dict[str, Any]]:
    """The timed waves of a mode, in the order of the repeats."""
    return [repeat["waves"][mode] for repeat in point["repeats"]]


def _over_separate(point: Point, waves: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Throughput over that of the same repeat in the separate process, measured the same way if possible."""
    mine = {repeat["repeat"]: wave for repeat, wave in zip(point["repeats"], waves, strict=True)}
    pairs = [
        (_rate(mine[wave["repeat"]]), wave["log_tokens_per_s"])
        for wave in point["separate"]["repeats"]
        if wave["log_tokens_per_s"] and wave["repeat"] in mine
    ]
    return ratio([a for a, _ in pairs], [b for _, b in pairs]) if pairs else None


def _rate(wave: Mapping[str, Any]) -> float:
    """Tokens a second by the log, or by step records where turns leave the log without full lines."""
    return float(wave["log_tokens_per_s"] or wave["tokens_per_s"])


def _paired(
    waves: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], what: str
) -> dict[str, Any]:
    return ratio([wave[what] for wave in waves], [wave[what] for wave in others])


def _paired_median(
    waves: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], what: str
) -> dict[str, Any]:
    return ratio([wave[what]["median"] for wave in waves], [wave[what]["median"] for wave in others])


def _floor(point: Point) -> dict[str, float | None]:
    """Time (us) and KV length of the point's floor."""
    floor = point["floor"] or {"us": None, "mean_len": None}
    return {"floor_us": floor["us"], "floor_len": floor["mean_len"]}


def _over_floor(point: Point, waves: Iterable[Mapping[str, Any]]) -> float | None:
    """Median over the repeats of the steps at the floor's KV length over the floor; None without such steps.

    The median step of a whole wave would not do: see `floor`.
    """
    there = [wave["floor_step_us"] for wave in waves if wave.get("floor_step_us")]
    return round(statistics.median(there) / point["floor"]["us"], 4) if there else None


def _lane(waves: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Sums and medians of the lane's figures; None for a mode, or a server, without a lane."""
    found = [wave["lane"] for wave in waves if wave["lane"]]
    if not found:
        return None
    return {
        "steps": sum(lane["steps"] for lane in found),
        "wasted_row_steps": sum(lane["wasted_row_steps"] for lane in found),
        **{name: _median(lane[name] for lane in found) for name in ("share", "wasted_share", "h2d_per_step")},
        **{name: _added(lane[name] for lane in found) for name in ("refused", "left")},
    }


def _median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return round(statistics.median(there), 5) if there else None


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for found in counts:
        for name, count in found.items():
            total[name] = total.get(name, 0) + count
    return total


# ------------------------------------------------------------------ over the batch sizes


def geomeans(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means over the batch sizes, by attention, prompt, output and mode."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["attention"], row["prompt"], row["output"], row["mode"]), []).append(row)
    return [
        {
            **dict(zip(("attention", "prompt", "output", "mode"), key, strict=True)),
            "batches": [row["batch"] for row in group],
            "over_stock": geometric_mean(_middle(row["over_stock"]) for row in group),
            "over_separate": geometric_mean(_middle(row["over_separate"]) for row in group),
            "step_over_floor": geometric_mean(row["step_over_floor"] for row in group),
            "cpu_over_stock": geometric_mean(_middle(row["cpu_over_stock"]) for row in group),
        }
        for key, group in groups.items()
    ]


def _middle(found: Mapping[str, Any] | None) -> float | None:
    return found["median"] if found else None
