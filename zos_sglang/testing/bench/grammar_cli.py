"""Command line of scripts/bench_grammar.py: what structured output costs, and in which mode."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from zos_sglang.console import console
from zos_sglang.testing.bench.checkpoint import vocabulary
from zos_sglang.testing.bench.client import BenchClient
from zos_sglang.testing.bench.command import drawn, measured, say
from zos_sglang.testing.bench.ending import COULD_NOT
from zos_sglang.testing.bench.flags import (
    json_flag,
    model_flags,
    modes_of,
    server_flags,
    server_options,
)
from zos_sglang.testing.bench.grammar import (
    TARGET,
    TARGET_SHARE,
    Plan,
    measure,
    scheduler_memory,
    summarise,
    target_met,
)
from zos_sglang.testing.bench.plots import COLOURS, PlotError, keep, off_screen
from zos_sglang.testing.bench.record import provenance, write_json
from zos_sglang.testing.bench.serve import Config, find_model
from zos_sglang.testing.bench.tables import ranged
from zos_sglang.testing.tiny import write_tokenizer

NAME, PLOT_NAME = "bench_grammar.json", "bench_grammar.png"
MODES = ("sync", "stock", "overlap", "resident")

DESCRIPTION = f"""\
One batch, of which a share of the rows has a grammar (a JSON schema that the answers cannot end), in every
mode of one server, switched live in alternating order.

  step        from forward to forward, median of a wave, and that over the repeats
  over none   over the step of the same mode without grammar rows, within a repeat; aimed at in mode resident:
              {TARGET:g} at most where {TARGET_SHARE:g} % of the rows have one
  over stock  over stock's step with the same rows
  in lane     share of the decode steps that the resident lane ran, least of the repeats
  answers     equal: the token ids of all rows are stock's in every wave

--out holds {NAME}, {PLOT_NAME} and the server's log."""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        prog="bench_grammar.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=DESCRIPTION,
        epilog="Exit code: 0 answers equal, 1 they differ, 2 could not run. Times are not judged.",
    )
    add = found.add_argument
    add("--modes", type=modes_of(MODES, 2), default=MODES[1:], help="(stock,overlap,resident)")
    add("--shares", type=_shares, default=(0.0, 2.0, 25.0, 100.0), help="percent of the rows (0,2,25,100)")
    add("--batch", type=int, default=64, help="rows (64)")
    add("--prompt-tokens", type=int, default=32, help="(32)")
    add("--output-tokens", type=int, default=192, help="(192)")
    add("--repeats", type=int, default=5, help="repeats, in alternating order (5)")
    add("--seed", type=int, default=0, help="of the prompts (0)")
    model_flags(found)
    server_flags(found)
    add("--out", type=Path, metavar="DIR", required=True, help="folder for the results")
    json_flag(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    args = parser().parse_args(argv)
    data = measured("bench_grammar", lambda: _measure(args))
    if data is None:
        return COULD_NOT
    write_json(args.out / NAME, data)
    drawn("bench_grammar", lambda: draw(data["summary"], args.out / PLOT_NAME))
    if args.json:
        print(json.dumps(data))
    else:
        print_summary(data["summary"])
    return exit_code(data["summary"])


def exit_code(summary: Mapping[str, Any]) -> int:
    """1 unless the answers of every share are equal."""
    return 0 if set(summary["answers"].values()) == {"equal"} else 1


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    model = find_model(args.model, args.cache)
    plan = Plan(
        *(args.modes, args.shares, args.batch, args.repeats),
        *(args.prompt_tokens, args.output_tokens, vocabulary(model), args.seed),
    )
    more = ["--disable-radix-cache"]
    if not (model / "tokenizer.json").is_file():
        words = write_tokenizer(args.cache / f"tokenizer-{plan.vocab}", plan.vocab)
        more += ["--tokenizer-path", str(words)]
    config = Config(
        model,
        args.modes[0],
        batches=(args.batch,),
        tokens_a_request=plan.prompt + plan.output,
        tokenizer=True,
        **server_options(args, more),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    server = config.server(args.out / "server.log", args.start_timeout_s)
    with server, BenchClient(server.url) as client:
        runs = measure(client, plan, partial(scheduler_memory, server.pid), say)
    settings = {
        **{"model": args.model, "modes": list(plan.modes), "shares": list(plan.shares), "batch": plan.batch},
        **{"prompt": plan.prompt, "output": plan.output, "repeats": plan.repeats, "seed": plan.seed},
    }
    summary = summarise(runs, plan.modes)
    return {**provenance("bench_grammar"), "settings": settings, "summary": summary, "runs": runs}


def print_summary(summary: Mapping[str, Any]) -> None:
    """The table, and what was aimed at."""
    from rich.table import Table

    table = Table(
        *("grammar rows", "mode", "step us", "over none", f"over {summary['base']}", "in lane", "answers"),
        title="a decode step",
    )
    for row in summary["rows"]:
        step = row["step_us"]
        table.add_row(
            f"{row['share']:g} % ({row['grammar_rows']})",
            row["mode"],
            f"{step['median']:.0f} ({step['min']:.0f} to {step['max']:.0f})",
            *(ranged(row[name]) for name in ("over_none", "over_base")),
            "-" if row["in_lane"] is None else f"{row['in_lane']:.1%}",
            summary["answers"][f"{row['share']:g}"],
        )
    out = console()
    out.print(table)
    if memory := summary["memory"]:
        out.print(
            f"scheduler's memory: {memory['mib_before']} MiB after the first repeat, {memory['mib_after']} "
            f"after {memory['steps']} decode steps more"
        )
    if (met := target_met(summary)) is not None:
        out.print(f"resident, {TARGET_SHARE:g} % over none at most {TARGET:g}: {'yes' if met else 'no'}")


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """Write the plot to `path` (PNG): steps and their ratio to no grammar, over the share.

    Raises PlotError without matplotlib.
    """
    try:
        pyplot = off_screen()
    except ImportError as error:
        raise PlotError(f"{error}; pip install matplotlib") from None
    figure, (steps, ratios) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    shares = sorted({row["share"] for row in summary["rows"]})
    for mode in dict.fromkeys(row["mode"] for row in summary["rows"]):
        rows = {row["share"]: row for row in summary["rows"] if row["mode"] == mode}
        style = {"marker": "o", "color": COLOURS.get(mode), "label": mode}
        steps.plot([rows[share]["step_us"]["median"] for share in shares], **style)
        if all(rows[share]["over_none"] for share in shares):
            ratios.plot([rows[share]["over_none"]["median"] for share in shares], **style)
    steps.set(title="decode step", ylabel="µs")
    ratios.set(title="step over that without grammar rows", ylabel="ratio")
    ratios.axhline(TARGET, color="black", linewidth=0.8, linestyle="--")
    for panel in (steps, ratios):
        panel.set_xticks(range(len(shares)), [f"{share:g} %" for share in shares])
        panel.set_xlabel("rows with a grammar")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    steps.legend(fontsize="small")
    keep(pyplot, figure, None, path)


def _shares(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(word) for word in text.split(",")}))
    except ValueError:
        found = (-1.0,)
    if found[0] < 0 or found[-1] > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of percentages such as 0,2,25,100")
    return found
