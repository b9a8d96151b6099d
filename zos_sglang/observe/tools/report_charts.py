"""Charts of the report as SVG and HTML, made without a browser's help."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from zos_sglang.observe.tools import text

WIDTH, HEIGHT, BINS = 420, 130, 42
_LEFT, _BOTTOM, _TOP = 8, 22, 26


def microseconds(value: float | None) -> str:
    """As the terminal shows them, but with a micro sign."""
    return text.microseconds(value).replace(" us", " µs")


def histogram(values: np.ndarray, weights: np.ndarray | None, found: Mapping[str, Any], colour: str) -> str:
    """A histogram with lines at P50, P90 and P99.

    Args:
        values: nanoseconds, one or more.
        weights: how often each counts; None: once.
        found: their `summary.distribution`.
        colour: of the bars.
    """
    us = values / 1000
    low, high = _limits(us, found)
    # Weights of a damaged trace may be beyond all numbers.
    with np.errstate(invalid="ignore"):
        counts, _ = np.histogram(us.clip(low, high), BINS, (low, high), weights=weights)
    beyond = int((us > high).sum())
    width = (WIDTH - 2 * _LEFT) / BINS
    floor = HEIGHT - _BOTTOM
    tall = (floor - _TOP) / max(counts.max(), 1)
    bars = "".join(
        f'<rect x="{_LEFT + place * width:.1f}" y="{floor - count * tall:.1f}" '
        f'width="{max(width - 1, 1):.1f}" height="{count * tall:.1f}" fill="{colour}"/>'
        for place, count in enumerate(counts.tolist())
        if count
    )
    marks = _marks(found, low, high, floor)
    last = f"&#8805; {microseconds(high)}" if beyond else microseconds(high)
    axis = (
        f'<line x1="{_LEFT}" x2="{WIDTH - _LEFT}" y1="{floor}" y2="{floor}" class="axis"/>'
        f'<text x="{_LEFT}" y="{HEIGHT - 6}">{microseconds(low)}</text>'
        f'<text x="{WIDTH - _LEFT}" y="{HEIGHT - 6}" text-anchor="end">{last}</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="histogram">{bars}{marks}{axis}</svg>'


def _limits(us: np.ndarray, found: Mapping[str, Any]) -> tuple[float, float]:
    """Of the axis: the longest few must not squeeze all others into one bar."""
    low = float(us.min())
    high = min(float(us.max()), max(4 * found["p90"], 1.3 * found["p99"]))
    low = 0.0 if low > 0 and low < high / 2 else low
    return low, max(high, low + max(abs(low) / 20, 1.0))


def _marks(found: Mapping[str, Any], low: float, high: float, floor: float) -> str:
    marks, free = "", -1.0
    for name in ("p50", "p90", "p99"):
        at = _LEFT + (min(found[name], high) - low) / (high - low) * (WIDTH - 2 * _LEFT)
        marks += f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 6}" y2="{floor}" class="mark"/>'
        if at >= free:  # names that would stand on each other are in the table below
            end = ' text-anchor="end"' if at > WIDTH - 60 else ""
            marks += f'<text x="{at:.1f}" y="{_TOP - 10}"{end}>{name.upper()}</text>'
            free = at + 32
    return marks


def stacked(rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> str:
    """One bar a row, in parts; `rows`: name to part to microseconds. All bars have one scale."""
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0
    made = []
    for name, parts in rows.items():
        pieces = "".join(
            f'<span style="width:{100 * value / longest:.2f}%;background:{colours[part]}" '
            f'title="{escape(part)}: {microseconds(value)}"></span>'
            for part, value in parts.items()
            if value > 0
        )
        made.append(
            f'<div class="bar-row"><span class="bar-name">{escape(name)}</span>'
            f'<span class="bar">{pieces}</span>'
            f'<span class="bar-sum">{microseconds(sum(parts.values()))}</span></div>'
        )
    return f'<div class="bars">{"".join(made)}</div>'


def table(columns: list[str], rows: list[list[str]], name: str) -> str:
    """A table; cells are HTML. Columns whose title ends in `>` hold figures."""
    kinds = ["num" if column.endswith(">") else "" for column in columns]
    head = "".join(
        f'<th class="{kind}">{escape(column.rstrip(">"))}</th>'
        for kind, column in zip(kinds, columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
