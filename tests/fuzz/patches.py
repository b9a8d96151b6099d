"""The patch tool on damaged patch folders and trees: all files or none, or one sentence."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from argparse import Namespace
from functools import cache
from pathlib import Path

from tests.fuzz.hostile import Choices
from tests.fuzz.runner import Target
from tests.unit import patch_case
from zos_sglang.patchset import cli
from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.hunks import parse
from zos_sglang.patchset.series import ABSENT, FILE

_SERIES = patch_case.series().encode()
_SET = {**patch_case.PATCHES, FILE: _SERIES}
_AS_LAID = {**patch_case.FILES, "sglang/_version.py": b"__version__ = version = '1.2.3'\n"}
_TREE = {**_AS_LAID, patch_case.NEW: b""}
#: Words in a patch that lead elsewhere, and numbers that count too much.
_WORDS = (
    *(
        b"--- a/../../etc/passwd",
        b"+++ b//etc/passwd",
        b"--- a/sglang/../../x",
        b"--- /dev/null",
        b"+++ /dev/null",
    ),
    *(b"+++ b/sglang/srt/../../../x", b"@@ -999999999,999999999 +1 @@", b"@@ -0,0 +0,0 @@", b"@@ -1 +1 @@"),
    *(b"\\ No newline at end of file", b"absent", b"0" * 64, b"--- a/sglang/x\0y", b"+++ b/sglang/\xff"),
)


def _damaged(choices: Choices, content: bytes) -> bytes | None:
    """A file cut, with lines moved, with a telling line, or gone (None)."""
    how = choices.below(8)
    if how == 7:
        return None
    if how <= 2:
        return choices.moved_line(content)
    if how <= 4:
        lines = content.split(b"\n")
        put = choices.pick(_WORDS) if choices.below(4) else choices.take(choices.below(8))
        lines[choices.below(len(lines))] = put
        return b"\n".join(lines)
    return choices.cut(content)


def make(choices: Choices) -> tuple[str, dict[str, bytes | None], dict[str, bytes | None]]:
    """A command, and what stands in the patch folder and in the tree instead of the right thing."""
    command = choices.pick(["apply", "apply", "apply", "check", "apply", "check", "revert"])
    found: tuple[dict[str, bytes | None], dict[str, bytes | None]] = {}, {}
    for _ in range(choices.below(3)):
        number = choices.one_in(4)
        place = (_SET, _TREE)[number]
        name = choices.pick(sorted(place))
        found[number][name] = _damaged(choices, place[name])
    return command, *found


class _Place:
    """One folder in memory for all inputs; only what the last one changed is laid anew."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="zos-fuzz-", dir=memory if memory.is_dir() else None))
        atexit.register(shutil.rmtree, self.folder, True)
        self.tree, self.patches = self.folder / "tree", self.folder / "patches"
        self.set = self.patches / f"sglang-{patch_case.RELEASE}"

    def lay(self) -> None:
        """A fresh tree and patch folder where something else may stand."""
        for place, wanted in ((self.set, _SET), (self.tree, _AS_LAID)):
            found = {
                os.path.relpath(os.path.join(at, name), place)
                for at, _, names in os.walk(place)
                for name in names
            }
            if not place.is_dir() or found - set(wanted):
                shutil.rmtree(self.folder)
                self.folder.mkdir()
                patch_case.write(self.folder)
                return
            for name, content in wanted.items():
                path = place / name
                if name not in found or path.read_bytes() != content:
                    _put(path, content)


@cache
def _place() -> _Place:
    return _Place()


def _put(path: Path, content: bytes | None) -> None:
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def check(given: tuple[str, dict[str, bytes | None], dict[str, bytes | None]]) -> str:
    """Raises what the tool lets through besides PatchError, and AssertionError for half a change."""
    command, in_set, in_tree = given
    place = _place()
    place.lay()
    tree, patches, folder = place.tree, place.patches, place.folder
    clean = _AS_LAID
    if command == "revert":
        cli.run_apply(_args(tree, patches))
    for name, content in in_tree.items():
        _put(tree / name, content)
    for name, content in in_set.items():
        _put(place.set / name, content)
        if content is not None and name != FILE:
            _parse_alone(content)
    before = patch_case.content(tree)
    beside = sorted(p.name for p in folder.iterdir())
    word = _run(command, tree, patches)
    assert sorted(p.name for p in folder.iterdir()) == beside, "a file outside the tree"
    after = patch_case.content(tree)
    if word == "done" and command != "check":
        version = {"sglang/_version.py": after.get("sglang/_version.py")}
        wanted = patch_case.patched(clean) if command == "apply" else clean
        assert {**after, **version} == {**wanted, **version}
    else:
        assert after == before
    return word


def _run(command: str, tree: Path, patches: Path) -> str:
    run = {"apply": cli.run_apply, "revert": cli.run_revert, "check": cli.run_check}[command]
    try:
        code, _, text = run(_args(tree, patches))
    except PatchError as error:
        assert str(error) and "\n" not in str(error)
        return "refused"
    assert text
    return "done" if code == 0 else f"check {code}"


def _parse_alone(content: bytes) -> None:
    """The reader without the hashes, which refuse most damage first."""
    try:
        patches = parse(content, "p")
    except PatchError:
        return
    for patch in patches:
        assert patch.path.startswith("sglang/") and ".." not in patch.path.split("/"), patch.path
        for text in (None, *_TREE.values()):
            try:
                if text is not None:
                    patch.unapply(text)
                patch.apply(text)
            except PatchError:
                continue


def _args(tree: Path, patches: Path) -> Namespace:
    return Namespace(tree=tree, patches=patches, release=None, dry_run=False, json=False)


assert ABSENT.encode() in _SERIES
TARGET = Target("patches", "the patch tool", make, check)
