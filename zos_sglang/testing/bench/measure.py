"""The measurement itself: waves of each batch size in each mode, in one process, interleaved."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from zos_sglang.observe.adjacent import pairs
from zos_sglang.observe.columns import from_columns
from zos_sglang.observe.names import Forward, code
from zos_sglang.testing.bench.client import BenchClient, BenchError, Wave, prompts
from zos_sglang.testing.bench.stats import (
    base_of,
    judge_digests,
    microseconds,
    order_of,
    ratio,
    spread,
    steady,
    thinned,
)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    `modes` are timed and compared, `compared` only compared. `stock`, else the first of `modes`, is the
    base of all ratios. With `turns` 0 each mode has waves of its own; with `turns` N the modes take N turns
    each within every wave, some milliseconds apart, which is what a machine whose speed changes from second
    to second needs.
    """

    modes: tuple[str, ...] = ("stock", "overlap")
    compared: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1, 16, 64)
    repeats: int = 5
    prompt_tokens: int = 32
    output_tokens: int = 160
    vocab: int = 384
    turns: int = 0

    @property
    def base(self) -> str:
        return base_of(self.modes)


@dataclass
class Cell:
    """All waves of one mode and batch size."""

    batch: int
    mode: str
    repeats: list[dict[str, Any]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def medians(self, what: str, which: str = "median") -> list[float]:
        return [repeat[what][which] for repeat in self.repeats]

    def report(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "mode": self.mode,
            "cpu_us": spread(self.medians("cpu_us")),
            "wall_us": spread(self.medians("wall_us")),
            "wall_mean_us": spread(self.medians("wall_us", "mean")),
            "repeats": self.repeats,
        }


def measure(
    client: BenchClient, settings: Settings, title: str, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run all waves and return the result: settings, cells, ratios, digests and counts.

    Raises BenchError, or TooFewSteps if a batch did not decode together.
    """
    everyone = (*settings.modes, *settings.compared)
    cells = {(b, m): Cell(b, m) for b in settings.batches for m in everyone}
    requests = {b: prompts(b, settings.prompt_tokens, settings.vocab) for b in settings.batches}
    shapes: dict[int, dict[str, Any]] = {}
    before = client.zos()
    seconds: dict[int, float] = {}
    for mode in everyone:  # warm every path and graph; not timed, but compared
        client.switch(mode)
        for batch in settings.batches:
            wave = client.wave(requests[batch], settings.output_tokens)
            cells[batch, mode].digests.append(wave.digest)
            shapes.setdefault(batch, variety(wave))
            seconds[batch] = wave.seconds
    for repeat in range(settings.repeats):
        for batch in settings.batches:
            row = [cells[batch, mode] for mode in order_of(settings.modes, repeat)]
            if settings.turns:
                turn_s = seconds[batch] / (settings.turns * len(row))
                modes = [cell.mode for cell in row]
                wave = mixed_wave(client, modes, requests[batch], settings.output_tokens, turn_s)
                _file(client, row, wave)
                seconds[batch] = wave.seconds
            else:
                for cell in row:
                    client.switch(cell.mode)
                    client.reset_records()
                    wave = client.wave(requests[batch], settings.output_tokens)
                    _file(client, [cell], wave)
        say(f"  {title}: repeat {repeat + 1} of {settings.repeats}")
    return {
        "title": title,
        "settings": {**asdict(settings), "base": settings.base},
        "cells": [cells[b, m].report() for b in settings.batches for m in settings.modes],
        "ratios": _ratios(cells, settings),
        "digests": _digests(cells, settings, shapes),
        "zos": _growth(before, client.zos()),
    }


def mixed_wave(
    client: BenchClient,
    modes: Sequence[str],
    input_ids: list[list[int]],
    output_tokens: int,
    turn_s: float,
    *,
    prefill_s: float = 0,
) -> Wave:
    """One wave whose mode changes every `turn_s` seconds, from no records.

    The first turn is `prefill_s` longer, so that a long prefill does not use up turns.
    """
    client.switch(modes[0])
    client.reset_records()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.wave, input_ids, output_tokens)
        time.sleep(prefill_s)
        for mode in itertools.cycle([*modes[1:], modes[0]]):
            time.sleep(turn_s)
            if running.done():
                break
            client.request(mode)
        return running.result()


def _file(client: BenchClient, row: list[Cell], wave: Wave) -> None:
    """Add a wave and the samples of its steps to the cells of the modes it ran in."""
    zos = client.zos()
    for place, cell in enumerate(row):
        cell.digests.append(wave.digest)
        cell.repeats.append(timings(wave, place, samples(zos, cell.mode, cell.batch), cell.batch))


def samples(zos: dict[str, Any], mode: str, batch: int) -> dict[str, list[int]]:
    """What the records say of decode steps of one mode and batch size, in order: lists in ns.

    Of each step behind one like it: `wall_ns` from forward to forward, and `cpu_ns` of the scheduler's thread
    in the iteration, without the forward where the thread computes it itself. Raises BenchError.
    """
    steps = zos.get("steps")
    if steps is None:
        raise BenchError("the server records no steps; start it with ZOS_RECORD=1, see its log")
    before, after = pairs(from_columns(steps["last"]), same_rows=True)
    mine = (after["mode"] == code("mode", mode)) & (after["rows"] == batch)
    mine &= after["forward"] == code("forward", Forward.DECODE)
    before, after = before[mine], after[mine]
    return {
        "cpu_ns": (after["cpu"] - after["cpu_forward"]).tolist(),
        "wall_ns": (after["t_forward"] - before["t_forward"]).tolist(),
    }


def timings(wave: Wave, place: int, found: dict[str, list[int]], batch: int) -> dict[str, Any]:
    """The record of a wave that ran as number `place` of its repeat. Raises TooFewSteps."""
    cpu, wall = steady(found["cpu_ns"], batch), steady(found["wall_ns"], batch)
    return {
        "place": place,
        "seconds": round(wave.seconds, 4),
        "tokens": wave.tokens,
        "steps": len(found["cpu_ns"]),
        "digest": wave.digest,
        "cpu_us": spread(microseconds(cpu)),
        "wall_us": spread(microseconds(wall)),
        "raw_cpu_ns": thinned(cpu),
        "raw_wall_ns": thinned(wall),
    }


def variety(wave: Wave) -> dict[str, Any]:
    """Evidence that equal digests mean something: answers differ, and are not one token repeated."""
    return {
        "answers": len(wave.ids),
        "different_answers": len({tuple(ids) for ids in wave.ids}),
        "different_tokens_an_answer": statistics.median(len(set(ids)) for ids in wave.ids),
    }


def _ratios(cells: dict[tuple[int, str], Cell], settings: Settings) -> list[dict[str, Any]]:
    found = []
    for batch in settings.batches:
        base = cells[batch, settings.base]
        for mode in settings.modes:
            if mode == settings.base:
                continue
            cell = cells[batch, mode]
            found.append(
                {
                    "batch": batch,
                    "mode": mode,
                    "over": settings.base,
                    "cpu": ratio(cell.medians("cpu_us"), base.medians("cpu_us")),
                    "wall": ratio(cell.medians("wall_us"), base.medians("wall_us")),
                    "wall_mean": ratio(cell.medians("wall_us", "mean"), base.medians("wall_us", "mean")),
                }
            )
    return found


def _digests(
    cells: dict[tuple[int, str], Cell], settings: Settings, shapes: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    found = {}
    for batch in settings.batches:
        by_mode = {cell.mode: cell.digests for (size, _), cell in cells.items() if size == batch}
        found[str(batch)] = {
            "verdict": judge_digests(by_mode, settings.base),
            "by_mode": {mode: sorted(set(digests)) for mode, digests in by_mode.items()},
            **shapes[batch],
        }
    return found


def _growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What the counters of the server gained, and what it says of itself."""
    gained = {
        kind: {name: count - before[kind].get(name, 0) for name, count in after[kind].items()}
        for kind in ("reasons", "paths")
    }
    keep = ("sglang", "prefill_rule", "own_launch", "streams")
    return {**{name: after.get(name) for name in keep}, **gained}


def equal_everywhere(result: dict[str, Any]) -> bool:
    """Whether all modes gave the same token ids at every batch size."""
    return all(entry["verdict"] == "equal" for entry in result["digests"].values())
