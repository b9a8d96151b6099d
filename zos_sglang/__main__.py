"""``python -m zos_sglang``, also installed as ``zos-sglang``: the commands of `cli`, where they can run.

Nothing is imported at the top that has to be installed: a Python without it is told in one line.
"""

from __future__ import annotations  # an older Python is to get the line, too

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: that of the command, or 2 where a module is missing."""
    try:
        from zos_sglang import cli

        return cli.main(argv)
    except ModuleNotFoundError as error:
        # A part of a package that is there is a fault, ours or its own, that installing does not mend.
        if error.name is None or "." in error.name:
            raise
        print(
            f"zos-sglang: error: {sys.executable} has no module {error.name}. Use the Python of the "
            "environment that zos-sglang is installed in, or install it and what it needs. Run in its "
            "folder: pip install -e .",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
