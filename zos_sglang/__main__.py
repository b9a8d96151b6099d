"""``python -m zos_sglang``, also installed as ``zos-sglang``: look at settings and hooks."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zos_sglang import __version__
from zos_sglang.settings import Row, SettingsError, as_json, as_text, rows


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2 for settings that cannot be used)."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        args.show(args.json)
    except SettingsError as error:
        print(f"zos-sglang: error: {error}", file=sys.stderr)
        return 2
    return 0


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
        ("patches", show_patches, "every SGLang callable that we replace, why, and whether it is"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="as JSON")
        command.set_defaults(show=show)
    return parser


def show_settings(as_json_text: bool) -> None:
    """Print the settings of this environment."""
    table = rows(os.environ)
    if as_json_text:
        print(json.dumps(as_json(table), indent=2))
        return
    shown = Table("variable", "value", "from", "default", "allowed", "help", show_lines=True)
    for row in table:
        shown.add_row(row.name, _text(row.value), row.source, _text(row.default), *_about(row))
    _console().print(shown)


def show_patches(as_json_text: bool) -> None:
    """Print the hook table, as this SGLang and this environment have it."""
    from zos_sglang.upstream.hooks import table

    columns = ("target", "kind", "replacement", "why", "remove_when", "status", "detail")
    hooks = [{c: getattr(hook, c) for c in columns} for hook in table()]
    if as_json_text:
        print(json.dumps(hooks, indent=2, default=str))
        return
    titles = ("target", "kind", "replacement", "why", "not needed when", "status", "detail")
    shown = Table(*titles, show_lines=True)
    for hook in hooks:
        shown.add_row(*(_text(hook[c]) for c in columns))
    _console().print(shown)


def _console() -> Console:
    """Wide where the output is no terminal: a log should hold whole names."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def _about(row: Row) -> tuple[str, str]:
    return row.allowed, f"{row.help} Flag: {row.flag}."


def _text(value: Any) -> str:
    return "unset" if value is None else as_text(value)


if __name__ == "__main__":
    sys.exit(main())
