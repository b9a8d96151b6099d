"""What the resident decode lane must get right, beyond what the other scenarios ask of every mode.

All of it is played on stock as well. Page size 16, no prefix cache, a queue that never empties, a pool that
has no room for reservations, sampled requests, and control calls that find the lane open.
"""

from __future__ import annotations

import random
from typing import Any

from zos_sglang.testing.compare.evidence import Evidence
from zos_sglang.testing.compare.lane import LaneEvidence
from zos_sglang.testing.compare.prompts import story
from zos_sglang.testing.compare.records import Record, Records
from zos_sglang.testing.compare.scenario import Scenario, Stage, count, greedy
from zos_sglang.testing.compare.scenarios.configs import PAGED, PAGED_TIGHT, PLAIN, UNCACHED
from zos_sglang.testing.compare.scenarios.control import Load
from zos_sglang.testing.compare.scenarios.metrics import scrape_while_running
from zos_sglang.testing.compare.scenarios.prefill import overfill, retracted

#: Rows that leave the lane one by one: no two of a wave end at the same step.
STAGGERED = 40


def _ends(seed: int) -> dict[str, Any]:
    """A seeded way to end: at a limit, on EOS, on stop ids or on a stop string; limits all differ."""
    rng = random.Random(seed)
    ids = [rng.randrange(20, 200) for _ in range(12)]
    return rng.choice(
        [
            greedy(STAGGERED + seed % 37),
            greedy(STAGGERED + seed % 37, ignore_eos=False),
            greedy(STAGGERED + seed % 37, ignore_eos=False, stop_token_ids=ids),
            greedy(STAGGERED + seed % 37, stop=["e ", "th", "."]),
            greedy(STAGGERED + seed % 37, stream_interval=5),
        ]
    )


async def _many_ends(stage: Stage, seed: int, requests: int = 20) -> None:
    """Requests of all ends, half streaming, arriving while others decode."""
    await stage.gather(
        *(
            stage.later(
                delay,
                stage.client.generate(
                    f"end-{i:02}",
                    stage.model.ids(5 + 7 * (i % 6), seed + i),
                    _ends(seed + i),
                    stream=i % 2 == 0,
                ),
            )
            for i, delay in enumerate(stage.delays(seed, requests, mean_s=0.02))
        )
    )


async def paged(stage: Stage) -> None:
    """Page size 16 with the prefix cache: two waves of the same prompts, cached token counts compared."""
    # Page size 16: lengths on both sides of a page's end. Told apart by their first token.
    prompts = [[40 + i, *stage.model.ids(28 + i % 9, 6000 + i)] for i in range(12)]
    for wave in ("first", "again"):
        await stage.gather(
            *(
                stage.client.generate(f"{wave}-{i:02}", prompt, greedy(30 + 3 * i), stream=i % 3 == 0)
                for i, prompt in enumerate(prompts)
            )
        )
    # In a third one the same prompt is asked for many times at once, so that a finished request's pages
    # take the place of those of the running ones.
    await stage.gather(
        *(stage.client.generate(f"same-{i}", prompts[0], greedy(17 + 8 * i), stream=i == 0) for i in range(6))
    )


async def paged_ends(stage: Stage) -> None:
    """Page size 16: limits that differ, EOS, stop ids, stop strings, an own stream interval."""
    await _many_ends(stage, 6100)


async def uncached_ends(stage: Stage) -> None:
    """The same without a prefix cache, page size 1."""
    await _many_ends(stage, 6200)


async def full_queue(stage: Stage) -> None:
    """8 places and 40 requests at once: someone waits nearly all the time."""
    await stage.gather(
        *(
            stage.client.generate(
                f"queued-{i:02}", stage.model.ids(10 + i, 6300 + i), greedy(60 + i), stream=i % 4 == 0
            )
            for i in range(40)
        )
    )


async def sampled(stage: Stage) -> None:
    """Temperature, top-k, top-p and min-p beside greedy rows, with limits that differ and EOS.

    One message makes one batch, so stock draws the same random numbers every time, as long as each row
    leaves the batch at the same step: an answer that ends late or early would shift all others.
    """
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.9},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.1, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
        {"temperature": 0.0},
    )
    for wave, ignore_eos in enumerate((True, False)):
        for own in range(3):
            # First all rows of one kind, then of all kinds.
            chosen = [kinds[(i * own + wave) % len(kinds)] for i in range(8)]
            params = [
                {**kind, "max_new_tokens": 20 + 5 * i, "ignore_eos": ignore_eos}
                for i, kind in enumerate(chosen)
            ]
            prompts = [story(6400 + 100 * wave + 10 * own + i, 1) for i in range(8)]
            await stage.client.generate_many(f"wave{wave}-{own}", prompts, params)


def sampled_answers(records: Records) -> int:
    """Evidence: answers to prompts of several requests."""
    return count(lambda r: "[" in r.name and r.tokens)(records)


async def refused_beside(stage: Stage) -> None:
    """A request that the lane refuses comes and goes while others decode: hidden states."""
    await stage.gather(
        *(
            stage.client.generate(f"plain-{i}", stage.model.ids(9 + i, 6600 + i), greedy(150 + i))
            for i in range(5)
        ),
        stage.later(
            0.1,
            stage.client.generate("hidden", stage.model.ids(12, 6650), greedy(8), return_hidden_states=True),
        ),
    )


async def paged_pool_full(stage: Stage) -> None:
    """Page size 16, no prefix cache, 12 requests that want three times the pages: retraction."""
    await overfill(stage, 6700, chain=8, rest=4)


async def calls_while_open(stage: Stage) -> None:
    """Control calls that find the lane open: flush, health, an unknown abort; then abort everything."""
    client = stage.client
    load = Load(stage, "load", seed=6800)
    await load.events_after(8)
    refused = client.file("flush-while-busy", {"POST": "/flush_cache"})
    response = await client.control("/flush_cache")
    refused.status = response.status_code
    await load.events_after(3)
    await client.read("health", "/health_generate")
    response = await client.control("/abort_request", {"rid": "no-such-request"})
    client.file("abort-of-nobody", {}).status = response.status_code
    await load.task
    victims = Load(stage, "cut", seed=6850)
    await victims.events_after(8)
    await client.control("/abort_request", {"abort_all": True})
    await victims.task
    for record in victims.records:
        record.prefix_of = f"full-{record.name}"
    await stage.gather(*(_full_answer(stage, record) for record in victims.records))


async def _full_answer(stage: Stage, record: Record) -> None:
    await stage.client.generate(f"full-{record.name}", record.sent["input_ids"], greedy(80))


SCENARIOS = (
    Scenario(
        "lane-calls",
        "flush, health, aborts that find the lane open",
        calls_while_open,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={"cut": count(lambda r: r.prefix_of and r.finish_type == "abort")},
            batch=8,
            lane=LaneEvidence(0.8, left=("intake",), refused=("abort-pending",)),
        ),
    ),
    Scenario(
        "lane-paged",
        "page size 16 with the prefix cache; cached token counts compared",
        paged,
        PAGED,
        Evidence(
            reasons=("overlapped",),
            seen={"from the cache": count(lambda r: r.usage.get("cached_tokens", 0) >= 16)},
            batch=8,
            lane=LaneEvidence(0.8, left=("length-limit",)),
        ),
        compare_cached=True,
    ),
    Scenario(
        "lane-paged-ends",
        "page size 16, every way to end",
        paged_ends,
        PAGED,
        Evidence(
            reasons=("overlapped",),
            seen={"stopped": count(lambda r: r.finish_type == "stop")},
            lane=LaneEvidence(left=("finish", "length-limit")),
        ),
    ),
    Scenario(
        "lane-metrics",
        "/metrics scraped while the lane is open",
        scrape_while_running,
        PAGED,
        Evidence(
            reasons=("overlapped",),
            seen={"counters that moved": count(lambda r: r.name.startswith("moved"))},
            batch=8,
            lane=LaneEvidence(0.8, left=("length-limit",)),
        ),
    ),
    Scenario(
        "lane-sampled",
        "temperature, top-k, top-p, min-p and greedy rows in one batch",
        sampled,
        UNCACHED,
        Evidence(
            reasons=("overlapped",),
            seen={"sampled": sampled_answers},
            lane=LaneEvidence(0.8, left=("length-limit",)),
        ),
    ),
    Scenario(
        "lane-uncached-ends",
        "no prefix cache, every way to end",
        uncached_ends,
        UNCACHED,
        Evidence(
            reasons=("overlapped",),
            seen={"stopped": count(lambda r: r.finish_type == "stop")},
            lane=LaneEvidence(left=("finish", "length-limit")),
        ),
    ),
    Scenario(
        "lane-queue",
        "8 places, 40 requests: a full queue does not keep the lane shut",
        full_queue,
        UNCACHED,
        Evidence(reasons=("overlapped",), batch=8, lane=LaneEvidence(0.8, left=("length-limit",))),
    ),
    Scenario(
        "lane-refused",
        "a request that the lane refuses joins and leaves the batch",
        refused_beside,
        UNCACHED,
        Evidence(
            reasons=("overlapped",),
            seen={"with hidden states": count(lambda r: r.vectors)},
            lane=LaneEvidence(refused=("hidden-states",)),
        ),
    ),
    Scenario(
        "lane-pool-full",
        "page size 16, no prefix cache, too few pages: retraction",
        paged_pool_full,
        PAGED_TIGHT,
        Evidence(
            reasons=("overlapped",),
            log=("KV cache pool is full. Retract requests",),
            seen={"retractions": retracted},
            lane=LaneEvidence(left=("pool-full",), refused=("admission-open",)),
        ),
    ),
)
