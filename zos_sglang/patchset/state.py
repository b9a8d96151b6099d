"""What state a tree is in, told by the hashes of its files alone: no note of ours can be out of date."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.series import PatchSet, Target, digest, load, releases
from zos_sglang.patchset.tree import Tree


class State(StrEnum):
    """Of a tree, and of each file in it."""

    ORIGINAL = "not applied"
    APPLIED = "applied"
    #: Some files (or some patches of a file) and not others: an interrupted run, or `patch` by hand.
    HALF = "half applied"
    #: A file that is neither SGLang's nor ours: nothing is touched then.
    FOREIGN = "foreign"


@dataclass(frozen=True)
class FileState:
    """One target file as it was found."""

    target: Target
    content: bytes | None
    state: State
    problem: str = ""


@dataclass(frozen=True)
class TreeState:
    """A tree against one patch set."""

    tree: Tree
    patches: PatchSet
    files: tuple[FileState, ...]

    @property
    def state(self) -> State:
        found = {file.state for file in self.files}
        if State.FOREIGN in found:
            return State.FOREIGN
        return found.pop() if len(found) == 1 else State.HALF

    def refuse_foreign(self) -> None:
        """Raise PatchError that names every file that is not ours to touch."""
        problems = [file.problem for file in self.files if file.state is State.FOREIGN]
        if problems:
            raise PatchError(
                f"{self.tree.root} is not SGLang {self.patches.release} as released: {'; '.join(problems)}. "
                f"Nothing was changed. Reinstall sglang=={self.patches.release}, or undo the other changes."
            )


def examine(tree: Tree, patches: PatchSet) -> TreeState:
    """Read and hash every target file."""
    return TreeState(tree, patches, tuple(_file(tree.root, target) for target in patches.targets))


def choose(tree: Tree, folder: Path, release: str | None) -> TreeState:
    """The tree against the set for its release: as asked for, as it states, or as its files show.

    Raises:
        PatchError: there is no such set, or no set's files are these.
    """
    if stated := release or tree.release:
        return examine(tree, load(folder, stated))
    found = [examine(tree, load(folder, known)) for known in releases(folder)]
    fitting = [one for one in found if one.state is not State.FOREIGN]
    if len(fitting) != 1:
        known = ", ".join(one.patches.release for one in found) or "none"
        raise PatchError(
            f"{tree.root} does not state its release, and its files are those of none that there are patches "
            f"for ({known}). Check out a release, or name the nearest with --release to see what differs."
        )
    return fitting[0]


def _file(root: Path, target: Target) -> FileState:
    path = root / target.path
    try:
        if path.is_symlink():
            return _foreign(target, "is a link; name the tree where the file itself lies")
        if not path.parent.is_dir():
            return _foreign(target, "its folder is missing")
        content = path.read_bytes() if path.exists() else None
    except OSError as error:
        return _foreign(target, f"cannot be read ({error.strerror})")
    reached = target.reached(content)
    if reached is None:
        seen = "is missing" if content is None else f"has sha256 {digest(content)[:16]}"
        return _foreign(target, f"{seen}, expected {target.original[:16]}")
    states = {0: State.ORIGINAL, len(target.steps): State.APPLIED}
    return FileState(target, content, states.get(reached, State.HALF))


def _foreign(target: Target, problem: str) -> FileState:
    return FileState(target, None, State.FOREIGN, f"{target.path} {problem}")
