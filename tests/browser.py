"""A page in a real Chromium, driven by playwright."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

#: `make test` installs the first of these where it may; see the target `browser`.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class Opened:
    """A page that has been drawn.

    Attributes:
        page: playwright's.
        complaints: errors and warnings of the console, uncaught exceptions, failed requests.
        requests: every address that was asked for.
    """

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def picture(self, selector: str) -> Image.Image:
        """What an element looks like, RGB."""
        return Image.open(io.BytesIO(self.page.locator(selector).screenshot())).convert("RGB")

    def cells(self, table: str) -> list[list[str]]:
        """Texts of a table's body, row by row; of a cell its first line."""
        rows: list[list[str]] = self.page.eval_on_selector_all(
            f"#{table} tbody tr",
            "rows => rows.map(row => [...row.cells].map(c => c.innerText.split('\\n')[0]))",
        )
        return rows


@contextmanager
def opened(place: Path | str) -> Iterator[Opened]:
    """Open a file or an address. Skips the test, and says so, on a machine without Chromium."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(
            "no Chromium on this machine, so no page was looked at; `make browser` installs it as root"
        )
    from playwright.sync_api import sync_playwright

    # Chromium's sandbox refuses to run as root.
    flags = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=flags)
        page = browser.new_page(viewport={"width": 1240, "height": 900})
        page.set_default_timeout(90_000)
        seen = Opened(page)
        page.on("console", lambda message: seen.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("requestfailed", lambda request: seen.complaints.append(f"failed: {request.url}"))
        page.on("request", lambda request: seen.requests.append(request.url))
        page.goto(place if isinstance(place, str) else place.resolve().as_uri())
        page.wait_for_load_state("networkidle")
        yield seen
        browser.close()


def rows_of_colour(picture: Image.Image, colour: str) -> list[int]:
    """The line of every pixel of exactly this colour (`#rrggbb`), from the top."""
    wanted = tuple(bytes.fromhex(colour[1:]))
    pixels = picture.load()
    assert pixels is not None
    return [y for y in range(picture.height) for x in range(picture.width) if pixels[x, y] == wanted]
