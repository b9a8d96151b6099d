"""A workload to simulate: what is asked for, and what a step costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zos_sglang.observe.model import Step

#: Microseconds in a second.
S = 1_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """What is served, and what a step costs (microseconds: a part for every step and one for every row).

    `rate` is requests a second, 0 for all at once; `prompt` and `output` are mean tokens and `spread` the
    coefficient of variation of both; `jitter` that of the thread's times. `serial` is the share of the
    thread's work that lies between a result and the next launch. Raises ValueError for what cannot be.
    """

    requests: int = 1000
    rate: float = 0.0
    prompt: int = 512
    output: int = 256
    spread: float = 0.0
    max_running: int = 64
    chunk: int = 8192
    gpu: float = 3000.0
    gpu_row: float = 0.0
    gpu_token: float = 5.0
    cpu: float = 2000.0
    cpu_row: float = 0.0
    cpu_lane: float = 500.0
    d2h: float = 20.0
    serial: float = 1.0
    jitter: float = 0.0
    ranks: int = 1
    depth: int = 1

    def __post_init__(self) -> None:
        for name in ("requests", "prompt", "output", "max_running", "chunk", "ranks", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number that is not negative, not {value}")
        if self.gpu + self.cpu == 0:
            raise ValueError("a step that takes no time: gpu and cpu are both 0")
        if self.serial > 1:
            raise ValueError(f"serial is a share, at most 1, not {self.serial}")

    def step(self, rows: int) -> Step:
        """The model's inputs for a decode step of `rows` rows."""
        cpu = self.cpu + self.cpu_row * rows
        return Step(
            gpu=self.gpu + self.gpu_row * rows,
            cpu=cpu,
            cpu_lane=self.cpu_lane,
            d2h=self.d2h,
            cpu_serial=self.serial * cpu,
        )


def draw(load: Workload, random: np.random.Generator) -> tuple[list[float], list[int], list[int]]:
    """Arrivals (us, the first at 0), prompt and output tokens."""
    count = load.requests
    arrivals = np.zeros(count)
    if load.rate:
        arrivals[1:] = np.cumsum(random.exponential(S / load.rate, count - 1))
    sigma = float(np.sqrt(np.log1p(load.spread**2)))
    factors = np.exp(random.normal(-(sigma**2) / 2, sigma, (2, count))) if sigma else np.ones((2, count))
    prompts, outputs = (
        np.maximum(1, np.rint(mean * factors[place])).astype(int).tolist()
        for place, mean in enumerate((load.prompt, load.output))
    )
    return arrivals.tolist(), prompts, outputs
