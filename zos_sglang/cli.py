"""Commands of ``python -m zos_sglang``: settings, hooks, and what a server does."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from zos_sglang import __version__, settings_page
from zos_sglang.console import console
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.tools import TOOLS
from zos_sglang.patchset import cli as patchset
from zos_sglang.settings import Row, SettingsError, as_json, as_text, rows


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2 for what cannot be used: settings, a server, a file)."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    # Flags of another program (SGLang's, for doctor); every other command knows all of its own.
    if hasattr(args, "rest"):
        args.rest = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.show(args) or 0
    except (SettingsError, ToolError) as error:
        print(f"zos-sglang: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zos-sglang",
        description="Zero-overhead scheduling for SGLang.",
        epilog="To serve a model: python -m zos_sglang.launch_server --help",
    )
    parser.add_argument("--version", action="version", version=f"zos-sglang {__version__}")
    commands = parser.add_subparsers(dest="command")
    for name, show, text in (
        ("settings", show_settings, "every ZOS_* variable with its value and where it came from"),
        (
            "patches",
            show_patches,
            "every SGLang callable that we replace, why, and whether it fits this SGLang",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="as JSON")
        command.set_defaults(show=show)
    commands.choices["settings"].add_argument(
        "--markdown", action="store_true", help="as docs/settings.md: names, allowed values, defaults"
    )
    patches = commands.choices["patches"]
    patches.add_argument(
        "--fingerprints", action="store_true", help="of this SGLang, to add a release to the table"
    )
    patchset.add(patches)
    for tool in TOOLS:
        tool.add(commands)
    return parser


def show_settings(args: argparse.Namespace) -> None:
    """Print the settings of this environment, or the page that documents them."""
    if args.markdown:
        print(settings_page.page(), end="")
        return
    table = rows(os.environ)
    if args.json:
        print(json.dumps(as_json(table), indent=2))
        return
    shown = Table("variable", "value", "from", "default", "allowed", "help", show_lines=True)
    for column, width in zip(shown.columns[-2:], (50, 70), strict=True):
        column.max_width = width  # prose, which no line need hold whole
    for row in table:
        # A value may look like markup: it is what somebody set.
        shown.add_row(row.name, escape(_text(row.value)), row.source, _text(row.default), *_about(row))
    console().print(shown)


def show_patches(args: argparse.Namespace) -> None:
    """Print the hook table, as this SGLang and this environment have it."""
    from zos_sglang.upstream import hooks
    from zos_sglang.upstream.fingerprints import fingerprint, resolve
    from zos_sglang.upstream.versions import installed

    if args.fingerprints:
        found = {h.target: fingerprint(resolve(h.target)) for h in hooks.hooks_of(installed())}
        print(json.dumps({installed(): found}, indent=2))
        return
    table = [asdict(hook) for hook in hooks.table()]
    if args.json:
        print(json.dumps(table, indent=2))
        return
    for hook in table:
        console().print(_card(hook), "")


def _card(hook: dict[str, str]) -> Table:
    """One hook as a block: dotted names are too long for columns side by side."""
    card = Table.grid(padding=(0, 2))
    for title, text in (
        (hook["kind"], hook["target"]),
        ("with" if hook["kind"] != "mirror" else "by", hook["replacement"]),
        ("why", hook["why"]),
        ("not needed when", hook["remove_when"]),
        ("status", f"{hook['status']} ({hook['detail']})"),
    ):
        card.add_row(f"[bold]{title}[/bold]", escape(text))
    return card


def _about(row: Row) -> tuple[str, str]:
    return row.allowed, f"{row.help} Flag: {row.flag}."


def _text(value: Any) -> str:
    return "unset" if value is None else as_text(value)
