"""`python -m zos_sglang patches diff`: what a release nobody prepared for changed in what we hook."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

import zos_sglang
from zos_sglang.console import console
from zos_sglang.patchset import fetch
from zos_sglang.patchset.diff import Change, compare, lost_names
from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.tree import Tree, find

OURS = Path(zos_sglang.__file__).parent / "upstream"
_TEXT = (
    "Compare every callable that zos-sglang replaces or mirrors, and every name of SGLang's that it uses, "
    "between a supported release and another one, from their sources. Exit codes: 0 nothing changed, "
    "1 something did, 2 sources that cannot be had."
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    command = commands.add_parser(
        "diff", help="what another release changed in what we hook", description=_TEXT
    )
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--release", metavar="X", help="fetched with pip into .cache/sglang, once")
    which.add_argument("--tree", type=Path, metavar="DIR", help="site-packages or a git checkout")
    which.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel that is there")
    command.add_argument("--base", metavar="X", help="compare with this one (default: the newest supported)")
    command.add_argument("--short", action="store_true", help="the table without the diffs")
    command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")
    command.set_defaults(show=run)


def run(args: argparse.Namespace) -> int:
    """Compare and print; returns the exit code."""
    from zos_sglang.upstream.hooks import HOOKS
    from zos_sglang.upstream.versions import SUPPORTED

    try:
        base = _base(args.base or SUPPORTED[-1])
        other = _other(args)
        names = (base.release or str(base.root), other.release or str(other.root))
        changes = compare(base.root, other.root, [hook.target for hook in HOOKS], names)
        lost = lost_names(base.root, other.root, OURS)
    except PatchError as error:
        if args.json:
            print(json.dumps({"error": str(error)}, indent=2))
        print(f"zos-sglang: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        report = {
            "base": names[0],
            "other": names[1],
            "hooks": [asdict(c) for c in changes],
            "lost_names": lost,
        }
        print(json.dumps(report, indent=2))
    else:
        _show(changes, lost, names, args.short)
    return 1 if lost or any(change.status != "same" for change in changes) else 0


def _base(release: str) -> Tree:
    here = fetch.installed()
    return here if here is not None and here.release == release else fetch.from_release(release)


def _other(args: argparse.Namespace) -> Tree:
    if args.tree is not None:
        return find(args.tree)
    return fetch.from_wheel(args.wheel) if args.wheel is not None else fetch.from_release(args.release)


def _show(
    changes: list[Change], lost: dict[str, tuple[str, ...]], names: tuple[str, str], short: bool
) -> None:
    out = console()
    if not short:
        for change in changes:
            if change.diff:
                out.print(change.diff, "", markup=False, soft_wrap=True)
    table = Table("status", "lines", "callable", title=f"SGLang {names[0]} to {names[1]}")
    table.columns[-1].overflow = "fold"
    for change in changes:
        lines = f"+{change.added} -{change.removed}" if change.status == "changed" else ""
        table.add_row(change.status, lines, change.target)
    out.print(table)
    for change in changes:
        if change.elsewhere:
            name = change.target.rsplit(".", 1)[1]
            out.print(f"A {name} stands in {', '.join(change.elsewhere)}.", soft_wrap=True)
    if lost:
        out.print(f"Names that zos_sglang/upstream uses and SGLang {names[1]} does not have:")
        for name, files in lost.items():
            out.print(f"  {name} ({', '.join(files)})", markup=False, soft_wrap=True)
    same = sum(change.status == "same" for change in changes)
    out.print(f"{same} of {len(changes)} callables are the same; {len(lost)} names are missing.")
