"""What a step record says about a batch, by SGLang 0.5.23's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zos_sglang.observe.names import (
    CODES,
    DELAYED_SAMPLING,
    EMBEDDING,
    LANE_OPENING,
    MIDDLE_CHUNK,
    Forward,
    code,
)
from zos_sglang.observe.recorder import Facts
from zos_sglang.resident.account import LaneAccount

_DECODE = code("forward", Forward.DECODE)
_REFUSALS, _DEPARTURES = CODES["refusal"], CODES["departure"]


def make_facts(scheduler: Any, account: LaneAccount) -> Callable[[Any, Any, bool], Facts]:
    """`facts(batch, result, resident)` of one scheduler; the account says why the lane refused or was left.

    A closure: this runs on every step outside the lane.
    """
    always = 0 if scheduler.is_generation else EMBEDDING
    forwards: dict[Any, int] = {}
    last: Any = None
    last_forward = 0

    def facts(batch: Any, result: Any, resident: bool) -> Facts:
        nonlocal last, last_forward
        mode, forward = batch.forward_mode, last_forward
        if mode is not last:  # finding an enumeration's member in a dict may take a call
            found = forwards.get(mode)
            if found is None:
                found = forwards[mode] = code("forward", mode.name.lower())
            last, last_forward = mode, found
            forward = found
        tokens = rows = len(batch.reqs)
        flags = always
        if resident:
            flags |= LANE_OPENING
            if getattr(result, "unsampled", False):
                flags |= DELAYED_SAMPLING
        else:
            if forward != _DECODE:
                tokens = batch.extend_num_tokens or rows
                # A running batch that began as a prefill still names the chunked request of that day.
                if batch.chunked_req is not None:
                    flags |= MIDDLE_CHUNK
            if getattr(result, "delay_sample_func", None) is not None:
                flags |= DELAYED_SAMPLING
        refusal = departure = 0
        if account.refusal is not None:
            refusal, account.refusal = _REFUSALS[account.refusal], None
        if account.departure is not None:
            departure, account.departure = _DEPARTURES[account.departure], None
        return rows, tokens, len(scheduler.waiting_queue), forward, flags, refusal, departure

    return facts
