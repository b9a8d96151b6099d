"""Every scenario of the regression, in the order of play."""

from __future__ import annotations

from zos_sglang.testing.compare.scenario import Scenario
from zos_sglang.testing.compare.scenarios.basics import SCENARIOS as BASICS
from zos_sglang.testing.compare.scenarios.control import SCENARIOS as CONTROL
from zos_sglang.testing.compare.scenarios.cuts import SCENARIOS as CUTS
from zos_sglang.testing.compare.scenarios.lane import SCENARIOS as LANE
from zos_sglang.testing.compare.scenarios.prefill import SCENARIOS as PREFILL
from zos_sglang.testing.compare.scenarios.sampling import SCENARIOS as SAMPLING
from zos_sglang.testing.compare.scenarios.special import SCENARIOS as SPECIAL

ALL: tuple[Scenario, ...] = (*BASICS, *SAMPLING, *PREFILL, *CUTS, *CONTROL, *LANE, *SPECIAL)
