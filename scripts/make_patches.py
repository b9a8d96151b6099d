#!/usr/bin/env python3
"""Write patches/sglang-X/ from the hook table and an unchanged SGLang X, and its file `series`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zos_sglang.patchset import fetch
from zos_sglang.patchset.cli import FOLDER
from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.make import Decorated, make
from zos_sglang.patchset.series import PREFIX
from zos_sglang.upstream.hooks import HOOKS


def main() -> int:
    """Write the folder anew; the README beside it is written by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", help="for example 0.5.23; fetched with pip unless it is installed")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of the patch sets")
    args = parser.parse_args()
    try:
        here = fetch.installed()
        fits = here is not None and here.release == args.release
        tree = here if here is not None and fits else fetch.from_release(args.release)
        hooks = [Decorated(h.target, h.kind, h.replacement) for h in HOOKS if h.kind != "mirror"]
        module = (FOLDER / "zos_hooks.py").read_text(encoding="utf-8")
        files = make(tree.root, hooks, module)
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = args.out / f"{PREFIX}{args.release}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.patch"):
        old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"{folder}: {len(files) - 1} patches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
