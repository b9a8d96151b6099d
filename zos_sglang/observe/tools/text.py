"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

#: Colours of paths, and letters where there is no colour; in lower case where the step was held up.
COLOURS = {
    "resident": "green",
    "resident-blocked": "yellow",
    "overlap": "cyan",
    "overlap-blocked": "dark_orange",
    "sync": "red",
    "nothing-pending": "bright_black",
}
LETTERS = {
    "resident": "R",
    "resident-blocked": "r",
    "overlap": "O",
    "overlap-blocked": "o",
    "sync": "S",
    "nothing-pending": "·",
}


def microseconds(value: float | None) -> str:
    """Microseconds with a unit that keeps them short; a dash for None."""
    if value is None:
        return "-"
    if abs(value) < 1000:
        return f"{value:.0f} us" if abs(value) >= 10 or value == 0 else f"{value:.1f} us"
    return f"{value / 1000:.2f} ms" if abs(value) < 1_000_000 else f"{value / 1_000_000:.2f} s"


def share(value: float | None) -> str:
    """A share as per cent; small ones do not become 0."""
    if value is None:
        return "-"
    return "<0.1 %" if 0 < value < 0.001 else f"{100 * value:.1f} %"


def quantiles(found: Mapping[str, Any] | None) -> list[str]:
    """P50, P90 and P99 of a distribution of `summary`, as table cells."""
    return [microseconds(None if found is None else found[name]) for name in ("p50", "p90", "p99")]


def table(*columns: str, rows: Iterable[Iterable[str]]) -> Table:
    """A plain table; the first column is left-aligned, figures are right-aligned."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place and column not in _TEXTS else "left")
    for row in rows:
        made.add_row(*(escape(cell) for cell in row))
    return made


_TEXTS = ("verdict", "note", "mode")


def bar(shares: Mapping[str, float], width: int) -> Text:
    """Shares of paths as one bar of `width` cells; every share above 0 has at least one."""
    text = Text()
    for name, value in shares.items():
        if value > 0:
            text.append(LETTERS.get(name, "?") * max(1, round(width * value)), COLOURS.get(name, "white"))
    return text


def rules(found: Iterable[Mapping[str, str]]) -> Table:
    """Rules that turn something off (`overlap_off.Rule.as_json`), one block each."""
    made = Table.grid(padding=(0, 2))
    for rule in found:
        made.add_row("", "[red]x[/red]", f"[bold]{escape(rule['words'])}[/bold] ({escape(rule['code'])})")
        whose = rule["whose"] + (f", {rule['where']}" if rule["where"] != "unknown" else "")
        for title, text in (("under", rule["flag"]), ("whose", whose), ("change", rule["change"])):
            made.add_row("", "", f"[bright_black]{title:7}[/bright_black]{escape(text)}")
    return made
