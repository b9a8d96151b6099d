"""Step records of steady batches in every mode, and what must hold of them.

The records tell times that nobody else measured. So they are held against what is known otherwise: device
times against the floor (the decode graph replayed back to back), each sign against the mode that ran.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from zos_sglang.observe.columns import from_columns, to_columns
from zos_sglang.observe.model import gpu, median_us
from zos_sglang.observe.names import Forward, code
from zos_sglang.observe.record import KEPT
from zos_sglang.observe.signs import Finding, Sign, Verdict, judge
from zos_sglang.testing.bench.check import Check
from zos_sglang.testing.bench.client import BenchClient, BenchError, prompts
from zos_sglang.testing.bench.floor import measure_floor

#: Tokens of the wave before the recorded one, which shows a mode the batch.
WARM_TOKENS = 32
#: Device samples below which a wave says nothing about the device.
SAMPLES = 8
#: A step of the lane is the floor's graph with advance, sampling and emission around it.
OVER_FLOOR = (0.97, 1.08)
#: Median time for which the device may be idle between two steps of the lane, us.
IDLE_US = 20.0


@dataclass(frozen=True)
class Plan:
    """What is recorded. `model` and `attention` only name the setting."""

    model: str
    attention: str
    modes: Sequence[str]
    batches: Sequence[int]
    prompt: int
    output: int
    vocab: int


def record(client: BenchClient, plan: Plan) -> Iterator[dict[str, Any]]:
    """A wave a batch and mode, as `scripts/check_model.py` reads it, with the floor beside it.

    Raises BenchError if the server keeps no records, or lost some of a wave.
    """
    if plan.output > KEPT:
        raise BenchError(f"--output-tokens {plan.output}: a server keeps {KEPT} steps; ask for fewer")
    client.post("/set_internal_state", {"server_args": {"zos_report_steps": KEPT}})
    for batch in plan.batches:
        asked = prompts(batch, plan.prompt, plan.vocab)
        floor = None
        for mode in plan.modes:
            client.switch(mode)
            client.wave(asked, WARM_TOKENS)
            begun = time.perf_counter()
            found = _wave(client, asked, plan.output, mode)
            seconds = time.perf_counter() - begun
            if mode == "resident":
                floor, _ = measure_floor(client, asked, plan.output, seconds / 2)
            yield {
                **{"model": plan.model, "attention": plan.attention, "mode": mode, "batch": batch},
                **{"prompt": plan.prompt, "output": plan.output, "floor": floor},
                **{"records": to_columns(found), "signs": [asdict(one) for one in judge(found)]},
            }


def _wave(client: BenchClient, asked: list[list[int]], output: int, mode: str) -> np.ndarray:
    before = client.zos()["steps"]["launches"]
    client.wave(asked, output)
    steps = client.zos()["steps"]
    records = from_columns(steps["last"])
    records = records[records["step"] > before]
    decode = np.count_nonzero(records["forward"] == code("forward", Forward.DECODE))
    if decode < output - 1:
        raise BenchError(f"{mode}: {decode} of {output - 1} decode steps have a record")
    if steps["faults"]:
        raise BenchError(f"{mode}: recording failed {steps['faults']} times; see the server's log")
    mine = records["mode"] == code("mode", mode)
    found: np.ndarray = records[mine]
    return found


def check(wave: Mapping[str, Any], *, asynchronous: bool) -> Iterator[Check]:
    """What must hold of one wave of `record`; on a device that works on the scheduler's thread, only that the
    signs say that they cannot tell."""
    where = f"batch {wave['batch']}, {wave['mode']}"
    records = from_columns(wave["records"])
    decode = records[records["forward"] == code("forward", Forward.DECODE)]
    expected = Verdict.WITHOUT if wave["mode"] == "sync" else Verdict.WITH
    for found in judge(records):
        yield _sign(where, found, expected if asynchronous else Verdict.CANNOT_TELL)
    if not asynchronous:
        return
    thread = int(decode["cpu_forward"].max(initial=0))
    yield Check(f"{where}: no forward is computed by the thread", thread == 0, thread)
    sampled = decode["gpu"][decode["gpu"] >= 0]
    yield Check(f"{where}: at least {SAMPLES} device times", sampled.size >= SAMPLES, int(sampled.size))
    if wave["mode"] != "resident" or sampled.size < SAMPLES:
        return
    gaps = decode["gpu_gap"][decode["gpu_gap"] >= 0]
    idle = median_us(gaps)
    ok = idle is not None and idle <= IDLE_US
    yield Check(f"{where}: the device is idle {IDLE_US:g} us at most", ok, idle)
    if wave["floor"] is not None:
        ratio = over_floor(decode, wave)
        low, high = OVER_FLOOR
        ok = ratio is not None and low <= ratio <= high
        yield Check(f"{where}: device time {low:g} to {high:g} times the floor", ok, ratio)


def over_floor(decode: np.ndarray, wave: Mapping[str, Any]) -> float | None:
    """Device time over the floor, at the floor's own KV length: a step grows with the context, and the floor
    is taken at whichever opening of the lane came next. None without device times."""
    sampled = decode["gpu"] >= 0
    lengths = wave["prompt"] + 1 + np.arange(decode.size)
    apart = np.abs(lengths[sampled] - wave["floor"]["mean_len"])
    device = gpu(decode[sampled][np.argsort(apart, kind="stable")[: 2 * SAMPLES]])
    return None if device is None else round(device / wave["floor"]["us"], 3)


def _sign(where: str, found: Finding, expected: Verdict) -> Check:
    """The opposite verdict is wrong; a sign may say that it cannot tell, if it says why."""
    honest = found.verdict == expected or (found.verdict is Verdict.CANNOT_TELL and found.note is not None)
    shown = f"{found.verdict}" + (f" ({found.note})" if found.note else "")
    return Check(f"{where}: sign {found.sign} says {expected}", honest, shown)


def told(waves: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """How often each sign told overlap from no overlap, or could not."""
    found = {sign: dict.fromkeys(Verdict, 0) for sign in Sign}
    for wave in waves:
        for one in wave["signs"]:
            found[one["sign"]][one["verdict"]] += 1
    return {str(sign): {str(verdict): n for verdict, n in counts.items()} for sign, counts in found.items()}


def row(wave: Mapping[str, Any]) -> list[str]:
    """A line of the table: batch, mode, step, device, idle, copy, device over floor (us)."""
    records = from_columns(wave["records"])
    decode = records[records["forward"] == code("forward", Forward.DECODE)]
    step = median_us(np.diff(decode["t_forward"]))
    device, idle, copy = gpu(decode), _known(decode, "gpu_gap"), _known(decode, "d2h")
    ratio = over_floor(decode, wave) if wave["floor"] else None
    numbers = ((step, 0), (device, 0), (idle, 1), (copy, 1), (ratio, 3))
    shown = ["-" if value is None else f"{value:.{digits}f}" for value, digits in numbers]
    return [str(wave["batch"]), wave["mode"], *shown]


def _known(records: np.ndarray, column: str) -> float | None:
    return median_us(records[column][records[column] >= 0])
