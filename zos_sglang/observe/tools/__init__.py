"""Commands of `python -m zos_sglang` that look at a server, a trace or a set of flags.

Each is a module with `add(commands)`, which adds its parser and sets `show` to the function that runs it
(`Namespace -> int | None`, the exit code). They raise `ToolError` for what cannot be done. A command that
takes the flags of another program sets the default `rest`; what it does not know itself is put there.
"""

from __future__ import annotations

import argparse
from typing import Protocol

from zos_sglang.observe.tools import doctor, report, simulate_cli, top


class Tool(Protocol):
    """A module of this package."""

    def add(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add the command's parser."""


TOOLS: tuple[Tool, ...] = (top, doctor, simulate_cli, report)
