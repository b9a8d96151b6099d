"""Numbers of the documentation held against the files that they come from.

A comment before a paragraph, a list or a table governs it:

    <!-- results: h200_arrivals.json summary/rows[rate={requests/s} mode=resident]/over_stock -->

Every number of the block must then be one that the comment picks (see `selection`), up to the rounding in
which it is printed. In a table, `{column}` stands for the text of that column (`{column@}` for the file that
it links to), so that each row is held against its own records, and a term `COLUMN: ...` is for that column
alone. What several tables need is written once and used by name:

    <!-- define lane: floor ms: summary/rows[batch={batch}]/floor_us; over sync: ... -->
    <!-- results: h200_lane_06b_fa3.json @lane -->

A number that is no result (an aim, a setting) is named with the reason:

    <!-- not measured: 1.05 what we aimed at -->

Outside such blocks no number may stand that looks like a measurement: one with a decimal point, with a
thousands comma, or before a unit. Code, links and addresses are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zos_sglang.testing.docs.blocks import Block, blocks
from zos_sglang.testing.docs.selection import SelectionError, Value, select

#: A number by itself: no version (0.5.23), no name (0.6B, H200, P99), no commit.
_NUMBER = re.compile(r"(?<![\w.,-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w]|\.\d|,\d{3})")
_KEY = re.compile(r"\{([^}]*)\}")
_VERSION = re.compile(r"(?:Python|SGLang|torch|CUDA|zos-sglang) $")
_UNITS = (
    *("%", "µs", "us", "ms", "s", "min", "GB", "MB", "kB", "times", "tokens", "token", "requests", "steps"),
    *("pairs", "aborts", "retractions", "scenarios", "repeats"),
)
_UNIT = re.compile(r"\s*-?(" + "|".join(_UNITS) + r")(?![\w])|(?:\s+to\s+[\d.,]+\s*(%|µs|us|ms|s)(?![\w]))")
#: How many of the smaller unit make one.
_SCALE = {("us", "ms"): 1e-3, ("us", "s"): 1e-6, ("ms", "s"): 1e-3, ("s", "ms"): 1e3, ("ms", "us"): 1e3}


@dataclass(frozen=True)
class Figure:
    """A number as it is printed, with the unit behind it."""

    text: str
    unit: str

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))

    @property
    def looks_measured(self) -> bool:
        return bool(self.unit) or "." in self.text or "," in self.text

    def is_one_of(self, values: list[Value]) -> bool:
        """Whether a value, in this figure's unit, is this figure as printed."""
        half = 0.5 * 10.0 ** -len(self.text.partition(".")[2]) + 1e-9
        return any(abs(form - self.value) <= half for value in values for form in _forms(value, self.unit))


def _forms(value: Value, unit: str) -> Iterator[float]:
    """What a value may be printed as: itself, in another unit, or in per cent (a share, or a change)."""
    yield value.number
    if unit == "%":
        yield from (100 * value.number, 100 * (value.number - 1), 100 * (1 - value.number))
    if (value.unit, unit) in _SCALE:
        yield value.number * _SCALE[value.unit, unit]


def figures(text: str, unit: str = "") -> Iterator[Figure]:
    """Numbers of a piece of text; `unit` is that of numbers without one, as a table's head has it."""
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`|<[^>]*>|https?://\S+", "`", text))
    for found in _NUMBER.finditer(plain):
        if _VERSION.search(plain[: found.start()]):
            continue
        behind = _UNIT.match(plain, found.end())
        yield Figure(found.group(), (behind.group(1) or behind.group(2)) if behind else unit)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


# ------------------------------------------------------------------ checking


def check(page: Path, results: Path) -> list[str]:
    """What is wrong with the numbers of a page, one sentence each."""
    return [
        f"{page.name}:{block.line}: {problem}"
        for block in blocks(page.read_text(encoding="utf-8"))
        for problem in problems(block, results)
    ]


def problems(block: Block, results: Path) -> Iterator[str]:
    """What is wrong with the numbers of a block, one sentence each."""
    exempt = {figure.text for reason in block.exempt for figure in figures(reason)}
    try:
        if not block.governed:
            for figure in _all(block):
                if figure.looks_measured and figure.text not in exempt:
                    yield f"{figure.text} {figure.unit} stands in no block that names its result file".strip()
        elif block.is_table:
            yield from _table(block, results, exempt)
        else:
            values = [v for term in block.results for v in select(term.place, term.file, results)]
            yield from _missing(figures(" ".join(block.lines)), values, exempt)
    except SelectionError as error:
        yield str(error)


def _all(block: Block) -> Iterator[Figure]:
    return figures(" ".join(block.lines))


def _table(block: Block, results: Path, exempt: set[str]) -> Iterator[str]:
    """Each row against what the comment picks with the row's own texts put in."""
    names = _cells(block.lines[0])
    units = [_head_unit(name) for name in names]
    keys = {key.removesuffix("@") for t in block.results for key in _KEY.findall(t.file + t.place)}
    for line in block.lines[2:]:
        cells = _cells(line)
        row = _row(names, cells)
        picked: dict[str, list[Value]] = {}
        for term in block.results:
            file, place = _put_in(term.file, row), _put_in(term.place, row)
            picked.setdefault(term.column, []).extend(select(place, file, results))
        for name, cell, unit in zip(names, cells, units, strict=False):
            # What a row is found by has been held against its record by that.
            if name not in keys:
                values = picked.get(name, picked.get("", []))
                for problem in _missing(figures(cell, unit), values, exempt):
                    yield f"row {' '.join(cells[:3])}, {name}: {problem}"


def _row(names: list[str], cells: list[str]) -> dict[str, str]:
    """What `{column}` and `{column@}` stand for in a row."""
    found: dict[str, str] = {}
    for name, cell in zip(names, cells, strict=False):
        link = re.fullmatch(r"\[(.*)\]\((?:.*/)?(.*)\)", cell)
        found[name], found[f"{name}@"] = (link.group(1), link.group(2)) if link else (cell, cell)
    return found


def _put_in(text: str, row: dict[str, str]) -> str:
    return _KEY.sub(lambda key: row.get(key[1], "?"), text)


def _head_unit(name: str) -> str:
    found = re.search(r"(?:^|\W)(ms|µs|us|s|%)(?:$|\W)", name)
    return found.group(1) if found and not name.endswith("/s") else ""


def _missing(found: Iterator[Figure], values: list[Value], exempt: set[str]) -> Iterator[str]:
    for figure in found:
        if figure.text not in exempt and not figure.is_one_of(values):
            yield f"{figure.text} {figure.unit} is in none of the named results".replace("  ", " ")
