"""Answers that are cut short: aborts and lost connections.

Timing chooses where an aborted answer ends, in stock too. So it is compared with its own full
answer, asked for afterwards: a prefix of it, finish reason abort, nothing behind it. Everybody
else's answers must be equal, and afterwards the server must be idle with no page missing.
"""

from __future__ import annotations

import asyncio

from zos_sglang.testing.compare.evidence import Evidence
from zos_sglang.testing.compare.lane import LaneEvidence
from zos_sglang.testing.compare.records import Record, Records
from zos_sglang.testing.compare.scenario import Scenario, Stage, count, greedy
from zos_sglang.testing.compare.scenarios.configs import FEW_SLOTS, PLAIN

# Many more than a victim gets before its abort arrives, unless the machine is too busy to deliver
# the abort; its full answer is asked for only as far as a victim usually gets.
VICTIM_TOKENS = 400
FULL_TOKENS = 80


async def abort_mid_stream(stage: Stage) -> None:
    """8 streams aborted after 3 to 10 events, 4 connections dropped, 8 bystanders."""
    client, model = stage.client, stage.model

    async def abort_after(events: int, name: str) -> Record:
        seen = asyncio.Event()

        def on_event(record: Record) -> None:
            if len(record.boundaries) >= events:
                seen.set()

        async def abort() -> None:
            await seen.wait()
            await client.control("/abort_request", {"rid": client.rid(name)})

        task = asyncio.create_task(abort())
        record = await client.generate(
            name, model.ids(12 + events, 3000 + events), greedy(VICTIM_TOKENS), stream=True, on_event=on_event
        )
        seen.set()  # a victim that was refused has no events; do not wait for them
        await task
        record.prefix_of = f"full-{name}"
        return record

    async def hang_up(index: int) -> None:
        record = await client.generate(
            f"drop-{index}",
            model.ids(20 + index, 3100 + index),
            greedy(VICTIM_TOKENS),
            stream=True,
            on_event=lambda r: len(r.boundaries) >= 4 + index,
        )
        record.loose = True

    await stage.gather(
        *(abort_after(3 + i, f"cut-{3 + i:02}") for i in range(8)),
        *(hang_up(i) for i in range(4)),
        *(
            client.generate(f"stay-{i}", model.ids(15 + i, 3200 + i), greedy(64), stream=i % 2 == 0)
            for i in range(8)
        ),
    )
    await stage.gather(
        *(
            client.generate(f"full-cut-{e:02}", model.ids(12 + e, 3000 + e), greedy(FULL_TOKENS))
            for e in range(3, 11)
        )
    )


async def abort_all(stage: Stage) -> None:
    """Everything at once: 6 running, one long prompt in chunks, 9 waiting; then business as usual."""
    client, model = stage.client, stage.model
    ready = asyncio.Event()
    started: set[str] = set()

    def on_event(record: Record) -> None:
        started.add(record.name)
        if len(started) >= 4 and len(record.boundaries) >= 4:
            ready.set()

    async def stop_everything() -> None:
        await ready.wait()
        await client.control("/abort_request", {"abort_all": True})

    sizes = [14, 18, 22, 26, 30, 900, *range(10, 20)]
    names = [f"cut-{i:02}" for i in range(len(sizes))]
    abort = asyncio.create_task(stop_everything())
    records: list[Record] = await stage.gather(
        *(
            client.generate(
                name, model.ids(size, 3300 + i), greedy(VICTIM_TOKENS), stream=True, on_event=on_event
            )
            for i, (name, size) in enumerate(zip(names, sizes, strict=True))
        )
    )
    ready.set()
    await abort
    for record in records:
        record.prefix_of = f"full-{record.name}"
    await stage.gather(
        *(
            client.generate(f"full-{name}", model.ids(size, 3300 + i), greedy(FULL_TOKENS))
            for i, (name, size) in enumerate(zip(names, sizes, strict=True))
        )
    )


def cut_check(records: Records) -> list[str]:
    """A late abort finds a complete answer; an abort that is always late is a lost one."""
    victims = [r for r in records.values() if r.prefix_of]
    cut = [r for r in victims if r.finish_type == "abort"]
    if 2 * len(cut) >= len(victims):
        return []
    return [f"only {len(cut)} of {len(victims)} aborted requests ended with abort"]


def cut_in_the_middle(records: Records) -> int:
    """Evidence: aborted answers that had begun and were not complete."""
    return count(lambda r: r.prefix_of and r.finish_type == "abort" and r.tokens)(records)


SCENARIOS = (
    Scenario(
        "abort",
        "streams aborted and connections lost in the middle",
        abort_mid_stream,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={"cut": cut_in_the_middle},
            batch=8,
            lane=LaneEvidence(left=("intake",), refused=("abort-pending",)),
        ),
        check=cut_check,
        smoke=True,
    ),
    Scenario(
        "abort-all",
        "everything aborted: running, in chunks and waiting",
        abort_all,
        FEW_SLOTS,
        Evidence(
            reasons=("overlapped",),
            seen={
                "cut": cut_in_the_middle,
                "never started": count(lambda r: r.prefix_of and r.tokens == 0),
            },
            lane=LaneEvidence(closed="selection"),
        ),
        check=cut_check,
    ),
)
