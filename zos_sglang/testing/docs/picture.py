"""PNG pictures that carry a digest of what they show, so that a stale one is found without drawing it again.

Comparing pixels would not do: another release of matplotlib draws the same data a little differently.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.plots import off_screen

#: Keyword of the PNG text chunk.
KEY = "zos-shows"
_DPI = 110

#: Draws data and gives back matplotlib's figure. What it draws depends on the data alone.
Draw = Callable[[Any], Any]


def digest(data: Any, draw: Draw) -> str:
    """SHA-256 of what a picture shows: the data, and the source of the function that draws them."""
    source = inspect.getsource(draw)
    text = json.dumps([source, data], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write(path: Path, data: Any, draw: Draw) -> None:
    """Draw `data` into `path`; the same data give the same bytes with the same matplotlib."""
    pyplot = plotter()
    with pyplot.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10}):
        figure = draw(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": None, KEY: digest(data, draw)})
        pyplot.close(figure)


def shows(path: Path) -> str | None:
    """The digest in a picture; None if it has none, or there is no picture."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as picture:
        found = picture.info.get(KEY)
    return None if found is None else str(found)


def stale(wanted: Mapping[Path, tuple[Any, Draw]]) -> list[Path]:
    """Pictures that are missing or show something else than `wanted` (data and how to draw them)."""
    return [path for path, (data, draw) in wanted.items() if shows(path) != digest(data, draw)]


def plotter() -> Any:
    """matplotlib's pyplot, drawing into memory. Raises ImportError with what to install."""
    try:
        return off_screen()
    except ImportError as error:
        raise ImportError(f"{error}; pip install -e '.[bench]'") from None
