"""The documentation as a site: it builds strictly, loads nothing from elsewhere, and two pages look right."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.browser import Opened, opened

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "build_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a broken link, anchor or an orphaned page fails here."""
    folder = tmp_path_factory.mktemp("site")
    assert script().build(folder / "site", folder / "docs") == 0
    return folder / "site"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Not into the test's output."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_every_page_of_the_repository_is_a_page_of_the_site(site: Path) -> None:
    pages = [path.stem for path in (ROOT / "docs").glob("*.md")]
    assert len(pages) > 8
    assert [page for page in pages if not (site / "docs" / page / "index.html").exists()] == []
    for place in ("index.html", "CONTRIBUTING/index.html", "bench/index.html", "patches/index.html"):
        assert (site / place).exists(), place
    assert (site / "bench" / "results" / "h200_arrivals.json").exists()


@pytest.mark.parametrize("text", ["[gone](gone.md)", "[no part](README.md#no-such-part)"])
def test_a_broken_link_fails_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    build = script()
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().partition("nav:\n  - Home")[0])
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "site.css").touch()
    (tmp_path / "README.md").write_text("# Title\n\nText.\n")
    assert build.build(tmp_path / "site", tmp_path / "build" / "docs") == 0
    (tmp_path / "README.md").write_text(f"# Title\n\n{text}\n")
    assert build.build(tmp_path / "site", tmp_path / "build" / "docs") == 1


@contextmanager
def looked_at(address: str) -> Iterator[Opened]:
    """The first page in Chromium; then nothing to complain of, and nothing loaded from elsewhere."""
    with opened(address) as seen:
        yield seen
        assert seen.complaints == []
        assert [url for url in seen.requests if not url.startswith((address, "data:", "blob:"))] == []


def test_the_first_page_shows_its_pictures_and_tables(address: str) -> None:
    with looked_at(address) as seen:
        widths = seen.page.evaluate("[...document.images].map(image => image.naturalWidth)")
        assert len(widths) == 2 and all(widths)
        assert seen.page.title() == "zos-sglang"
        heads = seen.page.eval_on_selector_all("article h2", "found => found.map(h => h.firstChild.data)")
        assert heads.index("Measured") < heads.index("Quick start") < heads.index("Limits")
        rows = seen.page.eval_on_selector_all("article table", "found => found.map(t => t.rows.length)")
        assert len(rows) >= 4 and min(rows) >= 3
        # A comment for the checker of figures is not to be seen.
        assert "results:" not in seen.page.inner_text("article")


def test_how_it_works_is_reached_by_the_menu_and_shows_its_timelines(address: str) -> None:
    with looked_at(address) as seen:
        seen.page.click("nav.md-nav--primary >> text=How it works")
        seen.page.wait_for_url("**/docs/how-it-works/")
        seen.page.wait_for_load_state("networkidle")
        widths = seen.page.evaluate("[...document.images].map(image => image.naturalWidth)")
        assert len(widths) == 4 and all(widths)
        assert seen.page.inner_text("article h1").startswith("How it works")
        # Lists that follow a paragraph are lists, and code is code.
        assert seen.page.locator("article ol > li").count() >= 16
