"""Where SGLang lies in a folder that somebody names, and which release it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zos_sglang.patchset.errors import PatchError

PACKAGE = "sglang"
_VERSION = re.compile(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Tree:
    """A folder with the package `sglang` in it. `release` is None where nothing states one."""

    root: Path
    release: str | None

    @property
    def package(self) -> Path:
        return self.root / PACKAGE


def find(folder: Path) -> Tree:
    """SGLang in site-packages, in a git checkout (`python/sglang`), or in the package's own folder.

    Raises:
        PatchError: it is not there.
    """
    choices = [folder, folder / "python"]
    if folder.resolve().name == PACKAGE:
        choices.append(folder.resolve().parent)
    for root in choices:
        if (root / PACKAGE / "srt").is_dir():
            return Tree(root, _stated(root))
    raise PatchError(
        f"--tree {folder}: no SGLang there. Name the folder that holds sglang/ (site-packages), or a git "
        f"checkout with python/{PACKAGE}."
    )


def _stated(root: Path) -> str | None:
    """The release as the package itself states it, or its metadata beside it; a checkout may state none."""
    try:
        if stated := _VERSION.search((root / PACKAGE / "_version.py").read_text(encoding="utf-8")):
            return stated[1]
    except (OSError, UnicodeDecodeError):
        pass
    infos = [p.name for p in root.glob(f"{PACKAGE}-*.dist-info")]
    return infos[0].removeprefix(f"{PACKAGE}-").removesuffix(".dist-info") if len(infos) == 1 else None
