"""Every lane kernel against its reference, the references against plain loops, and the sm_90 compiler.

The kernels run in Triton's interpreter, in a process of their own, because the variable that selects it
must be set before triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.lane_kernel_cases import CASES, CONTEXT, POOL
from zos_sglang.resident import kernels

ROUNDS = 40


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.lane_kernel_cases", str(ROUNDS)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_kernel_writes_what_its_reference_writes(name: str, interpreted: dict[str, str]) -> None:
    assert interpreted.get(name) is None


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=8)


@given(lengths, st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_advance_moves_live_rows_only(live: list[int], padding: int, data: Any) -> None:
    n, bucket = len(live), len(live) + padding
    rows = data.draw(st.permutations(range(1, POOL)))[:n]
    table = torch.arange(POOL * CONTEXT, dtype=torch.int32).view(POOL, CONTEXT)
    step = kernels.StepBuffers(
        torch.full((bucket,), 7),
        int64(*(length - 1 for length in live), *[0] * padding),
        int64(*live, *[1] * padding),
        torch.zeros(bucket, dtype=torch.int64),
        int64(*rows, *[0] * padding),
        table,
    )
    kernels.advance(step, torch.arange(100, 100 + bucket), int64(n))
    assert step.input_ids.tolist() == [*range(100, 100 + n), *[7] * padding]
    assert step.seq_lens.tolist() == [*(length + 1 for length in live), *[1] * padding]
    assert step.positions.tolist() == [*live, *[0] * padding]
    expected = [row * CONTEXT + length for row, length in zip(rows, live, strict=True)]
    assert step.out_cache_loc.tolist() == [*expected, *[0] * padding]


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_emitted_tokens_come_out_in_order(depth: int, steps: int, live: int) -> None:
    ring, tokens = torch.zeros(depth, 6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    counter = int64(0)
    for step in range(steps):
        kernels.emit(torch.arange(6) + 10 * step + 1, tokens, ring, counter, int64(live))
        assert ring[step % depth].tolist() == [10 * step + 1 + i if i < live else 0 for i in range(6)]
        assert torch.equal(tokens, ring[step % depth])
    assert counter.item() == steps


@given(lengths, st.sampled_from([1, 2, 16, 64]), st.data())
@settings(max_examples=120, deadline=None)
def test_reserved_slots_continue_the_rows_pages(live: list[int], page: int, data: Any) -> None:
    """Pages as an allocator would hand them out, token by token, against the one call."""
    n = len(live)
    steps = data.draw(st.integers(1, page if page > 1 else 20))
    rows = list(data.draw(st.permutations(range(POOL))))[:n]
    table = torch.full((POOL, CONTEXT), -1, dtype=torch.int32)
    fresh = iter(range(5, 10_000))
    for row, length in zip(rows, live, strict=True):
        for start in range(0, length, page):
            number = next(fresh)
            for position in range(start, min(start + page, length)):
                table[row, position] = number * page + position - start
    expected = table.clone()
    if page == 1:
        slots = int64(*(1000 + i for i in range(n * steps)))
        for r, row in enumerate(rows):
            for j in range(steps):
                expected[row, live[r] + j] = slots[j * n + r]
    else:
        pages = []
        for row, length in zip(rows, live, strict=True):
            number = int(table[row, length - 1]) // page
            for position in range(length, length + steps):
                if position % page == 0:
                    number = next(fresh)
                    pages.append(number)
                expected[row, position] = number * page + position % page
        slots = int64(*pages)
    kernels.write_slots(table, int64(*rows), int64(*live), slots, steps, page_size=page)
    assert torch.equal(table, expected)


def test_a_reservation_needs_one_new_page_at_most() -> None:
    table = torch.zeros(4, 100, dtype=torch.int32)
    with pytest.raises(ValueError, match="one new page"):
        kernels.write_slots(table, int64(1), int64(3), int64(1, 2), 17, page_size=16)
    with pytest.raises(ValueError, match="3 slots for 2 rows"):
        kernels.write_slots(table, int64(1, 2), int64(3, 3), int64(1, 2, 3), 2)


@given(lengths, st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_gathered_slots_are_the_rows_one_after_the_other(live: list[int], padding: int) -> None:
    table = torch.arange(POOL * CONTEXT, dtype=torch.int32).view(POOL, CONTEXT)
    rows, seq_lens = [*range(3, 3 + len(live)), *[0] * padding], [*live, *[1] * padding]
    kv_indptr = torch.zeros(len(rows) + 1, dtype=torch.int32)
    kv_indices = torch.full((1000,), -1)
    kernels.gather_slots(int64(*seq_lens), int64(*rows), table, kv_indptr, kv_indices)
    flat = [int(table[row, i]) for row, length in zip(rows, seq_lens, strict=True) for i in range(length)]
    assert kv_indices.tolist() == flat + [-1] * (1000 - len(flat))
    assert kv_indptr.tolist() == [sum(seq_lens[:i]) for i in range(len(rows) + 1)]


@given(st.integers(1, 60), st.integers(1, 40), st.sampled_from([1, 16]))
@settings(max_examples=40, deadline=None)
def test_appended_pages_give_the_whole_page_table(start: int, steps: int, page: int) -> None:
    table = torch.arange(CONTEXT, dtype=torch.int32).view(1, -1) + 16 * 50
    pages = -(-CONTEXT // page)
    page_table = torch.zeros(1, pages, dtype=torch.int32)
    have = -(-start // page)
    page_table[0, :have] = table[0, : have * page : page] // page
    cache_seqlens = torch.zeros(1, dtype=torch.int32)
    for length in range(start + 1, start + steps + 1):
        slot = table[0, length - 1 : length].to(torch.int64)
        kernels.append_page(int64(length), slot, cache_seqlens, page_table, int64(1), page_size=page)
        assert cache_seqlens.tolist() == [length]
        used = -(-length // page)
        assert torch.equal(page_table[0, :used], table[0, : used * page : page] // page)


@pytest.mark.parametrize("page", [1, 16])
def test_kernels_compile_for_the_device(page: int) -> None:
    """What the interpreter does not check: types, loops and barriers, down to machine code for sm_90."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from zos_sglang.resident import triton_kernels as tk

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted functions cannot be compiled")
    i64 = {"rows", "seq_lens", "slots", "pages", "tokens", "live", "counter", "positions", "input_ids"}
    i64 |= {"out_cache_loc", "sampled", "ring", "kv_indices", "parts"}
    i32 = {"table", "kv_indptr", "cache_seqlens", "page_table"}
    compiled = 0
    for name, function in vars(tk).items():
        if not name.endswith("_kernel"):
            continue
        constants = {"BLOCK": 128, "PAGE": page, "PARTS": 8}
        signature = {
            argument: "*i64" if argument in i64 else "*i32" if argument in i32 else "i32"
            for argument in function.arg_names
        }
        if "logits" in signature:
            signature["logits"] = "*fp32"
        used = {key: value for key, value in constants.items() if key in signature}
        signature |= dict.fromkeys(used, "constexpr")
        binary = compile(ASTSource(function, signature, used), target=GPUTarget("cuda", 90, 32))
        assert binary.asm["cubin"], name
        compiled += 1
    assert compiled == 8
