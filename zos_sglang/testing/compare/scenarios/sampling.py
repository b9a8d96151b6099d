"""What changes the choice of a token or ends an answer: stops, penalties, bias, grammars, seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from zos_sglang.testing.compare.evidence import Evidence
from zos_sglang.testing.compare.lane import LaneEvidence
from zos_sglang.testing.compare.prompts import story
from zos_sglang.testing.compare.records import Record, Records
from zos_sglang.testing.compare.scenario import GREEDY, Scenario, Stage, count, greedy, twins_differ
from zos_sglang.testing.compare.scenarios.configs import DELAY_SAMPLE, PLAIN, STREAM_8

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
            "open": {"type": "boolean"},
        },
        "required": ["name", "count", "open"],
        "additionalProperties": False,
    }
)
REGEX = r"(red|green|blue), [0-9]{2,4} (apples|pears)"
EBNF = 'root ::= ("yes" | "no") " because " word " " word\nword ::= [a-z] [a-z] [a-z] [a-z]?'


async def stops(stage: Stage) -> None:
    """12 plain answers, then stop conditions cut out of the middle of those very answers."""
    client, model = stage.client, stage.model
    prompts = [model.ids(10 + i, 1000 + i) for i in range(12)]
    plain: list[Record] = await stage.gather(
        *(client.generate(f"plain-{i:02}", p, greedy(40)) for i, p in enumerate(prompts))
    )
    requests = []
    for i, (prompt, answer) in enumerate(zip(prompts, plain, strict=True)):
        ids, text = answer.token_ids or [0], answer.text
        middle = len(text) // 2
        base = {**GREEDY, "max_new_tokens": 40}
        conditions: dict[str, dict[str, Any]] = {
            "id": {"stop_token_ids": [ids[len(ids) // 2]]},
            "string": {"stop": [text[middle : middle + 3], "never this one"]},
            "kept": {"stop": text[middle + 1 : middle + 4], "no_stop_trim": True},
            "regex": {"stop_regex": re.escape(text[middle : middle + 2]) + ".?"},
        }
        for kind, extra in conditions.items():
            # EOS would end some of them first; where it would, ignore it as the plain ones do
            # (not for stop ids, which ignore_eos turns off as well).
            params = {**base, **extra, "ignore_eos": kind != "id"}
            requests.append(client.generate(f"{kind}-{i:02}", prompt, params, stream=i % 2 == 0))
    await stage.gather(*requests)


def stopped(kind: str) -> Callable[[Records], int]:
    """Evidence: how many answers of that kind ended by their stop condition."""
    return count(lambda r: r.name.startswith(f"{kind}-") and r.finish_type == "stop")


async def penalties(stage: Stage) -> None:
    """Each prompt with and without penalties, in one message that makes one batch.

    Under overlap stock counts the tokens that the CPU has seen when it launches a step. Whether
    that includes a request's first one depends on what was launched in between, so penalised
    answers repeat only if everybody starts in the same prefill.
    """
    variants: list[dict[str, Any]] = [
        {"frequency_penalty": 1.2},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.2},
        {"min_new_tokens": 24, "frequency_penalty": -0.4, "ignore_eos": False},
    ]
    for wave in range(3):
        prompts = [story(1100 + 10 * wave + i, 1) for i in range(5)]
        params = [greedy(30 + 3 * i, **variant) for i, variant in enumerate(variants)]
        plain = [greedy(30 + 3 * i) for i in range(5)]
        await stage.client.generate_many(f"wave{wave}", prompts * 2, plain + params)


def penalised(records: Records) -> int:
    """Evidence: how many of the penalised answers differ from the plain ones of their prompts."""
    pairs = [(f"wave{w}[{i}]", f"wave{w}[{i + 5}]") for w in range(3) for i in range(5)]
    return sum(1 for a, b in pairs if a in records and records[a].token_ids != records[b].token_ids)


async def logit_bias(stage: Stage) -> None:
    """Each prompt with and without a bias, together in the same batches."""
    variants: list[dict[str, Any]] = [
        {"logit_bias": {"65": 6.0}},
        {"logit_bias": {"70": 4.0, "71": 4.0, "72": -50.0}},
        {"logit_bias": {str(i): -100.0 for i in range(60, 90)}},
    ]
    prompts = [stage.model.ids(8 + 3 * i, 1200 + i) for i in range(10)]
    await stage.gather(
        *(
            stage.client.generate(f"p{i:02}{end}", prompt, params, stream=i % 3 == 0)
            for i, prompt in enumerate(prompts)
            for end, params in (
                ("", greedy(40)),
                ("-biased", greedy(40, **variants[i % len(variants)])),
            )
        )
    )


async def log_probabilities(stage: Stage) -> None:
    """Output and prompt log-probabilities, top-k, chosen ids, some streamed, beside plain ones."""
    variants: list[dict[str, Any]] = [
        {},
        {"return_logprob": True},
        {"return_logprob": True, "top_logprobs_num": 3},
        {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
        {"return_logprob": True, "logprob_start_len": 4, "token_ids_logprob": [5, 60, 70]},
        {"return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True},
    ]
    await stage.gather(
        *(
            stage.client.generate(
                f"lp-{i:02}",
                stage.model.ids(12 + 2 * i, 1300 + i),
                greedy(16 + i % 5),
                stream=i % 4 == 3,
                **variants[i % len(variants)],
            )
            for i in range(24)
        )
    )


async def grammars(stage: Stage) -> None:
    """JSON schema, regex and EBNF: first alone, then mixed with plain requests."""
    kinds: dict[str, dict[str, Any]] = {
        "json": {"json_schema": SCHEMA},
        "regex": {"regex": REGEX},
        "ebnf": {"ebnf": EBNF},
    }
    params = {name: {**GREEDY, "max_new_tokens": 48, **kind} for name, kind in kinds.items()}
    for wave in ("alone", "mixed"):
        requests = [
            stage.client.generate(f"{wave}-{kind}-{i}", story(1400 + i, 1), params[kind], stream=i % 2 == 0)
            for i in range(4)
            for kind in kinds
        ]
        if wave == "mixed":
            requests += [
                stage.client.generate(f"{wave}-plain-{i}", stage.model.ids(20 + i, 1450 + i), greedy(30))
                for i in range(8)
            ]
        await stage.gather(*requests)


def grammar_check(records: Records) -> list[str]:
    """A finished answer must be a word of its grammar."""
    faults = []
    for record in records.values():
        if record.finish_type != "stop":
            continue
        if "-json-" in record.name:
            try:
                json.loads(record.text)
            except ValueError:
                faults.append(f"{record.name}: no JSON: {record.text!r}")
        elif "-regex-" in record.name and not re.fullmatch(REGEX, record.text):
            faults.append(f"{record.name}: does not match: {record.text!r}")
        elif "-ebnf-" in record.name and not re.fullmatch(
            r"(yes|no) because [a-z]{3,4} [a-z]{3,4}", record.text
        ):
            faults.append(f"{record.name}: not of the grammar: {record.text!r}")
    return faults


async def seeded(stage: Stage) -> None:
    """Temperature 0.8 with the server's own seed: one message per batch, all of one length, so
    stock draws the same random numbers every time; then top-k 1, whose draw cannot matter."""
    params = {"temperature": 0.8, "max_new_tokens": 24, "ignore_eos": True}
    for i in range(3):
        extra: dict[str, Any] = ({}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.02})[i]
        prompts = [story(1500 + 10 * i + j, 1) for j in range(8)]
        await stage.client.generate_many(f"batch-{i}", prompts, {**params, **extra})
    await stage.gather(
        *(
            stage.client.generate(
                f"top1-{i:02}", story(1550 + i, 1), {**params, "top_k": 1}, stream=i % 2 == 0
            )
            for i in range(12)
        ),
        *(stage.client.generate(f"greedy-{i}", story(1570 + i, 1), greedy(24)) for i in range(4)),
    )


async def delay_sample(stage: Stage) -> None:
    """Every batch sampled after the previous result: plain, biased, log-probabilities."""
    variants: list[dict[str, Any]] = [{}, {"logit_bias": {"70": 2.0}}, {"logit_bias": {"65": 3.0}}]
    logprobs: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}
    await stage.gather(
        *(
            stage.client.generate(
                f"delay-{i:02}",
                stage.model.ids(8 + 11 * (i % 5), 1600 + i),
                {**greedy(32, **variants[i % 3]), "ignore_eos": i % 2 == 0},
                stream=i % 2 == 0,
                **(logprobs if i % 6 == 5 else {}),
            )
            for i in range(24)
        )
    )


SCENARIOS = (
    Scenario(
        "stops",
        "stop token ids, stop strings (trimmed and kept) and stop regex",
        stops,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={f"stopped by {kind}": stopped(kind) for kind in ("id", "string", "kept", "regex")},
            batch=8,
        ),
    ),
    Scenario(
        "penalties",
        "frequency, presence and repetition penalties, minimum length",
        penalties,
        STREAM_8,
        Evidence(
            reasons=("overlapped",),
            seen={"changed": penalised},
            batch=8,
            lane=LaneEvidence(None, refused=("penalties",)),
        ),
    ),
    Scenario(
        "logit-bias",
        "logit bias beside plain requests",
        logit_bias,
        PLAIN,
        Evidence(reasons=("overlapped",), seen={"changed": twins_differ("-biased")}, batch=8),
    ),
    Scenario(
        "log-probabilities",
        "output and prompt log-probabilities with top-k and chosen ids",
        log_probabilities,
        PLAIN,
        Evidence(
            reasons=("overlapped",),
            seen={
                "with output": count(lambda r: (r.logprobs or {}).get("output_token_logprobs")),
                "with prompt": count(lambda r: (r.logprobs or {}).get("input_top_logprobs")),
            },
            lane=LaneEvidence(None, refused=("logprobs",)),
        ),
    ),
    Scenario(
        "grammars",
        "JSON schema, regex and EBNF, alone and mixed with plain requests",
        grammars,
        PLAIN,
        Evidence(
            paths=("delayed-sampling",),
            seen={"complete": count(lambda r: "plain" not in r.name and r.finish_type == "stop")},
            lane=LaneEvidence(masked=True),
        ),
        check=grammar_check,
        smoke=True,
    ),
    Scenario(
        "seeded-sampling",
        "temperature above 0 where stock repeats itself",
        seeded,
        STREAM_8,
        Evidence(reasons=("overlapped",), seen={"sampled": count(lambda r: r.name.startswith("batch"))}),
    ),
    Scenario(
        "delay-sample",
        "SGLANG_ENABLE_DELAY_SAMPLE=1: every batch sampled late",
        delay_sample,
        DELAY_SAMPLE,
        Evidence(
            reasons=("overlapped",),
            paths=("delayed-sampling",),
            batch=8,
            lane=LaneEvidence(closed="diagnostics"),
        ),
    ),
)
