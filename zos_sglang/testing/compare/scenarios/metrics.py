"""SGLang's own /metrics while requests decode: its counters must move as they do on stock."""

from __future__ import annotations

import asyncio
import re

from zos_sglang.testing.compare.scenario import Stage, greedy

#: Counters of the scheduler and of the tokenizer that must move while requests run.
MOVING = ("decode-tokens", "decode-steps")
#: Counters whose growth over a whole load depends on the answers alone.
EXACT = ("decode-tokens", "prompt-tokens", "answer-tokens", "requests", "latencies")
SAMPLES = {
    "decode-tokens": r'sglang:realtime_tokens_total\{.*mode="decode".*\}',
    "decode-steps": r'sglang:cuda_graph_passes_total\{.*mode="decode_\w+".*\}',
    "prompt-tokens": r"sglang:prompt_tokens_total\{.*\}",
    "answer-tokens": r"sglang:generation_tokens_total\{.*\}",
    "requests": r"sglang:num_requests_total\{.*\}",
    "latencies": r"sglang:e2e_request_latency_seconds_count\{.*\}",
}
FAMILY = re.compile(r"^# TYPE (sglang:\S+)", re.MULTILINE)


def samples(text: str) -> dict[str, float]:
    """Sums of the samples that `SAMPLES` names, from Prometheus text."""
    return {
        name: sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))
        for name, pattern in SAMPLES.items()
    }


async def _scrape(stage: Stage, name: str) -> dict[str, float]:
    """One scrape; the status and the names of the metrics are compared with stock's."""
    record = stage.client.file(name, {"GET": "/metrics"})
    response = await stage.client.http.get("/metrics")
    record.status = response.status_code
    record.fields = sorted(set(FAMILY.findall(response.text)))
    return samples(response.text)


async def scrape_while_running(stage: Stage) -> None:
    """Scrapes before, twice during, and after 10 requests; what they say between is compared."""
    client, model = stage.client, stage.model
    await client.generate("first", model.ids(9, 6900), greedy(4))  # every metric exists from here on
    before = await _scrape(stage, "scrape-before")
    events = 0

    def count(_: object) -> None:
        nonlocal events
        events += 1

    length = model.lasting(150)
    load = asyncio.create_task(
        stage.gather(
            *(
                client.generate(
                    f"load-{i}", model.ids(8 + i, 6910 + i), greedy(length), stream=i == 0, on_event=count
                )
                for i in range(10)
            )
        )
    )
    seen = []
    for i in (1, 2):
        goal = events + 12
        while events < goal and not load.done():
            await asyncio.sleep(0.005)
        seen.append(await _scrape(stage, f"scrape-{i}"))
    in_time = not load.done()
    await load
    for name in MOVING:
        record = client.file(f"moved-{name}", {})
        if not in_time:
            record.faults.append("the load had ended before the second scrape")
        if not before[name] < seen[0][name] < seen[1][name]:
            record.faults.append(f"{name} stood still: {before[name]}, then {[s[name] for s in seen]}")
    after = await _scrape(stage, "scrape-after")
    grown = client.file("grown", {})
    grown.usage = {name: round(after[name] - before[name]) for name in EXACT}
