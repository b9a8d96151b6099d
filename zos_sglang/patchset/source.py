"""Callables of an SGLang tree, found in its source without importing it."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from zos_sglang.patchset.errors import PatchError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Found:
    """A function or class as it stands in a file. `first_line` counts from 1 and includes decorators."""

    path: str
    name: str
    first_line: int
    text: str


def locate(root: Path, target: str) -> Found | None:
    """The definition behind a dotted path below the folder that holds sglang/, or None.

    A module that only passes a name on is seen through; a class is not searched for what it inherits, since a
    hook stands where the function is defined.

    Raises:
        PatchError: the file cannot be read or is no Python.
    """
    split = _module(root, target)
    if split is None:
        return None
    path, names = split
    found: Definition | None = None
    body: list[ast.stmt] = list(_parsed(root / path).body)
    for depth, name in enumerate(names):
        found = next(
            (node for node in _flat(body) if isinstance(node, Definition) and node.name == name), None
        )
        if found is None:
            origin = _imported(body, name) if depth == 0 else None
            return locate(root, ".".join([origin, *names[1:]])) if origin else None
        body = list(found.body)
    assert found is not None
    lines = _lines(root / path)
    first = min([found.lineno, *(d.lineno for d in found.decorator_list)])
    text = textwrap.dedent("\n".join(lines[found.lineno - 1 : found.end_lineno]))
    return Found(path, names[-1], first, text)


def last_import(root: Path, path: str) -> int:
    """The line of the last `from sglang... import` at the top level of a file, 0 where there is none."""
    found = [
        node.end_lineno or node.lineno
        for node in _parsed(root / path).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")
    ]
    return max(found, default=0)


def _module(root: Path, target: str) -> tuple[str, list[str]] | None:
    """`a.b.C.d` as the path of module a.b, relative to the root, and the names in it."""
    parts = target.split(".")
    for end in range(len(parts) - 1, 0, -1):
        stem = "/".join(parts[:end])
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if (root / path).is_file():
                return path, parts[end:]
    return None


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements with those under `if` and `try`, where a definition may stand too."""
    flat: list[ast.stmt] = []
    for node in body:
        flat.append(node)
        if isinstance(node, ast.If | ast.Try):
            flat += _flat([*node.body, *node.orelse])
    return flat


def _imported(body: list[ast.stmt], name: str) -> str | None:
    for node in _flat(body):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("sglang"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return f"{node.module}.{alias.name}"
    return None


@lru_cache(maxsize=64)
def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise PatchError(f"{path}: {error}") from error


def _lines(path: Path) -> list[str]:
    # Not `splitlines`: a form feed ends no line for Python's parser.
    return path.read_text(encoding="utf-8").split("\n")
