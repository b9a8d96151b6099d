"""The decode adapter and the graph executor over upstream's own runner, batch, buffers and sampler."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as sampler_module
from sglang.srt.model_executor import forward_batch_info

from tests.unit.upstream_decode_case import BUCKETS, VOCABULARY, Batch, model_runner, token_after
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.resident.graph_executor import GraphExecutor
from zos_sglang.upstream.decode_graph import DecodeGraphs

pytestmark = pytest.mark.usefixtures("published")
DEPTH = 3
#: What a batch with penalties has in the place of the plain one's.
PENALTIES = SimpleNamespace(
    is_required=True, accumulate_additive_penalties=lambda _: None, accumulate_scaling_penalties=lambda: None
)


@pytest.fixture
def runner() -> Any:
    return model_runner()


def batch_of(runner: Any, count: int, *, greedy: bool = True) -> Any:
    return Batch(runner.req_to_token_pool.req_to_token, count, greedy=greedy)


def test_steps_of_one_executor_over_batches_of_every_size(runner: Any) -> None:
    executor = GraphExecutor(DecodeGraphs(runner), depth=DEPTH)
    executor.capture_all()
    table = runner.req_to_token_pool.req_to_token
    steps = 0
    for count, greedy in ((4, True), (3, True), (4, True), (3, False), (1, True)):
        batch = batch_of(runner, count, greedy=greedy)
        runner.attn_backend.seen.clear()
        assert executor.refuses(batch) is None
        executor.open(batch)
        assert executor._loaded.greedy is greedy
        assert batch.seq_lens_sum is None, "the batch stays as upstream left it"
        tokens, lengths = batch.input_ids.clone(), batch.seq_lens.clone()
        for step in range(5):
            slot = steps % DEPTH
            executor.step()
            steps += 1
            tokens = token_after(tokens, lengths - 1, table[batch.req_pool_indices, lengths - 1])
            assert executor.last_tokens().tolist() == tokens.tolist(), (count, greedy, step)
            assert executor.ring[slot, :count].tolist() == tokens.tolist()
            lengths = lengths + 1
        bucket = 4 if count > 2 else 2
        assert runner.attn_backend.seen == [
            [*(5 + i + step for i in range(count)), *[1] * (bucket - count)] for step in range(5)
        ]
        buffers = runner.decode_cuda_graph_runner.buffers
        for buffer, fill in (
            (buffers.seq_lens, 1),
            (buffers.positions, 0),
            (buffers.out_cache_loc, 0),
            (buffers.req_pool_indices, 0),
        ):
            assert buffer[count:bucket].tolist() == [fill] * (bucket - count)
        executor.close()
    assert runner.forward_pass_id == steps


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kept", [[0, 2], [1, 2, 3], [3]])
def test_rows_that_ride_on_find_the_buffers_as_if_they_had_been_loaded(
    runner: Any, kept: list[int], greedy: bool
) -> None:
    executor = GraphExecutor(DecodeGraphs(runner), depth=DEPTH)
    executor.capture_all()
    batch = batch_of(runner, 4, greedy=greedy)
    executor.open(batch)
    executor.step()
    executor.step()
    tokens, lengths = executor.last_tokens()[kept], batch.seq_lens[kept] + 1
    left = batch.left(kept)
    assert executor.keeping(kept)
    executor.keep(left, torch.tensor(kept))
    executor.refresh()
    assert executor._loaded.greedy is greedy and executor.last_tokens().tolist() == tokens.tolist()
    bucket, rows = (4 if len(kept) > 2 else 2), len(kept)
    assert runner.attn_backend.seen[-1] == [*lengths.tolist(), *[1] * (bucket - rows)]
    moved = [buffer[:bucket].clone() for buffer in executor._decode.buffers[:-1]]
    for _ in range(3):
        executor.step()
        tokens = token_after(tokens, lengths, left.slots(lengths))
        lengths = lengths + 1
        assert executor.last_tokens().tolist() == tokens.tolist()
    executor.close()
    runner.attn_backend.seen.clear()
    executor.open(left.prepared(moved[0][:rows], moved[2][:rows]))
    for was, now in zip(moved, executor._decode.buffers[:-1], strict=True):
        assert was.tolist() == now[:bucket].tolist() or was is moved[0], "inputs of padding are not read"


def test_what_a_sampler_reads_is_only_of_the_rows_that_ride_on(runner: Any) -> None:
    read: list[Any] = []
    sample = runner.sample

    def watch(output: Any, forward: Any) -> Any:
        read.append((forward.positions.tolist(), len(forward.sampling_info), forward.batch_size))
        assert len(output.next_token_logits) == forward.batch_size == len(forward.req_pool_indices)
        return sample(output, forward)

    runner.sample = watch
    executor = GraphExecutor(DecodeGraphs(runner), depth=DEPTH)
    executor.capture_all()
    batch = batch_of(runner, 4, greedy=False)
    executor.open(batch)
    executor.step()
    executor.keep(batch.left([1, 3]), torch.tensor([1, 3]))
    executor.refresh()
    executor.step()
    assert read == [([4, 5, 6, 7], 4, 4), ([6, 8], 2, 2)]


@pytest.mark.parametrize("greedy", [True, False])
def test_the_token_oracle_follows_the_rows_that_ride_on(monkeypatch: Any, greedy: bool) -> None:
    monkeypatch.setenv("SGLANG_KV_CANARY_ENABLE_TOKEN_ORACLE", "1")
    runner = model_runner()
    read: list[tuple[list[int], list[int]]] = []
    sample = runner.sample

    def watch(output: Any, forward: Any) -> Any:
        info = forward.sampling_info
        assert forward.rids_int is info.rids_int
        read.append((info.rids_int.tolist(), info.bootstrap_room_ids_int.tolist()))
        return sample(output, forward)

    runner.sample = watch
    decode = DecodeGraphs(runner)
    batch = batch_of(runner, 4, greedy=greedy)
    loaded = decode.load(batch)
    loaded.sample()
    loaded = decode.keep(loaded, batch.left([1, 2, 3]), torch.tensor([1, 2, 3]))
    loaded.sample()
    loaded = decode.keep(loaded, batch.left([1, 3]), torch.tensor([0, 2]))
    loaded.sample()
    owners = read[0][0]
    assert len(set(owners)) == 4
    assert read[1:] == [(owners[1:], [-1] * 3), ([owners[1], owners[3]], [-1] * 2)]
    static = runner.decode_cuda_graph_runner.buffers
    assert static.rids_int.tolist() == [owners[1], owners[3], 0, 0]
    assert static.bootstrap_room_ids_int.tolist() == [-1] * 4


@pytest.mark.parametrize("what", ["a mask", "token ids for the canary", "a count of rows on the device"])
def test_a_batch_whose_rows_are_known_elsewhere_too_is_not_moved(
    runner: Any, what: str, monkeypatch: Any
) -> None:
    executor = GraphExecutor(DecodeGraphs(runner), depth=DEPTH)
    executor.capture_all()
    executor.open(batch_of(runner, 4))
    executor.step()
    assert executor.keeping([0, 1])
    loaded = executor._loaded
    if what == "a mask":
        executor._loaded = loaded._replace(mask=lambda: None)
    elif what == "token ids for the canary":
        loaded.forward.req_all_ids_lens = torch.ones(4)
    else:
        monkeypatch.setattr(forward_batch_info, "enable_num_token_non_padded", lambda: True)
    assert not executor.keeping([0, 1])


def test_rows_do_not_go_where_the_rest_would_have_to_be_padded_and_may_not(runner: Any) -> None:
    executor = GraphExecutor(DecodeGraphs(runner), depth=DEPTH)
    executor.capture_all()
    executor.open(batch_of(runner, 4))
    runner.decode_cuda_graph_runner.disable_padding = True
    assert executor.keeping([0, 1]) and not executor.keeping([0, 1, 2])


def test_what_a_seeded_sampler_reads_moves_on_with_the_step(runner: Any) -> None:
    read: list[tuple[list[int], list[int]]] = []
    sample = runner.sample

    def watch(output: Any, forward: Any) -> Any:
        assert output.next_token_logits.shape == (3, VOCABULARY), "padding rows are not sampled"
        read.append((forward.positions.tolist(), forward.seq_lens.tolist()))
        return sample(output, forward)

    runner.sample = watch
    executor = GraphExecutor(DecodeGraphs(runner), depth=DEPTH)
    executor.open(batch_of(runner, 3, greedy=False))
    for _ in range(3):
        executor.step()
    assert read == [([4 + n, 5 + n, 6 + n], [5 + n, 6 + n, 7 + n]) for n in range(3)]


def test_a_refresh_reads_the_metadata_again_for_the_lengths_of_now(runner: Any) -> None:
    executor = GraphExecutor(DecodeGraphs(runner), depth=DEPTH)
    executor.open(batch_of(runner, 2))
    executor.step()
    executor.step()
    executor.refresh()
    assert runner.attn_backend.seen[-2:] == [[6, 7], [6, 7]]


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(("count", "refusal"), [(0, Refusal.BATCH_SIZE), (1, None), (4, None), (5, "size")])
def test_a_batch_fits_the_largest_captured_size(runner: Any, count: int, refusal: Any) -> None:
    found = DecodeGraphs(runner).refuses(batch_of(runner, count))
    assert found is (Refusal.BATCH_SIZE if refusal else None)


def test_without_padding_only_captured_sizes_ride(runner: Any) -> None:
    runner.decode_cuda_graph_runner.disable_padding = True
    graphs = DecodeGraphs(runner)
    assert [graphs.refuses(batch_of(runner, n)) is None for n in range(1, 5)] == [
        n in BUCKETS for n in range(1, 5)
    ]


@pytest.mark.parametrize("name", ["replace_embeds", "input_embeds"])
def test_a_batch_with_embeddings_is_refused(runner: Any, name: str) -> None:
    batch = batch_of(runner, 2)
    setattr(batch, name, object())
    assert DecodeGraphs(runner).refuses(batch) is Refusal.MULTIMODAL


def test_graphs_of_a_runner_that_upstream_replaced_run_nothing_more(runner: Any) -> None:
    graphs = DecodeGraphs(runner)
    assert not graphs.stale
    runner.decode_cuda_graph_runner = model_runner().decode_cuda_graph_runner
    assert graphs.stale and graphs.refuses(batch_of(runner, 2)) is Refusal.ATTENTION_BACKEND


def test_metadata_is_upstreams_or_our_own(runner: Any) -> None:
    with pytest.raises(ValueError, match="upstream or own"):
        DecodeGraphs(runner, metadata="fast")


# ---------------------------------------------------------------- greedy or upstream's sampler


def is_greedy(runner: Any, batch: Any = None) -> bool:
    """Whether the executor samples this batch, or a plain greedy one, by itself."""
    runner.attn_backend.seen.clear()
    return bool(DecodeGraphs(runner).load(batch or batch_of(runner, 2)).greedy)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("has_custom_logit_processor", True),
        ("logit_bias", torch.zeros(1, VOCABULARY)),
        ("penalizer_orchestrator", PENALTIES),
        ("sampling_mask_batch_indices", torch.zeros(1)),
    ],
)
def test_a_greedy_batch_with_changed_logits_goes_through_upstreams_sampler(
    runner: Any, name: str, value: Any
) -> None:
    batch = batch_of(runner, 2)
    setattr(batch.sampling_info, name, value)
    assert not is_greedy(runner, batch)
    assert is_greedy(runner)


@pytest.mark.parametrize(
    "variable",
    [
        "SGLANG_SANITIZE_NAN_LOGITS",
        "SGLANG_ENABLE_NAN_LOGITS_CHECK",
        "SGLANG_ENABLE_ASYNC_ASSERT",
        "SGLANG_TRACE_SAMPLER_E2E",
    ],
)
def test_a_sampler_that_does_more_than_argmax_is_called(runner: Any, variable: str, monkeypatch: Any) -> None:
    assert is_greedy(runner)
    monkeypatch.setenv(variable, "1")
    assert not is_greedy(runner)


def test_another_sampler_an_observer_or_a_sync_is_called(runner: Any, monkeypatch: Any) -> None:
    assert is_greedy(runner)
    runner.sampling_observer = object()
    assert not is_greedy(runner)
    runner.sampling_observer = None
    for name in ("SYNC_TOKEN_IDS_ACROSS_TP", "_use_aiter"):
        with monkeypatch.context() as patch:
            patch.setattr(sampler_module, name, True)
            assert not is_greedy(runner), name
    runner.sampler = type("Sampler", (), {})()
    assert not is_greedy(runner)


# ---------------------------------------------------------------- what surrounds a replay


class Around:
    """Upstream's device timer and KV canary: writes down when they are entered and left."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    @contextmanager
    def inside(self, name: str, *given: Any) -> Any:
        self.log.append((name, *given))
        yield
        self.log.append(f"{name} left")

    def wrap(self, metadata: Any) -> Any:
        return self.inside("timer", metadata["category"])

    def with_ops_outside_graph(
        self, *, single_forward_indices: list[int], maybe_inaccurate_forward_batch: Any
    ) -> Any:
        return self.inside("canary", *single_forward_indices, len(maybe_inaccurate_forward_batch.rids))

    def with_active_single_forward_manager(self, index: int) -> Any:
        return self.inside("active", index)


def test_canary_and_device_timer_are_around_every_replay(runner: Any) -> None:
    around = Around()
    runner.canary_manager = runner.device_timer = around
    executor = GraphExecutor(DecodeGraphs(runner), depth=DEPTH)
    executor.open(batch_of(runner, 3))
    executor.step()
    once = [("canary", 0, 3), ("active", 0), ("timer", "decode"), "timer left", "active left", "canary left"]
    assert around.log == once
    executor.step()
    assert around.log == once * 2
