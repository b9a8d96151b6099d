"""The block `steps` of `/server_info`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from zos_sglang.observe.columns import to_columns
from zos_sglang.observe.model import inputs, what_if
from zos_sglang.observe.recorder import Recorder
from zos_sglang.observe.signs import judge
from zos_sglang.observe.summary import summarise

#: Grows when a reader must know.
FORMAT = 1


def make_block(recorder: Recorder, *, loop: str, last: int, cost: dict[str, Any] | None) -> dict[str, Any]:
    """Plain data for JSON.

    Args:
        recorder: whose records.
        loop: whose loop runs: "ours", "stock" or "normal".
        last: how many records are shown one by one.
        cost: what recording costs, if that was measured.
    """
    recorder.flush()
    records = recorder.ring.since(0)
    return {
        "format": FORMAT,
        "asynchronous": recorder.asynchronous,
        "loop": loop,
        "launches": recorder.launches,
        "faults": recorder.faults,
        "totals": recorder.totals.report(),
        "summary": summarise(records),
        "signs": [asdict(finding) for finding in judge(records, inputs(records))],
        "what_if": what_if(records),
        "last": to_columns(records[max(len(records) - last, 0) :]),
        "cost": cost,
    }
