"""Server modes of their own: stream intervals, hidden states, embeddings, the host cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zos_sglang.testing.compare.evidence import Evidence
from zos_sglang.testing.compare.lane import LaneEvidence
from zos_sglang.testing.compare.prompts import story
from zos_sglang.testing.compare.records import Records
from zos_sglang.testing.compare.scenario import Scenario, Stage, count, greedy
from zos_sglang.testing.compare.scenarios.configs import (
    EMBEDDING,
    FEW_SLOTS,
    HICACHE,
    PLAIN,
    STREAM_8,
)

NO_HICACHE = (
    "SGLang 0.5.23 registers the host pool with cudaHostRegister whatever the device "
    "(mem_cache/pool_host/common.py: alloc_with_host_register), so the scheduler dies at start "
    "with 'Found no NVIDIA driver'; its page copies are CUDA kernels of sgl_kernel.kvcacheio"
)


async def _streams(stage: Stage, seed: int) -> None:
    # Long enough that the last one begins before the first one ends, also where the client is late.
    length = stage.model.lasting(30)
    await stage.gather(
        *(
            stage.client.generate(
                f"stream-{i:02}", stage.model.ids(7 + i, seed + i), greedy(length + i), stream=True
            )
            for i in range(16)
        ),
        # The request's own interval beats the server's.
        *(
            stage.client.generate(
                f"own3-{i}",
                stage.model.ids(11 + i, seed + 40 + i),
                greedy(length + 10, stream_interval=3),
                stream=True,
            )
            for i in range(4)
        ),
    )


async def stream_interval_1(stage: Stage) -> None:
    """16 streams of every token, 4 of every third."""
    await _streams(stage, 5000)


async def stream_interval_8(stage: Stage) -> None:
    """16 streams of every eighth token, 4 of every third; differences only."""
    await _streams(stage, 5100)


def interval_check(interval: int) -> Callable[[Records], list[str]]:
    """Events may only come where the interval allows: after the 1st token, then every so many.

    The network may join events, so some of them may be absent, but none may lie in between.
    """

    def check(records: Records) -> list[str]:
        faults = []
        for record in records.values():
            step = 3 if record.name.startswith("own3") else interval
            last = record.tokens
            wrong = [b for b in record.boundaries if b != last and (b - 1) % step]
            if wrong:
                faults.append(f"{record.name}: events after {wrong} tokens with interval {step}")
            if sorted(set(record.boundaries)) != record.boundaries:
                faults.append(f"{record.name}: token counts go back: {record.boundaries}")
        return faults

    return check


async def hidden_states(stage: Stage) -> None:
    """Hidden states of all tokens, of the last one, and none, in the same batches."""
    wanted: dict[str, Any] = {"return_hidden_states": True}
    await stage.gather(
        *(
            stage.client.generate(
                f"hidden-{i:02}",
                # No common beginning: what comes from the cache has no hidden states.
                [40 + i, *stage.model.ids(6 + i, 5200 + i)],
                greedy(6 + i % 4),
                **(wanted if i % 3 else {}),
            )
            for i in range(12)
        )
    )


async def embeddings(stage: Stage) -> None:
    """24 embedding requests of different lengths, some in lists, some longer than a chunk."""
    await stage.gather(
        *(
            stage.later(
                0.02 * i,
                stage.client.embed(
                    f"embed-{i:02}",
                    [story(5300 + i, 2), story(5340 + i, 1)]
                    if i % 4 == 3
                    else story(5300 + i, 1 + 3 * (i % 6)),
                ),
            )
            for i in range(24)
        )
    )


async def host_cache(stage: Stage) -> None:
    """Prompts that push each other out of the device pool and come back from host memory."""
    prompts = [stage.model.ids(200, 5400 + i) for i in range(12)]
    for wave in range(3):
        await stage.gather(
            *(
                stage.client.generate(f"wave{wave}-{i:02}", p, greedy(24), stream=i % 2 == 0)
                for i, p in enumerate(prompts)
            )
        )


SCENARIOS = (
    Scenario(
        "stream-interval-1",
        "every token streamed",
        stream_interval_1,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={"events": lambda rs: sum(len(r.boundaries) for r in rs.values())},
            batch=8,
        ),
        check=interval_check(1),
    ),
    Scenario(
        "stream-interval-8",
        "--stream-interval 8 with token differences",
        stream_interval_8,
        STREAM_8,
        Evidence(
            reasons=("overlapped",),
            seen={"events": lambda rs: sum(len(r.boundaries) for r in rs.values())},
            batch=8,
        ),
        check=interval_check(8),
    ),
    Scenario(
        "hidden-states",
        "hidden states returned",
        hidden_states,
        FEW_SLOTS,
        Evidence(
            reasons=("overlapped",),
            seen={"with hidden states": count(lambda r: r.vectors)},
            lane=LaneEvidence(closed="selection"),
        ),
    ),
    Scenario(
        "embedding",
        "an embedding model: no sampling",
        embeddings,
        EMBEDDING,
        Evidence(
            reasons=("overlapped",),
            paths=("embedding",),
            seen={"vectors": count(lambda r: r.vectors)},
            batch=0,
            lane=LaneEvidence(closed="model"),
        ),
    ),
    Scenario(
        "hicache",
        "--enable-hierarchical-cache with host memory",
        host_cache,
        HICACHE,
        Evidence(
            reasons=("overlapped",),
            log=("hicache_attached=True",),
            lane=LaneEvidence(closed="host-cache"),
        ),
        not_on_cpu=NO_HICACHE,
    ),
)
