"""Result files of measurements that can stop at any moment and go on: begun, continued, never mixed.

A result is one JSON file, rewritten after every step of the measurement. Its `identity` says what was
measured, where and how; a later call continues the file only if its own identity is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.record import write_json

_PACKAGE = Path(__file__).resolve().parents[2]
_SHOWN = 120


class ResumeError(ValueError):
    """The file at hand cannot be continued or overwritten; the message says why and what to do."""


class Store:
    """A result file whose parts are runs: one load under one setting in one repeat, a flat dict each.

    The file holds `head` (provenance), `identity`, `calls` (one for each time the script was started),
    `runs`, `complete`, and `summary`, which is what `summarise` makes of the runs.

    Args:
        path: the file.
        head: what `record.provenance` returns; its `kind` is the file's.
        identity: settings that must be equal for two calls to share the file. How many repeats there shall
            be is none of them: a later call may ask for more.
        summarise: makes the summary of all runs; called at each save.
        call: what may differ from call to call and should be kept.
        resume: continue the file if there is one. False: an existing file is an error.
        version: of the runs' format; raise it when older files could not be continued.

    Raises:
        ResumeError: the file cannot be continued, or exists without `resume`.
    """

    def __init__(
        self,
        path: Path,
        head: Mapping[str, Any],
        identity: Mapping[str, Any],
        summarise: Callable[[Sequence[Mapping[str, Any]]], Any],
        *,
        call: Mapping[str, Any] | None = None,
        resume: bool = False,
        version: int = 1,
    ) -> None:
        self.path, self._summarise = path, summarise
        empty = {"complete": False, "calls": [], "runs": []}
        self.data = begin(path, head, identity, empty, resume=resume, version=version)
        self.data["calls"].append({**call_of(head), **(call or {})})
        self.data["complete"] = False

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All finished runs, in the order in which they ran."""
        found: list[dict[str, Any]] = self.data["runs"]
        return found

    def missing(self, repeats: int, keys: Iterable[Mapping[str, Any]]) -> list[int]:
        """The repeats, of those from 0 on, in which not every one of `keys` has a run.

        Add the runs of a repeat together, so that what is compared was measured within one call.
        """
        there = [{**key} for key in keys]
        return [
            repeat for repeat in range(repeats) if not all(self.has(**key, repeat=repeat) for key in there)
        ]

    def has(self, **key: Any) -> bool:
        """Whether there is a run with these values."""
        return any(all(run.get(name) == value for name, value in key.items()) for run in self.runs)

    def add(self, runs: Iterable[Mapping[str, Any]]) -> None:
        """Keep finished runs, with the number of this call, and save."""
        place = len(self.data["calls"]) - 1
        self.runs.extend(plain({**run, "call": place}) for run in runs)
        self.save()

    def finish(self) -> None:
        """Note that nothing is missing, and save."""
        self.data["complete"] = True
        self.save()

    def save(self) -> None:
        """Write what there is, with its summary."""
        self.data["summary"] = self._summarise(self.runs)
        write_json(self.path, self.data)


def begin(
    path: Path,
    head: Mapping[str, Any],
    identity: Mapping[str, Any],
    empty: Mapping[str, Any],
    *,
    resume: bool,
    version: int = 1,
) -> dict[str, Any]:
    """The data of the file at `path` to go on with, or those of a new one: `head`, `identity`, `empty`.

    To the identity come the code's digest, the versions and the machine. Raises ResumeError.
    """
    mine = plain(
        {
            "format": version,
            "code": code_digest(),
            "versions": head["versions"],
            "machine": head["machine"],
            **identity,
        }
    )
    if not path.exists():
        return {**head, "identity": mine, **empty}
    if not resume:
        raise ResumeError(f"{path} exists; --resume continues it, another --out keeps it")
    old = load(path, head["kind"])
    check_same(old["identity"], mine)
    return old


def call_of(head: Mapping[str, Any]) -> dict[str, Any]:
    """What of the provenance differs from call to call."""
    return {name: head[name] for name in ("commit", "date", "command")}


def load(path: Path, kind: str) -> dict[str, Any]:
    """The result file at `path`. Raises ResumeError if there is none, or it is not one of `kind`."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ResumeError(f"{path}: there is no such file") from None
    except ValueError as error:
        raise ResumeError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != kind or "identity" not in data:
        raise ResumeError(f"{path} is not a result of {kind}")
    return data


def code_digest(package: Path = _PACKAGE) -> str:
    """SHA-256 over the plugin's sources without its testing package: what a run measured.

    A commit's name would not do: it is unknown where there is no git, and says nothing of changed files.
    """
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] != "testing":
            found.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def check_same(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise ResumeError that names everything in which two runs differ."""
    new = plain(new)
    different = [
        f"{name}: {_short(old.get(name))} then, {_short(new.get(name))} now"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if different:
        raise ResumeError(
            "--resume would compare runs that differ, use another --out: " + "; ".join(different)
        )


def plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: lists for tuples, text for keys."""
    found: dict[str, Any] = json.loads(json.dumps(value))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
