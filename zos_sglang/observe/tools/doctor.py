"""`doctor FLAGS`: what a server with these flags will do. `doctor URL`: what a running one does, and why."""

from __future__ import annotations

import argparse
import json
from typing import Any

from zos_sglang.console import console
from zos_sglang.observe.errors import ToolError
from zos_sglang.observe.remote import look
from zos_sglang.observe.tools import doctor_flags, doctor_server

TEXT = (
    "Say whether overlap and the resident lane are in effect, which rule in whose code turns them off, and "
    "what to change: for the flags of a server, before it starts (python -m zos_sglang doctor --model-path "
    "... and any other flag), or for the server at URL, with what happened so far."
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    # No abbreviations, no positional arguments: everything else belongs to SGLang, and stays in order.
    parser = commands.add_parser(
        "doctor",
        help="whether overlap and the lane are in effect, and if not, why and what to change",
        description=TEXT,
        usage="zos-sglang doctor [--json] (URL [--api-key K] [--rank N] | SGLANG FLAGS)",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--api-key", help="of the server at URL")
    parser.add_argument("--rank", type=int, default=0, help="data-parallel rank of the server at URL")
    parser.set_defaults(show=run, rest=[])


def run(args: argparse.Namespace) -> int:
    """Examine what was named, and print it."""
    if not args.rest:
        raise ToolError("doctor: name a server (http://HOST:PORT), or give its flags (--model-path ...)")
    found: dict[str, Any]
    if args.rest[0].startswith("-"):
        found, show = doctor_flags.examine(args.rest), doctor_flags.show
    elif len(args.rest) > 1:
        raise ToolError(f"doctor: a server's address stands alone; what is {args.rest[1]} for?")
    else:
        found, show = doctor_server.examine(look(args.rest[0], args.api_key, args.rank)), doctor_server.show
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found, console())
    return 0
