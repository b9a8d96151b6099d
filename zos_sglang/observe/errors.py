"""What a tool cannot do, in one sentence for people."""

from __future__ import annotations


class ToolError(Exception):
    """The command line prints `str()` on one line and exits with 2."""
