#!/usr/bin/env python3
"""Make an environment of its own for one SGLang release, with that release's pins."""

from __future__ import annotations

import argparse
import email.parser
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Make it, unless it is there already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", help="for example 0.5.22")
    parser.add_argument("venv", type=Path, help="folder of the environment")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="leave out a requirement of SGLang's that cannot be installed here; repeatable",
    )
    args = parser.parse_args()
    ready = args.venv / ".ready"
    if ready.exists():
        return 0
    python = args.venv / "bin" / "python"
    if not python.exists():
        venv.create(args.venv, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*install, *wanted(args.release, python, args.without)], check=True)
    subprocess.run([*install, "--no-deps", f"sglang=={args.release}"], check=True)
    subprocess.run([*install, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)
    ready.touch()
    return 0


def wanted(release: str, python: Path, without: list[str]) -> list[str]:
    """The release's own requirements as its wheel states them, and what zos-sglang's tests need."""
    with tempfile.TemporaryDirectory() as folder:
        download = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder]
        subprocess.run([*download, f"sglang=={release}"], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("sglang-*.whl"))) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = email.parser.Parser().parsestr(wheel.read(name).decode())
    return [*kept(metadata.get_all("Requires-Dist", []), without), *OURS]


def kept(stated: list[str], without: list[str]) -> list[str]:
    """Requirements of no extra, less those of a named package."""
    left_out = {_plain(name) for name in without}
    names = [_plain(re.split(r"[^\w.-]", requirement)[0]) for requirement in stated]
    pairs = zip(stated, names, strict=True)
    return [text for text, name in pairs if "extra ==" not in text and name not in left_out]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


#: Of setup.py, what smoke needs; SGLang itself comes with the release's own pins.
OURS = (
    *("pyzmq>=25", "pydantic>=2.7", "starlette", "pyyaml", "rich>=13", "prometheus-client>=0.20"),
    *("httpx>=0.27", "psutil", "gguf>=0.10", "pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100"),
    *("setuptools>=68", "wheel"),
)


if __name__ == "__main__":
    sys.exit(main())
