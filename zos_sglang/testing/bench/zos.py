"""One point of scripts/bench_zos.py: waves of one shape and batch size in every mode of one server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.client import BenchClient, Wave, prompts
from zos_sglang.testing.bench.counters import gained, lane_figures
from zos_sglang.testing.bench.floor import MODE as FLOOR_MODE
from zos_sglang.testing.bench.floor import measure_floor, merged
from zos_sglang.testing.bench.floor_steps import floor_step_us
from zos_sglang.testing.bench.logtime import step_times
from zos_sglang.testing.bench.measure import mixed_wave, samples, timings, variety
from zos_sglang.testing.bench.stats import order_of, spread
from zos_sglang.testing.compare.prompts import ModelInfo

#: Room for a wave slower than the one before, and for the end of the run.
_SLOWER, _END_S = 1.3, 5.0
#: No two requests of a run share a seed.
_SEEDS_A_WAVE = 10_000

Keep = Callable[[dict[str, Any]], None]


class OutOfTime(Exception):
    """The time limit is too near for the next wave."""


class Budget:
    """The time limit of a run, in seconds from its making; None is no limit."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._limit_s, self._start = clock, limit_s, clock()

    def spend(self, seconds: float) -> None:
        """Raise OutOfTime if something that takes about `seconds` would end too late."""
        spent = self._clock() - self._start
        if self._limit_s is not None and spent + seconds * _SLOWER + _END_S > self._limit_s:
            raise OutOfTime


@dataclass(frozen=True)
class Plan:
    """What to measure at every point.

    `floors` is the number of untimed waves that ask for the floor, `english` the model whose tokenizer makes
    the prompts; None gives random ones below `vocab`.
    """

    modes: tuple[str, ...]
    repeats: int = 5
    warmup: int = 2
    turns: int = 0
    floors: int = 1
    vocab: int = 384
    english: ModelInfo | None = None

    def prompts(self, point: dict[str, Any], seed: int = 0) -> list[list[int]]:
        """The requests of one wave: random token ids, or with `english` sentences in that model's tokens."""
        batch, length = point["batch"], point["prompt"]
        if self.english is None:
            return prompts(batch, length, self.vocab, seed)
        return [self.english.ids(length, seed * _SEEDS_A_WAVE + row) for row in range(batch)]


@dataclass(frozen=True)
class Pace:
    """How long a wave took, and how long its decode part: what the next one will take."""

    seconds: float
    decode_s: float


class Engine:
    """A started server as this benchmark sees it. `place` is the number of the run in the result file."""

    def __init__(self, client: BenchClient, log: Path, budget: Budget, place: int) -> None:
        self.client, self.budget, self.place = client, budget, place
        self._log, self._read = log, 0

    def capacity(self) -> int:
        """How many tokens the server's KV pool holds."""
        return int(self.client.info()["internal_states"][0]["memory_usage"]["token_capacity"])

    def new_log_lines(self) -> list[str]:
        """What the server has logged since the last call."""
        if not self._log.exists():
            return []
        with self._log.open(errors="replace") as source:
            source.seek(self._read)
            text = source.read()
            self._read = source.tell()
        return text.splitlines()


def live_point(
    engine: Engine, point: dict[str, Any], plan: Plan, keep: Keep, save: Callable[[], None]
) -> None:
    """Warm up, ask for the floor, and run the repeats that the point has not yet.

    `keep` gets all samples of each wave, `save` is called after every repeat. Raises OutOfTime, BenchError,
    TooFewSteps.
    """
    missing = _missing(point["repeats"], plan.repeats)
    if not missing:
        return
    asked = plan.prompts(point)
    pace = _warm_up(engine, point, plan, asked)
    save()
    if FLOOR_MODE in plan.modes and point["floor"] is None:
        _floors(engine, point, plan, pace)
    for repeat in missing:
        waves, raw = _repeat(engine, point, plan, repeat, pace)
        point["repeats"].append({"repeat": repeat, "run": engine.place, "waves": waves})
        for record in raw:
            keep(record)
        save()


def separate_point(engine: Engine, point: dict[str, Any], plan: Plan, save: Callable[[], None]) -> None:
    """The same waves in a process of stock SGLang without overlap; timed by its own log. Raises as above."""
    separate = point["separate"]
    missing = _missing(separate["repeats"], plan.repeats)
    seconds = 0.0
    for number in range(plan.warmup if missing else 0):
        engine.budget.spend(seconds)
        wave = engine.client.wave(plan.prompts(point), point["output"])
        seconds = wave.seconds
        separate["warmups"].append({"number": number, "digest": wave.digest, "seconds": round(seconds, 4)})
    for repeat in missing:
        engine.budget.spend(seconds)
        input_ids = plan.prompts(point, repeat)
        engine.new_log_lines()
        wave = engine.client.wave(input_ids, point["output"])
        seconds = wave.seconds
        separate["repeats"].append(
            {
                "repeat": repeat,
                "run": engine.place,
                "seconds": round(seconds, 4),
                "tokens": wave.tokens,
                "digest": wave.digest,
                **log_times(engine.new_log_lines(), point["batch"]),
            }
        )
        save()


def _missing(done: Sequence[dict[str, Any]], repeats: int) -> list[int]:
    there = {entry["repeat"] for entry in done}
    return [repeat for repeat in range(repeats) if repeat not in there]


def _warm_up(engine: Engine, point: dict[str, Any], plan: Plan, asked: list[list[int]]) -> dict[str, Pace]:
    """Untimed waves of every mode, compared all the same; the pace of each mode."""
    pace: dict[str, Pace] = {}
    for number in range(max(1, plan.warmup)):
        for mode in plan.modes:
            engine.budget.spend(pace[mode].seconds if mode in pace else 0)
            engine.client.switch(mode)
            engine.client.reset_records()
            wave = engine.client.wave(asked, point["output"])
            pace[mode] = _pace(wave, [samples(engine.client.zos(), mode, point["batch"])])
            point["variety"] = point["variety"] or variety(wave)
            _note_untimed(point, mode, number, wave)
    return pace


def _pace(wave: Wave, found: Sequence[dict[str, list[int]]]) -> Pace:
    return Pace(wave.seconds, min(wave.seconds, sum(sum(one["wall_ns"]) for one in found) / 1e9))


def _note_untimed(point: dict[str, Any], mode: str, number: int | str, wave: Wave) -> None:
    point["warmups"].append(
        {"mode": mode, "number": number, "digest": wave.digest, "seconds": round(wave.seconds, 4)}
    )


def _floors(engine: Engine, point: dict[str, Any], plan: Plan, pace: dict[str, Pace]) -> None:
    """The floor, from waves of their own; their answers are compared like those of a warm-up."""
    mine = pace[FLOOR_MODE]
    asked = plan.prompts(point)
    for _ in range(plan.floors):
        engine.budget.spend(mine.seconds)
        found, wave = measure_floor(engine.client, asked, point["output"], mine.seconds - mine.decode_s / 2)
        _note_untimed(point, FLOOR_MODE, "floor", wave)
        point["floor"] = merged(point["floor"], found)
        if found is None:
            return


def _repeat(
    engine: Engine, point: dict[str, Any], plan: Plan, repeat: int, pace: dict[str, Pace]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The records of one repeat by mode, and all its samples; `pace` is brought up to date."""
    input_ids = plan.prompts(point, repeat)
    key = {name: point[name] for name in ("attention", "prompt", "output", "batch")}
    order = order_of(plan.modes, repeat)
    waves: dict[str, Any] = {}
    raw = []
    for group in [order] if plan.turns else [[mode] for mode in order]:
        before = engine.client.zos()
        engine.new_log_lines()
        wave = _timed_wave(engine, point, plan, group, input_ids=input_ids, pace=pace)
        after, lines = engine.client.zos(), engine.new_log_lines()
        found = {mode: samples(after, mode, point["batch"]) for mode in group}
        alone = len(group) == 1
        for mode in group:
            pace[mode] = _pace(wave, list(found.values()))
            waves[mode] = {
                **timings(wave, order.index(mode), found[mode], point["batch"]),
                **_counts(point, mode, gained(before, after), alone=alone),
                **log_times(lines if alone else [], point["batch"]),
                "floor_step_us": _floor_step(point, found[mode]) if alone else None,
            }
            waves[mode]["tokens_per_s"] = round(point["batch"] / waves[mode]["wall_us"]["mean"] * 1e6, 2)
            raw.append({"run": engine.place, **key, "repeat": repeat, "mode": mode, **found[mode]})
    return {mode: waves[mode] for mode in plan.modes}, raw


def _floor_step(point: dict[str, Any], found: dict[str, list[int]]) -> float | None:
    return floor_step_us(found["wall_ns"], point["prompt"], point["output"], point["floor"])


def _timed_wave(
    engine: Engine,
    point: dict[str, Any],
    plan: Plan,
    group: list[str],
    *,
    input_ids: list[list[int]],
    pace: dict[str, Pace],
) -> Wave:
    """A wave of one mode, or one in which the modes of `group` take turns."""
    client, output = engine.client, point["output"]
    seconds = statistics.fmean(pace[mode].seconds for mode in group)
    engine.budget.spend(seconds)
    if len(group) == 1:
        client.switch(group[0])
        client.reset_records()
        return client.wave(input_ids, output)
    decode_s = statistics.fmean(pace[mode].decode_s for mode in group)
    turn_s = decode_s / (plan.turns * len(group))
    return mixed_wave(client, group, input_ids, output, turn_s, prefill_s=seconds - decode_s)


def _counts(point: dict[str, Any], mode: str, growth: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """The lane's figures, and what else the server counted in a wave of one mode `alone`."""
    # The prefill gives the first token; every other one takes a decode step.
    steps = point["output"] - 1 if alone else None
    return {
        "lane": lane_figures(growth, point["batch"], steps) if mode == FLOOR_MODE else None,
        "counts": {name: growth[name] for name in ("paths", "reasons") if name in growth} if alone else None,
    }


def log_times(lines: Sequence[str], batch: int) -> dict[str, Any]:
    """Step time (us) and throughput of one wave of one mode as the server's own log tells them, else None."""
    # The switch before the wave may stand among its lines.
    found = step_times(lines, mode="unknown")
    steps = [step for (size, _), times in found.items() if size == batch for step in times]
    if not steps:
        return {"log_step_us": None, "log_tokens_per_s": None}
    return {
        "log_step_us": {**spread(steps), "raw": steps},
        "log_tokens_per_s": round(batch / statistics.fmean(steps) * 1e6, 2),
    }
