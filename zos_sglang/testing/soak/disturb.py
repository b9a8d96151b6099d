"""What happens to the server meanwhile: pauses, flushes, reloads, mode switches, everything aborted."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx

from zos_sglang.testing.soak.judge import Tally
from zos_sglang.testing.soak.traffic import Traffic

MODES = ("stock", "overlap", "resident")
#: A control call that takes longer counts as a hang.
_LIMIT_S = 60.0
_POLL_S = 0.05


class Disturber:
    """One disturbance after the other, drawn from a seed.

    Args:
        http: the server.
        traffic: told when everything is aborted.
        tally: gets what went wrong.
        model: folder that the weights are reloaded from.
        modes: what is switched between.
        pause_s: seconds between two disturbances, on average.
        timeout_s: a long pause outlasts this limit of the server's.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        traffic: Traffic,
        tally: Tally,
        *,
        model: str,
        modes: tuple[str, ...] = MODES,
        pause_s: float = 1.5,
        timeout_s: float,
        seed: int,
    ) -> None:
        self.http, self.traffic, self.tally = http, traffic, tally
        self.model, self.modes, self.pause_s, self.timeout_s = model, modes, pause_s, timeout_s
        self.random = random.Random(f"disturbances/{seed}")
        self.done: Counter[str] = Counter()
        self.mode = modes[-1]
        #: Seconds in each mode, up to the last switch.
        self.seconds: Counter[str] = Counter()
        self._since = time.monotonic()
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "switch": (40, self._switch),
            "flush": (12, self._flush),
            "pause in place": (10, lambda: self._pause("in_place")),
            "pause with retraction": (10, lambda: self._pause("retract")),
            "pause and switch": (6, self._pause_and_switch),
            "reload while paused": (6, self._reload_paused),
            "reload while running": (3, self._reload_running),
            "abort all": (3, self._abort_all),
            "pause with abort": (2, self._pause_with_abort),
            "long pause": (1, self._long_pause),
            "readings": (7, self._readings),
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of all disturbances."""
        return tuple(self._kinds)

    async def run(self) -> None:
        """Disturb while the gate is open, until cancelled or the soak is over."""
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        # Each kind once, so that also a short soak has seen all of them; then as they come.
        first = self.random.sample(names, len(names))
        while not self.traffic.over:
            await asyncio.sleep(self.random.expovariate(1 / self.pause_s))
            await self.traffic.gate.wait()
            await self._one(first.pop() if first else self.random.choices(names, weights)[0])

    async def _one(self, name: str) -> None:
        try:
            async with asyncio.timeout(_LIMIT_S):
                await self._kinds[name][1]()
        except TimeoutError:
            self.tally.fault(f"{name}: not over after {_LIMIT_S:.0f} s")
        except httpx.HTTPError as error:
            if not self.traffic.over:
                self.tally.broken = self.tally.broken or f"{name}: {type(error).__name__}: {error}"
                self.traffic.over = True
            return
        self.done[name] += 1

    # ------------------------------------------------------------------ kinds

    async def switch_to(self, mode: str) -> None:
        """Change the mode and wait until it is in effect."""
        await self._must("/set_internal_state", {"server_args": {"zos_mode": mode}})
        while True:
            state = await self.zos()
            if state["mode"] == mode and not state.get("pending_mode"):
                break
            await asyncio.sleep(_POLL_S)
        self.seconds[self.mode] += round(time.monotonic() - self._since)
        self.mode, self._since = mode, time.monotonic()

    async def _switch(self) -> None:
        others = [mode for mode in self.modes if mode != self.mode]
        # The last one is what the soak is most about.
        await self.switch_to(self.random.choice([*others, self.modes[-1]]))

    async def _flush(self) -> None:
        # Refused while requests run; with a timeout it waits for an idle moment that may not come.
        reply = await self.http.post("/flush_cache", params={"timeout": self.random.choice((0, 0.5))})
        if reply.status_code not in (200, 400):
            self.tally.fault(f"/flush_cache answered {reply.status_code}: {reply.text[:200]}")

    async def _pause(self, mode: str) -> None:
        await self._must("/pause_generation", {"mode": mode})
        await asyncio.sleep(self.random.uniform(0, 0.8))
        await self._must("/continue_generation", {})

    async def _pause_and_switch(self) -> None:
        await self._must("/pause_generation", {"mode": self.random.choice(("in_place", "retract"))})
        mode = self.random.choice(self.modes)
        await self._must("/set_internal_state", {"server_args": {"zos_mode": mode}})
        await self._must("/continue_generation", {})
        await self.switch_to(mode)

    async def _reload_paused(self) -> None:
        retract = self.random.random() < 0.5
        await self._must("/pause_generation", {"mode": "retract" if retract else "in_place"})
        # Rows that stay keep their pages, so the cache cannot be emptied under them.
        await self._must("/update_weights_from_disk", {"model_path": self.model, "flush_cache": retract})
        await self._must("/continue_generation", {})

    async def _reload_running(self) -> None:
        # Waits for what runs; what arrives waits for it.
        await self._must("/update_weights_from_disk", {"model_path": self.model})

    async def _abort_all(self) -> None:
        with self._aborting():
            await self._must("/abort_request", {"abort_all": True})
            # The answer comes when it is sent, not when it has arrived.
            await asyncio.sleep(0.5)

    async def _pause_with_abort(self) -> None:
        with self._aborting():
            await self._must("/pause_generation", {"mode": "abort"})
            await self._must("/continue_generation", {})
            await asyncio.sleep(0.5)

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        self.traffic.abort_alls += 1
        self.traffic.aborting = True
        try:
            yield
        finally:
            self.traffic.aborting = False
            self.traffic.abort_alls += 1

    async def _long_pause(self) -> None:
        await self._must("/pause_generation", {"mode": "in_place"})
        await asyncio.sleep(self.timeout_s + 1)
        await self._must("/continue_generation", {})

    async def _readings(self) -> None:
        for path in ("/health", "/v1/loads", "/server_info", "/health_generate"):
            reply = await self.http.get(path)
            if reply.status_code != 200:
                self.tally.fault(f"{path} answered {reply.status_code}: {reply.text[:200]}")

    # ------------------------------------------------------------------ inner

    async def zos(self) -> dict[str, Any]:
        """Our block of /server_info."""
        reply = await self.http.get("/server_info")
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()["internal_states"][0]["zos"]
        return found

    async def _must(self, path: str, body: dict[str, Any]) -> None:
        reply = await self.http.post(path, json=body)
        if reply.status_code != 200:
            self.tally.fault(f"{path} {body} answered {reply.status_code}: {reply.text[:200]}")
