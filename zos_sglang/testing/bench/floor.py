"""The floor: stock's own decode graph of a batch, which the server replays back to back amid a wave.

A decode step takes longer the longer the sequences are, even within one wave (Qwen3-0.6B's shape on an H200,
batch 256, 32 tokens in, 256 out: from 2.65 to 4.3 ms), and the floor knows one length only: that of the
moment at which the lane next opened, up to a third beyond the middle of the wave. The median step of a whole
wave over such a floor is therefore too low, below 1 at times. So a step is held against the floor at the
floor's own length (`floor_steps`), in the waves of one mode alone, where the length of each step is known.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from zos_sglang.testing.bench.client import BenchClient, BenchError, Wave

REPLAYS = 200
MODE = "resident"
_KEY = "zos_floor"
#: Output tokens of the wave that uses up a request for the floor that came too late for its own.
_LEFTOVER_TOKENS = 32


def measure_floor(
    client: BenchClient, input_ids: list[list[int]], output_tokens: int, middle_s: float
) -> tuple[dict[str, Any] | None, Wave]:
    """Ask for the floor `middle_s` seconds into an untimed wave of mode `resident`.

    The lane opens anew for the request, so the replays see the KV lengths of that moment. Returns the floor
    (None where the server measured none: no lane, or no graphs) and the wave, for its answers.
    """
    client.switch(MODE)
    client.reset_records()
    before = entries(client.zos())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.wave, input_ids, output_tokens)
        time.sleep(middle_s)
        asked = not running.done() and _ask(client)
        wave = running.result()
    if not asked:
        return None, wave
    found = new_entries(before, entries(client.zos()))
    if not found:
        # It would come true in the next wave, which is timed.
        client.wave(input_ids, min(output_tokens, _LEFTOVER_TOKENS))
    wanted = len(input_ids[0]) + output_tokens / 2
    return report(found, len(input_ids), wanted), wave


def _ask(client: BenchClient) -> bool:
    """Whether the server took the request: one without a lane does not know the word."""
    try:
        answer = client.post("/set_internal_state", {"server_args": {_KEY: REPLAYS}})
    except BenchError:
        return False
    return not (isinstance(answer, list) and False in answer)


def entries(zos: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The floors that the server has measured so far."""
    return list(zos.get("floor") or [])


def new_entries(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `after` has beyond `before`; a server may drop the oldest entries meanwhile."""
    left = list(before)
    found = []
    for entry in after:
        if entry in left:
            left.remove(entry)
        else:
            found.append(entry)
    return found


def report(found: Sequence[Mapping[str, Any]], batch: int, wanted_len: float) -> dict[str, Any] | None:
    """The floor of `batch` rows; None without an entry of that batch.

    `wanted_len` is the mean KV length of the timed steps, `mean_len` the one that was replayed. Of several
    floors both time and length are medians, so that they belong together.
    """
    fitting = [entry for entry in found if entry["batch"] == batch]
    if not fitting:
        return None
    return {
        "us": round(statistics.median(entry["us"] for entry in fitting), 3),
        "mean_len": round(statistics.median(entry["mean_len"] for entry in fitting), 1),
        "wanted_len": wanted_len,
        "replays": REPLAYS,
        "raw": [dict(entry) for entry in fitting],
    }


def merged(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Both floors of one point as one: all entries, their median."""
    both = [found for found in (old, new) if found]
    if not both:
        return None
    raw = [entry for found in both for entry in found["raw"]]
    return report(raw, raw[0]["batch"], both[0]["wanted_len"])
