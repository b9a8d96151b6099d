"""``python -m zos_sglang``, also installed as ``zos-sglang``: the commands of `cli`, where they can run.

Nothing is imported at the top that has to be installed: a Python without it is told in one line.
"""

from __future__ import annotations  # an older Python is to get the line, too

import sys
from collections.abc import Sequence

from zos_sglang.missing import told


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: that of the command, or 2 where a module is missing."""
    try:
        from zos_sglang import cli

        return cli.main(argv)
    except ModuleNotFoundError as error:
        return told(error)


if __name__ == "__main__":
    sys.exit(main())
