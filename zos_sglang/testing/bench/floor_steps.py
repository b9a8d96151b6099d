"""Steps at the floor's own KV length: the only steps of a wave that the floor may be held against."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Steps count whose KV length is at most this far, in tokens, from the one that the floor was replayed at.
REACH = 16
_FIELD = "floor_step_us"


def floor_step_us(
    wall_ns: Sequence[int], prompt: int, output: int, floor: Mapping[str, Any] | None
) -> float | None:
    """Median step (us) at the KV length of `floor` in a wave of one mode alone; None where none is known.

    `wall_ns` are all samples of the wave, `prompt` and `output` its tokens a request. Only a complete list
    tells the length of each sample: `output` tokens take `output` - 1 decode steps, and a sample lies between
    two of them.
    """
    if floor is None or len(wall_ns) != output - 2:
        return None
    # The first decode step sees the prompt and the token that the prefill gave. A loop that launches ahead
    # waits out the step before, whose length is one less; that is within what the reach averages over.
    near = [ns for i, ns in enumerate(wall_ns) if abs(prompt + 1 + i - floor["mean_len"]) <= REACH]
    return round(statistics.median(near) / 1000, 3) if near else None


def add_floor_steps(data: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> int:
    """Give the repeats of a loaded result their `floor_step_us` where they lack it; how many got one.

    `samples` are the records of waves.jsonl. A result with turns gets none: the steps of one mode do not
    tell their length there.
    """
    if data["identity"].get("turns"):
        return 0
    by_wave = {_key(record, record): record["wall_ns"] for record in samples}
    added = 0
    for point in data["points"]:
        for repeat in point["repeats"]:
            for mode, wave in repeat["waves"].items():
                found = by_wave.get(_key(point, {**repeat, "mode": mode}), [])
                if wave.get(_FIELD) is None:
                    wave[_FIELD] = floor_step_us(found, point["prompt"], point["output"], point["floor"])
                    added += wave[_FIELD] is not None
    return added


def _key(point: Mapping[str, Any], wave: Mapping[str, Any]) -> tuple[Any, ...]:
    """What one wave is known by, in the result and beside it."""
    where = tuple(point[name] for name in ("attention", "prompt", "output", "batch"))
    return (*where, *(wave[name] for name in ("run", "repeat", "mode")))
