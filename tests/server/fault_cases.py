"""Steps that fail on demand in a real server: the cases, the load they meet, the page that tells of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


@dataclass(frozen=True)
class Case:
    """`point` fails at call `at` in `mode`. `then`: a mode asked for while all runs, or (`early`) before."""

    point: str
    mode: str
    at: int
    then: str = ""
    early: bool = False
    #: Whether it may be asked for once more, from that call on.
    again: bool = True

    @property
    def name(self) -> str:
        return f"{self.point}-{self.mode}"

    @property
    def modes(self) -> str:
        """As the tables of the page say it."""
        return f"{self.mode}, to {self.then}" if self.then else self.mode


CASES = [
    Case("guard", "overlap", 3),
    Case("launch", "overlap", 3),
    Case("relay", "overlap", 3),
    Case("readback", "overlap", 3),
    Case("barrier", "overlap", 3),
    Case("snapshot", "overlap", 3),
    Case("launch", "sync", 3),
    Case("readback", "sync", 3),
    # Once more, and the lane could not open either.
    Case("launch", "resident", 1, again=False),
    Case("judge", "resident", 1),
    Case("open", "resident", 1),
    Case("advance", "resident", 5),
    Case("reservation", "resident", 2),
    Case("lane-readback", "resident", 5),
    Case("leave", "resident", 1),
    Case("mask", "resident", 3),
    Case("processing", "resident", 5),
    Case("stream-output", "resident", 3),
    Case("lane-build", "stock", 1, then="resident", early=True),
    Case("mode-switch", "overlap", 1, then="sync"),
    Case("mode-switch", "stock", 1, then="overlap"),
    Case("recording", "resident", 1),
    Case("recording", "stock", 3),
    Case("metrics", "resident", 1),
    Case("report", "resident", 1, again=False),
    # A trace that has ended does not begin again, and mode off is final.
    Case("trace", "resident", 1, again=False),
    Case("mode-off", "overlap", 1, then="off", again=False),
]


def streamed(client: Any, number: int) -> str:
    """All that a client of a stream saw: the text after each message, and how it ended."""
    params = {"temperature": 0, "max_new_tokens": 20 + number, "ignore_eos": True}
    body = {"text": f"stream {number}", "stream": True, "sampling_params": params}
    with client.http.stream("POST", "/generate", json=body) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    texts = [json.loads(line)["text"] for line in lines]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    ended = [json.loads(line)["meta_info"]["finish_reason"] for line in lines]
    assert ended[:-1] == [None] * (len(lines) - 1), "one end, and it comes last"
    return f"{texts[-1]} {ended[-1]}"


def constrained(client: Any) -> str:
    """An answer under a grammar: its sampling waits for the result before."""
    params = {"temperature": 0, "max_new_tokens": 16, "regex": "[a-z]+"}
    answer = client.http.post("/generate", json={"text": "grammar", "sampling_params": params})
    answer.raise_for_status()
    text: str = answer.json()["text"]
    return text


def load(client: Any, *, rows: int, streams: int) -> list[str]:
    """Answers of a wave of so many rows, with streams and a grammar beside it."""
    with ThreadPoolExecutor(streams + 1) as pool:
        others = [pool.submit(streamed, client, number) for number in range(streams)]
        others.append(pool.submit(constrained, client))
        return client.wave(rows) + [other.result() for other in others]


def asked(client: Any, **values: Any) -> None:
    assert client.set_state(**values).json() == [True]


def under_load(client: Any, case: Case, load: Callable[[], list[str]]) -> list[str]:
    """The answers of a load, with the case's switch before it or while it runs."""
    if case.early:
        asked(client, zos_mode=case.then)
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load)
        if case.then and not case.early:
            asked(client, zos_mode=case.then)
        return loaded.result()


def used_tokens(client: Any) -> int:
    """KV slots in use once nothing runs and no prefix is kept."""
    assert client.http.post("/flush_cache", params={"timeout": 10}).status_code == 200
    return sum(one["num_used_tokens"] for one in client.http.get("/v1/loads").json()["loads"])


def hold_page(begin: str, end: str, table: str) -> None:
    """Compare what stands on the page between two marks; with WRITE_FAULT_TABLE set, write it."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(begin)
    found, tail = rest.split(end)
    made = f"\n\n{table}\n\n"
    if os.environ.get("WRITE_FAULT_TABLE"):
        PAGE.write_text(f"{head}{begin}{made}{end}{tail}", encoding="utf-8")
    else:
        assert found == made, "docs/reliability.md is not of this server; WRITE_FAULT_TABLE=1 writes it"
