"""`scripts/check_model.py`: reads results, predicts, writes JSON, prints a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from zos_sglang.console import console
from zos_sglang.testing.bench.record import write_json
from zos_sglang.testing.model_check import records, waves
from zos_sglang.testing.model_check.compare import LIMIT, line, summary

#: Settings below which a check says nothing.
ENOUGH = 6


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for sources that cannot be used. A prediction that misses is a finding, no failure."""
    parser = argparse.ArgumentParser(
        description="Predict the step time of each mode from what other modes measured, and compare."
    )
    parser.add_argument(
        "sources", nargs="+", type=Path, help="folders of scripts/bench_zos.py, or JSON files of step records"
    )
    parser.add_argument(
        "--d2h-us", type=float, default=20.0, help="copy to the host, for bench_zos (default 20)"
    )
    parser.add_argument("--out", type=Path, help="write the JSON here")
    args = parser.parse_args(argv)
    try:
        result = check(args.sources, args.d2h_us)
    except (OSError, ValueError, KeyError) as error:
        print(f"check_model: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if args.out is not None:
        write_json(args.out, result)
    show(result)
    return 0


def check(sources: Sequence[Path], d2h_us: float) -> dict[str, Any]:
    """The result. Raises ValueError for too few settings, OSError, ValueError, KeyError for bad sources."""
    folders = [path for path in sources if path.is_dir()]
    files = [path for path in sources if not path.is_dir()]
    found = waves.cases(folders, d2h_us)
    heads = [waves.head(path) for path in folders]
    for path in files:
        found += records.cases(path)
        heads.append(records.head(path))
    settings = list(dict.fromkeys(case.setting for case in found))
    found.sort(key=lambda case: settings.index(case.setting))
    lines = [one for case in found if (one := line(case)) is not None]
    if len(settings) < ENOUGH:
        raise ValueError(f"{len(settings)} settings with modes to compare; {ENOUGH} are needed")
    shared = {
        key: heads[0][key] if all(one[key] == heads[0][key] for one in heads) else None
        for key in ("commit", "versions", "machine")
    }
    return {
        "kind": "model_check",
        **shared,
        "sources": heads,
        "limit": LIMIT,
        "d2h_us": d2h_us if folders else None,
        "settings": len(settings),
        "summary": summary(lines),
        "lines": lines,
    }


def show(result: dict[str, Any]) -> None:
    """A line a setting and mode; those that miss are marked."""
    names = ("model", "attention", "in:out", "batch", "mode", "measured, µs", "predicted", "error")
    table = Table(*names, "with own CPU", "error", "CPU ratio", "cause of a miss")
    for one in result["lines"]:
        table.add_row(
            one["model"],
            one["attention"],
            f"{one['prompt']}:{one['output']}",
            str(one["batch"]),
            one["mode"],
            f"{one['measured_us']:.0f}",
            f"{one['predicted_us']:.0f}",
            _error(one["error"]),
            "" if one["own_cpu_error"] is None else f"{one['own_cpu_predicted_us']:.0f}",
            _error(one["own_cpu_error"]),
            "" if one["cpu_ratio"] is None else f"{one['cpu_ratio']:.2f}",
            one["cause"] or "",
        )
    out = console()
    out.print(table)
    for mode, found in result["summary"].items():
        text = (
            f"{mode}: {found['within']} of {found['settings']} within {LIMIT:.0%},"
            f" worst {found['worst']:+.1%}"
        )
        if found["own_cpu_settings"]:
            text += (
                f"; with its own CPU {found['own_cpu_within']} of {found['own_cpu_settings']},"
                f" worst {found['own_cpu_worst']:+.1%}"
            )
        out.print(text)


def _error(share: float | None) -> str:
    if share is None:
        return ""
    text = f"{share:+.1%}"
    return f"[bold red]{text} ![/bold red]" if abs(share) > LIMIT else text
