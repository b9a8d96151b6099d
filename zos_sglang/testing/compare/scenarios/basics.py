"""Plain generation: lengths, end of sequence, the OpenAI endpoints, prefixes, several answers."""

from __future__ import annotations

import random
from typing import Any

from zos_sglang.testing.compare.evidence import Evidence
from zos_sglang.testing.compare.lane import LaneEvidence
from zos_sglang.testing.compare.prompts import question, story
from zos_sglang.testing.compare.records import Records
from zos_sglang.testing.compare.scenario import GREEDY, Scenario, Stage, count, greedy
from zos_sglang.testing.compare.scenarios.configs import PLAIN


async def mixed_lengths(stage: Stage) -> None:
    """24 requests, prompts of 3 to 200 tokens, 4 to 64 new ones, arriving at random."""
    rng = random.Random(1)
    sizes = [(rng.choice((3, 17, 60, 200)), rng.choice((4, 20, 40, 64))) for _ in range(24)]
    await stage.gather(
        *(
            stage.later(
                delay,
                stage.client.generate(
                    f"mixed-{i:02}", stage.model.ids(tokens, seed=100 + i), greedy(new), stream=i % 2 == 0
                ),
            )
            for i, ((tokens, new), delay) in enumerate(zip(sizes, stage.delays(2, len(sizes)), strict=True))
        )
    )


async def end_of_sequence(stage: Stage) -> None:
    """32 requests that may end whenever the model says so, at a different step each."""
    params = {**GREEDY, "max_new_tokens": 64}
    chats = {"temperature": 0, "max_tokens": 64}
    await stage.gather(
        *(
            stage.client.generate(f"eos-{i:02}", story(200 + i, 1 + i % 3), params, stream=i % 2 == 0)
            for i in range(16)
        ),
        *(
            stage.client.openai(
                f"chat-{i:02}",
                "chat",
                {**chats, "messages": [{"role": "user", "content": question(i)}]},
                stream=i % 2 == 0,
            )
            for i in range(16)
        ),
    )


async def one_token(stage: Stage) -> None:
    """32 answers of one token: every request finishes in its prefill."""
    await stage.gather(
        *(
            stage.client.generate(
                f"one-{i:02}", stage.model.ids(5 + i, 300 + i), greedy(1), stream=i % 2 == 0
            )
            for i in range(28)
        ),
        # Running decodes beside them, so that the pending result is often the other kind.
        *(stage.client.generate(f"run-{i}", stage.model.ids(9, 340 + i), greedy(40)) for i in range(4)),
    )


async def openai(stage: Stage) -> None:
    """8 completions and 8 chats, half streaming, with usage, stop strings and log-probabilities."""
    base = {"temperature": 0, "max_tokens": 32}
    completion_extras: list[dict[str, Any]] = [{}, {"stop": ["e", "\n"]}, {"echo": True}, {"logprobs": 2}]
    chat_extras: list[dict[str, Any]] = [
        {},
        {"stop": "a"},
        {"logprobs": True, "top_logprobs": 2},
        {"logit_bias": {"70": 2.0}},
    ]
    # Not streamed: where a step adds no text (a stop token, half a character), SGLang's stream leaves out its
    # log-probabilities unless the step happens to share a message with another.
    streamed_chat_extras = [*chat_extras[:2], {}, *chat_extras[3:]]
    requests = []
    for i in range(8):
        body = {**base, "prompt": story(400 + i), **completion_extras[i % 4]}
        requests.append(stage.client.openai(f"completion-{i}", "completion", body, stream=i >= 4))
        chat = {"messages": [{"role": "user", "content": question(i)}], "seed": 3}
        extras = (chat_extras if i < 4 else streamed_chat_extras)[i % 4]
        requests.append(stage.client.openai(f"chat-{i}", "chat", {**base, **chat, **extras}, stream=i >= 4))
    await stage.gather(*requests)


async def shared_prefix(stage: Stage) -> None:
    """One prompt seeds the cache; 20 others share its first 96 tokens, then 8 share one of theirs."""
    prefix = stage.model.ids(96, 500)
    await stage.client.generate("seed", prefix, greedy(8))
    # Told apart by their first token: otherwise chance decides how much they share.
    tails = [[40 + i, *stage.model.ids(6 + i % 9, 510 + i)] for i in range(20)]
    await stage.gather(
        *(
            stage.client.generate(f"share-{i:02}", prefix + tail, greedy(24), stream=i % 4 == 0)
            for i, tail in enumerate(tails)
        )
    )
    # The same prompts again: all but the last token of each is cached now.
    await stage.gather(
        *(stage.client.generate(f"again-{i:02}", prefix + tails[i], greedy(24)) for i in range(8))
    )


async def flush_between_waves(stage: Stage) -> None:
    """The same wave three times; the cache is emptied before the third."""
    # No common beginning: otherwise chance decides how much one takes over from another.
    prompts = [[40 + i, *stage.model.ids(30 + i, 600 + i)] for i in range(12)]
    for wave in ("first", "cached", "flushed"):
        if wave == "flushed":
            await stage.client.must("/flush_cache")
        await stage.gather(
            *(stage.client.generate(f"{wave}-{i:02}", p, greedy(20)) for i, p in enumerate(prompts))
        )


def flush_check(records: Records) -> list[str]:
    """After the flush nothing may come from the cache, before it the prompts must."""
    cached = {name: r.usage.get("cached_tokens", 0) for name, r in records.items()}
    stale = [n for n, c in cached.items() if n.startswith("flushed") and c]
    cold = [n for n, c in cached.items() if n.startswith("cached") and c < 20]
    return [f"{n}: {cached[n]} cached tokens after the flush" for n in stale] + [
        f"{n}: only {cached[n]} cached tokens in the second wave" for n in cold
    ]


async def parallel_answers(stage: Stage) -> None:
    """Several answers of one request (n) and lists of prompts, natively and through OpenAI."""
    client, model = stage.client, stage.model
    await stage.gather(
        *(client.generate_many(f"n-{i}", [model.ids(12 + i, 700 + i)], greedy(24, n=3)) for i in range(4)),
        *(
            client.generate_many(
                f"list-{i}", [model.ids(8 + j, 720 + 10 * i + j) for j in range(4)], greedy(20)
            )
            for i in range(2)
        ),
        *(
            client.openai(
                f"openai-{i}",
                "completion",
                {"prompt": story(740 + i), "n": 2, "temperature": 0, "max_tokens": 20},
                stream=i % 2 == 0,
            )
            for i in range(4)
        ),
    )


SCENARIOS = (
    Scenario(
        "mixed-lengths",
        "mixed prompt and answer lengths, greedy, random arrivals, half streaming",
        mixed_lengths,
        PLAIN,
        Evidence(reasons=("overlapped",), paths=("prefill", "decode"), batch=8),
        smoke=True,
    ),
    Scenario(
        "eos",
        "end of sequence by chance, natively and in chats",
        end_of_sequence,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={"ended by EOS": count(lambda r: r.name.startswith("eos") and r.finish_type == "stop")},
            batch=8,
        ),
        smoke=True,
    ),
    Scenario(
        "one-token",
        "max_new_tokens 1 beside running decodes",
        one_token,
        PLAIN,
        Evidence(paths=("prefill",), seen={"one token": count(lambda r: r.tokens == 1)}, batch=1),
    ),
    Scenario(
        "openai",
        "completions and chats, half streaming with usage",
        openai,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={"log-probabilities": count(lambda r: r.logprobs)},
            lane=LaneEvidence(None, refused=("logprobs",)),
        ),
        smoke=True,
    ),
    Scenario(
        "shared-prefix",
        "many prompts with one prefix; cached token counts compared",
        shared_prefix,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={"from the cache": count(lambda r: r.usage.get("cached_tokens", 0) >= 96)},
        ),
        compare_cached=True,
    ),
    Scenario(
        "flush",
        "cache flushed between waves; cached token counts compared",
        flush_between_waves,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={"from the cache": count(lambda r: r.usage.get("cached_tokens", 0) >= 20)},
        ),
        check=flush_check,
        compare_cached=True,
    ),
    Scenario(
        "parallel-answers",
        "n > 1 and lists of prompts",
        parallel_answers,
        PLAIN,
        Evidence(reasons=("overlapped",), seen={"further answers": count(lambda r: r.name.endswith("[1]"))}),
    ),
)
