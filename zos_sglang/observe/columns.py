"""Records as JSON: one list a column, words instead of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from zos_sglang.observe.names import CODES, COLUMNS
from zos_sglang.observe.record import STEP

_FIELDS = tuple(name for name in STEP.names or () if name != "pad")


def to_columns(records: np.ndarray) -> dict[str, list[Any]]:
    """Records of dtype `STEP` as plain lists by field; a word is None where there is none."""
    found: dict[str, list[Any]] = {}
    for name in _FIELDS:
        numbers = records[name].tolist()
        words = (None, *map(str, COLUMNS[name])) if name in COLUMNS else None
        found[name] = numbers if words is None else [words[number] for number in numbers]
    return found


def from_columns(columns: Mapping[str, list[Any]]) -> np.ndarray:
    """Records of `to_columns`. Raises ValueError naming a column that is missing, uneven or unknown."""
    if missing := [name for name in _FIELDS if name not in columns]:
        raise ValueError(f"step records without column {missing[0]!r}")
    sizes = {len(columns[name]) for name in _FIELDS}
    if len(sizes) > 1:
        raise ValueError("step records whose columns have different lengths")
    records = np.zeros(sizes.pop() if sizes else 0, STEP)
    for name in _FIELDS:
        values = columns[name]
        if name in COLUMNS:
            values = [_number(name, value) for value in values]
        records[name] = values
    return records


def _number(column: str, word: str | None) -> int:
    if word is None:
        return 0
    if word not in CODES[column]:
        raise ValueError(f"step records with an unknown {column} {word!r}")
    return CODES[column][word]
