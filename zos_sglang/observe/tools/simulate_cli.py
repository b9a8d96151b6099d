"""`python -m zos_sglang simulate`: a workload far larger than this machine, in every mode, by the model."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from typing import Any

from rich.table import Table

from zos_sglang.console import console
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.model import PREDICTED
from zos_sglang.observe.simulate import Outcome, simulate
from zos_sglang.observe.workload import Workload

_HELP = {
    "requests": "requests in all",
    "rate": "requests a second (Poisson); 0: all at once",
    "prompt": "mean tokens of a prompt",
    "output": "mean tokens of an answer",
    "spread": "coefficient of variation of both lengths",
    "max_running": "rows of a batch at most",
    "chunk": "tokens of a prefill at most",
    "gpu": "device time of a step, microseconds",
    "gpu_row": "of that, for every row of a decode step",
    "gpu_token": "of that, for every token of a prefill",
    "cpu": "what the scheduler's thread is busy with a step, microseconds",
    "cpu_row": "of that, for every row",
    "cpu_lane": "the same for a step of the resident lane",
    "d2h": "copy of a result to the host, microseconds",
    "serial": "share of the thread's work between a result and the next launch",
    "jitter": "coefficient of variation of the thread's times, on every rank by itself",
    "ranks": "ranks that must all have launched a step before it starts",
    "depth": "results that may be pending at a launch, with overlap",
}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    text = "run the scheduling model over a synthetic workload, in every mode; seeded"
    parser = commands.add_parser("simulate", help=text, description=text)
    for one in fields(Workload):
        parser.add_argument(
            f"--{one.name.replace('_', '-')}",
            type=type(one.default),
            default=one.default,
            help=f"{_HELP[one.name]} (default {one.default})",
        )
    parser.add_argument("--modes", default=",".join(PREDICTED), help="modes, with commas (all: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and jitter (default 0)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(show=show)


def show(args: argparse.Namespace) -> int:
    """Simulate and print. Raises ToolError for a workload or a mode that cannot be."""
    try:
        if args.seed < 0:
            raise ValueError(f"seed must not be negative, not {args.seed}")
        workload = Workload(**{one.name: getattr(args, one.name) for one in fields(Workload)})
        modes = list(dict.fromkeys(args.modes.split(",")))
        outcomes = [simulate(workload, mode, args.seed) for mode in modes]
    except ValueError as error:
        raise ToolError(str(error)) from None
    if args.json:
        print(json.dumps(as_json(workload, args.seed, outcomes), indent=2))
    else:
        console().print(table(outcomes))
    return 0


def as_json(workload: Workload, seed: int, outcomes: list[Outcome]) -> dict[str, Any]:
    """All that went in and came out; `predicted_us` becomes a list of two."""
    return {"workload": asdict(workload), "seed": seed, "outcomes": [asdict(one) for one in outcomes]}


def table(outcomes: list[Outcome]) -> Table:
    """A column a mode; the first is the base of the ratio."""
    shown = Table("", *(one.mode for one in outcomes))
    for column in shown.columns[1:]:
        column.justify = "right"
    base = outcomes[0].tokens_per_s
    rows = {
        "tokens a second": [f"{one.tokens_per_s:,.0f}" for one in outcomes],
        f"over {outcomes[0].mode}": [
            f"{one.tokens_per_s / base:.2f}" if base else "unknown" for one in outcomes
        ],
        "seconds": [f"{one.seconds:,.2f}" for one in outcomes],
        "steps (decode, in the lane)": [
            f"{one.steps:,} ({one.decode_steps:,}, {one.lane_steps:,})" for one in outcomes
        ],
        "rows a decode step": [f"{one.rows_mean:.1f}" for one in outcomes],
        "rows computed for nothing": [f"{one.rows_wasted:,}" for one in outcomes],
        "decode interval, ms: P50 P90 P99": [_spread(one.interval_us) for one in outcomes],
        "  the model's, steady": [_model(one) for one in outcomes],
        "time per output token, ms": [_spread(one.tpot_us) for one in outcomes],
        "time to first token, ms": [_spread(one.ttft_us) for one in outcomes],
        "device busy": [f"{one.gpu_busy:.1%}" for one in outcomes],
        "thread busy": [f"{one.cpu_busy:.1%}" for one in outcomes],
    }
    for name, cells in rows.items():
        shown.add_row(name, *cells)
    return shown


def _spread(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    return " ".join(f"{found[name] / 1000:.2f}" for name in ("p50", "p90", "p99"))


def _model(outcome: Outcome) -> str:
    if outcome.predicted_us is None:
        return "unknown"
    low, high = (f"{value / 1000:.2f}" for value in outcome.predicted_us)
    return low if low == high else f"{low} to {high}"
