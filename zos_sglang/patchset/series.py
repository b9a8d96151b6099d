"""The `series` file of a release: the patches in order, and each target file's hash before and after.

    0002-scheduler.patch
      - <sha256 of the file before> sglang/srt/managers/scheduler.py
      + <sha256 of the file after> sglang/srt/managers/scheduler.py

`-  absent` stands where the patch creates the file. A hunk without context would fit into any file; the hash
makes it fit into one.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.hunks import FilePatch, parse

FILE = "series"
PREFIX = "sglang-"
ABSENT = "absent"
_ENTRY = re.compile(r"  ([-+]) ([0-9a-f]{64}|absent) (\S+)")
_NAME = re.compile(r"\d{4}-[a-z0-9-]+\.patch")


def digest(content: bytes | None) -> str:
    """sha256 of a file's content, `absent` for no file."""
    return ABSENT if content is None else hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Step:
    """One patch of one file, with the hashes around it."""

    name: str
    patch: FilePatch
    before: str
    after: str


@dataclass(frozen=True)
class Target:
    """All that the set does to one file, in order."""

    path: str
    steps: tuple[Step, ...]

    @property
    def original(self) -> str:
        return self.steps[0].before

    @property
    def patched(self) -> str:
        return self.steps[-1].after

    def reached(self, content: bytes | None) -> int | None:
        """How many of the steps are in this content, or None where it is no state of ours."""
        found = digest(content)
        states = [self.original, *(step.after for step in self.steps)]
        return states.index(found) if found in states else None

    def forward(self, content: bytes | None) -> bytes:
        """The file with every patch, from any state that `reached` knows.

        Raises:
            PatchError: a patch file and its hashes disagree.
        """
        for step in self.steps[_known(self.reached(content)) :]:
            content = step.patch.apply(content)
            _expect(step, self.path, content, step.after)
        assert content is not None
        return content

    def back(self, content: bytes | None) -> bytes | None:
        """The file without any patch, from any state that `reached` knows. Raises as `forward`."""
        for step in reversed(self.steps[: _known(self.reached(content))]):
            assert content is not None
            content = step.patch.unapply(content)
            _expect(step, self.path, content, step.before)
        return content


def _known(steps: int | None) -> int:
    assert steps is not None, "classify a file before it is changed"
    return steps


@dataclass(frozen=True)
class PatchSet:
    """The patches for one release."""

    release: str
    targets: tuple[Target, ...]
    names: tuple[str, ...]


def _expect(step: Step, path: str, content: bytes | None, wanted: str) -> None:
    if digest(content) != wanted:
        raise PatchError(f"{step.name} and its {FILE} disagree about {path}; restore the patch folder")


def releases(folder: Path) -> tuple[str, ...]:
    """The releases that a patch folder has sets for, oldest first."""
    found = (p.name.removeprefix(PREFIX) for p in folder.glob(f"{PREFIX}*") if (p / FILE).is_file())
    return tuple(sorted(found, key=lambda r: [(len(part), part) for part in r.split(".")]))


def load(folder: Path, release: str) -> PatchSet:
    """Read the set for a release.

    Raises:
        PatchError: there is none, or its files do not belong together.
    """
    if release not in releases(folder):
        known = (
            ", ".join(releases(folder))
            or f"none in {folder}; name the folder patches of a clone with --patches"
        )
        raise PatchError(f"there are no patches for SGLang {release} (there are for: {known})")
    where = folder / f"{PREFIX}{release}"
    steps: list[Step] = []
    names = []
    for name, hashes in _entries(where / FILE):
        names.append(name)
        patches = {p.path: p for p in parse(_read(where / name), name)}
        if set(patches) != set(hashes):
            raise PatchError(f"{name} and its {FILE} name different files; restore the patch folder")
        steps += [Step(name, patches[path], *hashes[path]) for path in hashes]
    if stray := {p.name for p in where.glob("*.patch")} - set(names):
        raise PatchError(f"{', '.join(sorted(stray))} stands in {where}, but not in its {FILE}")
    return PatchSet(release, _targets(steps), tuple(names))


def _targets(steps: list[Step]) -> tuple[Target, ...]:
    paths = dict.fromkeys(step.patch.path for step in steps)
    targets = tuple(Target(path, tuple(s for s in steps if s.patch.path == path)) for path in paths)
    for target in targets:
        for earlier, later in zip(target.steps, target.steps[1:], strict=False):
            if earlier.after != later.before:
                raise PatchError(f"{later.name} does not begin where {earlier.name} ends: {target.path}")
        for step in target.steps:
            if step.patch.creates != (step.before == ABSENT) or step.after == ABSENT:
                raise PatchError(f"{step.name} and its {FILE} disagree about {target.path}")
    return targets


def _entries(series: Path) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Every patch of a series file with `path -> (before, after)`."""
    found: list[tuple[str, dict[str, tuple[str, str]]]] = []
    pending: tuple[str, str] | None = None
    try:
        lines = _read(series).decode("ascii").split("\n")
    except UnicodeDecodeError:
        raise PatchError(f"{series}: not ASCII") from None
    for number, line in enumerate(lines, 1):
        entry = _ENTRY.fullmatch(line)
        wrong = PatchError(f"{series}: line {number}: expected NAME, or `  - HASH PATH` and `  + HASH PATH`")
        if pending:
            path, before = pending
            if entry is None or entry[1] != "+" or entry[3] != path:
                raise wrong
            found[-1][1][path] = (before, entry[2])
            pending = None
        elif entry is not None:
            if not found or entry[1] != "-" or entry[3] in found[-1][1]:
                raise wrong
            pending = (entry[3], entry[2])
        elif _NAME.fullmatch(line):
            found.append((line, {}))
        elif line.strip() and not line.startswith("#"):
            raise wrong
    if pending or not found or not all(files for _, files in found):
        raise PatchError(f"{series}: ends in the middle; restore the patch folder")
    if len({name for name, _ in found}) < len(found):
        raise PatchError(f"{series}: names a patch twice")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PatchError(f"{path}: {error.strerror}") from error
