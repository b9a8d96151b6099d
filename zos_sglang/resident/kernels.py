"""Device work of a lane step, each piece as a plain PyTorch reference and as a Triton kernel.

Names used throughout:

* `bucket`: the number of rows a captured graph has, `live` (int64 [1], on the device): how many of them are
  requests. The rest is padding and never advances: length 1, row 0, position 0, slot 0.
* `table`: request to slot, int32 [requests, context].
* lengths, positions, rows, slots and tokens: int64.

`live` and `counter` are on the device because a captured kernel reads what is there when it is replayed,
while a Python number would be frozen. A tensor on the CPU goes to the reference, any other to Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class StepBuffers(NamedTuple):
    """What the model reads for one step: int64 [bucket] each; the request table int32 [requests, context]."""

    input_ids: Any
    positions: Any
    seq_lens: Any
    out_cache_loc: Any
    rows: Any
    table: Any

    def first(self, bucket: int) -> StepBuffers:
        """The same buffers, cut to `bucket` rows."""
        cut = [buffer[:bucket] for buffer in self[:-1]]
        return StepBuffers._make([*cut, self.table])


def advance(step: StepBuffers, tokens: Any, live: Any) -> None:
    """Move the live rows to their next step, in place.

    The token just sampled becomes the input, the length grows by one, the position is the new length minus
    one, and the slot is what the table holds there.

    Args:
        step: all but `rows` and `table` are written.
        tokens: int64 [at least bucket], the last sample.
        live: int64 [1], at most the bucket.
    """
    if step.seq_lens.device.type == "cpu":
        advance_reference(step, tokens, live)
    else:
        from zos_sglang.resident.triton_kernels import launch_advance

        launch_advance(step, tokens, live)


def advance_reference(step: StepBuffers, tokens: Any, live: Any) -> None:
    n = int(live)
    step.input_ids[:n] = tokens[:n]
    step.seq_lens[:n] += 1
    step.positions[:n] = step.seq_lens[:n] - 1
    step.out_cache_loc[:n] = step.table[step.rows[:n], step.positions[:n]].to(torch.int64)


def emit(sampled: Any, tokens: Any, ring: Any, counter: Any, live: Any) -> None:
    """Hand the live rows' sample on: to `tokens` and to ring slot `counter % depth`; then count.

    Args:
        sampled: int64 [at most capacity].
        tokens: int64 [capacity], written.
        ring: int64 [depth, capacity], one slot written.
        counter: int64 [1], raised by one.
        live: int64 [1].
    """
    if tokens.device.type == "cpu":
        emit_reference(sampled, tokens, ring, counter, live)
    else:
        from zos_sglang.resident.triton_kernels import launch_emit

        launch_emit(sampled, tokens, ring, counter, live)


def emit_reference(sampled: Any, tokens: Any, ring: Any, counter: Any, live: Any) -> None:
    n = int(live)
    tokens[:n] = sampled[:n]
    ring[int(counter) % ring.shape[0], :n] = sampled[:n]
    counter += 1


def write_slots(table: Any, rows: Any, seq_lens: Any, slots: Any, steps: int, *, page_size: int = 1) -> None:
    """Write a reservation of `steps` slots a row to `table[row, length .. length + steps - 1]`.

    Args:
        table: int32 [requests, context], written.
        rows: int64 [n], rows of `table`, each at most once.
        seq_lens: int64 [n], lengths with the newest prepared token: the last written position is one less.
        slots: int64. With page size 1 slots, step after step: [steps * n], step j of row r at `j * n + r`.
            With larger pages page numbers: one for each row whose `steps` tokens reach a new page, in the
            order of the rows.
        steps: at most `page_size` when that is above 1, so that a row needs one new page at most.

    Raises:
        ValueError: more steps than a page holds, or too few slots.
    """
    n = rows.shape[0]
    if page_size == 1 and slots.shape[0] < n * steps:
        raise ValueError(f"{slots.shape[0]} slots for {n} rows and {steps} steps")
    if page_size > 1 and steps > page_size:
        raise ValueError(f"{steps} steps reach further than one new page of {page_size} tokens")
    if n == 0 or steps <= 0:
        return
    if table.device.type == "cpu":
        write_slots_reference(table, rows, seq_lens, slots, steps, page_size=page_size)
    else:
        from zos_sglang.resident.triton_kernels import launch_write_slots

        launch_write_slots(table, rows, seq_lens, slots, steps, page_size=page_size)


def prepare_write_slots(table: Any, page_size: int = 1) -> None:
    """Compile `write_slots` for this table, so that the first reservation does not wait for a compiler.

    One variant serves all sizes and alignments. Writes nothing; does nothing on the CPU.
    """
    if table.device.type != "cpu":
        from zos_sglang.resident.triton_kernels import compile_write_slots

        compile_write_slots(table, page_size)


def write_slots_reference(
    table: Any, rows: Any, seq_lens: Any, slots: Any, steps: int, *, page_size: int = 1
) -> None:
    columns = seq_lens[:, None] + torch.arange(steps, device=seq_lens.device)
    if page_size == 1:
        values = slots[: steps * rows.shape[0]].view(steps, -1).T
    else:
        last = seq_lens - 1
        needs = (seq_lens + steps - 1) // page_size != last // page_size
        pages = torch.zeros_like(seq_lens)
        pages[needs] = slots[: int(needs.sum())]
        same = columns // page_size == (last // page_size)[:, None]
        within = table[rows, last].to(torch.int64)[:, None] + columns - last[:, None]
        values = torch.where(same, within, pages[:, None] * page_size + columns % page_size)
    table[rows[:, None], columns] = values.to(table.dtype)


def gather_slots(seq_lens: Any, rows: Any, table: Any, kv_indptr: Any, kv_indices: Any) -> None:
    """All rows' slots one after the other, as Triton attention reads them.

    Same values as upstream's cumulative sum and gather, padding rows included, in one kernel whose programs
    also share long rows.

    Args:
        seq_lens, rows: int64 [bucket].
        table: int32 [requests, context].
        kv_indptr: int32 [bucket + 1]; entries 1.. are written, entry 0 must be 0 already.
        kv_indices: int64 [at least the sum of lengths], written up to that sum.
    """
    if seq_lens.device.type == "cpu":
        gather_slots_reference(seq_lens, rows, table, kv_indptr, kv_indices)
    else:
        from zos_sglang.resident.triton_kernels import launch_gather_slots

        launch_gather_slots(seq_lens, rows, table, kv_indptr, kv_indices)


def gather_slots_reference(seq_lens: Any, rows: Any, table: Any, kv_indptr: Any, kv_indices: Any) -> None:
    kv_indptr[1:] = torch.cumsum(seq_lens, dim=0)
    slots = torch.cat([table[row, :length] for row, length in zip(rows, seq_lens.tolist(), strict=True)])
    kv_indices[: slots.shape[0]] = slots


def append_page(
    seq_lens: Any, out_cache_loc: Any, cache_seqlens: Any, page_table: Any, live: Any, *, page_size: int
) -> None:
    """FA3's lengths for all rows, and the page of the newest token in each live row's page table.

    The rest of a row is what the step before left there; writing a page that is there already changes
    nothing. `cu_seqlens_k` is left alone: plain decode never reads it.

    Args:
        seq_lens, out_cache_loc: int64 [bucket], as `advance` left them.
        cache_seqlens: int32 [bucket], written.
        page_table: int32 [at least bucket, pages], one entry a live row written.
        live: int64 [1].
        page_size: tokens a page.
    """
    if seq_lens.device.type == "cpu":
        append_page_reference(seq_lens, out_cache_loc, cache_seqlens, page_table, live, page_size=page_size)
    else:
        from zos_sglang.resident.triton_kernels import launch_append_page

        launch_append_page(seq_lens, out_cache_loc, cache_seqlens, page_table, live, page_size=page_size)


def append_page_reference(
    seq_lens: Any, out_cache_loc: Any, cache_seqlens: Any, page_table: Any, live: Any, *, page_size: int
) -> None:
    n = int(live)
    cache_seqlens.copy_(seq_lens)
    each = torch.arange(n, device=seq_lens.device)
    page_table[each, (seq_lens[:n] - 1) // page_size] = (out_cache_loc[:n] // page_size).to(page_table.dtype)
