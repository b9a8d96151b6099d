"""What scripts/bench_serving.py asks SGLang's own serving benchmark for: points, and its command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.arrivals import count_of

#: Datasets by SGLang's names. `sharegpt` reads the file that `sharegpt.py` makes, `random` its tokens.
DATASETS = ("random", "sharegpt", "generated-shared-prefix")
SHARED = "generated-shared-prefix"
#: At 1 SGLang keeps the prompts in a file under the home directory, named after the tokenizer's class and not
#: after the tokenizer; and a run that reads the file draws other arrival times than the run that wrote it.
_SHARED_RANGE = 0.9
#: Positions that a request cannot use.
_KEPT_BACK = 8


@dataclass(frozen=True)
class Point:
    """One load: `rate` requests a second (None: all at once), at most `concurrency` at a time (None: any)."""

    dataset: str
    rate: float | None
    concurrency: int | None
    requests: int

    def key(self, mode: str) -> dict[str, Any]:
        """What names a run of this point in a result file."""
        return {**asdict(self), "mode": mode}

    @property
    def name(self) -> str:
        return name_of(asdict(self))


@dataclass(frozen=True)
class Lengths:
    """Tokens of the datasets.

    `range_ratio`: random lengths lie between this share of the length and all of it. `scale` is that of the
    ShareGPT lengths. There are `groups` different shared prefixes.
    """

    prompt: int = 256
    output: int = 128
    range_ratio: float = 0.5
    scale: float = 1.0
    prefix: int = 512
    question: int = 64
    groups: int = 8

    def longest(self, dataset: str) -> int:
        """Positions of the longest request of a dataset; ShareGPT's lengths are cut to what there is."""
        if dataset == "random":
            return self.prompt + self.output + _KEPT_BACK
        return self.prefix + self.question + self.output + _KEPT_BACK if dataset == SHARED else 0


def name_of(load: Any) -> str:
    """A point, a run or a row of figures in words."""
    words = [load["dataset"]]
    if load["rate"] is not None:
        words.append(f"{load['rate']:g}/s")
    if load["concurrency"] is not None:
        words.append(f"{load['concurrency']} at a time")
    return ", ".join(words)


def points(
    datasets: Sequence[str],
    rates: Sequence[float],
    concurrencies: Sequence[int],
    lengths: Lengths,
    *,
    most: int,
    seconds: float,
    rounds: int,
) -> list[Point]:
    """Every dataset at every rate, and with every number of requests at a time.

    A rate has `seconds` of arrivals, a concurrency `rounds` requests for each place; at most `most`, and for
    a shared prefix rounded up to whole groups.
    """
    loads: list[tuple[float | None, int | None, int]] = [
        (rate, None, count_of(rate, most, seconds)) for rate in rates
    ]
    loads += [(None, places, min(most, places * rounds)) for places in concurrencies]
    return [
        Point(dataset, rate, places, _whole(count, lengths.groups) if dataset == SHARED else count)
        for dataset in datasets
        for rate, places, count in loads
    ]


def _whole(count: int, groups: int) -> int:
    return -(-count // groups) * groups


@dataclass(frozen=True)
class Target:
    """Where requests go, and what they are made with. `positions` is the model's context."""

    url: str
    tokenizer: Path
    conversations: Path
    positions: int


def arguments(point: Point, lengths: Lengths, target: Target, seed: int, result: Path) -> list[str]:
    """The arguments of `python -m sglang.bench_serving` for one run, which appends one line to `result`.

    No warm-up request: it would fill the prefix cache with the first prompt of the run.
    """
    found = [
        *("--backend", "sglang", "--base-url", target.url, "--ready-check-timeout-sec", "0"),
        # Only looked at for a chat template; the name of the served model is not sent.
        *("--model", str(target.tokenizer), "--tokenizer", str(target.tokenizer)),
        *("--dataset-name", point.dataset, "--num-prompts", str(point.requests), "--seed", str(seed)),
        *("--request-rate", "inf" if point.rate is None else f"{point.rate:g}"),
        *("--warmup-requests", "0", "--disable-tqdm"),
        *("--output-file", str(result), "--output-details", "--cache-report"),
    ]
    if point.concurrency is not None:
        found += ["--max-concurrency", str(point.concurrency)]
    return found + _of_dataset(point, lengths, target)


def _of_dataset(point: Point, lengths: Lengths, target: Target) -> list[str]:
    # Random token ids as text would come back as other ids, and as more of them: so they go as ids.
    if point.dataset == "random":
        return [
            *("--dataset-path", str(target.conversations), "--tokenize-prompt"),
            *("--random-input-len", str(lengths.prompt), "--random-output-len", str(lengths.output)),
            *("--random-range-ratio", str(lengths.range_ratio)),
        ]
    if point.dataset == SHARED:
        return [
            *("--gsp-num-groups", str(lengths.groups), "--tokenize-prompt"),
            *("--gsp-prompts-per-group", str(point.requests // lengths.groups)),
            *("--gsp-system-prompt-len", str(lengths.prefix), "--gsp-question-len", str(lengths.question)),
            *("--gsp-output-len", str(lengths.output), "--gsp-range-ratio", str(_SHARED_RANGE)),
        ]
    return [
        *("--dataset-path", str(target.conversations)),
        *("--sharegpt-context-len", str(target.positions - _KEPT_BACK)),
    ]
