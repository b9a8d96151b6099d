"""Metadata of a distribution that is not installed, by which SGLang finds a plugin or another version."""

from __future__ import annotations

import os
from pathlib import Path

from zos_sglang.testing.server import cpu_env


def distribution(folder: Path, name: str, version: str, entries: str = "") -> dict[str, str]:
    """Make metadata of a distribution that comes first on the path; returns the environment for it.

    Args:
        entries: its entry_points.txt.
    """
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)
    return {"PYTHONPATH": os.pathsep.join([str(folder), cpu_env()["PYTHONPATH"]])}
