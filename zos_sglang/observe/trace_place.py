"""What a trace may take the place of."""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: Stands in the first events of every trace (`trace_events.META`), within so many bytes.
_MARK, _HEAD = b'"zos_meta"', 4096


def not_replaceable(path: Path) -> str | None:
    """Why a trace may not take the place of what stands at `path`; None where it may. Raises OSError.

    A trace, an empty file and a link may be replaced. Anything else is more likely a slip of the hand, and
    root would replace /dev/null itself.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        return None
    if not stat.S_ISREG(found.st_mode):
        return "this is no ordinary file"
    if not found.st_size:
        return None
    with path.open("rb") as file:
        return None if _MARK in file.read(_HEAD) else "there is a file of this name that is no trace"
