"""The result file of scripts/bench_zos.py: begun, continued, never mixed with another version's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench import store
from zos_sglang.testing.bench.floor_steps import add_floor_steps
from zos_sglang.testing.bench.record import write_json
from zos_sglang.testing.bench.stats import base_of
from zos_sglang.testing.bench.summary import summarise

NAME, RAW_NAME = "bench_zos.json", "waves.jsonl"
#: Raise when older files could not be continued.
FORMAT = 1


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
        empty: dict[str, Any] = {"runs": [], "points": []}
        self.data = store.begin(self.path, head, identity, empty, resume=resume, version=FORMAT)
        self.data["runs"].append({**store.call_of(head), **run})

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
    return store.load(out / NAME, "bench_zos")


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
