"""What the tables of the benchmarks share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str],
    note: str | None = None,
) -> Any:
    """A table of texts; the columns named in `left` are words, the others are numbers."""
    from rich import box
    from rich.table import Table

    found = Table(title=title, caption=note, box=box.SIMPLE_HEAD)
    for name in columns:
        found.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found


def number(value: float | None, digits: int) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def median(found: Mapping[str, float] | None, digits: int) -> str:
    """The median of a spread, or a dash."""
    return number(found["median"] if found else None, digits)


def medians(row: Mapping[str, Any], what: str, *which: str, digits: int = 2) -> str:
    """Medians of several figures of one quantity, as `a / b / c`."""
    return " / ".join(median(row[f"{what}.{name}"], digits) for name in which)


def ranged(found: Mapping[str, float] | None, mark: str = "") -> str:
    """A ratio's median with its extremes, or a dash; `mark` stands behind the median."""
    if not found:
        return "-"
    return f"{found['median']:.3f}{mark} ({found['min']:.3f} to {found['max']:.3f})"
