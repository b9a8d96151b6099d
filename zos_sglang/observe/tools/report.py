"""`python -m zos_sglang report TRACE -o report.html`: what a trace says, as a page or as numbers."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zos_sglang.observe import signs
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.summary import summarise
from zos_sglang.observe.tools.report_page import page
from zos_sglang.observe.trace_reader import Trace, read

_HELP = "what a trace (ZOS_TRACE) says: timeline, distributions, reasons, signs; one page for a browser"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    command = commands.add_parser("report", help=_HELP, description=_HELP)
    command.add_argument("trace", type=Path, metavar="TRACE", help="file that a server wrote with ZOS_TRACE")
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="page to write (default: report.html; with --json none)",
    )
    command.add_argument("--json", action="store_true", help="print the numbers as JSON")
    command.set_defaults(show=show)


def show(args: argparse.Namespace) -> None:
    """Read the trace, write the page, print where it is. Raises ToolError for what cannot be done."""
    trace = read(args.trace)
    numbers = figures(trace)
    output = args.output or (None if args.json else Path("report.html"))
    if output is not None:
        _write(output, page(args.trace.name, trace, numbers), args.trace)
    for note in trace.notes:
        print(f"zos-sglang: note: {args.trace}: {note}", file=sys.stderr)
    if args.json:
        print(json.dumps({"trace": str(args.trace)} | numbers, indent=2))
    else:
        print(f"{output}: {len(trace.records)} steps of {numbers['summary']['seconds']:.1f} s")


def figures(trace: Trace) -> dict[str, Any]:
    """All numbers of the page, ready for JSON."""
    return {
        "facts": trace.facts,
        "ended": trace.ended,
        "notes": trace.notes,
        "summary": summarise(trace.records),
        "signs": [asdict(finding) for finding in signs.judge(trace.records)],
        "delivery": str(signs.delivery(trace.records)),
    }


def _write(output: Path, content: str, trace: Path) -> None:
    if output.exists() and output.samefile(trace):
        raise ToolError(f"{output}: is the trace itself; name another file for the page")
    try:
        output.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ToolError(f"{output}: cannot be written: {error.strerror}") from error
