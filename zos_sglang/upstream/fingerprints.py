"""Fingerprints of upstream callables: has what we replace or mirror changed since we read it?"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
import re
import textwrap
from typing import Any

_DECORATORS = re.compile(r"\A.*?(?=^(?:async )?(?:def|class) )", re.MULTILINE | re.DOTALL)


def resolve(target: str) -> Any:
    """The object behind a dotted path.

    Raises:
        ImportError, AttributeError: upstream moved or removed it.
    """
    return pkgutil.resolve_name(target)


def fingerprint(obj: Any) -> str:
    """Hash of signature and source of a callable or class, decorators and wrappers taken off.

    Trailing white space and blank lines do not count; every other character of the source does.

    Raises:
        OSError: the source is not there (a compiled or zipped installation).
    """
    inner = inspect.unwrap(obj)
    source = textwrap.dedent(inspect.getsource(inner))
    # From the `def` on: decorators are seen through, and our source patches add one.
    source = _DECORATORS.sub("", source, count=1)
    lines = [line.rstrip() for line in source.splitlines() if line.strip()]
    # Names and kinds only: the text of a default may hold an address.
    signature = [f"{p.name}:{p.kind.name}" for p in inspect.signature(inner).parameters.values()]
    text = "\n".join([*signature, *lines])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
