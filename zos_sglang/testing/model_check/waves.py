"""Cases from a result of bench_zos: `bench_zos.json` and `waves.jsonl` of one folder.

A sample there is the distance of two forwards and the thread's CPU between them: the forward's own call,
which replays a graph, is in the distance only. The parts of the model come out of it so:

    G   the lane's median step of the same setting, whose device is never idle; for the lane itself the floor,
        graphs replayed back to back, against the steps at the floor's own KV length
    C   CPU between forwards + F
    F   the forward's call, and what else is not the thread's CPU: the distance minus the CPU in mode stock,
        whose thread never sleeps (it spins where it waits, and that is CPU)
    S   C - H
    H   what a loop without overlap does while the device works: not to be had from one setting's samples. It
        is the median over all other settings of G + D + C minus their measured step in mode sync
    D   given
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from zos_sglang.observe.model import Step
from zos_sglang.testing.bench.floor_steps import floor_step_us
from zos_sglang.testing.model_check.case import Case, Setting

#: A step of stock this much longer than the device's is paced by its thread, which then does not wait.
_PACED_BY_THREAD = 1.05


@dataclass(frozen=True, slots=True)
class Sample:
    """Medians over a mode's waves of each wave's median; microseconds. `at_floor`: see floor_steps."""

    wall: float
    cpu: float
    rest: float
    at_floor: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """A setting with its floor and its modes."""

    setting: Setting
    floor: float | None
    modes: dict[str, Sample]


def head(folder: Path) -> dict[str, Any]:
    """Where the result in `folder` comes from. Raises OSError and ValueError for what is none."""
    data = _data(folder)
    return {
        "name": folder.name,
        **{key: data[key] for key in ("kind", "commit", "date", "versions", "machine")},
    }


def cases(folders: Sequence[Path], d2h: float) -> list[Case]:
    """All cases of several results; H is shared among them. `d2h` is D in microseconds."""
    points = [point for folder in folders for point in read(folder)]
    return [*_sync(points, d2h), *(case for point in points for case in (*_overlap(point), *_lane(point)))]


def read(folder: Path) -> Iterator[Point]:
    """The points that were measured."""
    data = _data(folder)
    model = Path(data["identity"]["model"]).name
    waves: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    with (folder / "waves.jsonl").open() as source:
        for line in source:
            wave = json.loads(line)
            waves.setdefault((*_where(wave), wave["mode"]), []).append(wave)
    for point in data["points"]:
        modes = {
            mode: _sample(found, point)
            for mode in data["identity"]["modes"]
            if (found := waves.get((*_where(point), mode)))
        }
        if modes:
            floor = point["floor"]["us"] if point["floor"] else None
            yield Point(Setting(model, *_where(point)), floor, modes)


def _sync(points: Sequence[Point], d2h: float) -> list[Case]:
    """Mode sync: G of the lane, F of stock, CPU of overlap, H of the other settings."""
    wanted = ("sync", "stock", "overlap", "resident")
    full = [point for point in points if all(mode in point.modes for mode in wanted)]
    hidden: dict[str, dict[Setting, float]] = {
        cpu: {
            point.setting: point.modes["resident"].wall
            + d2h
            + point.modes[cpu].cpu
            + point.modes["stock"].rest
            - point.modes["sync"].wall
            for point in full
        }
        for cpu in ("overlap", "sync")
    }
    found = []
    for point in full:
        others = [other.setting for other in full if other.setting != point.setting]
        if not others:
            continue
        both = []
        for cpu in ("overlap", "sync"):
            busy = point.modes[cpu].cpu + point.modes["stock"].rest
            h = median(hidden[cpu][other] for other in others)
            both.append(Step(point.modes["resident"].wall, busy, None, d2h, busy - h))
        sources = {
            "G": "resident",
            "cpu": "overlap",
            "F": "stock",
            "H": "sync of other settings",
            "D": "given",
        }
        found.append(_case(point, "sync", both[0], both[1], sources))
    return found


def _overlap(point: Point) -> Iterator[Case]:
    """Mode overlap: G of the lane, F of stock, CPU of stock where that does not spin, else of sync.

    Where the thread sets the pace, this says that overlap takes as long as stock.
    """
    if not all(mode in point.modes for mode in ("stock", "overlap", "resident")):
        return
    device, stock = point.modes["resident"].wall, point.modes["stock"]
    donor = "stock" if stock.wall > _PACED_BY_THREAD * device or "sync" not in point.modes else "sync"
    step, own = (Step(device, point.modes[cpu].cpu + stock.rest) for cpu in (donor, "overlap"))
    yield _case(point, "overlap", step, own, {"G": "resident", "cpu": donor, "F": "stock"})


def _lane(point: Point) -> Iterator[Case]:
    """Mode resident: the floor, unless the thread is slower than that."""
    lane = point.modes.get("resident")
    if lane is None or lane.at_floor is None or point.floor is None:
        return
    step = Step(point.floor, cpu_lane=lane.cpu)
    yield Case(point.setting, "resident", lane.at_floor, step, {"G": "floor", "L": "resident (own CPU)"})


def _case(point: Point, mode: str, step: Step, own: Step, sources: dict[str, str]) -> Case:
    ratio = point.modes[mode].cpu / point.modes[sources["cpu"]].cpu
    return Case(point.setting, mode, point.modes[mode].wall, step, sources, own, ratio)


def _sample(waves: Sequence[dict[str, Any]], point: dict[str, Any]) -> Sample:
    walls = [np.array(wave["wall_ns"]) for wave in waves]
    cpus = [np.array(wave["cpu_ns"]) for wave in waves]
    near = [
        floor_step_us(wave["wall_ns"], point["prompt"], point["output"], point["floor"]) for wave in waves
    ]
    known = [us for us in near if us is not None]
    return Sample(
        wall=median(float(np.median(wall)) for wall in walls) / 1000,
        cpu=median(float(np.median(cpu)) for cpu in cpus) / 1000,
        rest=median(float(np.median(wall - cpu)) for wall, cpu in zip(walls, cpus, strict=True)) / 1000,
        at_floor=median(known) if known else None,
    )


def _where(entry: dict[str, Any]) -> tuple[str, int, int, int]:
    return entry["attention"], entry["prompt"], entry["output"], entry["batch"]


def _data(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "bench_zos.json").read_text())
    if not isinstance(data, dict) or data.get("kind") != "bench_zos":
        raise ValueError(f"{folder / 'bench_zos.json'} is not a result of bench_zos")
    return data
