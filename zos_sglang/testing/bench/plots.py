"""What the plots of the benchmarks share: colours, matplotlib without a screen, and how a plot is kept."""

from __future__ import annotations

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
