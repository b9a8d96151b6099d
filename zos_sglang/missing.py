"""One line instead of a traceback where a Python lacks what has to be installed."""

from __future__ import annotations  # an older Python is to get the line, too

import sys

COULD_NOT = 2


def told(error: ModuleNotFoundError) -> int:
    """Say what is missing; returns the exit code.

    Raises the error itself where a part of a package is missing that is there: a fault, ours or its own, that
    installing does not mend.
    """
    if error.name is None or "." in error.name:
        raise error
    print(
        f"zos-sglang: error: {sys.executable} has no module {error.name}. Use the Python of the "
        "environment that zos-sglang is installed in, or install it and what it needs. Run in its "
        "folder: pip install -e .",
        file=sys.stderr,
    )
    return COULD_NOT
