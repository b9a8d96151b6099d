"""Prefills: long prompts in chunks, many at once, mixed with decodes; retraction; priorities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from zos_sglang.testing.compare.evidence import Evidence
from zos_sglang.testing.compare.records import Records
from zos_sglang.testing.compare.scenario import Scenario, Stage, count, greedy
from zos_sglang.testing.compare.scenarios.configs import (
    FEW_SLOTS,
    MIXED_CHUNK,
    PLAIN,
    PREFILL_WAITS,
    SMALL_POOL,
    STREAM_8,
)


async def _long_beside_decodes(stage: Stage, seed: int, lengths: Sequence[int]) -> None:
    """6 running decodes; then long prompts arrive together, streaming."""
    client, model = stage.client, stage.model
    await stage.gather(
        *(
            client.generate(f"run-{i}", model.ids(10 + i, seed + i), greedy(64), stream=i % 2 == 0)
            for i in range(6)
        ),
        *(
            stage.later(
                0.1,
                client.generate(f"long-{i}", model.ids(length, seed + 50 + i), greedy(12), stream=True),
            )
            for i, length in enumerate(lengths)
        ),
    )


async def chunked(stage: Stage) -> None:
    """Prompts of up to 1,000 tokens: middle chunks, and prefills one after the other."""
    await _long_beside_decodes(stage, 2000, (1000, 300, 700, 250, 520, 800, 200, 260))


async def mixed_chunk(stage: Stage) -> None:
    """The same with decodes riding in the prefill batches."""
    await _long_beside_decodes(stage, 2100, (900, 400, 600, 250, 700, 350))


async def prefill_waits(stage: Stage) -> None:
    """Upstream's variable: a prefill is processed before the next prefill is launched."""
    await _long_beside_decodes(stage, 2200, (600, 300, 500, 250, 400, 200))


async def prefill_never_waits(stage: Stage) -> None:
    """ZOS_CONSECUTIVE_PREFILL=never: no prefill waits for the one before."""
    await _long_beside_decodes(stage, 2300, (600, 300, 500, 250, 400, 200))


async def retraction(stage: Stage) -> None:
    """24 requests that want three times the pool: some lose their pages and start again."""
    await stage.gather(
        *(
            stage.client.generate(
                f"pool-{i:02}", stage.model.ids(20 + i, 2400 + i), greedy(96), stream=i % 2 == 0
            )
            for i in range(24)
        )
    )


def retracted(records: Records) -> int:
    """Evidence: how often answers were thrown back into the queue."""
    return sum(record.retractions for record in records.values())


async def priorities(stage: Stage) -> None:
    """6 slots: 12 requests of low priority, and once the first answers, 12 of high priority."""
    client, model = stage.client, stage.model
    order: list[str] = []
    begun = asyncio.Event()

    async def ask(name: str, priority: int, seed: int) -> None:
        low = priority == 0
        if not low:
            await begun.wait()
        await client.generate(
            name,
            model.ids(12, seed),
            greedy(model.lasting(40) if low else 40),
            stream=low,
            on_event=(lambda record: begun.set()) if low else None,
            priority=priority,
        )
        order.append(name)

    await stage.gather(
        *(ask(f"low-{i:02}", 0, 2500 + i) for i in range(12)),
        *(ask(f"high-{i:02}", 10, 2550 + i) for i in range(12)),
    )
    # Six slots, so the last six to end must be of the low priority that had to wait.
    for name in order[-6:]:
        if name.startswith("high"):
            client.records[name].faults.append(f"high priority, but among the last six: {order[-6:]}")


SCENARIOS = (
    Scenario(
        "chunked-prefill",
        "long prompts in chunks, together, beside running decodes",
        chunked,
        PLAIN,
        Evidence(reasons=("overlapped", "first-token"), paths=("middle-chunk", "prefill")),
        smoke=True,
    ),
    Scenario(
        "mixed-chunk",
        "--enable-mixed-chunk",
        mixed_chunk,
        MIXED_CHUNK,
        Evidence(reasons=("overlapped", "first-token"), paths=("mixed",)),
    ),
    Scenario(
        "prefill-waits",
        "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP=1",
        prefill_waits,
        PREFILL_WAITS,
        Evidence(reasons=("overlapped", "consecutive-prefill"), never=("first-token",)),
    ),
    Scenario(
        "prefill-never-waits",
        "ZOS_CONSECUTIVE_PREFILL=never, token differences every 8 tokens",
        prefill_never_waits,
        STREAM_8,
        Evidence(reasons=("overlapped",), never=("first-token", "consecutive-prefill")),
    ),
    Scenario(
        "retraction",
        "a pool so small that requests are retracted",
        retraction,
        SMALL_POOL,
        Evidence(
            reasons=("overlapped",),
            log=("KV cache pool is full. Retract requests",),
            seen={"retractions": retracted},
        ),
    ),
    Scenario(
        "priorities",
        "--enable-priority-scheduling: late but important requests go first",
        priorities,
        FEW_SLOTS,
        Evidence(reasons=("overlapped",), seen={"answers": count(lambda r: r.name.startswith("high"))}),
    ),
)
