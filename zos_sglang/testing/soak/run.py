"""One soak of one started server: record, let the users loose, disturb, look at idle moments, judge."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from zos_sglang.testing.bench.checkpoint import vocabulary
from zos_sglang.testing.server import ServerProcess
from zos_sglang.testing.soak.disturb import MODES, Disturber
from zos_sglang.testing.soak.judge import Tally
from zos_sglang.testing.soak.plan import Scale, Source, questions
from zos_sglang.testing.soak.traffic import Traffic, client
from zos_sglang.testing.soak.truth import Oracle, Truth, record
from zos_sglang.testing.soak.watch import Sample, sample_of

#: Seconds until the requests under way must be over, once nobody asks any more; clients that hung up are
#: aborted by SGLang two seconds later.
_DRAIN_S = 90.0
_PROGRESS_S = 10.0


@dataclass(frozen=True)
class Settings:
    """How long, how much, from which seed.

    `idle_every_s` seconds between two idle moments; `faults`: the server was asked to fail on purpose.
    """

    minutes: float
    scale: Scale = field(default_factory=Scale)
    modes: tuple[str, ...] = MODES
    seed: int = 0
    idle_every_s: float = 45.0
    faults: bool = False


class Soak:
    """State of one run. `say` gets the progress line."""

    def __init__(self, server: ServerProcess, settings: Settings, say: Callable[[str], None]) -> None:
        self.server, self.settings, self.say = server, settings, say
        self.tally = Tally()
        self.samples: list[Sample] = []
        self.zos: dict[str, Any] = {}
        self.begun = 0.0
        self.oldest_s = 0.0
        self.http = client(server.url)

    async def run(self) -> None:
        """Everything; faults stand in `tally`. Raises BenchError if stock's answers cannot be recorded."""
        settings, scale = self.settings, self.settings.scale
        model = Path(self.server.model)
        async with self.http:
            vocab = vocabulary(model)
            asked = questions(scale, vocab, settings.seed)
            self.source = Source(scale, settings.seed)
            self.traffic = Traffic(self.http, asked, Oracle(asked, vocab), self.source, self.tally)
            self.disturber = Disturber(
                self.http,
                self.traffic,
                self.tally,
                model=str(model),
                modes=settings.modes,
                timeout_s=scale.timeout_s,
                seed=settings.seed,
            )
            if not scale.oracle:
                await self.disturber.switch_to("stock")
                truth: Truth = await record(self.http, asked, scale)
                self.traffic.truth = truth
            await self.disturber.switch_to(settings.modes[-1])
            await self._soak()

    async def _soak(self) -> None:
        self.begun = time.monotonic()
        users = [asyncio.create_task(self.traffic.user()) for _ in range(self.settings.scale.users)]
        others = [asyncio.create_task(self.disturber.run()), asyncio.create_task(self._progress())]
        try:
            await self._idle_moment()
            end = self.begun + self.settings.minutes * 60
            while not self.traffic.over and time.monotonic() < end:
                self.traffic.gate.set()
                await asyncio.sleep(min(self.settings.idle_every_s, max(0.0, end - time.monotonic())))
                await self._idle_moment()
            self.zos = await self.disturber.zos() if self.tally.broken is None else {}
        except httpx.HTTPError as error:
            self.tally.broken = self.tally.broken or f"{type(error).__name__}: {error}"
        finally:
            self.traffic.over = True
            self.traffic.gate.set()
            for task in (*users, *others):
                task.cancel()
            for task in (*users, *others):
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _idle_moment(self) -> None:
        """Nobody asks: everything must end, every page come back. Then look."""
        if self.traffic.over:
            return
        if not await self.traffic.drained(_DRAIN_S):
            left = sorted(self.traffic.under_way)[:3]
            self.tally.fault(
                f"{len(self.traffic.under_way)} requests not over after {_DRAIN_S:.0f} s: {left}"
            )
            self.traffic.over = True
            return
        deadline = time.monotonic() + _DRAIN_S
        while (reply := await self.http.post("/flush_cache", params={"timeout": 1})).status_code != 200:
            if time.monotonic() > deadline:
                self.tally.fault(f"not idle {_DRAIN_S:.0f} s after the last request: {reply.text[:200]}")
                self.traffic.over = True
                return
            await asyncio.sleep(0.2)
        # What it publishes at idle comes a moment later.
        await asyncio.sleep(0.5)
        load = (await self.http.get("/v1/loads")).json()["loads"][0]
        sample = sample_of((time.monotonic() - self.begun) / 60, self.server.pid, load)
        self.samples.append(sample)
        if sample.used_tokens or sample.waiting or sample.running:
            self.tally.fault(
                f"idle, flushed, and {sample.used_tokens} tokens of the pool, {sample.waiting} waiting, "
                f"{sample.running} running"
            )

    async def _progress(self) -> None:
        while True:
            self.oldest_s = max(self.oldest_s, self.traffic.oldest_s)
            if int(time.monotonic() - self.begun) % _PROGRESS_S == 0:
                self.say(self._line())
            await asyncio.sleep(1)

    def _line(self) -> str:
        tally, minutes = self.tally, (time.monotonic() - self.begun) / 60
        ends = ", ".join(f"{n} {what}" for what, n in sorted(tally.outcomes.items()))
        processes = self.samples[-1].processes.values() if self.samples else ()
        memory = sum(process.rss_mb for process in processes)
        return (
            f"  {minutes:5.1f} of {self.settings.minutes:g} min, {self.disturber.mode}: "
            f"{tally.requests} requests ({ends}), {tally.output_tokens} tokens, "
            f"{sum(self.disturber.done.values())} disturbances, "
            f"{tally.retractions} retractions, {memory:.0f} MB, {tally.wrong_count} WRONG"
        )
