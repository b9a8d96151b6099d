"""The lane's executor over a toy model: order of work, rows that come and go, padding, sampling, failures."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.unit.toy_decode import PADDING_LENGTH, Rows, ToyDecode
from zos_sglang.resident.capture import Capture
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.resident.graph_executor import GraphExecutor

DEPTH = 4


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(1, 200) for _ in range(rng.randint(1, 12))] for _ in range(count)]


def run_window(executor: GraphExecutor, rows: Rows, steps: int) -> None:
    """One stay in the lane; every token of every step must be the one the toy model defines."""
    batch = rows.batch()
    executor.open(batch)
    rows.reserve(batch, steps - 1)
    for _ in range(steps):
        slot = rows.decode.steps % DEPTH
        executor.step()
        expected = rows.expect()
        assert executor.ring[slot, : len(expected)].tolist() == expected
        assert executor.last_tokens().tolist() == expected
    executor.close()


def padding(decode: ToyDecode, rows: int) -> list[list[int]]:
    step = decode.buffers.first(decode.bucket(rows))
    return [b[rows:].tolist() for b in (step.seq_lens, step.positions, step.out_cache_loc, step.rows)]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_steps_continue_where_the_last_sample_ended(count: int, greedy: bool) -> None:
    decode = ToyDecode()
    decode.greedy = greedy
    executor = GraphExecutor(decode, depth=DEPTH)
    run_window(executor, Rows(decode, prompts(count)), 11)
    assert decode.steps == 11


def test_rows_leave_and_others_return_within_a_bucket() -> None:
    decode = ToyDecode()
    executor = GraphExecutor(decode, depth=DEPTH)
    rows = Rows(decode, prompts(8))
    run_window(executor, rows, 5)
    for place in (6, 0, 2):
        rows.drop(place)
        run_window(executor, rows, 3)
        left = len(rows.numbers)
        gap = decode.bucket(left) - left
        assert padding(decode, left) == [[PADDING_LENGTH] * gap, [0] * gap, [0] * gap, [0] * gap]
    decode.greedy = False
    run_window(executor, rows, 3)


@pytest.mark.parametrize("greedy", [True, False])
def test_rows_go_while_the_rest_rides_on_into_smaller_buckets(greedy: bool) -> None:
    decode = ToyDecode()
    decode.greedy = greedy
    executor = GraphExecutor(decode, depth=DEPTH)
    executor.capture_all()
    rows = Rows(decode, prompts(8))
    batch = rows.batch()
    executor.open(batch)
    rows.reserve(batch, 20)
    for gone in ([6], [0, 3], [1, 2, 3], [0]):
        for _ in range(3):
            slot, expected = decode.steps % DEPTH, rows.expect()
            executor.step()
            assert executor.ring[slot, : len(expected)].tolist() == expected
        kept = [row for row in range(len(rows.numbers)) if row not in gone]
        batch = rows.left(batch, kept)
        assert executor.keeping(kept)
        executor.keep(batch, torch.tensor(kept))
        for place in reversed(gone):
            rows.drop(place)
        left = len(rows.numbers)
        assert executor.last_tokens().tolist() == [history[-1] for history in rows.histories]
        gap = decode.bucket(left) - left
        assert padding(decode, left) == [[PADDING_LENGTH] * gap, [0] * gap, [0] * gap, [0] * gap]
    executor.step()
    assert executor.last_tokens().tolist() == rows.expect()


def test_rows_do_not_go_into_a_bucket_that_is_not_captured_nor_where_the_graphs_cannot() -> None:
    decode = ToyDecode()
    executor = GraphExecutor(decode, depth=DEPTH)
    executor.open(Rows(decode, prompts(8)).batch())
    assert not executor.keeping([0, 1])
    assert executor.keeping([0, 1, 2, 3, 4])
    decode.can_keep = False
    assert not executor.keeping([0, 1, 2, 3, 4])


def test_what_a_sampled_batch_draws_is_the_next_input() -> None:
    decode = ToyDecode()
    decode.greedy = False
    executor = GraphExecutor(decode, depth=DEPTH)
    rows = Rows(decode, prompts(2))
    batch = rows.batch()
    rows.reserve(batch, 1)
    loaded = decode.load(batch)
    loaded.sample = lambda: torch.tensor([17, 19], dtype=torch.int32)
    decode.load = lambda _: loaded  # type: ignore[method-assign]
    executor.open(batch)
    executor.step()
    executor.step()
    assert decode.buffers.input_ids[:2].tolist() == [17, 19]
    assert executor.last_tokens().tolist() == [17, 19]


def test_warm_up_of_graphs_neither_advances_nor_emits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture runs its work beforehand, with whatever the last batch left in the buffers."""

    def warm_up(self: Capture, what: str, work: Any) -> Any:
        work()
        work()
        return work

    decode = ToyDecode()
    executor = GraphExecutor(decode, depth=DEPTH)
    rows = Rows(decode, prompts(3))
    run_window(executor, rows, 3)
    before = [buffer.clone() for buffer in decode.buffers] + [executor.ring.clone()]
    monkeypatch.setattr(Capture, "__call__", warm_up)
    executor._buckets.clear()
    executor.capture_all()
    after = [*decode.buffers, executor.ring]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    run_window(executor, rows, 3)


def test_closing_hands_back_what_a_step_in_flight_reads() -> None:
    decode = ToyDecode()
    executor = GraphExecutor(decode, depth=DEPTH)
    executor.open(Rows(decode, prompts(3)).batch())
    loaded = executor._loaded
    executor.step()
    assert any(held is loaded for held in executor.close())


def test_slots_that_moved_are_read_anew_on_refresh() -> None:
    """Publishing a prefix may replace slots below the rows' lengths while the lane stays open."""
    decode = ToyDecode()
    executor = GraphExecutor(decode, depth=DEPTH)
    rows = Rows(decode, prompts(3))
    batch = rows.batch()
    executor.open(batch)
    executor.step()
    executor.refresh()
    assert decode.reloaded == [4]


def test_no_step_without_a_batch() -> None:
    executor = GraphExecutor(ToyDecode(), depth=DEPTH)
    with pytest.raises(RuntimeError, match="no batch"):
        executor.step()


def test_too_large_a_batch_is_refused() -> None:
    decode = ToyDecode()
    executor = GraphExecutor(decode, depth=DEPTH)
    rows = Rows(decode, prompts(9))
    assert executor.refuses(rows.batch()) is Refusal.BATCH_SIZE
    rows.drop(0)
    assert executor.refuses(rows.batch()) is None
