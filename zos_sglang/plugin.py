"""Entry point of group `sglang.srt.plugins`: SGLang calls `register` once in every process it starts."""

from __future__ import annotations

import functools
import importlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zos_sglang.settings import PREFIX, Settings, SettingsError

if TYPE_CHECKING:
    from zos_sglang.upstream.hooks import Process

logger = logging.getLogger(__name__)

_SCHEDULER_MODULE = "sglang.srt.managers.scheduler"
_DETOKENIZER_MODULE = "sglang.srt.managers.detokenizer_manager"
_HTTP_MODULE = "sglang.srt.entrypoints.http_server"

#: Processes that `register` has been called in: this one, or none.
_called: set[int] = set()


def register() -> None:
    """Register the hooks of this process; do nothing unless ZOS_MODE asks for it.

    Raises:
        SystemExit: bad settings, or, under ZOS_STRICT=1, an SGLang that we do not know. An ordinary
            exception would be logged by SGLang and the server would start without us.
    """
    _called.add(os.getpid())
    wanted = bool(os.environ.get("ZOS_MODE", "").strip())
    if not wanted and not any(name.startswith(PREFIX) for name in os.environ):
        return
    try:
        settings = Settings.from_env(os.environ)
    except SettingsError as error:
        if not wanted:
            logger.warning("zos-sglang is inactive, ZOS_MODE is not set: %s", error)
            return
        print(f"zos-sglang: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    if settings.mode in (None, "off"):
        return
    from zos_sglang.upstream import entry, hooks
    from zos_sglang.upstream.runtime import runtime

    runtime.settings = settings
    for process in _roles():
        if problem := hooks.unknown_upstream(process):
            try:
                entry.step_aside(problem)
            except entry.UnusableError as error:
                print(error, file=sys.stderr, flush=True)
                raise SystemExit(2) from None
            return
        hooks.register(process)


def from_source(path: str) -> Callable[..., Any] | None:
    """The hook behind a dotted path, or None, said once; for SGLang's source (`patches/zos_hooks.py`).

    Its plugin loader may have passed us over (SGLANG_PLUGINS, no entry point); then the first hook of the
    process reads the settings and looks at the release, as the loader's call would have.

    Raises:
        SystemExit: as `register`.
    """
    if os.getpid() not in _called:
        register()
        from zos_sglang.upstream import hooks

        if missing := [target for process in _roles() for target in hooks.not_in_source(process)]:
            logger.warning(
                "zos-sglang: this SGLang's source patches lack %s, which do nothing here; apply the patches "
                "of this zos-sglang",
                ", ".join(missing),
            )
    return _found(path)


@functools.cache
def _found(path: str) -> Callable[..., Any] | None:
    module, name = path.rsplit(".", 1)
    found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    if found is None:
        logger.warning("zos-sglang: this SGLang's source patches are of another zos-sglang: no %s", path)
    return found


def _roles() -> list[Process]:
    """Which tables apply here: SGLang's children import what they run before they load plugins.

    A server started in somebody's child process has imported neither yet, or the HTTP server too.
    """
    if multiprocessing.parent_process() is None:
        return ["main"]
    scheduler = _SCHEDULER_MODULE in sys.modules
    front = _HTTP_MODULE in sys.modules or not (scheduler or _DETOKENIZER_MODULE in sys.modules)
    return [*(["main"] if front else []), *(["scheduler"] if scheduler else [])]  # type: ignore[list-item]
