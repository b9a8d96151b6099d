"""What a scenario is: requests to play, the server to play them on, and the proof it must give."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zos_sglang.testing.compare.client import Client
from zos_sglang.testing.compare.evidence import Evidence
from zos_sglang.testing.compare.prompts import ModelInfo
from zos_sglang.testing.compare.records import Record, Records

GREEDY: dict[str, Any] = {"temperature": 0.0}


def greedy(max_new_tokens: int, **params: Any) -> dict[str, Any]:
    """Sampling parameters of a greedy answer that runs to its length limit unless told otherwise."""
    return {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **params}


@dataclass(frozen=True)
class ServerConfig:
    """Flags and environment of one server start; scenarios of one config share the server.

    `env` goes to both servers, `our_env` (ZOS_* variables) only to ours.
    """

    name: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    our_env: Mapping[str, str] = field(default_factory=dict)
    incremental: bool = False

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass
class Stage:
    """What a scenario plays on: one server's client, the model, and whose server it is."""

    client: Client
    model: ModelInfo
    ours: bool
    our_mode: str | None

    async def gather(self, *requests: Awaitable[Any]) -> list[Any]:
        """Run requests at the same time; if one raises, cancel the rest and raise."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_run(request)) for request in requests]
        return [task.result() for task in tasks]

    async def later(self, delay_s: float, request: Awaitable[Any]) -> Any:
        """Send `request` after `delay_s` seconds."""
        await asyncio.sleep(delay_s)
        return await request

    def delays(self, seed: int, count: int, mean_s: float = 0.03) -> list[float]:
        """Arrival times in seconds of a seeded Poisson stream."""
        rng, now, times = random.Random(seed), 0.0, []
        for _ in range(count):
            times.append(now)
            now += rng.expovariate(1 / mean_s)
        return times


async def _run(request: Awaitable[Any]) -> Any:
    return await request


@dataclass(frozen=True)
class Scenario:
    """One scenario of the regression.

    check sees the records of one server and returns what is wrong with them by themselves.
    not_on_cpu says why it cannot run there; it is then listed with that reason, never faked.
    """

    name: str
    about: str
    play: Callable[[Stage], Awaitable[None]]
    config: ServerConfig
    evidence: Evidence = field(default_factory=Evidence)
    check: Callable[[Records], list[str]] | None = None
    smoke: bool = False
    compare_cached: bool = False
    not_on_cpu: str | None = None


def count(predicate: Callable[[Record], Any]) -> Callable[[Records], int]:
    """Evidence: how many answers fulfil `predicate`."""
    return lambda records: sum(1 for record in records.values() if predicate(record))


def twins_differ(suffix: str) -> Callable[[Records], int]:
    """Evidence: how many answers NAME+suffix differ from the plain answer NAME."""

    def differing(records: Records) -> int:
        pairs = [(r, records.get(n + suffix)) for n, r in records.items()]
        return sum(1 for plain, twin in pairs if twin and twin.token_ids != plain.token_ids)

    return differing
