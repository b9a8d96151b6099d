"""The lane's Triton kernels and their launchers; `kernels.py` says what each one does and when.

All length, position, row and slot tensors are int64, request tables int32, scalars int64 [1]. A launcher
writes what the reference of the same name writes, bit for bit.

Two things are easy to get wrong here:

* A block smaller than the launch's threads is replicated over warps. A kernel that changes a value in place
  therefore loads everything, then waits for the whole program (`tl.debug_barrier`), then stores; otherwise
  one warp's store is another warp's load.
* Sizes that change while serving are not specialised on, and neither is the alignment of slices of free
  lists: each variant would be compiled when it first occurs, in the middle of a step.
"""

# A kernel's parameters are its interface to the device: positional, and without types that mypy knows.
# ruff: noqa: PLR0917
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from zos_sglang.resident import greedy
from zos_sglang.resident.kernels import StepBuffers

ROWS = 128
TILE = 512
#: Programs that the gather of all rows' slots should start, if rows and context are large enough.
GATHER_PROGRAMS = 1024


@triton.jit
def _advance_kernel(
    input_ids,
    positions,
    seq_lens,
    out_cache_loc,
    rows,
    table,
    table_stride,
    tokens,
    live,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = index < tl.load(live)
    position = tl.load(seq_lens + index, mask=real, other=0)
    row = tl.load(rows + index, mask=real, other=0)
    token = tl.load(tokens + index, mask=real, other=0)
    slot = tl.load(table + row * table_stride + position, mask=real, other=0)
    tl.debug_barrier()
    tl.store(seq_lens + index, position + 1, mask=real)
    tl.store(positions + index, position, mask=real)
    tl.store(input_ids + index, token, mask=real)
    tl.store(out_cache_loc + index, slot.to(tl.int64), mask=real)


def launch_advance(step: StepBuffers, tokens: Any, live: Any) -> None:
    _advance_kernel[(triton.cdiv(step.seq_lens.shape[0], ROWS),)](
        *step, step.table.stride(0), tokens, live, BLOCK=ROWS, num_warps=ROWS // 32
    )


@triton.jit
def _emit_kernel(sampled, tokens, ring, ring_stride, depth, counter, live, capacity, BLOCK: tl.constexpr):
    # One program: it both reads and moves the counter.
    count = tl.load(counter)
    alive = tl.load(live)
    slot = ring + (count % depth) * ring_stride
    for start in range(0, capacity, BLOCK):
        index = start + tl.arange(0, BLOCK)
        real = (index < alive) & (index < capacity)
        token = tl.load(sampled + index, mask=real, other=0)
        tl.store(slot + index, token, mask=real)
        tl.store(tokens + index, token, mask=real)
    tl.debug_barrier()
    tl.store(counter, count + 1)


def launch_emit(sampled: Any, tokens: Any, ring: Any, counter: Any, live: Any) -> None:
    _emit_kernel[(1,)](
        sampled, tokens, ring, ring.stride(0), ring.shape[0], counter, live, sampled.shape[0], BLOCK=TILE
    )


@triton.jit(do_not_specialize=["n", "steps"], do_not_specialize_on_alignment=["rows", "seq_lens", "slots"])
def _write_tokens_kernel(table, table_stride, rows, seq_lens, slots, n, steps, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    row = tl.load(rows + r)
    first = tl.load(seq_lens + r)
    for start in range(0, steps, BLOCK):
        step = start + tl.arange(0, BLOCK)
        mask = step < steps
        slot = tl.load(slots + step.to(tl.int64) * n + r, mask=mask, other=0)
        tl.store(table + row * table_stride + first + step, slot.to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["n", "steps"], do_not_specialize_on_alignment=["rows", "seq_lens", "pages"])
def _write_pages_kernel(
    table, table_stride, rows, seq_lens, pages, n, steps, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    r = tl.program_id(0)
    row = tl.load(rows + r)
    first = tl.load(seq_lens + r)
    # How many rows before this one take a new page: the place of this row's page in the list.
    before = tl.zeros((), tl.int64)
    for start in range(0, r, BLOCK):
        other = start + tl.arange(0, BLOCK)
        length = tl.load(seq_lens + other, mask=other < r, other=1)
        crosses = ((length + steps - 1) // PAGE != (length - 1) // PAGE) & (other < r)
        before += tl.sum(crosses.to(tl.int64))
    last = first - 1
    last_slot = tl.load(table + row * table_stride + last).to(tl.int64)
    page = tl.zeros((), tl.int64)
    if (first + steps - 1) // PAGE != last // PAGE:
        page = tl.load(pages + before)
    # The page of a token that exists already is read, never written, so no ordering is needed here.
    for start in range(0, steps, BLOCK):
        step = start + tl.arange(0, BLOCK)
        position = first + step
        same = position // PAGE == last // PAGE
        slot = tl.where(same, last_slot + position - last, page * PAGE + position % PAGE)
        tl.store(table + row * table_stride + position, slot.to(tl.int32), mask=step < steps)


def launch_write_slots(
    table: Any, rows: Any, seq_lens: Any, slots: Any, steps: int, *, page_size: int
) -> None:
    n = rows.shape[0]
    kernel, options = _slot_writer(page_size)
    kernel[(n,)](table, table.stride(0), rows, seq_lens, slots, n, steps, **options)


def compile_write_slots(table: Any, page_size: int) -> None:
    kernel, options = _slot_writer(page_size)
    numbers = table.new_empty(1, dtype=torch.int64)
    kernel.warmup(table, table.stride(0), numbers, numbers, numbers, 1, 1, grid=(1,), **options)


def _slot_writer(page_size: int) -> tuple[Any, dict[str, int]]:
    if page_size == 1:
        return _write_tokens_kernel, {"BLOCK": 32, "num_warps": 1}
    return _write_pages_kernel, {"PAGE": page_size, "BLOCK": 128, "num_warps": 4}


@triton.jit
def _gather_kernel(seq_lens, rows, table, table_stride, kv_indptr, kv_indices, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    # Each program sums the lengths before its row by itself: some hundred numbers from the L2 cache cost
    # less than a second kernel that has to finish first.
    start = tl.zeros((), tl.int64)
    for base in range(0, r, BLOCK):
        other = base + tl.arange(0, BLOCK)
        start += tl.sum(tl.load(seq_lens + other, mask=other < r, other=0))
    length = tl.load(seq_lens + r)
    if part == 0:
        tl.store(kv_indptr + r + 1, (start + length).to(tl.int32))
    source = table + tl.load(rows + r) * table_stride
    for base in range(part * BLOCK, length, parts * BLOCK):
        column = base + tl.arange(0, BLOCK).to(tl.int64)
        slot = tl.load(source + column, mask=column < length, other=0)
        tl.store(kv_indices + start + column, slot.to(tl.int64), mask=column < length)


def launch_gather_slots(seq_lens: Any, rows: Any, table: Any, kv_indptr: Any, kv_indices: Any) -> None:
    bucket = seq_lens.shape[0]
    parts = max(1, min(triton.cdiv(table.shape[1], TILE), GATHER_PROGRAMS // bucket))
    _gather_kernel[(bucket, parts)](
        seq_lens, rows, table, table.stride(0), kv_indptr, kv_indices, BLOCK=TILE, num_warps=4
    )


@triton.jit
def _append_page_kernel(
    seq_lens,
    out_cache_loc,
    cache_seqlens,
    page_table,
    page_stride,
    live,
    bucket,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(seq_lens + index, mask=index < bucket, other=1)
    tl.store(cache_seqlens + index, length.to(tl.int32), mask=index < bucket)
    real = index < tl.load(live)
    slot = tl.load(out_cache_loc + index, mask=real, other=0)
    entry = page_table + index.to(tl.int64) * page_stride + (length - 1) // PAGE
    tl.store(entry, (slot // PAGE).to(tl.int32), mask=real)


def launch_append_page(
    seq_lens: Any, out_cache_loc: Any, cache_seqlens: Any, page_table: Any, live: Any, *, page_size: int
) -> None:
    bucket = seq_lens.shape[0]
    _append_page_kernel[(triton.cdiv(bucket, ROWS),)](
        seq_lens,
        out_cache_loc,
        cache_seqlens,
        page_table,
        page_table.stride(0),
        live,
        bucket,
        PAGE=page_size,
        BLOCK=ROWS,
        num_warps=ROWS // 32,
    )


@triton.jit
def _largest_kernel(logits, row_stride, parts, counter, columns, span, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    part = tl.program_id(1)
    if r + part == 0:
        # Nothing else here looks at it.
        tl.store(counter, tl.load(counter) + 1)
    row = logits + r.to(tl.int64) * row_stride
    first = part * span
    last = tl.minimum(first + span, columns)
    best = tl.full([BLOCK], -2147483648, tl.int32)
    column_of_best = tl.zeros([BLOCK], tl.int32)
    for start in range(first, last, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(row + column, mask=column < last, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = tl.where(value == 0.0, 0, key)
        key = tl.where(value != value, 0x7FFFFFFF, key)  # noqa: PLR0124 - only NaN differs from itself
        key = tl.where(column < last, key, -2147483648)
        better = key > best
        best = tl.where(better, key, best)
        column_of_best = tl.where(better, column, column_of_best)
    packed = (best.to(tl.int64) << 32) | (4294967295 - column_of_best.to(tl.int64))
    tl.store(parts + r * tl.num_programs(1) + part, tl.max(packed, 0))


def launch_largest_of_parts(logits: Any, parts: Any, counter: Any) -> None:
    rows, columns = logits.shape
    span = greedy.span_of(columns, parts.shape[1])
    _largest_kernel[(rows, parts.shape[1])](
        logits, logits.stride(0), parts, counter, columns, span, BLOCK=greedy.TILE, num_warps=4
    )


@triton.jit
def _hand_on_kernel(
    parts, tokens, ring, ring_stride, depth, counter, live, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = index < tl.load(live)
    keys = tl.load(parts + index[:, None] * PARTS + tl.arange(0, PARTS)[None, :], mask=real[:, None], other=0)
    token = 4294967295 - (tl.max(keys, 1) & 4294967295)
    slot = ring + ((tl.load(counter) - 1) % depth) * ring_stride
    tl.store(tokens + index, token, mask=real)
    tl.store(slot + index, token, mask=real)


def launch_hand_on(parts: Any, tokens: Any, ring: Any, counter: Any, live: Any) -> None:
    rows, count = parts.shape
    block = 16
    _hand_on_kernel[(triton.cdiv(rows, block),)](
        parts, tokens, ring, ring.stride(0), ring.shape[0], counter, live, PARTS=count, BLOCK=block
    )
