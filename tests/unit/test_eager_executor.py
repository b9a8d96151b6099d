"""Lane steps without graphs: over a toy whose tokens depend on every input, and over upstream's own code."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from tests.unit.toy_decode import Rows, ToyDecode
from tests.unit.upstream_decode_case import VOCABULARY, Batch, model_runner, token_after
from zos_sglang.resident.eager import EagerExecutor
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream.lane_model import SglangModelStep

DEPTH = 3


class ToyStep:
    """`ModelStep` over the toy model: it writes each token into its slot and reads all slots of a row."""

    def __init__(self, decode: ToyDecode) -> None:
        self.decode = decode
        self.seen: list[tuple[int, list[int], list[int]]] = []

    def build(self, batch: Any) -> Any:
        return SimpleNamespace(rows=batch.req_pool_indices)

    def forward(
        self, template: Any, done: int, tokens: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        decode, rows = self.decode, len(tokens)
        self.seen.append((done, lengths.tolist(), slots.tolist()))
        step = decode.buffers
        for buffer, values in (
            (step.input_ids, tokens),
            (step.seq_lens, lengths),
            (step.positions, lengths - 1),
            (step.out_cache_loc, slots),
            (step.rows, template.rows),
        ):
            buffer[:rows] = values
        decode.lengths[:rows] = lengths
        decode.model(rows)
        return lambda: decode.logits(rows).argmax(-1).to(torch.int32)

    def floor_us(self, template: Any, replays: int) -> float:
        return 10.0 * replays


def toy(depth: int = DEPTH) -> tuple[ToyDecode, ToyStep, EagerExecutor]:
    decode = ToyDecode()
    model = ToyStep(decode)
    return decode, model, EagerExecutor(model, decode.buffers.table, depth=depth, capacity=decode.capacity)


def test_steps_continue_where_the_last_sample_ended_over_several_openings() -> None:
    decode, model, executor = toy()
    rows = Rows(decode, [[5, 6, 7], [9], [1, 2, 3, 4, 5]])
    steps = 0
    for opening in range(3):
        batch = rows.batch()
        rows.reserve(batch, 6)
        executor.open(batch)
        for done in range(7):
            expected, slot = rows.expect(), executor.ring[steps % DEPTH]
            executor.step()
            steps += 1
            assert executor.last_tokens().tolist() == expected == slot[: len(expected)].tolist()
            assert model.seen[-1][0] == done
        assert len(executor.close()) == 5
        if opening == 0:
            rows.drop(1)
    assert not executor.graphs


def test_a_step_makes_new_tensors_and_leaves_the_batchs_alone() -> None:
    """The step before, or whoever got the batch, may still read the old ones."""
    decode, model, executor = toy()
    rows = Rows(decode, [[5, 6, 7], [9]])
    batch = rows.batch()
    rows.reserve(batch, 3)
    before = {name: value.clone() for name, value in vars(batch).items() if name != "reqs"}
    executor.open(batch)
    executor.step()
    first = executor.last_tokens()
    kept = first.clone()
    for _ in range(DEPTH + 1):
        executor.step()
    assert torch.equal(first, kept), "the sample of a step stays when its slot of the ring comes round"
    for name, value in before.items():
        assert torch.equal(getattr(batch, name), value), name
    assert [lengths for _, lengths, _ in model.seen] == [[3 + n, 1 + n] for n in range(DEPTH + 2)]


def test_rows_go_while_the_rest_rides_on() -> None:
    decode, model, executor = toy()
    rows = Rows(decode, [[5, 6, 7], [9], [1, 2, 3, 4, 5], [8, 8]])
    batch = rows.batch()
    rows.reserve(batch, 9)
    executor.open(batch)
    for step, place in enumerate((1, 0, None)):
        for _ in range(3):
            expected = rows.expect()
            executor.step()
            assert executor.last_tokens().tolist() == expected
        if place is not None:
            kept = [row for row in range(len(rows.numbers)) if row != place]
            filtered = rows.left(batch, kept)
            assert executor.keeping(kept)
            executor.keep(filtered, torch.tensor(kept))
            rows.drop(place)
            assert executor.last_tokens().tolist() == [history[-1] for history in rows.histories]
            assert filtered.input_ids is filtered.out_cache_loc is None
            batch = filtered
        assert model.seen[-1][0] == 3 * step + 2, "steps count on"


def test_closing_hands_back_what_a_step_in_flight_reads_and_forgets_it() -> None:
    decode, _, executor = toy()
    rows = Rows(decode, [[5, 6, 7]])
    batch = rows.batch()
    executor.open(batch)
    executor.step()
    tokens = executor.last_tokens()
    held = executor.close()
    assert {id(batch.req_pool_indices), id(batch.seq_lens), id(batch.out_cache_loc), id(tokens)} <= {
        id(value) for value in held
    }
    assert executor.last_tokens().numel() == 0


def test_a_batch_wider_than_the_ring_is_refused() -> None:
    decode, _, executor = toy()
    assert executor.refuses(Rows(decode, [[1]] * 8).batch()) is None
    assert executor.refuses(Rows(decode, [[1]] * 9).batch()) is Refusal.BATCH_SIZE


def test_slots_that_moved_are_found_without_a_refresh() -> None:
    """Every step reads the table itself; `refresh` has nothing to do."""
    decode, model, executor = toy()
    rows = Rows(decode, [[5, 6, 7]])
    batch = rows.batch()
    rows.reserve(batch, 3)
    executor.open(batch)
    executor.step()
    decode.buffers.table[1, 3] = 77
    executor.refresh()
    executor.step()
    assert model.seen[-1] == (1, [4], [77])


def test_the_floor_is_the_models() -> None:
    decode, _, executor = toy()
    executor.open(Rows(decode, [[5]]).batch())
    assert executor.floor_us(3) == 30.0


# ---------------------------------------------------------------- upstream's own step


class Forwards:
    """Upstream's runner with a model of one line; keeps each forward batch that it was given."""

    def __init__(self) -> None:
        self.runner = model_runner()
        self.runner.forward = self.forward
        self.table = self.runner.req_to_token_pool.req_to_token
        self.given: list[Any] = []

    def forward(self, step: Any) -> Any:
        self.given.append(step)
        best = token_after(step.input_ids, step.positions, step.out_cache_loc)
        logits = torch.zeros(len(best), VOCABULARY).scatter_(1, best[:, None], 1.0)
        return SimpleNamespace(logits_output=LogitsProcessorOutput(next_token_logits=logits))

    def batch(self, count: int, *, greedy: bool = True) -> Any:
        batch: Any = Batch(self.table, count, greedy=greedy)
        batch.orig_seq_lens = batch.seq_lens.clone()
        return batch


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("greedy", [True, False])
def test_upstreams_forward_batch_moves_on_with_every_step(greedy: bool) -> None:
    upstream = Forwards()
    executor = EagerExecutor(SglangModelStep(upstream.runner), upstream.table, depth=DEPTH, capacity=4)
    batch = upstream.batch(3, greedy=greedy)
    executor.open(batch)
    tokens, lengths = batch.input_ids.clone(), batch.seq_lens.clone()
    for n in range(5):
        executor.step()
        step = upstream.given[n]
        slots = upstream.table[batch.req_pool_indices, lengths - 1].long()
        for name, wanted in (
            ("input_ids", tokens),
            ("seq_lens", lengths),
            ("seq_lens_cpu", lengths),
            ("orig_seq_lens", lengths),
            ("positions", lengths - 1),
            ("out_cache_loc", slots),
        ):
            assert getattr(step, name).tolist() == wanted.tolist(), (n, name)
        assert step.seq_lens_sum == int(lengths.sum())
        assert step.kv_loc_plan.write_ids(upstream.runner.kv_index_translator).tolist() == slots.tolist()
        tokens = token_after(tokens, lengths - 1, slots)
        assert executor.last_tokens().tolist() == tokens.tolist()
        lengths = lengths + 1
    assert len({id(step) for step in upstream.given}) == 5


@pytest.mark.usefixtures("published")
def test_the_template_stays_as_it_was_built_whatever_a_forward_does_to_its_own() -> None:
    upstream = Forwards()
    model = SglangModelStep(upstream.runner)
    batch = upstream.batch(2)
    template = model.build(batch)
    kept = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in vars(template).items()
    }
    for done in range(3):
        lengths = batch.seq_lens + done
        model.forward(template, done, batch.input_ids + done, lengths, batch.out_cache_loc + done)
        upstream.given[-1].input_ids = upstream.given[-1].positions = None
    for name, value in kept.items():
        now = getattr(template, name)
        assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now is value, name
    assert [step.seq_lens_sum for step in upstream.given] == [11, 13, 15]


@pytest.mark.usefixtures("published")
def test_the_batch_keeps_its_sampling_parameters_and_the_step_gets_a_copy() -> None:
    upstream = Forwards()
    batch = upstream.batch(2)
    live = batch.sampling_info
    template = SglangModelStep(upstream.runner).build(batch)
    assert batch.sampling_info is live is not template.sampling_info
    live.copy_for_forward = lambda: "no parameters"
    with pytest.raises(AttributeError):
        SglangModelStep(upstream.runner).build(batch)
    assert batch.sampling_info is live, "also after a fault"


@pytest.mark.usefixtures("published")
def test_the_floor_runs_the_model_alone_on_what_was_loaded() -> None:
    upstream = Forwards()
    executor = EagerExecutor(SglangModelStep(upstream.runner), upstream.table, depth=DEPTH, capacity=4)
    batch = upstream.batch(2)
    executor.open(batch)
    assert executor.floor_us(4) > 0
    assert [step.seq_lens.tolist() for step in upstream.given] == [[5, 6]] * 4
    assert executor._count == 0, "a timed step is none of the lane's"
