"""``python -m zos_sglang.launch_server``: SGLang's launcher with the plugin switched on.

Takes every SGLang flag unchanged and one group of its own, made from the settings. A flag beats
its variable; a command-line flag beats SGLang's ``--config`` file. Mode ``resident`` is the
default here. What we refuse ourselves ends with one message on stderr and exit code 2.

Nothing of SGLang is imported at the top: child processes import this module again, and a wrong
setting should be told at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from zos_sglang.missing import told
from zos_sglang.modes import Mode

try:
    from zos_sglang.settings import (
        Settings,
        SettingsError,
        allowed,
        as_text,
        choices,
        did_you_mean,
        env_name,
        flag_name,
        is_path,
        is_switch,
    )
    from zos_sglang.upstream import preflight
    from zos_sglang.upstream.cpu_start import ON_A_CPU
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(told(error))

PROG = "python -m zos_sglang.launch_server"
GROUP = "zero-overhead scheduling"
#: How SGLang's message of a machine without a device begins.
NO_DEVICE = "No accelerator"
DEFAULT_MODE: Mode = "resident"
CONFIG_FLAG = "--config"


class ConfigFileError(ValueError):
    """SGLang's --config file cannot be used."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting. Values stay text here; :class:`Settings` judges them."""
    group = parser.add_argument_group(GROUP, "Each flag beats the environment variable that its help names.")
    for field, info in Settings.model_fields.items():
        default = DEFAULT_MODE if field == "mode" else info.default
        shown = "unset" if default is None else as_text(default)
        text = f"{info.description} [{allowed(field)}; default {shown}; {env_name(field)}]"
        group.add_argument(
            flag_name(field),
            dest=_dest(field),
            default=argparse.SUPPRESS,
            nargs="?" if is_switch(field) else None,
            const="1" if is_switch(field) else None,
            metavar=_metavar(field),
            help=text.replace("%", "%%"),
        )


def split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Our flags (field to text) and the rest, which is SGLang's.

    Raises :class:`SettingsError` for a --zos flag that does not exist.
    """
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    add_arguments(parser)
    ours, rest = parser.parse_known_args(list(argv))
    flags = [flag_name(field) for field in Settings.model_fields]
    for word in rest:
        if word.startswith("--zos-"):
            name = word.partition("=")[0]
            raise SettingsError(
                f"{name}: there is no such flag.{did_you_mean(name, flags)} All: {', '.join(flags)}."
            )
    given = vars(ours)
    return {f: given[_dest(f)] for f in Settings.model_fields if _dest(f) in given}, rest


def full_parser() -> argparse.ArgumentParser:
    """SGLang's parser with our group: what --help shows and a --config file is read against."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog=PROG)
    add_arguments(parser)
    ServerArgs.add_cli_args(parser)
    return parser


def merge_config(argv: list[str]) -> list[str]:
    """The arguments with SGLang's --config file folded in. Raises :class:`ConfigFileError`."""
    if CONFIG_FLAG not in argv:
        return argv
    import yaml
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    try:
        return list(ConfigArgumentMerger(full_parser()).merge_config_with_args(argv))
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise ConfigFileError(f"{CONFIG_FLAG}: {error}") from error


def prepare(argv: list[str]) -> tuple[Settings, list[str]]:
    """Judge everything that can be judged before SGLang starts.

    Returns the settings and SGLang's own arguments. Raises SettingsError, PreflightError or
    ConfigFileError.
    """
    preflight.check_platform(os.environ)
    argv = merge_config(argv)
    flags, rest = split(argv)
    settings = Settings.load(os.environ, flags, DEFAULT_MODE)
    if settings.mode != "off":
        preflight.check_version()
        preflight.check_plugin(os.environ)
    # Unknown flags may belong to another plugin, which is not loaded yet: SGLang decides later.
    args, _ = full_parser().parse_known_args(rest)
    if settings.mode != "off":
        preflight.check_launcher(args)
    preflight.check_arguments(args)
    preflight.check_trace(settings.trace)
    return settings, rest


def serve(argv: list[str]) -> None:
    """Run SGLang's server with its own arguments until it ends, as its own launcher does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        full_parser().print_help()
        return 0
    try:
        settings, rest = prepare(arguments)
    except (SettingsError, preflight.PreflightError, ConfigFileError) as error:
        print(f"zos-sglang: error: {error}", file=sys.stderr)
        return 2
    settings.export(os.environ)
    try:
        serve(rest)
    except RuntimeError as error:
        if not str(error).startswith(NO_DEVICE):
            raise
        print(f"zos-sglang: error: {error} {ON_A_CPU}", file=sys.stderr)
        return 2
    return 0


def _metavar(field: str) -> str:
    if words := choices(field):
        return "{" + ",".join(words) + "}"
    return "0|1" if is_switch(field) else "FILE" if is_path(field) else "FAULTS" if field == "fault" else "N"


def _dest(field: str) -> str:
    return f"zos_{field}"


if __name__ == "__main__":
    try:
        code = main()
    except ModuleNotFoundError as error:
        code = told(error)
    sys.exit(code)
