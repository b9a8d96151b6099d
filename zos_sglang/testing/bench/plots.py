"""What the plots of the benchmarks share: colours, matplotlib without a screen, and how a plot is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Okabe and Ito's colours: told apart by most eyes, and in print.
COLOURS = {
    "sync": "#E69F00",
    "stock": "#0072B2",
    "overlap": "#009E73",
    "resident": "#D55E00",
    "never": "#56B4E9",
    "always": "#CC79A7",
    "first-token": "#009E73",
}
GREY = "#999999"


class PlotError(RuntimeError):
    """Nothing was drawn; the message says why and what to do."""


def off_screen() -> Any:
    """matplotlib's pyplot, drawing into memory. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def pyplot_for(path: Path) -> Any:
    """The same for the command whose plot is `path`, `<command>.png`. Raises PlotError without matplotlib."""
    try:
        return off_screen()
    except ImportError as error:
        raise PlotError(
            f"{error}; pip install matplotlib, then draw it with {path.stem}.py --plot-only {path.parent}"
        ) from None


def grid(pyplot: Any, rows: int, columns: int, inches: tuple[float, float] = (3.6, 3.0)) -> tuple[Any, Any]:
    """A figure, and its panels in an array [rows, columns]; `inches` is the size of one."""
    width, height = inches
    size = (width * columns, height * rows)
    found: tuple[Any, Any] = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return found


def keep(pyplot: Any, figure: Any, title: str | None, path: Path) -> None:
    """Write a figure to `path` (PNG) and let go of it."""
    if title is not None:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def lines_by_mode(
    rows: Sequence[Mapping[str, Any]], axis: str, metric: str
) -> dict[str, list[tuple[float, Mapping[str, float]]]]:
    """Pairs (place on the axis, spread over the repeats) by mode, in the order of the axis."""
    found: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
    for row in sorted(rows, key=lambda row: row[axis]):
        if row[metric] is not None:
            found.setdefault(row["mode"], []).append((row[axis], row[metric]))
    return found


def spread_lines(panel: Any, lines: Mapping[str, Sequence[tuple[float, Mapping[str, float]]]]) -> None:
    """Medians by mode over a logarithmic axis, with bars from the least to the largest repeat.

    `lines` holds pairs (place on the axis, spread over the repeats).
    """
    for mode, points in lines.items():
        middle = [found["median"] for _, found in points]
        bars = [
            [found["median"] - found["min"] for _, found in points],
            [found["max"] - found["median"] for _, found in points],
        ]
        panel.errorbar(
            [place for place, _ in points],
            middle,
            yerr=bars,
            marker="o",
            capsize=3,
            color=COLOURS.get(mode),
            label=mode,
        )
    places = sorted({place for points in lines.values() for place, _ in points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{place:g}" for place in places])
    panel.minorticks_off()
    highest = max((found["max"] for points in lines.values() for _, found in points), default=0)
    panel.set_ylim(0, 1.1 * highest or 1)
    panel.grid(alpha=0.3)
