"""The result file of scripts/bench_zos.py: begun, continued, never mixed with another version's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.floor_steps import add_floor_steps
from zos_sglang.testing.bench.record import write_json
from zos_sglang.testing.bench.stats import base_of
from zos_sglang.testing.bench.summary import summarise

NAME, RAW_NAME = "bench_zos.json", "waves.jsonl"
#: Raise when older files could not be continued.
FORMAT = 1
_PACKAGE = Path(__file__).resolve().parents[2]
_SHOWN = 120


class ResumeError(ValueError):
    """The file at hand cannot be continued or overwritten; the message says why and what to do."""


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


class ResultFile:
    """`bench_zos.json` in folder `out`, rewritten after every repeat, and `waves.jsonl` with all samples.

    `head` is the provenance of this run, `identity` what must be equal for two runs to share a file, `run`
    what may differ between them. Raises ResumeError.
    """

    def __init__(
        self,
        out: Path,
        head: Mapping[str, Any],
        identity: Mapping[str, Any],
        run: Mapping[str, Any],
        resume: bool,
    ) -> None:
        self.path, self.raw = out / NAME, out / RAW_NAME
        mine = {
            "format": FORMAT,
            "code": code_digest(),
            "versions": head["versions"],
            "machine": head["machine"],
            **identity,
        }
        old = load(out) if resume and self.path.exists() else None
        if old is None and self.path.exists():
            raise ResumeError(f"{self.path} exists; --resume continues it, another --out keeps it")
        if old is not None:
            check_same(old["identity"], mine)
        self.data: dict[str, Any] = old or {**head, "identity": plain(mine), "runs": [], "points": []}
        self.data["runs"].append({**{key: head[key] for key in ("commit", "date", "command")}, **run})

    def point(self, attention: str, prompt: int, output: int, batch: int) -> dict[str, Any]:
        """The point's entry, made if need be."""
        key = {"attention": attention, "prompt": prompt, "output": output, "batch": batch}
        for found in self.data["points"]:
            if all(found[name] == value for name, value in key.items()):
                point: dict[str, Any] = found
                return point
        point = {
            **key,
            **{"skipped": None, "error": None, "variety": None, "floor": None},
            **{"warmups": [], "repeats": [], "separate": {"warmups": [], "repeats": []}},
        }
        self.data["points"].append(point)
        return point

    def save(self) -> None:
        """Write what there is, with its summary."""
        self.data["summary"] = _summary(self.data)
        write_json(self.path, self.data)

    def keep_raw(self, record: Mapping[str, Any]) -> None:
        """Append one wave's samples, all of them, to `waves.jsonl`."""
        self.raw.parent.mkdir(parents=True, exist_ok=True)
        with self.raw.open("a") as sink:
            sink.write(json.dumps(record, separators=(",", ":")) + "\n")


def load(out: Path) -> dict[str, Any]:
    """The result file in folder `out`. Raises ResumeError if there is none, or it is something else's."""
    path = out / NAME
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ResumeError(f"{path}: there is no such file") from None
    except ValueError as error:
        raise ResumeError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != "bench_zos" or "identity" not in data:
        raise ResumeError(f"{path} is not a result of bench_zos")
    return data


def up_to_date(out: Path) -> dict[str, Any]:
    """The result in folder `out` with a summary as this version makes it. Raises ResumeError as `load` does.

    Repeats without `floor_step_us` get it from `waves.jsonl`, and the file is rewritten then.
    """
    data = load(out)
    added = add_floor_steps(data, _samples(out / RAW_NAME))
    data["summary"] = _summary(data)
    if added:
        write_json(out / NAME, data)
    return data


def _samples(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a `waves.jsonl`, none if there is no such file; a line that a kill tore is left out."""
    if path.exists():
        with path.open() as source:
            for line in source:
                with suppress(ValueError):
                    yield json.loads(line)


def _summary(data: Mapping[str, Any]) -> dict[str, Any]:
    return summarise(data["points"], base_of(data["identity"]["modes"]))


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
