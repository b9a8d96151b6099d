"""Makes the ranks of a server as different as real life does: delays and garbage collection in some of them.

A plugin for tests. `RANK_JITTER` lists ranks with a seed each ("1:7,0:3"); such a rank is held up at random
in its intake, before its forwards and in its result processing, by up to `RANK_JITTER_MS` milliseconds, and
collects its garbage now and then. What is right must not change by it: ranks wait for each other in
collectives only. The log says once for each place what befell the rank there (`TOLD`): a hook that SGLang
cannot apply is only logged, and a test without delays would pass.

`RANK_FAULT` ("RANK:KIND:AT") makes one rank decide otherwise once, to see that it is found out:

    decision    launch number AT or the first one after it that may overlap does not
    selection   batch number AT selected, or the first one after it that decodes, is not launched: the other
                ranks hang in its forward
    lane        the AT-th opening of the resident lane fails, which closes it in this rank alone

`ENTRY` is the `entry_points.txt` of a distribution that lets SGLang find the plugin.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ENTRY = "[sglang.srt.plugins]\nrank_jitter = zos_sglang.testing.rank_jitter:register\n"
JITTER, MILLISECONDS, FAULT = "RANK_JITTER", "RANK_JITTER_MS", "RANK_FAULT"
KINDS = ("decision", "selection", "lane")
#: Where a rank is held up.
PLACES = ("intake", "forward", "processing", "processing in the lane")
HELD_UP, COLLECTED = "held up", "garbage collected"
#: What the log says of each place and of what happened there.
TOLD = "rank_jitter: {what} in {place}"

logger = logging.getLogger(__name__)

_RECEIVE = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver.recv_requests"
_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
_PROCESS = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
#: How many passages hold the rank up, and how many collect garbage.
_HELD_UP, _COLLECTED = 0.08, 0.01


@dataclass
class Plan:
    """What the environment asks for. `seeds` by rank; `fault` is (rank, kind, at) or None."""

    seeds: dict[int, int] = field(default_factory=dict)
    milliseconds: float = 10.0
    fault: tuple[int, str, int] | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Plan:
        """Raises ValueError for what cannot be read."""
        seeds = {}
        for word in environ.get(JITTER, "").split(","):
            if word:
                rank, seed = word.split(":")
                seeds[int(rank)] = int(seed)
        plan = cls(seeds, float(environ.get(MILLISECONDS, "10")))
        if text := environ.get(FAULT):
            rank, kind, at = text.split(":")
            if kind not in KINDS:
                raise ValueError(f"{FAULT}={text}: {kind} is none of {', '.join(KINDS)}")
            plan.fault = int(rank), kind, int(at)
        return plan


class Told:
    """Says in the log, once for each place, what befell this rank there."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def __call__(self, what: str, place: str) -> None:
        if (what, place) not in self._said:
            self._said.add((what, place))
            logger.warning(TOLD.format(what=what, place=place))


class Jitter:
    """Holds up the rank that it runs in.

    Args:
        plan: for whom and how much.
        rank_of: this rank; asked once, when the first place is passed.
    """

    def __init__(
        self,
        plan: Plan,
        rank_of: Callable[[], int],
        sleep: Callable[[float], None] = time.sleep,
        collect: Callable[[], Any] = gc.collect,
    ) -> None:
        self.plan = plan
        self.rank_of = rank_of
        self.sleep = sleep
        self.collect = collect
        self._random: random.Random | None = None
        self._asked = False
        self._tell = Told()

    def place(self, name: str) -> Callable[..., None]:
        """To be called where the rank passes by; takes any arguments and leaves them alone."""
        return lambda *_, **__: self._pass_by(name)

    def _pass_by(self, place: str) -> None:
        if not self._asked:
            self._asked = True
            seed = self.plan.seeds.get(self.rank_of())
            self._random = None if seed is None else random.Random(seed)
        chance = self._random
        if chance is None:
            return
        luck = chance.random()
        if luck < _HELD_UP:
            self._tell(HELD_UP, place)
            self.sleep(chance.random() * self.plan.milliseconds / 1000)
        elif luck < _HELD_UP + _COLLECTED:
            self._tell(COLLECTED, place)
            self.collect()


def otherwise(
    decide: Callable[..., Any], instead: Callable[[Any], Any], rank: Callable[[], int], plan: Plan
) -> Any:
    """`decide`, whose result is replaced once, from call `at` on, in the rank of the plan's fault.

    Args:
        instead: what to return in place of a result, or the result itself where it cannot be changed.
    """
    assert plan.fault is not None
    whose, _, at = plan.fault
    calls, done = 0, False

    def deciding(*args: Any) -> Any:
        nonlocal calls, done
        result = decide(*args)
        if result is None or done or rank() != whose:
            return result
        calls += 1
        if calls < at:
            return result
        changed = instead(result)
        done = changed is not result
        return changed

    return deciding


def failing(call: Callable[..., Any], rank: Callable[[], int], plan: Plan) -> Any:
    """`call`, which raises in its AT-th call in the rank of the plan's fault."""
    assert plan.fault is not None
    whose, _, at = plan.fault
    calls = 0

    def calling(*args: Any) -> Any:
        nonlocal calls
        calls += rank() == whose
        if calls == at and rank() == whose:
            raise RuntimeError("planted by RANK_FAULT")
        return call(*args)

    return calling


def register() -> None:
    """Entry point of group `sglang.srt.plugins`; acts in processes that run a scheduler.

    Raises:
        SystemExit: a bad variable.
    """
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    try:
        plan = Plan.of(os.environ)
    except ValueError as error:
        raise SystemExit(f"rank_jitter: {error}") from None
    if plan.seeds:
        _hold_up(plan)
    if plan.fault is not None:
        _decide_otherwise(plan)


def _hold_up(plan: Plan) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from zos_sglang.upstream.lane_results import LaneResults

    jitter = Jitter(plan, this_rank)
    *hooked, lane = PLACES
    for target, place in zip((_RECEIVE, _FORWARD, _PROCESS), hooked, strict=True):
        HookRegistry.register(target, jitter.place(place), HookType.BEFORE)
    process, in_the_lane = LaneResults.process, jitter.place(lane)

    def held_up(results: Any, batch: Any, result: Any) -> None:
        in_the_lane()
        process(results, batch, result)

    LaneResults.process = held_up  # type: ignore[method-assign]


def _decide_otherwise(plan: Plan) -> None:
    from zos_sglang.overlap.event_loop import EventLoop
    from zos_sglang.overlap.guards import FIRST_TOKEN
    from zos_sglang.resident.eager import EagerExecutor
    from zos_sglang.upstream.port import SglangPort

    assert plan.fault is not None
    if plan.fault[1] == "decision":
        EventLoop._decide = otherwise(  # type: ignore[method-assign]
            EventLoop._decide, lambda found: FIRST_TOKEN if found.overlap else found, this_rank, plan
        )
    elif plan.fault[1] == "lane":
        EagerExecutor.open = failing(EagerExecutor.open, this_rank, plan)  # type: ignore[method-assign]
    else:
        SglangPort.select = otherwise(  # type: ignore[method-assign]
            SglangPort.select,
            lambda batch: None if batch.forward_mode.is_decode() else batch,
            this_rank,
            plan,
        )


def this_rank() -> int:
    """This process's tensor-parallel rank; known once its scheduler is set up."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)
