"""A plugin for tests of DP attention: one rank is late now and then, and every rank can show its stacks.

`DP_JITTER=RANK:SEED` makes rank RANK (of tensor parallelism) sleep or collect garbage at random before its
intake, behind its selection and before it processes a result. The log says once for each place that it did:
a hook that SGLang cannot apply is only logged. On signal `STACKS` every rank writes the stacks of its threads
to the file `stacks_of(folder, pid)`, folder `DP_STACKS`. A request with id `HANG` makes RANK sleep for good.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zos_sglang.testing.rank_jitter import HELD_UP, Told, this_rank

#: `entry_points.txt` of a distribution that lets SGLang find the plugin.
ENTRY = "[sglang.srt.plugins]\ndp_jitter = zos_sglang.testing.dp_jitter:register\n"
JITTER, FOLDER = "DP_JITTER", "DP_STACKS"
STACKS = signal.SIGUSR2
HANG = "hang-this-rank"
PLACES = ("intake", "selection", "processing")

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
#: Of the three places of an iteration: how often, and for how long at most (seconds).
_DELAYS = ((0.02, 0.005), (0.001, 0.1))
_GARBAGE = 0.0005


def stacks_of(folder: str | Path, pid: int) -> Path:
    return Path(folder) / f"stacks-{pid}.txt"


class Jitter:
    """The delays of one rank, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._tell = Told()

    def __call__(self, place: str) -> None:
        for share, seconds in _DELAYS:
            if self._random.random() < share:
                self._tell(HELD_UP, place)
                time.sleep(self._random.uniform(0, seconds))
        if self._random.random() < _GARBAGE:
            gc.collect()


def register() -> None:
    """Entry point of group `sglang.srt.plugins`; does nothing outside a scheduler's process."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # The file stays open for as long as the process lives: faulthandler keeps its descriptor only.
    faulthandler.register(STACKS, file=stacks_of(os.environ[FOLDER], os.getpid()).open("w"), all_threads=True)
    late, seed = (int(word) for word in os.environ[JITTER].split(":"))
    jitter = Jitter(seed)
    intake, selection, processing = PLACES

    def before(place: str) -> Callable[..., None]:
        def held_up(*_: Any, **__: Any) -> None:
            if this_rank() == late:
                jitter(place)

        return held_up

    def behind(plan: Any, *_: Any, **__: Any) -> None:
        if this_rank() == late:
            jitter(selection)
            batch = plan.batch_to_run
            if batch is not None and any(req.rid == HANG for req in batch.reqs):
                time.sleep(3600)

    HookRegistry.register(f"{_SCHEDULER}.ingest_requests", before(intake), HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", behind, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", before(processing), HookType.BEFORE)
