"""Make the patch set of a release from the hook table: one decorator a hook, one patch a file.

Nothing is written by hand, so a hook cannot be forgotten, and the patches of two releases differ only in
where their lines stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.hunks import split_lines
from zos_sglang.patchset.series import digest
from zos_sglang.patchset.source import last_import, locate

HOOKS_PATH = "sglang/srt/zos_hooks.py"
IMPORT = "from sglang.srt.zos_hooks import hook as zos_hook"
#: What a patch is called after, where the name of its file would say less.
NAMES = {
    "sglang/srt/speculative/spec_info.py": "future-map",
    "sglang/srt/managers/scheduler.py": "scheduler-event-loop",
    "sglang/srt/managers/scheduler_components/dp_attn.py": "dp-attention",
    "sglang/srt/disaggregation/prefill.py": "disaggregation-prefill-loop",
    "sglang/srt/disaggregation/decode.py": "disaggregation-decode-loop",
}


class Decorated(NamedTuple):
    """One hook for the source: the callable, and what its decorator says."""

    target: str
    kind: str
    replacement: str


class Insertion(NamedTuple):
    """A line that is put in behind line `after` (counted from 1; 0 is the beginning)."""

    after: int
    text: str


def make(root: Path, hooks: Iterable[Decorated], module: str) -> Mapping[str, str]:
    """Every file of a patch folder, by name: the patches and the series.

    Args:
        root: the folder that holds an unchanged sglang/.
        hooks: in the order of the table.
        module: the text of `zos_hooks.py`, the only new file.

    Raises:
        PatchError: a hook's target is not there.
    """
    by_file: dict[str, list[Insertion]] = {}
    for hook in hooks:
        found = locate(root, hook.target)
        if found is None:
            raise PatchError(f"{hook.target}: not in {root}")
        line = _lines(root / found.path)[found.first_line - 1]
        indent = line[: len(line) - len(line.lstrip())]
        decorator = f'{indent}@zos_hook("{hook.kind}", "{hook.replacement}")'
        by_file.setdefault(found.path, []).append(Insertion(found.first_line - 1, decorator))
    files = {"0001-zos-hooks.patch": _new_file(HOOKS_PATH, module)}
    series = [_HEAD, *_entry("0001-zos-hooks.patch", HOOKS_PATH, None, module.encode())]
    for number, (path, decorators) in enumerate(by_file.items(), 2):
        before = (root / path).read_bytes()
        insertions = sorted([Insertion(last_import(root, path), IMPORT), *decorators])
        stem = NAMES.get(path, PurePosixPath(path).stem)
        name = f"{number:04}-{stem.replace('_', '-')}.patch"
        files[name], after = _insert(path, before, insertions)
        series += _entry(name, path, before, after)
    return {**files, "series": "\n".join(series) + "\n"}


_HEAD = (
    "# The order, and sha256 of each whole file before (-) and after (+). Made by scripts/make_patches.py."
)


def _entry(name: str, path: str, before: bytes | None, after: bytes) -> list[str]:
    return [name, f"  - {digest(before)} {path}", f"  + {digest(after)} {path}"]


def _new_file(path: str, text: str) -> str:
    lines = text.removesuffix("\n").split("\n")
    head = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    return head + "".join(f"+{line}\n" for line in lines)


def _insert(path: str, before: bytes, insertions: list[Insertion]) -> tuple[str, bytes]:
    """A patch without context, and the file it makes."""
    lines = split_lines(before)
    patch = [f"--- a/{path}\n+++ b/{path}\n"]
    for number, (after, text) in enumerate(insertions):
        patch.append(f"@@ -{after},0 +{after + number + 1} @@\n+{text}\n")
    for after, text in reversed(insertions):
        lines.insert(after, f"{text}\n".encode())
    return "".join(patch), b"".join(lines)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")
