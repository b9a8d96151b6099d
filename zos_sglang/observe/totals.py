"""Counts of all steps since the start, made from records as they become complete."""

from __future__ import annotations

from typing import Any

import numpy as np

from zos_sglang.observe.names import COLUMNS, Work

_COUNTED = ("mode", "path", "reason", "forward", "barrier", "refusal", "departure", "ready")
_CPU = (*(str(work) for work in Work), "forward")


class Totals:
    """Sums over records of dtype `record.STEP`; each record is to be added once."""

    def __init__(self) -> None:
        self._counts = {column: np.zeros(len(COLUMNS[column]) + 1, np.int64) for column in _COUNTED}
        self._blocks = np.zeros((2, len(COLUMNS["block"]) + 1), np.int64)
        self._ns = dict.fromkeys((*(f"cpu_{name}" for name in _CPU), "cpu", "wall", "wait"), 0)
        self._sums = dict.fromkeys(("rows", "tokens"), 0)
        self.steps = 0

    def add(self, records: np.ndarray) -> None:
        """Count some more records."""
        self.steps += len(records)
        for column, counts in self._counts.items():
            counts[:] += np.bincount(records[column], minlength=len(counts))
        size = self._blocks.shape[1]
        lost = np.maximum(records["blocked"], 0)
        self._blocks[0] += np.bincount(records["block"], minlength=size)
        self._blocks[1] += np.bincount(records["block"], weights=lost, minlength=size).astype(np.int64)
        for name in self._ns:
            self._ns[name] += int(np.maximum(records[name], 0).sum())
        for name in self._sums:
            self._sums[name] += int(records[name].sum())

    def report(self) -> dict[str, Any]:
        """Plain numbers by word; words that never occurred are left out.

        `cpu_us` by class of work; `block` by cause, with the microseconds it cost; all others are steps.
        """
        found: dict[str, Any] = {"steps": self.steps, **self._sums}
        for column, counts in self._counts.items():
            words = zip(COLUMNS[column], counts[1:].tolist(), strict=True)
            found[column] = {str(word): count for word, count in words if count}
        steps, lost = self._blocks[:, 1:].tolist()
        found["block"] = {
            str(word): {"steps": n, "us": ns // 1000}
            for word, n, ns in zip(COLUMNS["block"], steps, lost, strict=True)
            if n
        }
        found["cpu_us"] = {name: self._ns[f"cpu_{name}"] // 1000 for name in _CPU}
        found["wall_us"], found["wait_us"] = self._ns["wall"] // 1000, self._ns["wait"] // 1000
        return found
