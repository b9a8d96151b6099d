"""Which of the callables that we replace or mirror differ between two SGLang releases, and how."""

from __future__ import annotations

import ast
import difflib
import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zos_sglang.patchset.source import Definition, locate

Status = Literal["same", "changed", "gone", "new"]


@dataclass(frozen=True)
class Change:
    """One target in two releases. `elsewhere`: where a callable of its name stands, if it is gone."""

    target: str
    status: Status
    added: int = 0
    removed: int = 0
    diff: str = ""
    elsewhere: tuple[str, ...] = ()


def compare(base: Path, other: Path, targets: Iterable[str], names: tuple[str, str]) -> list[Change]:
    """Every target in the order given; `names` are what the diffs call the two releases.

    As for a fingerprint, decorators, blank lines and trailing white space do not count.

    Raises:
        PatchError: a file cannot be read.
    """
    return [_change(base, other, target, names) for target in targets]


def _change(base: Path, other: Path, target: str, names: tuple[str, str]) -> Change:
    was, now = locate(base, target), locate(other, target)
    if now is None:
        return Change(target, "gone", elsewhere=_elsewhere(other, target.rsplit(".", 1)[1]))
    if was is None:
        return Change(target, "new", added=len(_counted(now.text)))
    old, new = _counted(was.text), _counted(now.text)
    if old == new:
        return Change(target, "same")
    marks = difflib.ndiff(old, new)
    signs = [line[0] for line in marks]
    head = (f"{target} {names[0]}", f"{target} {names[1]}")
    lines = difflib.unified_diff(old, new, *head, lineterm="")
    return Change(target, "changed", signs.count("+"), signs.count("-"), "\n".join(lines))


def _counted(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _elsewhere(root: Path, name: str) -> tuple[str, ...]:
    """Files that define something of this name: where it may have gone."""
    wanted = re.compile(rf"^\s*(?:async )?(?:def|class) {re.escape(name)}\b", re.MULTILINE)
    found = []
    for path in sorted((root / "sglang" / "srt").rglob("*.py")):
        if wanted.search(path.read_text(encoding="utf-8", errors="replace")):
            found.append(str(path.relative_to(root)))
    return tuple(found[:5])


def lost_names(base: Path, other: Path, ours: Path) -> dict[str, tuple[str, ...]]:
    """Names that our code uses, that occur in the base release, and nowhere in the other: name to our files.

    A name is an attribute, an imported one, or a text that could be looked up; what we define ourselves does
    not count. A callable that we do not hook may rename what we read, and no hook changes by it; this finds
    it. One that kept its name and changed its meaning is found by no text: for that the test matrix runs.
    """
    used: dict[str, set[str]] = {}
    own: set[str] = set().union(*(_defined(path) for path in ours.parent.rglob("*.py")))
    for path in sorted(ours.rglob("*.py")):
        for name in _names(path):
            used.setdefault(name, set()).add(path.relative_to(ours.parent).as_posix())
    lost = ((_words(base) - _words(other)) & set(used)) - own - set(errno.errorcode.values())
    return {name: tuple(sorted(used[name])) for name in sorted(lost)}


def _names(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            found |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            # A name that is looked up by getattr.
            found.add(node.value)
    return found


def _defined(path: Path) -> set[str]:
    """Functions, classes and enumeration members of a file of ours."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, Definition):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            assigned = [n for n in node.body if isinstance(n, ast.Assign)]
            found |= {t.id for n in assigned for t in n.targets if isinstance(t, ast.Name)}
    return found


def _words(root: Path) -> set[str]:
    """Every word of the runtime's source; module names count too."""
    found: set[str] = set()
    for path in (root / "sglang" / "srt").rglob("*.py"):
        found.add(path.stem)
        found.update(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8", errors="replace")))
    return found
