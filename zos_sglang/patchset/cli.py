"""`python -m zos_sglang patches apply|check|revert|diff`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zos_sglang.patchset import diff_cli, transaction
from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.state import State, TreeState, choose
from zos_sglang.patchset.tree import find

#: Of a checkout of zos-sglang; the installed package carries no patches.
FOLDER = Path(__file__).parents[2] / "patches"
CHECK_CODES = {State.APPLIED: 0, State.ORIGINAL: 1, State.FOREIGN: 2, State.HALF: 3}

_TREE = "site-packages (or another folder with sglang/ in it), or a git checkout with python/sglang"
_TEXTS = {
    "apply": (
        "patch an SGLang: all files or none",
        "Verify the release and the hash of every file, keep the originals in sglang/.zos_patches, and put "
        "the patched files in their place: all of them or none. What is applied already stays; what an "
        "interrupted run left half applied is completed. Exit codes: 0 applied (or it was already), 2 "
        "refused, nothing changed.",
    ),
    "revert": (
        "take the patches out again: byte-identical files",
        "Put the original files back, byte for byte, from a patched or a half patched tree. Exit codes: 0 "
        "reverted (or nothing was applied), 2 refused, nothing changed.",
    ),
    "check": (
        "say whether an SGLang is patched, can be, or neither",
        "Compare the hash of every file with the patch set of the release. Changes nothing. Exit codes: "
        "0 applied, 1 not applied and can be, 2 neither (another release, or changed files), 3 half applied "
        "(apply or revert repairs it).",
    ),
}


def add(patches: argparse.ArgumentParser) -> None:
    """Add the subcommands to `patches`, which keeps its meaning without one."""
    commands = patches.add_subparsers(dest="patches_command", metavar="apply|check|revert|diff")
    for name, run in (("apply", run_apply), ("check", run_check), ("revert", run_revert)):
        short, text = _TEXTS[name]
        command = commands.add_parser(name, help=short, description=text)
        command.add_argument("--tree", type=_folder, required=True, metavar="DIR", help=_TREE)
        command.add_argument("--release", metavar="X", help="where the tree does not state it; hashes decide")
        command.add_argument("--patches", type=Path, default=FOLDER, metavar="DIR", help="the patch sets")
        # Not to take back a --json that stands before the subcommand.
        command.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON")
        if name != "check":
            command.add_argument("--dry-run", action="store_true", help="change nothing, say what would")
        command.set_defaults(show=_answering(run))
    diff_cli.add(commands)


def _folder(text: str) -> Path:
    """A folder by its name; an empty one, say of an unset shell variable, is not the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a folder")
    return Path(text)


def run_apply(args: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """Patch the tree."""
    nothing = "applied already: {}, nothing changed"
    return _change(args, State.APPLIED, transaction.apply, ("would patch", "patched"), nothing)


def run_revert(args: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """Take the patches out."""
    nothing = "nothing to revert: {} is as released"
    return _change(args, State.ORIGINAL, transaction.revert, ("would put back", "put back"), nothing)


def _change(
    args: argparse.Namespace,
    wanted: State,
    change: Callable[[TreeState], list[str]],
    verbs: tuple[str, str],
    nothing: str,
) -> tuple[int, dict[str, Any], str]:
    """Bring the tree to a state, or with --dry-run say what that would do."""
    found = _found(args)
    was, what = found.state, f"SGLang {found.patches.release} in {found.tree.root}"
    if args.dry_run:
        files = [file.target.path for file in transaction.pending(found, wanted)]
    else:
        files = change(found)
    text = nothing.format(what)
    if files:
        text = f"{verbs[not args.dry_run]} {what}: {len(files)} files"
        text += " (it was half applied)" if was is State.HALF else ""
    return 0, _report(found, wanted, files, args), text


def run_check(args: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """Say what state the tree is in."""
    found = choose(find(args.tree), args.patches, args.release)
    lines = [f"SGLang {found.patches.release} in {found.tree.root}: {found.state}"]
    lines += [f"  {file.target.path}: {file.problem or file.state}" for file in found.files]
    report = {
        "release": found.patches.release,
        "tree": str(found.tree.root),
        "state": str(found.state),
        "files": {f.target.path: {"state": str(f.state), "problem": f.problem} for f in found.files},
    }
    return CHECK_CODES[found.state], report, "\n".join(lines)


def _found(args: argparse.Namespace) -> TreeState:
    found = choose(find(args.tree), args.patches, args.release)
    found.refuse_foreign()
    return found


def _report(found: TreeState, goal: State, files: list[str], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "release": found.patches.release,
        "tree": str(found.tree.root),
        "before": str(found.state),
        "state": str(found.state if args.dry_run else goal),
        "dry_run": args.dry_run,
        "files": files,
    }


def _answering(
    run: Callable[[argparse.Namespace], tuple[int, dict[str, Any], str]],
) -> Callable[[argparse.Namespace], int]:
    """Print what a subcommand found, or why it refused, as text or JSON."""

    def show(args: argparse.Namespace) -> int:
        try:
            code, report, text = run(args)
        except PatchError as error:
            if args.json:
                print(json.dumps({"error": str(error)}, indent=2))
            print(f"zos-sglang: error: {error}", file=sys.stderr)
            return 2
        print(json.dumps(report, indent=2) if args.json else text)
        return code

    return show
