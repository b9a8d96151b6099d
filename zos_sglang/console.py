"""The one console that our tools print tables to."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

#: Columns where the output is no terminal: more than any table of ours has. A table takes what it needs.
UNBOUNDED = 10_000


def console(file: IO[str] | None = None, columns: int = UNBOUNDED) -> Console:
    """A console as wide as the terminal; elsewhere nothing is cut or wrapped: a file holds whole lines.

    Args:
        file: where to print (default: stdout).
        columns: width where there is no terminal, for what would fill any width.
    """
    from rich.console import Console  # a measurement that prints JSON does without

    out = sys.stdout if file is None else file
    return Console(file=file, width=None if out.isatty() else columns, highlight=False)
