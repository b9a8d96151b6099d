"""SGLang's command line, resolved as its launcher does it, without a model's weights and without a server."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from zos_sglang.settings import did_you_mean
from zos_sglang.upstream import cpu_start, preflight
from zos_sglang.upstream.versions import installed

#: Files that describe a model in a folder; SGLang reads the first, other formats have the others.
_DESCRIPTIONS = ("config.json", "params.json", "*.gguf")


class FlagsError(ValueError):
    """Flags that SGLang does not take; ``str()`` is one line for people."""


@dataclass(frozen=True)
class Resolved:
    """What SGLang made of the flags.

    `device` is what the server would run on, `device_here` whether this machine has it, `assumed` whether
    nobody named it and SGLang found none here. `lacking` is what a start here needs and does not have.
    """

    args: Any
    device: str
    device_here: bool
    assumed: bool
    lacking: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagsError(message)


def resolve(argv: Sequence[str]) -> Resolved:
    """Resolve SGLang's own flags. Writes variables of this process, as SGLang's resolution does.

    Raises:
        FlagsError: a flag that SGLang does not know, a value that it does not take, a model that it cannot
            read, or flags that contradict each other.
    """
    with _quiet():
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.server_args import ServerArgs

        given = _parse(ServerArgs, argv)
        _check_model(given)
        device, here = _device(given.device)
        assumed = device is None
        given.device = device = device or "cuda"
        try:
            record = ServerArgs.from_cli_args(given)
            record.resolve_once()
        except (Exception, SystemExit) as error:
            raise FlagsError(
                f"SGLang refuses these flags: {_first_line(error)}{_doubt(device, here, error)}"
            ) from error
        lacking = cpu_start.NO_DEVICE if assumed else cpu_start.lacking(device)
    return Resolved(record, device, here, assumed, lacking)


def _parse(server_args: Any, argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="sglang", add_help=False)
    server_args.add_cli_args(parser)
    given, unknown = parser.parse_known_args(list(argv))
    if unknown:
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise FlagsError(f"{word}: no flag before this word takes it")
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise FlagsError(f"{word}: SGLang {installed()} knows no such flag.{did_you_mean(word, known)}")
    return given


def _check_model(given: argparse.Namespace) -> None:
    paths = {field: getattr(given, field, None) for field in preflight.PATH_FLAGS}
    try:
        # Another node than the first serves no HTTP, so its address is not looked at.
        preflight.check_arguments(argparse.Namespace(**paths, node_rank=1))
    except preflight.PreflightError as error:
        raise FlagsError(str(error)) from error
    folder = Path(str(given.model_path)).expanduser()
    if folder.is_dir() and not any(next(folder.glob(name), None) for name in _DESCRIPTIONS):
        raise FlagsError(f"--model-path {given.model_path}: no config.json in this folder")


def _device(named: str | None) -> tuple[str | None, bool]:
    """The device to resolve for (None: none named and none found), and whether this machine has it."""
    import torch
    from sglang.srt.utils import get_device

    if named is None:
        try:
            return str(get_device()), True
        except Exception:
            return None, False
    kind = named.partition(":")[0]
    module = getattr(torch, kind, None)
    return named, kind == "cpu" or bool(module is not None and module.is_available())


def _doubt(device: str, here: bool, error: BaseException) -> str:
    """What may be the reason of a refusal, if not the flags."""
    if not here:
        return f" (There is no {device} device here, which may be the reason.)"
    if device.startswith("cpu") and isinstance(error, ImportError):
        return f" (--device cpu needs {cpu_start.ENGINE}. {cpu_start.ON_A_CPU})"
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what SGLang says on the way; its complaints come as exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
