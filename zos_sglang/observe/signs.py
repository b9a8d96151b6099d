"""The four signs that overlap works, each judged by itself.

A sign has a value and two expectations, one with and one without overlap, from the same model as the what-if
(`model`). Its verdict is the nearer expectation, or `cannot-tell` where the two lie too close together, an
input is unknown, or there are too few steps. "Ready to launch" goes by its sign instead: positive without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from zos_sglang.observe.adjacent import difference, pairs, size_class
from zos_sglang.observe.model import GAP_NS, Step, busy, gpu, in_lane, median_us, predict, serial
from zos_sglang.observe.names import Block, Forward, Ready, code
from zos_sglang.observe.summary import distribution, tpot

#: Pairs of steps below which no sign is judged.
ENOUGH = 32
#: Expectations that differ by less than this share of the larger cannot be told apart.
APART = 0.1
#: Two results within this share of the device's time for a step: the first one was held back.
HELD = 0.75
#: Share of such gaps from which on output comes in bursts; fewer are results that the host picked up late.
OFTEN = 0.25
SLOW_THREAD = "the thread is slower than the device: a result waits for the next launch with overlap, too"


class Sign(StrEnum):
    """What is looked at."""

    CPU_OVER_WALL = "cpu-over-wall"
    READY_TO_LAUNCH = "ready-to-launch"
    INTERVAL_OVER_GPU = "interval-over-gpu"
    TOKEN_TIME = "token-time"


class Verdict(StrEnum):
    """What a sign says: this is a loop with overlap, without, or it cannot be told."""

    WITH = "with"
    WITHOUT = "without"
    CANNOT_TELL = "cannot-tell"


class Delivery(StrEnum):
    """How output comes: evenly, in bursts faster than the device is, or evenly at the device's pace."""

    STEADY = "steady"
    BURSTS = "bursts"
    SLOW_GPU = "slow-gpu"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sign. `value` and the expectations are in `unit` ("us" or "ratio"); None is unknown."""

    sign: Sign
    value: float | None
    expected_with: float | None
    expected_without: float | None
    verdict: Verdict
    unit: str
    note: str | None = None
    #: Numbers beside it, in microseconds.
    detail: dict[str, float] = field(default_factory=dict)


def judge(records: np.ndarray, known: Mapping[tuple[int, int], Step] | None = None) -> list[Finding]:
    """The four signs, in the order of `Sign`, of the newest mode's decode steps of the commonest kind.

    Args:
        records: dtype `STEP`, in order of `step`.
        known: `model.inputs` of more records than these, for the device's times: those of the lane are better
            than those of a loop. Default: only what these records say.
    """
    before, after = _alike(records)
    step = _step(after, known or {})
    found = [sign(before, after, step) for sign in (_cpu_over_wall, _ready, _interval, _token_time)]
    note = None
    if after.size < ENOUGH:
        note = f"{after.size} adjacent decode steps of one kind; {ENOUGH} are needed"
    elif after["cpu_forward"].max() > 0:
        note = "the device works on the scheduler's thread: nothing can overlap"
    if note is not None:
        return [replace(one, verdict=Verdict.CANNOT_TELL, note=note) for one in found]
    return found


def delivery(records: np.ndarray, gpu_us: float | None = None) -> Delivery:
    """Tell output in bursts from a device that is slow, over the same steps as `judge`.

    Bursts: many outputs follow the one before sooner than the device can do a step, so that one was held
    back. (A loop that is one step ahead then launches in bursts, too. That the device's steps are all
    longer, by the lower quartile of its samples, tells this from steps that differ.) Or, whatever the
    device's time: the times between outputs spread (P99 - P50) over more than half a launch interval
    although launches are even (spread below a quarter of P50). Slow device: both are even, and the interval
    is the device's time.
    """
    before, after = _alike(records)
    launches = distribution(after["t_forward"] - before["t_forward"])
    outputs = tpot(before, after)
    if launches is None or outputs is None:
        return Delivery.STEADY
    pace = launches["p50"]
    even = launches["p99"] - pace < pace / 4
    if even and outputs["spread"] > pace / 2:
        return Delivery.BURSTS
    device = gpu(after) if gpu_us is None else gpu_us
    if device is not None and _held(before, after, device):
        return Delivery.BURSTS
    if even and outputs["spread"] < pace / 4 and device is not None and abs(pace - device) <= device / 10:
        return Delivery.SLOW_GPU
    return Delivery.STEADY


def _held(before: np.ndarray, after: np.ndarray, device_us: float) -> bool:
    """Whether results come closer together than the device can make them."""
    sampled = after["gpu"][after["gpu"] >= 0]
    shortest = min(device_us * 1000, float(np.percentile(sampled, 25)) if sampled.size else np.inf)
    gaps = difference(after["t_output"], before["t_output"])
    return bool(np.count_nonzero(gaps < HELD * shortest) >= OFTEN * gaps.size)


def _alike(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adjacent decode steps of the newest mode; of these the commonest size class, in or out of the lane."""
    before, after = pairs(records)
    fits = after["forward"] == code("forward", Forward.DECODE)
    fits &= (after["t_forward"] > 0) & (before["t_forward"] > 0) & (in_lane(after) == in_lane(before))
    before, after = before[fits], after[fits]
    if after.size:
        kinds = size_class(after["rows"]) * 2 + in_lane(after)
        kinds[after["mode"] != after["mode"][-1]] = -1
        found, counts = np.unique(kinds[kinds >= 0], return_counts=True)
        mine = kinds == found[counts.argmax()]
        before, after = before[mine], after[mine]
    return before, after


def _step(records: np.ndarray, known: Mapping[tuple[int, int], Step]) -> Step:
    """The model's inputs for the steps that are judged, whichever path they took."""
    # On an idle device the samples begin at the submission, and the launch counts in: not once more, then.
    gap = median_us(records["gpu_gap"][records["gpu_gap"] >= 0])
    idle = gap is not None and gap * 1000 > GAP_NS
    own = Step(
        gpu=gpu(records),
        cpu=busy(records),
        d2h=median_us(records["d2h"][records["d2h"] >= 0]) or 0.0,
        cpu_serial=serial(records, "t_forward" if idle else "t_launched"),
    )
    if not records.size:
        return own
    better = known.get((int(records["forward"][-1]), int(size_class(records["rows"][-1:])[0])))
    if better is None or better.gpu is None:
        return own
    return replace(own, gpu=better.gpu, d2h=better.d2h)


def _cpu_over_wall(before: np.ndarray, after: np.ndarray, step: Step) -> Finding:
    """A thread that waits for the device does not run: with overlap the same work fills more of a step."""
    records = after[(after["cpu"] >= 0) & (after["wall"] > 0)]
    if not records.size:
        return _nearer(Sign.CPU_OVER_WALL, None, (None, None), "ratio")
    wall = int(records["wall"].sum())
    # A wait that spins, as stock's does on some devices, is CPU but no work.
    work = min(int(records["cpu"].sum()), wall - int(records["wait"].clip(0).sum()))
    each = work / records.size / 1000
    ahead, serially = (each / pace if pace else None for pace in _paces(step))
    return _nearer(Sign.CPU_OVER_WALL, work / wall, (ahead, serially), "ratio")


def _ready(before: np.ndarray, after: np.ndarray, step: Step) -> Finding:
    """How long a result had been there when the next forward was called: negative if it was yet to come."""
    seen = (before["ready"] != code("ready", Ready.UNSEEN)) & (before["t_ready"] > 0)
    value = median_us(after["t_forward"][seen] - before["t_ready"][seen])
    gap = median_us(after["gpu_gap"][after["gpu_gap"] >= 0])
    if value is None and gap is not None:
        # Nobody saw the results, but the device saw itself idle, or did not.
        value = gap if gap * 1000 > GAP_NS else 0.0
    call = median_us(after["t_launched"] - after["t_forward"]) or 0.0
    ahead = None
    if step.cpu is not None and step.gpu is not None:
        ahead = step.cpu - call - step.gpu - step.d2h
    slow = bool(np.count_nonzero(after["block"] == code("block", Block.CPU_BOUND)) * 2 > after.size)
    slow = slow or (ahead is not None and ahead > 0)
    found = Finding(
        Sign.READY_TO_LAUNCH,
        value,
        ahead,
        serial(after, "t_forward"),
        Verdict.CANNOT_TELL,
        "us",
        SLOW_THREAD if slow else None,
        {} if gap is None else {"gpu_gap": gap},
    )
    if value is None:
        return replace(found, note="no result was seen coming")
    if value <= 0:
        return replace(found, verdict=Verdict.WITH)
    if not slow:
        return replace(found, verdict=Verdict.WITHOUT)
    # Positive in either case: the distances decide, if they are known. The time of a result that nobody
    # waited for is an upper bound only.
    if np.count_nonzero(before["ready"] == code("ready", Ready.WAITED)) * 2 <= before.size:
        return found
    return replace(found, verdict=_verdict(value, ahead, found.expected_without))


def _interval(before: np.ndarray, after: np.ndarray, step: Step) -> Finding:
    """The distance of two launches in units of the device's time: 1 if the device is never idle."""
    interval = median_us(after["t_forward"] - before["t_forward"])
    ratios = [pace / step.gpu if pace and step.gpu else None for pace in (interval, *_paces(step))]
    return _nearer(Sign.INTERVAL_OVER_GPU, ratios[0], (ratios[1], ratios[2]), "ratio")


def _token_time(before: np.ndarray, after: np.ndarray, step: Step) -> Finding:
    """Time per output token: its median is the time of one step, unless output is held back."""
    times = tpot(before, after)
    if times is None:
        return _nearer(Sign.TOKEN_TIME, None, _paces(step), "us")
    detail = {name: times[name] for name in ("p50", "p90", "p99", "spread")}
    found = replace(_nearer(Sign.TOKEN_TIME, times["p50"], _paces(step), "us"), detail=detail)
    if delivery(after, step.gpu) is Delivery.BURSTS:
        return replace(found, verdict=Verdict.CANNOT_TELL, note="output comes in bursts")
    return found


def _paces(step: Step) -> tuple[float | None, float | None]:
    """The time of a step with and without overlap."""
    ahead, serially = predict(step, "overlap"), predict(step, "sync")
    return (None if ahead is None else ahead.low), (None if serially is None else serially.low)


def _nearer(
    sign: Sign, value: float | None, expected: tuple[float | None, float | None], unit: str
) -> Finding:
    verdict, note = _verdict(value, *expected), None
    if verdict is Verdict.CANNOT_TELL:
        unknown = value is None or None in expected
        note = "an input is unknown" if unknown else "with and without are too close together"
    return Finding(sign, value, *expected, verdict, unit, note)


def _verdict(value: float | None, ahead: float | None, serially: float | None) -> Verdict:
    if value is None or ahead is None or serially is None:
        return Verdict.CANNOT_TELL
    if abs(ahead - serially) < APART * max(abs(ahead), abs(serially)):
        return Verdict.CANNOT_TELL
    return Verdict.WITH if abs(value - ahead) <= abs(value - serially) else Verdict.WITHOUT
