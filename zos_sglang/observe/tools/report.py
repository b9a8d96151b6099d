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
from zos_sglang.observe.tools.report_page import TITLE, page
from zos_sglang.observe.trace_reader import Trace, read

#: A page states its title within so many bytes.
_HEAD = 4096
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
    command.add_argument(
        "--force", action="store_true", help="overwrite a file at -o even if it is no page of this tool"
    )
    command.add_argument("--json", action="store_true", help="print the numbers as JSON")
    command.set_defaults(show=show)


def show(args: argparse.Namespace) -> None:
    """Read the trace, write the page, print where it is. Raises ToolError for what cannot be done."""
    trace = read(args.trace)
    numbers = figures(trace)
    output = args.output or (None if args.json else Path("report.html"))
    if output is not None:
        _write(output, page(args.trace.name, trace, numbers), args.trace, args.force)
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


def _write(output: Path, content: str, trace: Path, force: bool) -> None:
    """Write the page; over another page of ours, but over nothing else unless `force`. Raises ToolError.

    What no encoding knows (half a surrogate pair, say, in a trace's facts) is shown as a question mark.
    """
    try:
        if not output.exists():
            # Exclusively: a link that leads to nothing is not followed.
            with output.open("x", encoding="utf-8", errors="replace") as file:
                file.write(content)
            return
        if output.samefile(trace):
            raise ToolError(f"{output}: is the trace itself; name another file for the page")
        if not (force or _may_be_overwritten(output)):
            raise ToolError(f"{output}: there is a file that is no report; name another one, or give --force")
        output.write_text(content, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ToolError(f"{output}: cannot be written: {error.strerror}") from error


def _may_be_overwritten(output: Path) -> bool:
    """Whether an earlier page stands there, nothing yet, or what holds nothing (a pipe, a terminal)."""
    if output.is_fifo() or output.is_char_device():
        return True
    with output.open("rb") as file:
        head = file.read(_HEAD)
    return not head or TITLE.encode() in head
