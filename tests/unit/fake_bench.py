"""A server as scripts/bench_zos.py sees one, made up: its steps take what they are told to take."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.made_records import records
from zos_sglang.observe.columns import to_columns
from zos_sglang.observe.names import AFTER_IDLE
from zos_sglang.testing.bench.client import Wave
from zos_sglang.testing.bench.zos import Budget, Engine, Plan, live_point, separate_point
from zos_sglang.testing.bench.zos_file import ResultFile, load

OUTPUT = 40
#: Microseconds per step of the made-up server.
STEP_US = {"stock": 1000, "overlap": 900, "resident": 500}


def report_of(samples: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The block `steps` whose records give these samples, by mode and batch size."""
    found = [records(0)]
    for mode, sizes in samples.items():
        for rows, taken in sizes.items():
            made = records(len(taken["cpu_ns"]) + 1, mode=mode, rows=int(rows), cpu_forward=7)
            made["cpu"][1:] = np.array(taken["cpu_ns"]) + 7
            made["t_forward"] = 1_000 + np.cumsum([0, *taken["wall_ns"]])
            made["flags"][0] = AFTER_IDLE
            found.append(made)
    return {"last": to_columns(np.concatenate(found))}


class FakeServer:
    """Answers like a server whose step takes `STEP_US`, and `growth_us` more than the step before.

    `floor_us` None is one that times no floor.
    """

    def __init__(
        self, log: Path, *, floor_us: float | None = 480.0, liar: str | None = None, growth_us: int = 0
    ) -> None:
        self.log, self.floor_us, self.liar, self.growth_us = log, floor_us, liar, growth_us
        self.mode = "stock"
        self.waves: list[tuple[str, int]] = []
        self.samples: dict[str, Any] = {}
        self.lane: dict[str, Any] = {
            "steps": 0,
            "row_steps": 0,
            "wasted_row_steps": 0,
            "opened": 0,
            "refused": {"not-decode": 0},
            "left": {},
            "share": 0.5,
        }
        self.floors: list[dict[str, float]] = []
        self.wanted = 0
        self.asked: list[int] = []
        log.write_text("")

    def zos(self) -> dict[str, Any]:
        copied: dict[str, Any] = json.loads(json.dumps({"lane": self.lane}))
        copied["steps"] = report_of(self.samples)
        return {**copied, "paths": {"decode": 7}, "reasons": {}, "floor": list(self.floors)}

    def info(self) -> dict[str, Any]:
        return {"internal_states": [{"memory_usage": {"token_capacity": 4096}}]}

    def switch(self, mode: str) -> None:
        self.mode = mode
        with self.log.open("a") as sink:
            sink.write(f"zos-sglang: mode x -> {mode}\n")

    request = switch

    def reset_records(self) -> None:
        self.samples = {}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.wanted = body["server_args"]["zos_floor"]
        self.asked.append(self.wanted)
        return [True]

    def wave(self, input_ids: list[list[int]], output_tokens: int) -> Wave:
        rows, step = len(input_ids), STEP_US[self.mode] * 1000
        self.waves.append((self.mode, output_tokens))
        samples = range(output_tokens - 2)
        self.samples[self.mode] = {
            str(rows): {
                "cpu_ns": [step // 2 for _ in samples],
                "wall_ns": [step + self.growth_us * 1000 * i for i in samples],
            }
        }
        if self.mode == "resident":
            self.lane["steps"] += output_tokens - 1
            self.lane["row_steps"] += (output_tokens - 1) * rows
            self.lane["opened"] += 1
        rate = rows / STEP_US[self.mode] * 1e6
        with self.log.open("a") as sink:
            for _ in range(4):
                sink.write(f"Decode batch, #running-req: {rows}, gen throughput (token/s): {rate:.2f}, x\n")
        word = 1 if self.mode == self.liar else 0
        ids = [[ids[0], *[word] * (output_tokens - 1)] for ids in input_ids]
        return Wave(ids, 0.01 + step * output_tokens / 1e9)


class FloorServer(FakeServer):
    """Times the floor as the lane does: at an opening after it was asked, here the end of a wave.

    It says that the KV length was 52, which is that of sample 19 of a wave of 32 tokens in.
    """

    def wave(self, input_ids: list[list[int]], output_tokens: int) -> Wave:
        found = super().wave(input_ids, output_tokens)
        if self.mode == "resident":
            time.sleep(0.05)
            if self.wanted and self.floor_us is not None:
                self.floors.append({"batch": len(input_ids), "mean_len": 52.0, "us": self.floor_us})
            self.wanted = 0
        return found


PLAN = Plan(("stock", "overlap", "resident"), repeats=2, warmup=1, floors=0, vocab=384)
HEAD = {
    "kind": "bench_zos",
    "commit": "abc",
    "date": "today",
    "command": "bench_zos.py",
    "versions": {"sglang": "0.5.23"},
    "machine": {"cpu": "c", "gpu": None},
}
IDENTITY = {"model": "tiny", "modes": ("stock", "overlap", "resident")}


def result_file(out: Path, *, resume: bool = False, **changed: Any) -> ResultFile:
    return ResultFile(out, {**HEAD, **changed}, IDENTITY, {}, resume)


def engine(server: FakeServer, budget: Budget | None = None) -> Engine:
    return Engine(server, server.log, budget or Budget(None), 0)  # type: ignore[arg-type]


def measured(
    out: Path, plan: Plan = PLAN, server: FakeServer | None = None, *, separate: bool = True
) -> dict[str, Any]:
    """A result file's data after one point, batch 4, and its separate process at twice stock's step."""
    server = server or FakeServer(out / "server.log")
    result = result_file(out)
    point = result.point("triton", 32, OUTPUT, 4)
    live_point(engine(server), point, plan, result.keep_raw, result.save)
    if separate:
        apart = FakeServer(out / "separate.log")
        separate_point(engine(apart), point, plan, result.save)
    result.save()
    return load(out)
