"""Greedy sampling in two kernels: the largest logit of each part of a row, then of the row.

`torch.argmax` gives a row of 150,000 logits to one block, about 3 microseconds a row on an H200: three
quarters of a millisecond at batch 256. Parts of a row fill the device at every batch size.

Each part becomes one int64 whose order is that of `torch.argmax`: the value in the upper half, mapped so that
integers compare as the floats do and NaN is largest; below it the column, inverted, so that the first of
equals wins.
"""

from __future__ import annotations

from typing import Any

import torch

#: Parts that a device of some hundred multiprocessors keeps in flight.
_PARTS_IN_FLIGHT = 1056
MOST_PARTS = 64
#: Columns that a program takes at a time; parts are whole multiples.
TILE = 1024
_INT32_MAX = 2**31 - 1
_COLUMNS = 2**32 - 1
#: Smaller than the key of any logit: a part behind the last column.
_EMPTY = -(2**63) + _COLUMNS


def parts_of(rows: int) -> int:
    """Into how many parts (a power of two) each of `rows` rows is split."""
    wanted = -(-_PARTS_IN_FLIGHT // rows)
    return min(MOST_PARTS, 1 << (wanted - 1).bit_length())


def span_of(columns: int, parts: int) -> int:
    """Columns of one part."""
    return -(-columns // (parts * TILE)) * TILE


def largest_of_parts(logits: Any, parts: Any, counter: Any) -> None:
    """The key of the largest logit of each part; then count.

    Args:
        logits: float [rows, columns], at most 2**32 columns.
        parts: int64 [rows, parts], written.
        counter: int64 [1], raised by one, before `hand_on` uses it.
    """
    if logits.device.type == "cpu":
        largest_of_parts_reference(logits, parts, counter)
    else:
        from zos_sglang.resident.triton_kernels import launch_largest_of_parts

        launch_largest_of_parts(logits, parts, counter)


def largest_of_parts_reference(logits: Any, parts: Any, counter: Any) -> None:
    rows, columns = logits.shape
    span = span_of(columns, parts.shape[1])
    # Adding zero turns the negative zero, equal to the positive one, into it.
    bits = (logits.to(torch.float32) + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & _INT32_MAX)
    ordered = torch.where(torch.isnan(logits), _INT32_MAX, ordered).to(torch.int64)
    keys = (ordered << 32) | (_COLUMNS - torch.arange(columns, device=logits.device))
    lowest = torch.full((rows, span * parts.shape[1]), _EMPTY, device=logits.device)
    lowest[:, :columns] = keys
    parts.copy_(lowest.view(rows, -1, span).amax(-1))
    counter += 1


def hand_on(parts: Any, tokens: Any, ring: Any, counter: Any, live: Any) -> None:
    """The column of each live row's largest key, to `tokens` and to ring slot `(counter - 1) % depth`.

    Args:
        parts: int64 [rows, parts].
        tokens: int64 [capacity], written.
        ring: int64 [depth, capacity], one slot written.
        counter: int64 [1], steps including this one.
        live: int64 [1], at most `rows`.
    """
    if parts.device.type == "cpu":
        hand_on_reference(parts, tokens, ring, counter, live)
    else:
        from zos_sglang.resident.triton_kernels import launch_hand_on

        launch_hand_on(parts, tokens, ring, counter, live)


def hand_on_reference(parts: Any, tokens: Any, ring: Any, counter: Any, live: Any) -> None:
    n = int(live)
    columns = _COLUMNS - (parts[:n].amax(-1) & _COLUMNS)
    tokens[:n] = columns
    ring[(int(counter) - 1) % ring.shape[0], :n] = columns
