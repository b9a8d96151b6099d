"""The tables and verdicts that scripts/bench_prefill.py prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zos_sglang.console import console
from zos_sglang.testing.bench.prefill_summary import ALWAYS, NEVER, OURS
from zos_sglang.testing.bench.tables import median, medians, number, ranged, table

FIGURES = (
    *("load", "rule", "TTFT ms P50/P90/P99", "E2E ms P50/P99", "output tokens/s", "all tokens/s"),
    *("stream ITL ms P50/P99", "longest gap", "burst s", "waited", "answers"),
)
#: Figure and heading of each column of ratios.
SHOWN = (
    ("ttft_ms.p50", "TTFT P50"),
    ("ttft_ms.p90", "TTFT P90"),
    ("ttft_ms.p99", "TTFT P99"),
    ("tokens_per_s", "all tokens/s"),
    ("output_tokens_per_s", "output tokens/s"),
    ("itl_ms.p50", "ITL P50"),
    ("itl_ms.p99", "ITL P99"),
    ("gap_ms.max", "longest gap"),
)
_LEFT = ("load", "rule", "over", "answers")


def print_summary(data: Mapping[str, Any]) -> None:
    """Figures of every load and contender, ratios, whether targets are met, and what went wrong."""
    summary, out = data["summary"], console()
    rows = summary["rows"]
    repeats = max((row["repeats"] for row in rows), default=0)
    title = f"{data['identity']['model']}: medians over {repeats} repeats"
    out.print(table(title, FIGURES, map(row_cells, rows), _LEFT))
    names = dict(SHOWN)
    out.print(
        table(
            "ratios within each repeat: median (min to max)",
            ("load", "rule", "over", *names.values()),
            [
                ratio_cells(row, base)
                for row in rows
                for base in (NEVER, ALWAYS)
                if f"over_{base}" in row and any(row[f"over_{base}"].values())
            ],
            _LEFT,
        )
    )
    for verdict in summary["targets"]:
        out.print(verdict_line(verdict))
    for line in troubles(data):
        out.print(line)


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of one row of figures; `waited` are launches that let the prefill before be processed."""
    answers = row["answers"]
    return [
        *(row["load"], row["rule"]),
        medians(row, "ttft_ms", "p50", "p90", "p99", digits=1),
        medians(row, "e2e_ms", "p50", "p99", digits=1),
        *(median(row["output_tokens_per_s"], 1), median(row["tokens_per_s"], 0)),
        medians(row, "itl_ms", "p50", "p99"),
        median(row["gap_ms.max"], 1),
        median(row["window_s"], 3),
        f"{row['waited']} of {row['prefills']}" if row["prefills"] else "-",
        f"{answers['differing']} of {answers['compared']} differ" if answers["compared"] else "-",
    ]


def ratio_cells(row: Mapping[str, Any], base: str) -> list[str]:
    """The texts of one row of ratios over `base`."""
    over = row[f"over_{base}"]
    return [row["load"], row["rule"], base, *(ranged(over[metric]) for metric, _ in SHOWN)]


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """One target in words: met or missed, by the median, with the spread."""
    found, names = verdict["ratio"], dict(SHOWN)
    sign = ">=" if verdict["more"] else "<="
    noisy = "" if verdict["clear"] else ", within the noise"
    return (
        f"{verdict['load']}: {names[verdict['metric']]} of {OURS} over {verdict['over']}: "
        f"{found['median']:.3f} (quartiles {found['q1']:.3f} to {found['q3']:.3f}, "
        f"all {found['min']:.3f} to {found['max']:.3f}), target {sign} {verdict['bound']:g}: "
        f"{'met' if verdict['met'] else 'MISSED'}{noisy}"
    )


def troubles(data: Mapping[str, Any]) -> list[str]:
    """What a reader must know of the runs: failures, streams that ended too soon, busy clients."""
    runs = data["runs"]
    found = [
        f"{run['load']}, {run['rule']}, repeat {run['repeat']}: {error}"
        for run in runs
        for error in run["errors"]
    ]
    if short := [run for run in runs if run["covered"] is False]:
        found.append(
            f"in {number(len(short), 0)} runs the streams did not decode all the while: raise --stream-tokens"
            " or --settle-s"
        )
    if any(run["client"]["in_the_way"] for run in runs):
        found.append("some clients were busy or late enough to have delayed what they measured: see `client`")
    return found
