"""What the measuring commands with a folder of results have in common: their flags, and how they end."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.ending import COULD_NOT, exiting_on
from zos_sglang.testing.bench.flags import FAILURES, json_flag
from zos_sglang.testing.bench.plots import PlotError

#: What `exit_of` means, for --help.
EXIT_CODES = """\
Exit code: 0 done, 1 requests failed, or answers differ where they must not (--exact, the default on a CPU in
float32), 2 could not run or not one repeat was whole."""


@dataclass(frozen=True)
class Command:
    """One measuring command. Its result is a dict, kept as JSON in the folder that --out names.

    Args:
        name: the script's name without `.py`, as its messages begin and as its plot is called.
        measure: measures what the flags ask for.
        load: the result in a folder, for --plot-only.
        draw: writes the plot of a result to a path. Raises PlotError.
        show: prints a result's tables.
        exit_code: what a result means.
    """

    name: str
    measure: Callable[[argparse.Namespace], dict[str, Any]]
    load: Callable[[Path], dict[str, Any]]
    draw: Callable[[Mapping[str, Any], Path], None]
    show: Callable[[Mapping[str, Any]], None]
    exit_code: Callable[[dict[str, Any]], int]

    def run(self, parser: argparse.ArgumentParser, argv: list[str] | None = None) -> int:
        """Measure, or draw what was measured; returns the exit code."""
        args = parser.parse_args(argv)
        if (args.out is None) == (args.plot_only is None):
            parser.error("name one of --out DIR and --plot-only DIR")
        made = partial(self.load, args.plot_only) if args.plot_only else partial(self.measure, args)
        data = measured(self.name, made)
        if data is None:
            return COULD_NOT
        plotted = self._draw(data, args.plot_only or args.out)
        if args.json:
            print(json.dumps(data))
        else:
            self.show(data)
        return COULD_NOT if args.plot_only and not plotted else self.exit_code(data)

    def _draw(self, data: Mapping[str, Any], out: Path) -> bool:
        return drawn(self.name, partial(self.draw, data, out / f"{self.name}.png"))


def measured(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """What `measure` gives; None, after one line on stderr, where it could not run (`flags.FAILURES`)."""
    with exiting_on(signal.SIGTERM):
        try:
            return measure()
        except FAILURES as error:
            print(f"{name}: error: {error}", file=sys.stderr)
            return None


def drawn(name: str, draw: Callable[[], None]) -> bool:
    """Whether `draw` made its plot; if not, one line on stderr says why."""
    try:
        draw()
    except PlotError as error:
        print(f"{name}: no plot: {error}", file=sys.stderr)
        return False
    return True


def exit_of(rows: Sequence[Mapping[str, Any]], *, failed: bool, exact: bool) -> int:
    """1 if requests failed or answers differ that must be equal, else 2 if nothing was compared, else 0."""
    if failed or (exact and any(row["answers"]["differing"] for row in rows)):
        return 1
    return 0 if rows else COULD_NOT


def result_flags(parser: argparse.ArgumentParser) -> None:
    """--limit-s, --out, --resume, --plot-only and --json."""
    add = parser.add_argument
    add("--limit-s", type=float, help="stop cleanly before so many seconds are over")
    add("--out", type=Path, metavar="DIR", help="folder for the results")
    add("--resume", action="store_true", help="go on with what --out holds")
    add("--plot-only", type=Path, metavar="DIR", help="measure nothing: table and plot of the results in DIR")
    json_flag(parser)


def say(line: str) -> None:
    """One line of progress, beside what --json prints."""
    print(line, file=sys.stderr, flush=True)
