"""Every scenario of the regression, in the order of play."""

from __future__ import annotations

from zos_sglang.testing.compare.scenario import Scenario
from zos_sglang.testing.compare.scenarios import basics, control, cuts, prefill, sampling, special

ALL: tuple[Scenario, ...] = (
    *basics.SCENARIOS,
    *sampling.SCENARIOS,
    *prefill.SCENARIOS,
    *cuts.SCENARIOS,
    *control.SCENARIOS,
    *special.SCENARIOS,
)
