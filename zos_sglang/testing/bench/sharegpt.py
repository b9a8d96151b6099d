"""Conversations of ShareGPT's lengths, made on the spot in ShareGPT's format: a seed, and no download.

Lengths are log-normal, prompt and answer apart from each other. What is fitted: after the cuts that serving
benchmarks make (a prompt of at most 1,024 tokens, at most 2,048 with its answer) the means are 214 and 200
tokens, those of the 1,000 requests in vllm-project/vllm pull request 7062 (213,987 and 199,771 tokens). What
is assumed: the spreads, for which only means are published; 1.3 and 1.0 put the median at 134 and 126
tokens, and a hundredth of the prompts above 940. Real prompts and answers depend on each other; these do not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from zos_sglang.testing.bench.words import Texts

#: Mean and standard deviation of the logarithm of the lengths, in tokens.
PROMPT, ANSWER = (5.012, 1.3), (4.847, 1.0)
#: Longer ones are drawn again, shorter ones are made this long.
MOST_PROMPT, MOST_BOTH, LEAST = 1024, 2048, 4


def lengths(seed: int, scale: float = 1.0) -> Iterator[tuple[int, int]]:
    """Pairs (prompt, answer) of tokens without end, the same ones for the same seed.

    `scale` shortens all of them, the cuts too: small models on a CPU are slow.
    """
    source = random.Random(f"sharegpt/{seed}")
    while True:
        prompt = max(LEAST, round(source.lognormvariate(*PROMPT)))
        answer = max(LEAST, round(source.lognormvariate(*ANSWER)))
        if prompt <= MOST_PROMPT and prompt + answer <= MOST_BOTH:
            yield max(LEAST, round(prompt * scale)), max(LEAST, round(answer * scale))


def conversations(tokenizer: Path, count: int, seed: int, scale: float = 1.0) -> str:
    """`count` conversations of one question and one answer in ShareGPT's JSON, as tokens of `tokenizer`."""
    texts, source = Texts(tokenizer), random.Random(f"texts/{seed}")
    found = []
    for index, (prompt, answer) in zip(range(count), lengths(seed, scale), strict=False):
        turns = (("human", prompt), ("gpt", answer))
        said = [{"from": who, "value": texts.text(tokens, source)} for who, tokens in turns]
        found.append({"id": f"made-{seed}-{index}", "conversations": said})
    return json.dumps(found)
