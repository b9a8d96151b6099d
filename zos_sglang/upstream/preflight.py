"""What stops a start, found before the model is loaded and said in one message each.

SGLang finds most of these too, but late, behind a traceback of a child process.
"""

import argparse
import errno
import os
import socket
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from zos_sglang.observe.trace_place import not_replaceable
from zos_sglang.settings import shown
from zos_sglang.upstream.cpu_start import ON_A_CPU
from zos_sglang.upstream.versions import SUPPORTED, built_in, installed

GENERAL_PLUGINS = "sglang.srt.plugins"
PLATFORM_PLUGINS = "sglang.srt.platforms"
OUR_ENTRY = "zos_sglang.plugin:register"

PATH_FLAGS = {
    "model_path": "--model-path",
    "tokenizer_path": "--tokenizer-path",
    "speculative_draft_model_path": "--speculative-draft-model-path",
}


class PreflightError(RuntimeError):
    """The server cannot start; ``str()`` is the message for people, with the way out."""


def check_version(version: str | None = None) -> None:
    """Refuse an SGLang release that the hooks do not know."""
    version = version or installed()
    supported = ", ".join(SUPPORTED)
    if version is None:
        raise PreflightError(f"SGLang is not installed. Run: pip install sglang=={SUPPORTED[-1]}")
    if version not in SUPPORTED:
        raise PreflightError(
            f"SGLang {version} is not supported; zos-sglang knows {supported}. Run: pip install "
            f"sglang=={SUPPORTED[-1]}; or start this release as it is with --zos-mode off."
        )


def check_plugin(
    environ: Mapping[str, str],
    plugins: Iterable[EntryPoint] | None = None,
    platforms: Iterable[EntryPoint] | None = None,
) -> None:
    """Refuse where SGLang's plugin loader would pass over us, in this or any child process.

    An SGLang with our source patches calls us without it.
    """
    if built_in():
        return
    plugins = entry_points(group=GENERAL_PLUGINS) if plugins is None else plugins
    platforms = entry_points(group=PLATFORM_PLUGINS) if platforms is None else platforms
    ours = next((e for e in plugins if e.value == OUR_ENTRY), None)
    if ours is None:
        raise PreflightError(
            "the distribution zos-sglang is not installed, so SGLang cannot find its plugin. Run "
            "in its folder: pip install -e ."
        )
    listed = [name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",")]
    if any(listed) and ours.name not in listed:
        raise PreflightError(
            f"SGLANG_PLUGINS={environ['SGLANG_PLUGINS']} does not list {ours.name!r}, so SGLang "
            f"would skip this plugin. Add {ours.name}, or unset SGLANG_PLUGINS."
        )
    platform = environ.get("SGLANG_PLATFORM")
    passed_over = {e.dist.name for e in platforms if e.dist and e.name != platform}
    if platform and ours.dist and ours.dist.name in passed_over:
        raise PreflightError(
            f"SGLANG_PLATFORM={platform}: SGLang skips every plugin of a distribution that also "
            f"carries another platform, and {ours.dist.name} does. Move that platform's entry "
            "point to a distribution of its own, or unset SGLANG_PLATFORM."
        )


def check_platform(environ: Mapping[str, str], platforms: Iterable[EntryPoint] | None = None) -> None:
    """Refuse a platform that is not there: SGLang would say so by a traceback, at its import."""
    platform = environ.get("SGLANG_PLATFORM")
    names = {e.name for e in (entry_points(group=PLATFORM_PLUGINS) if platforms is None else platforms)}
    if platform and platform not in names:
        raise PreflightError(
            f"SGLANG_PLATFORM={shown(platform)}: SGLang finds no platform of this name, only "
            f"{', '.join(sorted(names)) or 'its own'}. Unset it, or install the platform. {ON_A_CPU}"
        )


def check_launcher(args: argparse.Namespace) -> None:
    """Refuse launchers whose schedulers load no plugins: stock would run without a word."""
    if getattr(args, "use_ray", False):
        raise PreflightError(
            "--use-ray: SGLang's Ray schedulers load no plugins, so zos-sglang cannot run in them. Leave "
            "the flag out, or start with --zos-mode off."
        )


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse model folders that are not there and an address that cannot be bound.

    `args` are SGLang's parsed flags, not yet resolved.
    """
    for field, flag in PATH_FLAGS.items():
        value = getattr(args, field, None)
        if value and _is_local_path(value) and not Path(value).exists():
            raise PreflightError(
                f"{flag} {value}: there is no such file or folder. Give the folder of a "
                "Hugging Face model, or a model's name (ORGANISATION/MODEL)."
            )
    # Other nodes than the first serve no HTTP, and workers with SO_REUSEPORT share a used port.
    if not getattr(args, "node_rank", 0) and not getattr(args, "enable_http_worker_reuseport", 0):
        _check_address(args.host, args.port)


def check_trace(trace: str | None) -> None:
    """Refuse a trace that could not be written; `trace` is the setting."""
    if trace is None:
        return
    try:
        problem = _trace_problem(Path(trace))
    except OSError as error:  # a name too long, a loop of links
        problem = f"{error.strerror}. Name another file"
    if problem is not None:
        raise PreflightError(f"ZOS_TRACE={shown(trace)} (--zos-trace): {problem}, or unset it.")


def _trace_problem(path: Path) -> str | None:
    """What is wrong with a trace's file, and the way out; None where it can be written. Raises OSError."""
    folder = path.parent
    if path.is_dir():
        return "this is a folder. Give a file in it, as trace.json"
    if not folder.is_dir():
        return f"there is no folder {shown(str(folder))}. Make it, or name another file"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} cannot be written to. Name a file elsewhere"
    if why_not := not_replaceable(path):
        return f"{why_not}. Remove it, or name another file"
    return None


def _is_local_path(value: str) -> bool:
    """Whether a model is named by a path: `a/b` alone may be a model's name on a hub."""
    if "://" in value:
        return False
    return value.startswith((os.sep, "./", "../", "~")) or value.strip(os.sep).count(os.sep) > 1


def _check_address(host: str, port: int) -> None:
    """Bind as uvicorn will (SO_REUSEADDR: a port in TIME_WAIT is free) and let go again."""
    if not 0 <= port <= 65535:
        raise PreflightError(f"--port {port}: not allowed. Allowed: 0 to 65535.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PreflightError(
            f"--host {host}: no address of this name ({error.strerror}). Use 127.0.0.1 or 0.0.0.0."
        ) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise PreflightError(_why_not_bound(host, port, error)) from error


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: in use on {host}. Stop what listens there, or take another port."
    if error.errno == errno.EACCES:
        return f"--port {port}: this user may not listen on it. Take a port above 1023."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: no address of this machine. Use 127.0.0.1 or 0.0.0.0."
    return f"--host {host} --port {port}: cannot listen there ({error.strerror})."
