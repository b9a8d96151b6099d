"""The model's recursion over a whole workload: arrivals, lengths, jitter, ranks, depth. Seeded.

Every rank has a thread of its own with its own jitter; a step starts on the device when every rank has
launched it, and all have its result at the same time, as with tensor parallelism. A thread launches a step
and then processes the result of the step `depth` before; without overlap it processes first. Rows leave when
their last result is processed, so with overlap they stay for `depth` steps more, which nobody uses. Prefills
take turns with decode steps; a prompt longer than a chunk is one prefill.

Times are microseconds from the first arrival on.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from zos_sglang.observe.model import PREDICTED, Range, predict
from zos_sglang.observe.summary import distribution
from zos_sglang.observe.workload import S, Workload, draw

US = 1_000
#: Random numbers drawn at a time.
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run gave. Distributions as `summary.distribution`; shares of the run's time."""

    mode: str
    seconds: float
    requests: int
    tokens: int
    tokens_per_s: float
    steps: int
    decode_steps: int
    lane_steps: int
    rows_mean: float
    rows_wasted: int
    gpu_busy: float
    cpu_busy: float
    interval_us: dict[str, Any] | None
    tpot_us: dict[str, Any] | None
    ttft_us: dict[str, Any] | None
    predicted_us: Range | None


def simulate(workload: Workload, mode: str, seed: int = 0) -> Outcome:
    """Serve `workload` in `mode` ("sync", "overlap", "resident"). Raises ValueError for another mode."""
    if mode not in PREDICTED:
        raise ValueError(f"no simulation of mode {mode!r}; there are {', '.join(PREDICTED)}")
    run = _Run(workload, mode, np.random.default_rng(seed))
    while run.iterate():
        pass
    return run.outcome()


class _Jitter:
    """Factors of mean 1 for the threads of all ranks, drawn in blocks."""

    def __init__(self, random: np.random.Generator, spread: float, ranks: int) -> None:
        self.random, self.ranks = random, ranks
        # Of a lognormal distribution: no time is negative, and some are long.
        self.sigma = float(np.sqrt(np.log1p(spread**2)))
        self.block: list[Any] = []

    def draw(self) -> Any:
        """One factor a rank: array of `ranks`, or a plain number for one rank (much faster)."""
        if not self.sigma:
            return 1.0
        if not self.block:
            normal = self.random.normal(-(self.sigma**2) / 2, self.sigma, (_BLOCK, self.ranks))
            factors = np.exp(normal)
            self.block = factors[:, 0].tolist() if self.ranks == 1 else list(factors)
        return self.block.pop()


@dataclass(slots=True)
class _Launched:
    ready: float
    #: The number of the decode step, 0 for a prefill; rows whose token somebody waits for.
    decode: int
    live: int
    #: Arrivals of the requests that a prefill gives the first token.
    arrivals: list[float]


class _Run:
    """One run under way. `now` is the threads' time: a number, or an array of one a rank."""

    def __init__(self, workload: Workload, mode: str, random: np.random.Generator) -> None:
        self.load, self.mode = workload, mode
        self.arrivals, self.prompts, self.outputs = draw(workload, random)
        self.jitter = _Jitter(random, workload.jitter, workload.ranks)
        self.depth = 0 if mode == "sync" else workload.depth
        self.now: Any = 0.0
        self.device = self.device_busy = self.thread_busy = 0.0
        self.next = self.decoded = 0
        #: Rows in the batch; those of them that still want tokens; by decode step, how many end with it.
        self.rows = self.live = 0
        self.ends: Counter[int] = Counter()
        self.changed = True
        self.pending: deque[_Launched] = deque()
        self.lane_steps = self.wasted = self.steps = self.row_steps = 0
        #: Time of the last launch, and of the last output, of a decode step; None after a gap.
        self.last_launch: float | None = None
        self.last_output: float | None = None
        self.intervals: list[float] = []
        self.gaps: list[tuple[float, int]] = []
        self.first: list[float] = []

    def iterate(self) -> bool:
        """One iteration of the event loop. False when everything is served."""
        admitted = self._admit()
        if admitted or self.rows:
            self._step(admitted)
        elif self.pending:
            self._process(0.0)
        elif self.next < len(self.arrivals):
            self.now = _later(self.now, self.arrivals[self.next])
            self.last_launch = self.last_output = None
        else:
            return False
        return True

    def _admit(self) -> list[int]:
        """Requests for a prefill: arrived, within the batch's rows and a chunk's tokens (one always fits)."""
        found: list[int] = []
        tokens, now = 0, _latest(self.now)
        while self.next < len(self.arrivals) and self.arrivals[self.next] <= now:
            tokens += self.prompts[self.next]
            if self.rows + len(found) >= self.load.max_running or (found and tokens > self.load.chunk):
                break
            found.append(self.next)
            self.next += 1
        return found

    def _step(self, admitted: list[int]) -> None:
        load = self.load
        lane = self.mode == "resident" and not admitted and not self.changed
        self.lane_steps += lane
        work = (load.cpu_lane if lane else load.cpu + load.cpu_row * self.rows) * self.jitter.draw()
        self.thread_busy += float(np.mean(work))
        if self.depth:
            self.now = self.now + work / 2
            self._launch(admitted)
            if len(self.pending) > self.depth:
                self._process(work / 2)
            else:
                self.now = self.now + work / 2
        else:
            serial = work * load.serial
            if self.pending:
                self._process(serial / 2)
                self.now = self.now + serial / 2
            else:
                self.now = self.now + serial
            # Processing may have emptied the batch; then this iteration found nothing to launch.
            if admitted or self.rows:
                self._launch(admitted)
            self.now = self.now + (work - serial)

    def _launch(self, admitted: list[int]) -> None:
        load, launched = self.load, _latest(self.now)
        self.steps += 1
        if admitted:
            tokens = sum(self.prompts[one] for one in admitted)
            takes = load.gpu + load.gpu_token * tokens
            step = _Launched(0.0, 0, 0, [self.arrivals[one] for one in admitted])
            for one in admitted:
                # The prefill gives the first token.
                if self.outputs[one] > 1:
                    self.rows, self.live = self.rows + 1, self.live + 1
                    self.ends[self.decoded + self.outputs[one] - 1] += 1
            self.changed, self.last_launch = True, None
        else:
            self.decoded += 1
            takes = load.gpu + load.gpu_row * self.rows
            step = _Launched(0.0, self.decoded, self.live, [])
            self.row_steps += self.rows
            self.wasted += self.rows - self.live
            self.live -= self.ends[self.decoded]
            if self.last_launch is not None:
                self.intervals.append(launched - self.last_launch)
            self.changed, self.last_launch = False, launched
        self.device = max(self.device, launched) + takes
        self.device_busy += takes
        step.ready = self.device + load.d2h
        self.pending.append(step)

    def _process(self, takes: Any) -> None:
        step = self.pending.popleft()
        self.now = _later(self.now, step.ready) + takes
        # Rank 0 sends the output.
        output = float(self.now if isinstance(self.now, float) else self.now[0])
        self.first += [output - arrival for arrival in step.arrivals]
        if step.decode:
            if self.last_output is not None and step.live:
                self.gaps.append((output - self.last_output, step.live))
            self.last_output = output
            if left := self.ends.pop(step.decode, 0):
                self.rows -= left
                self.changed = True

    def outcome(self) -> Outcome:
        """What came of it, after the last iteration."""
        seconds, tokens = _latest(self.now) / S, int(sum(self.outputs))
        gaps = np.array(self.gaps or np.zeros((0, 2)))
        rows = self.row_steps / self.decoded if self.decoded else 0.0
        return Outcome(
            mode=self.mode,
            seconds=round(seconds, 6),
            requests=len(self.arrivals),
            tokens=tokens,
            tokens_per_s=round(tokens / seconds, 1) if seconds else 0.0,
            steps=self.steps,
            decode_steps=self.decoded,
            lane_steps=self.lane_steps,
            rows_mean=round(rows, 2),
            rows_wasted=self.wasted,
            gpu_busy=round(self.device_busy / S / seconds, 4) if seconds else 0.0,
            cpu_busy=round(self.thread_busy / S / seconds, 4) if seconds else 0.0,
            interval_us=distribution(np.array(self.intervals) * US),
            tpot_us=distribution(gaps[:, 0] * US, gaps[:, 1]),
            ttft_us=distribution(np.array(self.first) * US),
            predicted_us=predict(self.load.step(round(rows)), self.mode, max(1, self.depth)),
        )


def _later(now: Any, time: float) -> Any:
    return max(now, time) if isinstance(now, float) else np.maximum(now, time)


def _latest(now: Any) -> float:
    return now if isinstance(now, float) else float(now.max())
