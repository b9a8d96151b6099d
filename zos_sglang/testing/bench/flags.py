"""Flags that the measuring commands share, and what their words mean."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from zos_sglang.settings import PREFIX, Settings
from zos_sglang.testing.bench.client import BenchError
from zos_sglang.testing.bench.serve import SHAPES, TINY
from zos_sglang.testing.bench.stats import TooFewSteps
from zos_sglang.testing.models import ModelError
from zos_sglang.testing.server import ServerFailed

#: Decode batch sizes that get a CUDA graph where requests come and go.
GRAPHS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
#: What a command cannot go on after: one line on stderr, exit code 2.
FAILURES = (ServerFailed, BenchError, ModelError, TooFewSteps, httpx.HTTPError, OSError, ValueError)


def model_flags(parser: argparse.ArgumentParser) -> None:
    """--model, --attention, --cache and --start-timeout-s."""
    add = parser.add_argument
    add("--model", default=TINY, help=f"{TINY}, {', '.join(SHAPES)} or a folder ({TINY})")
    add("--attention", help="triton or fa3 (triton on CUDA, torch_native on the CPU)")
    add("--cache", type=Path, default=Path(".cache"), help="where models are kept (.cache)")
    add("--start-timeout-s", type=float, default=420, help="for each server (420)")


def server_flags(parser: argparse.ArgumentParser) -> None:
    """What else a server is started with: --dtype, --graphs, --prefill-graphs, --env and --server-args."""
    add = parser.add_argument
    add("--dtype", help="(bfloat16 on CUDA, float32 on the CPU)")
    add("--graphs", choices=("on", "off"), default="on", help="CUDA graphs of decode; no effect on a CPU")
    add("--prefill-graphs", action="store_true", help="CUDA graphs of prefills, too: a longer start")
    env_flag(parser)
    add("--server-args", default="", help="more flags for the server, as one string")


def env_flag(parser: argparse.ArgumentParser) -> None:
    """--env, for the servers of ours that a command starts; text that `pair` takes apart."""
    parser.add_argument(
        "--env", action="append", default=[], type=variable, metavar="K=V", help="for our servers; repeatable"
    )


def variable(text: str) -> str:
    """A type for argparse: NAME=VALUE; a ZOS_ setting is judged here, not by each server that starts."""
    try:
        name, value = pair(text)
        if name.startswith(PREFIX):
            Settings.load({name: value})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def graph_flag(parser: argparse.ArgumentParser) -> None:
    """--graph-batches."""
    found = ",".join(map(str, GRAPHS))
    parser.add_argument("--graph-batches", type=numbers, default=GRAPHS, help=f"({found})")


def json_flag(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def clients_of(args: argparse.Namespace) -> int:
    """Client processes: --clients, or as many as leave the server its cores."""
    return args.clients or (1 if (os.cpu_count() or 1) < 8 else 4)


def is_exact(args: argparse.Namespace, cuda: bool) -> bool:
    """Whether differing answers are a failure: as --exact says, by default in float32 on a CPU."""
    if args.exact is not None:
        return bool(args.exact)
    return not cuda and args.dtype in (None, "float32")


def server_options(args: argparse.Namespace, more: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of `Config` that follow from the flags above; `more` flags come before --server-args."""
    return {
        "attention": args.attention,
        "dtype": args.dtype,
        "graphs": args.graphs == "on",
        "prefill_graphs": args.prefill_graphs,
        "env": dict(pair(text) for text in args.env),
        "args": [*more, *shlex.split(args.server_args)],
    }


def modes_of(known: Sequence[str], least: int = 1) -> Callable[[str], tuple[str, ...]]:
    """A type for argparse: at least so many different modes, of those that are known."""

    def modes(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        if len(set(words)) < max(least, len(words)):
            wanted = "at least two different modes" if least > 1 else "each mode once"
            raise argparse.ArgumentTypeError(f"name {wanted}")
        return words

    return modes


def numbers(text: str) -> tuple[int, ...]:
    """A type for argparse: whole numbers above 0, in order, each once."""
    try:
        found = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        found = (0,)
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of batch sizes such as 1,16,64")
    return found


def positive(text: str) -> int:
    """A type for argparse: a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def rates(text: str) -> tuple[float, ...]:
    """A type for argparse: requests a second, in order, each once."""
    try:
        found = tuple(sorted({float(word) for word in text.split(",")}))
    except ValueError:
        found = (0.0,)
    if not found[0] > 0 or found[-1] == float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rates such as 4,16,64")
    return found


def pair(text: str) -> tuple[str, str]:
    """Name and value of NAME=VALUE. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"--env {text!r}: write NAME=VALUE")
    return name, value
