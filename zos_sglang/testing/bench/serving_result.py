"""What SGLang's serving benchmark wrote about one run, as the flat dict that the result file keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.client import BenchError

#: Our name of a latency, and SGLang's.
LATENCIES = {"ttft_ms": "ttft", "itl_ms": "itl", "tpot_ms": "tpot", "e2e_ms": "e2e_latency"}
#: Our name of a statistic, and SGLang's. P50 is called median there.
STATISTICS = {"p50": "median", "p90": "p90", "p95": "p95", "p99": "p99", "mean": "mean"}
_KEPT_ERRORS, _DIGITS = 5, 12


def read_result(path: Path, requests: int, *, whole_texts: bool = True) -> dict[str, Any]:
    """The figures of the one run that wrote `path`, a line of JSON.

    All figures are SGLang's own: latencies in milliseconds, throughput over the whole run. `digests` are of
    the answers' texts, in the order of the requests; None for a request that failed, and for all of them if
    not `whole_texts`. Raises BenchError if the file is not what was expected.
    """
    try:
        lines = path.read_text().splitlines()
        found = json.loads(lines[-1])
        if len(lines) != 1 or not isinstance(found, dict):
            raise ValueError(f"{len(lines)} lines instead of one object")
        return _figures(found, requests, whole_texts)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(f"{path.name} of sglang.bench_serving cannot be read: {error!r}") from None


def _figures(found: Mapping[str, Any], requests: int, whole_texts: bool) -> dict[str, Any]:
    errors = list(found["errors"])
    if len(errors) != requests:
        raise ValueError(f"{len(errors)} requests, {requests} were asked for")
    failed = [f"request {index}: {_short(error)}" for index, error in enumerate(errors) if error]
    report = found.get("cache_report") or {}
    return {
        "failed": requests - int(found["completed"]),
        "errors": failed[:_KEPT_ERRORS],
        "duration_s": round(found["duration"], 4),
        "requests_per_s": round(found["request_throughput"], 4),
        "tokens_per_s": round(found["output_throughput"], 2),
        "input_tokens": found["total_input_tokens"],
        "output_tokens": found["total_output_tokens"],
        "cached_tokens": report.get("total_cached_tokens"),
        "mean_in_flight": round(found["concurrency"], 2),
        **{
            name: {ours: round(found[f"{theirs}_{what}_ms"], 4) for ours, theirs in STATISTICS.items()}
            for name, what in LATENCIES.items()
        },
        "digests": digests(found["generated_texts"], errors) if whole_texts else [None] * requests,
    }


def digests(texts: Sequence[str], errors: Sequence[str]) -> list[str | None]:
    """A short SHA-256 of each answer, None where there was an error instead."""
    return [
        None if error else hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
        for text, error in zip(texts, errors, strict=True)
    ]


def _short(error: str) -> str:
    """An error's last line: SGLang keeps whole tracebacks."""
    return error.strip().splitlines()[-1][:200]
