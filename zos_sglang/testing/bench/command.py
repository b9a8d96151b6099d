"""What the measuring commands with a folder of results have in common: their flags, and how they end."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.flags import FAILURES, json_flag
from zos_sglang.testing.bench.plots import PlotError

#: Exit code of a command that could not run, or could not do what it was asked for.
COULD_NOT = 2


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
        try:
            data = self.load(args.plot_only) if args.plot_only else self._measure(args)
        except FAILURES as error:
            print(f"{self.name}: error: {error}", file=sys.stderr)
            return COULD_NOT
        drawn = self._draw(data, args.plot_only or args.out)
        if args.json:
            print(json.dumps(data))
        else:
            self.show(data)
        return COULD_NOT if args.plot_only and not drawn else self.exit_code(data)

    def _measure(self, args: argparse.Namespace) -> dict[str, Any]:
        # A time limit from outside must stop the servers too.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(COULD_NOT))
        try:
            return self.measure(args)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _draw(self, data: Mapping[str, Any], out: Path) -> bool:
        path = out / f"{self.name}.png"
        try:
            self.draw(data, path)
        except PlotError as error:
            print(f"{self.name}: no plot: {error}", file=sys.stderr)
            return False
        return True


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
