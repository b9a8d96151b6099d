"""So many inputs of one target, in batches, until one fails; the smallest failing input is kept."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from tests.fuzz.hostile import Choices

#: Inputs of one run of hypothesis. It remembers what it has tried, so memory and time a step grow with it.
BATCH = 2000
_SHOWN = 4000
#: Choices of an input.
_BYTES = st.binary(min_size=24, max_size=64)


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
        name: of `scripts/fuzz.py --target`.
        about: in words, for people.
        make: an input from choices: a valid one, damaged.
        check: raises for an input that the code under test did not take as it promises. Returns a word for
            what became of it, so that a run shows that it got beyond the first refusal.
    """

    name: str
    about: str
    make: Callable[[Choices], Any]
    check: Callable[[Any], str]


@dataclass
class Outcome:
    """`inputs` tried in `seconds`, by what became of them; `failure`: the smallest input and its error."""

    target: str
    seed: int
    inputs: int
    seconds: float
    became: dict[str, int]
    failure: dict[str, str] | None = None


def run(
    target: Target,
    inputs: int,
    seed: int,
    report: Callable[[Outcome], None] = lambda _: None,
    seconds: float = math.inf,
) -> Outcome:
    """Try at least `inputs` inputs; stops at the first that fails, made smaller.

    `report` is called after each batch; the last batch begins before `seconds` are over.
    """
    begun, became = time.monotonic(), dict[str, int]()
    outcome = Outcome(target.name, seed, 0, 0.0, became)
    batch = 0
    while outcome.inputs < inputs and outcome.failure is None and outcome.seconds < seconds:
        _batch(target, min(BATCH, inputs - outcome.inputs), seed + batch * 1_000_003, outcome)
        batch += 1
        outcome.seconds = round(time.monotonic() - begun, 1)
        report(outcome)
    return outcome


def _batch(target: Target, inputs: int, seed: int, outcome: Outcome) -> None:
    failing: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(_BYTES)
    def one(content: bytes) -> None:
        value = target.make(Choices(content))
        outcome.inputs += 1
        try:
            word = target.check(value)
        except Exception:
            failing[:] = [value]
            raise
        outcome.became[word] = outcome.became.get(word, 0) + 1

    try:
        one()
    except Exception as error:
        # Hypothesis runs the smallest input last.
        shown = repr(failing[0]) if failing else "(no input)"
        outcome.failure = {
            "input": shown[:_SHOWN],
            "error": f"{type(error).__name__}: {error}"[:_SHOWN],
            "traceback": "".join(traceback.format_exception(error))[-_SHOWN:],
        }
