"""Calls into zos-sglang (zero-overhead scheduling), if it is installed and ZOS_MODE is set.

Without the package, or with ZOS_MODE unset, every decorated function passes its call on unchanged.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any


def _load(path: str) -> Callable[..., Any] | None:
    """The hook behind a dotted path, or None where nobody asked for it or it is not installed."""
    if os.environ.get("ZOS_MODE", "off") in ("", "off"):
        return None
    try:
        return importlib.import_module("zos_sglang.plugin").from_source(path)
    except ImportError:
        return None


def hook(kind: str, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function with a hook of zos-sglang, looked up when the function is called.

    ``kind`` is "around" (the hook gets the function and calls it), "before" (the hook sees the
    arguments first) or "after" (the hook gets the result and may replace it).
    """

    def decorate(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            call = _load(path)
            if call is None:
                return original(*args, **kwargs)
            if kind == "around":
                return call(original, *args, **kwargs)
            if kind == "before":
                call(*args, **kwargs)
                return original(*args, **kwargs)
            result = original(*args, **kwargs)
            changed = call(result, *args, **kwargs)
            return result if changed is None else changed

        hooked.__zos_hook__ = path
        return hooked

    return decorate
