#!/usr/bin/env python3
"""Draws the figures of the README and of docs/benchmarks.md from bench/results/*.json.

    python scripts/plot_results.py [--out docs/images]
    python scripts/plot_results.py --check      # exit code 1 if a picture shows other data

The same data give the same bytes; a picture carries a digest of what it shows, which --check compares.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zos_sglang.testing.docs import picture
from zos_sglang.testing.docs.result_figures import figures

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--check", action="store_true", help="draw nothing; say which pictures are stale")
    args = parser.parse_args()
    wanted = {args.out / name: found for name, found in figures(args.results).items()}
    if args.check:
        stale = picture.stale(wanted)
        for path in stale:
            print(f"{path}: shows other data; run scripts/plot_results.py", file=sys.stderr)
        print(f"{len(wanted) - len(stale)} of {len(wanted)} pictures show what the results hold")
        return 1 if stale else 0
    for path, (data, draw) in wanted.items():
        picture.write(path, data, draw)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
