#!/usr/bin/env python3
"""Builds the documentation as a site, strictly: a broken link or anchor, or a page that no menu has, ends it.

    python scripts/build_docs.py [--site build/site]
    python -m http.server --directory build/site

MkDocs takes pages from one folder only. So they are laid out in build/docs as they lie in the repository, the
README as the first page, together with the files that they link to.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What the site consists of: pages, and what pages show or link to.
PARTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**/*",
    "bench/*.md",
    "bench/results/*.json",
    "patches/README.md",
)


def lay_out(folder: Path) -> list[Path]:
    """Copy the parts into `folder`, anew; returns their places in the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    parts = sorted({path for part in PARTS for path in ROOT.glob(part) if path.is_file()})
    for path in parts:
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    return parts


def build(site: Path, pages: Path) -> int:
    """Lay the pages out and run MkDocs; returns its exit code."""
    lay_out(pages)
    # Of the two folders MkDocs takes only the site's as a flag.
    config = pages.with_name("mkdocs.yml")
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {pages}\n", encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "-f", config, "-d", site]
    # A notice about MkDocs 2, which setup.py says why we do not take.
    return subprocess.run(command, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site", help="where the site goes")
    args = parser.parse_args()
    code = build(args.site.resolve(), ROOT / "build" / "docs")
    if not code:
        print(f"python -m http.server --directory {args.site}")
    return code


if __name__ == "__main__":
    sys.exit(main())
