"""Prefills: long prompts in chunks, many at once, mixed with decodes; retraction; priorities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from zos_sglang.testing.compare.evidence import Evidence
from zos_sglang.testing.compare.lane import LaneEvidence
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


async def overfill(stage: Stage, seed: int, *, chain: int, rest: int, tokens: int = 160) -> None:
    """`chain` requests, each sent when the one before has begun to answer; then `rest` at once.

    Stock books the whole answer of a request that it admits, and a small part of it once the request runs:
    requests that come one by one overfill a pool. The end of sequence is forbidden by a bias: for
    requests that ignore it, stock admits exactly what fits.
    """
    params = greedy(tokens, ignore_eos=False, logit_bias={str(eos): -100.0 for eos in stage.model.eos_ids})
    begun = [asyncio.Event() for _ in range(chain)]

    async def send(index: int, stream: bool) -> None:
        await stage.client.generate(
            f"pool-{index:02}",
            stage.model.ids(18 + index, seed + index),
            params,
            stream=stream,
            on_event=lambda record: begun[index].set() if stream and index < chain else None,
        )
        if index < chain:
            begun[index].set()  # refused requests have no events

    async def after_the_one_before(index: int) -> None:
        if index:
            await begun[min(index, chain) - 1].wait()
        await send(index, stream=index < chain or index % 2 == 0)

    await stage.gather(*(after_the_one_before(i) for i in range(chain + rest)))


async def retraction(stage: Stage) -> None:
    """24 requests that want four times the pool: some lose their pages and start again."""
    await overfill(stage, 2400, chain=8, rest=16)


def retracted(records: Records) -> int:
    """Evidence: how often answers were thrown back into the queue."""
    return sum(record.retractions for record in records.values())


async def priorities(stage: Stage) -> None:
    """6 slots: 12 requests of low priority, and once the first answers, 12 of high priority."""
    client, model = stage.client, stage.model
    begun = asyncio.Event()

    async def low(index: int) -> None:
        await client.generate(
            f"low-{index:02}",
            model.ids(12, 2500 + index),
            greedy(model.lasting(60)),
            priority=0,
            stream=True,
            on_event=lambda record: begun.set(),
        )
        begun.set()  # refused requests have no events

    async def high(index: int) -> None:
        await begun.wait()
        await client.generate(f"high-{index:02}", model.ids(12, 2550 + index), greedy(40), priority=10)

    await stage.gather(
        *(low(i) for i in range(12)),
        *(high(i) for i in range(12)),
    )


def overtaken(records: Records) -> int:
    """Evidence: requests of low priority that ended after one of high priority sent later.

    First come, first served would let all of the low ones end first: they are of one length.
    """
    first = min((r.rank for r in records.values() if r.name.startswith("high")), default=0)
    return count(lambda r: r.name.startswith("low") and r.rank > first)(records)


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
            lane=LaneEvidence(left=("pool-full",), refused=("admission-open",)),
        ),
    ),
    Scenario(
        "priorities",
        "--enable-priority-scheduling: late but important requests go first",
        priorities,
        FEW_SLOTS,
        # Its places are given away by preemption, which the lane leaves to the ordinary path.
        Evidence(
            reasons=("overlapped",), seen={"overtaken": overtaken}, lane=LaneEvidence(closed="selection")
        ),
    ),
)
