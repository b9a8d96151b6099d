"""One thing that must hold of a server that was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One thing that must hold, with what was found."""

    what: str
    ok: bool
    found: Any
