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


def pyplot_for(path: Path) -> Any:
    """matplotlib's pyplot, for files. Raises PlotError without matplotlib; `path` is `<command>.png`."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise PlotError(
            f"{error}; pip install matplotlib, then draw it with {path.stem}.py --plot-only {path.parent}"
        ) from None
    return pyplot


def keep(pyplot: Any, figure: Any, title: str, path: Path) -> None:
    """Write a figure to `path` (PNG) and let go of it."""
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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
