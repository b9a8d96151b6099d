"""The whole suite in two parts: what measures times or load by itself, then everything else two at a time."""

from __future__ import annotations

import argparse
import subprocess
import sys

ALONE = "(alone or soak or gpu)"
PARTS = (
    ("what measures, one test after the other", ALONE, []),
    # A server's start takes one core; another one has the other meanwhile.
    ("everything else, two files at a time", f"not {ALONE}", ["-n", "2", "--dist", "loadfile"]),
)
NONE_SELECTED = 5


def main(argv: list[str]) -> int:
    """Run both parts; returns pytest's code of the first that failed, or 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests",
        description=__doc__,
        epilog="Every other argument is pytest's. Ends with pytest's code of the first part that failed; "
        "with 5 if there was no test.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="marks", help="as pytest's: only tests with these marks")
    args, more = parser.parse_known_args(argv)
    codes = []
    for number, (what, part, how) in enumerate(PARTS):
        print(f"== tests: {what}", flush=True)
        marks = f"({args.marks}) and {part}" if args.marks else part
        given = _coverage(more, last=number == len(PARTS) - 1)
        command = [sys.executable, "-m", "pytest", *given, *how, "-m", marks]
        codes.append(subprocess.run(command, check=False).returncode)
    ran = [code for code in codes if code != NONE_SELECTED]
    return next((code for code in ran if code), 0) if ran else NONE_SELECTED


def _coverage(arguments: list[str], last: bool) -> list[str]:
    """The arguments, with coverage that is of both parts and told of at the end, where any is asked for."""
    if not any(one.startswith("--cov") for one in arguments):
        return list(arguments)
    if last:
        return [*arguments, "--cov-append"]
    told = "--cov-report", "--cov-fail-under"
    return [*(one for one in arguments if not one.startswith(told)), "--cov-report="]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
