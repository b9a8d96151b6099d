"""One prediction to check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from zos_sglang.observe.model import Step


class Setting(NamedTuple):
    """What was served: the model's name, the attention backend, tokens in and out, requests."""

    model: str
    attention: str
    prompt: int
    output: int
    batch: int


@dataclass(frozen=True, slots=True)
class Case:
    """A mode in a setting: what a step took, and the inputs to predict it from. Microseconds.

    Every input of `step` comes from other modes (`sources` says which), except L, which the lane alone has.
    `own` is the same with the CPU time of the thread in the mode itself (its thread clock, not the time that
    is predicted), which tells the model's error from the host's: the same work of the same machine takes more
    or less CPU from wave to wave. `cpu_ratio` is that CPU over the CPU that `step` was made with. For the
    lane `own` has the device's time in the lane instead, and `gpu_ratio` is that of `step` over it.
    """

    setting: Setting
    mode: str
    measured: float
    step: Step
    sources: dict[str, str]
    own: Step | None = None
    cpu_ratio: float | None = None
    gpu_ratio: float | None = None
