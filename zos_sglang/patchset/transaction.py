"""All of the files or none: prepare every file, keep the originals, rename, and put back what a fault left.

Everything that can fail (space, rights, a hash) is done beside the tree first. What is left are renames in
one file system, with signals held. An error between two of them is rolled back; after a crash between two of
them the tree is half applied, which the next `apply` completes and the next `revert` takes back.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zos_sglang.patchset.errors import PatchError
from zos_sglang.patchset.series import digest
from zos_sglang.patchset.state import FileState, State, TreeState, examine

#: Below the package: the same file system, so a rename is one step. Nothing imports it.
FOLDER = ".zos_patches"
ORIGINALS = "originals"
#: What is to be put in place, and what is to be put back if that fails.
STAGE = ("new", "old")
_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Move:
    """One prepared change. `new` None removes the file; `old` None says that there was none."""

    path: Path
    new: Path | None
    old: Path | None


def apply(found: TreeState) -> list[str]:
    """Bring every file to its patched state; returns the paths that were changed.

    Raises:
        PatchError: nothing was changed, or everything was put back.
    """
    return _change(found, State.APPLIED)


def revert(found: TreeState) -> list[str]:
    """Bring every file back to its original, byte for byte. Returns and raises as `apply`."""
    return _change(found, State.ORIGINAL)


def pending(found: TreeState, goal: State) -> list[FileState]:
    """The files that are not there yet."""
    return [file for file in found.files if file.state is not goal]


def _change(found: TreeState, goal: State) -> list[str]:
    package = found.tree.package
    try:
        with _alone(package):
            # Again, now that nobody else is at work: what was decided on must still be so.
            found = examine(found.tree, found.patches)
            found.refuse_foreign()
            todo = pending(found, goal)
            work = package / FOLDER
            if todo:
                _discard_stage(work)
                try:
                    _commit(_prepare(found, todo, goal, work))
                except BaseException:
                    _forget_unneeded(found, work)
                    raise
                finally:
                    # All is in place, or back: what cannot be removed now, the next run removes.
                    for name in STAGE:
                        shutil.rmtree(work / name, ignore_errors=True)
            if goal is State.ORIGINAL:
                shutil.rmtree(work, ignore_errors=True)
            return [file.target.path for file in todo]
    except OSError as error:
        where = error.filename or package
        raise PatchError(f"{where}: {error.strerror}. The tree is as it was.") from error


@contextmanager
def _alone(package: Path) -> Iterator[None]:
    """Hold the package against another run of this tool; the lock ends with the process."""
    handle = os.open(package, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PatchError(f"{package}: another run is changing it; wait for it to end") from None
    else:
        yield
    finally:
        os.close(handle)


def _prepare(found: TreeState, todo: list[FileState], goal: State, work: Path) -> list[Move]:
    """Write every new file and keep every present one, all below `work`."""
    for name in STAGE:
        (work / name).mkdir(parents=True)
    # A checkout's `git status` should not show what we keep.
    (work / ".gitignore").write_text("*\n")
    moves = []
    for number, file in enumerate(todo):
        path = found.tree.root / file.target.path
        old = new = None
        if file.content is not None:
            old = _same_file(path, work / "old" / str(number))
        original = work / ORIGINALS / file.target.path
        if goal is State.APPLIED:
            _keep_original(file, path, original)
            new = _written(work / "new" / str(number), file.target.forward(file.content), path)
        elif (content := file.target.back(file.content)) is not None:
            new = work / "new" / str(number)
            if _holds(original, file.target.original):
                # The very file that was there, with its times and rights.
                _same_file(original, new)
            else:
                _written(new, content, path)
        moves.append(Move(path, new, old))
    _sync_folders(work)
    return moves


def _keep_original(file: FileState, path: Path, original: Path) -> None:
    if file.content is None or _holds(original, file.target.original):
        return
    content = file.target.back(file.content)
    if content is None:
        return
    original.parent.mkdir(parents=True, exist_ok=True)
    original.unlink(missing_ok=True)
    if file.state is State.ORIGINAL:
        _same_file(path, original)
    else:
        _written(original, content, path)


def _holds(path: Path, wanted: str) -> bool:
    return path.is_file() and digest(path.read_bytes()) == wanted


def _same_file(source: Path, copy: Path) -> Path:
    """A second name for a file, or a copy where the file system gives none."""
    try:
        os.link(source, copy)
    except OSError:
        shutil.copy2(source, copy)
        _sync(copy)
    return copy


def _written(path: Path, content: bytes, like: Path) -> Path:
    """A file on disk with the rights of another one. Never writes into a file that may have two names."""
    with path.open("xb") as sink:
        sink.write(content)
        sink.flush()
        os.fsync(sink.fileno())
    if like.exists():
        shutil.copymode(like, path)
    return path


def _sync_folders(work: Path) -> None:
    """Put the names of what was prepared on disk too: a crash of the machine must not cost the originals."""
    for folder in (work.parent, work, *(path for path in work.rglob("*") if path.is_dir())):
        with suppress(OSError):  # some file systems sync no folders
            _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _commit(moves: list[Move]) -> None:
    """Make every move, or none."""
    done: list[Move] = []
    with _signals_held():
        try:
            for move in moves:
                done.append(move)
                _put(move.new, move.path)
        except BaseException as error:
            _roll_back(done, error)
            raise


@contextmanager
def _signals_held() -> Iterator[None]:
    """Answer signals when all is in place. Only the main thread answers any; no other can be interrupted.

    Handlers and not a mask: a masked signal goes to another thread, and its handler runs here all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in _HELD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for arrived in came:
            os.kill(os.getpid(), arrived)


def _roll_back(done: list[Move], why: BaseException) -> None:
    stuck = []
    for move in reversed(done):
        try:
            _put(move.old, move.path)
        except OSError as error:
            stuck.append(f"{move.path} ({error.strerror})")
    if stuck:
        raise PatchError(
            f"{why}; and these files could not be put back: {', '.join(stuck)}. The tree is half applied: "
            "remove the cause, then run `patches revert` again."
        ) from why


def _put(source: Path | None, path: Path) -> None:
    """One step of the file system. A rename onto another name of the same file does nothing, and is right."""
    if source is not None:
        os.replace(source, path)
    else:
        path.unlink(missing_ok=True)


def _forget_unneeded(found: TreeState, work: Path) -> None:
    """Remove what is kept, if the tree is original.

    A signal that was held is answered after the commit, as an error: so look at what the tree is now.
    """
    with suppress(Exception):
        if examine(found.tree, found.patches).state is State.ORIGINAL:
            shutil.rmtree(work, ignore_errors=True)


def _discard_stage(work: Path) -> None:
    for name in STAGE:
        with suppress(FileNotFoundError):
            shutil.rmtree(work / name)
