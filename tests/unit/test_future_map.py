"""The future map over upstream's, on small CPU tensors: its debug mode sees who reads what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap as UpstreamFutureMap
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from zos_sglang.overlap.row_ledger import RowLedgerError
from zos_sglang.settings import Settings
from zos_sglang.upstream.future_map import FutureMap
from zos_sglang.upstream.runtime import runtime

ROWS = 8


@pytest.fixture
def pool():
    return SimpleNamespace(
        req_to_token=torch.zeros((ROWS, 16), dtype=torch.int32),
        req_generation=torch.ones(ROWS, dtype=torch.int64),
    )


@pytest.fixture
def future_map(pool, monkeypatch):
    """Debug mode on, no speculation."""
    monkeypatch.setattr(runtime, "settings", Settings(mode="overlap", debug_future_map=True))
    return FutureMap(torch.device("cpu"), SpeculativeAlgorithm.NONE, pool)


def rows(*indices):
    return torch.tensor(indices, dtype=torch.int64)


def decode(*indices):
    return SimpleNamespace(
        prefill_input_ids_cpu=None,
        mix_running_indices=None,
        input_ids=None,
        req_pool_indices=rows(*indices),
        enable_overlap=True,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        device=torch.device("cpu"),
    )


def prefill(*tokens, mixed=()):
    batch = decode()
    batch.prefill_input_ids_cpu = rows(*tokens)
    batch.mix_running_indices = rows(*mixed) if mixed else None
    return batch


def sampled(future_map, indices, tokens):
    future_map.stash(rows(*indices), RelayPayload(bonus_tokens=rows(*tokens)))


def test_a_decode_takes_the_tokens_of_its_rows(future_map):
    sampled(future_map, [2, 5], [20, 50])
    batch = decode(5, 2)
    future_map.resolve(batch)
    assert batch.input_ids.tolist() == [50, 20]


def test_a_second_read_without_a_write_is_found(future_map):
    sampled(future_map, [2], [20])
    future_map.resolve(decode(2))
    with pytest.raises(RowLedgerError, match="row 2 was read without a write"):
        future_map.resolve(decode(2))


def test_a_read_by_another_generation_is_found(future_map, pool):
    sampled(future_map, [2], [20])
    pool.req_generation[2] += 1  # the pool hands the row to another request
    with pytest.raises(RowLedgerError, match="row 2 holds a token of generation 1, read by 2"):
        future_map.resolve(decode(2))


def test_rows_that_sit_out_a_prefill_stay_valid(future_map):
    sampled(future_map, [2, 3], [20, 30])
    batch = prefill(7, 8, 9)
    future_map.resolve(batch)
    assert batch.input_ids.tolist() == [7, 8, 9]
    sampled(future_map, [4], [40])
    batch = decode(2, 3, 4)
    future_map.resolve(batch)
    assert batch.input_ids.tolist() == [20, 30, 40]


def test_a_mixed_batch_reads_the_rows_of_its_running_part_only(future_map):
    sampled(future_map, [2, 3], [20, 30])
    batch = prefill(7, 8, mixed=(3,))
    future_map.resolve(batch)
    assert batch.input_ids.tolist() == [7, 8, 30]
    assert batch.mix_running_indices is None and batch.prefill_input_ids_cpu is None
    with pytest.raises(RowLedgerError, match="row 3"):
        future_map.resolve(decode(3))
    future_map.resolve(decode(2))


def test_a_batch_that_brings_its_own_tokens_reads_nothing(future_map):
    batch = decode(6)
    batch.input_ids = rows(1)
    future_map.resolve(batch)
    assert batch.input_ids.tolist() == [1]


def test_tokens_relayed_without_drafts_count_as_writes(future_map):
    future_map.stash_bonus_tokens(rows(4), rows(44))
    batch = decode(4)
    future_map.resolve(batch)
    assert batch.input_ids.tolist() == [44]


def test_without_the_debug_mode_nothing_is_checked(pool, monkeypatch):
    monkeypatch.setattr(runtime, "settings", Settings(mode="overlap"))
    plain = FutureMap(torch.device("cpu"), SpeculativeAlgorithm.NONE, pool)
    sampled(plain, [2], [20])
    for _ in range(2):
        batch = decode(2)
        plain.resolve(batch)
        assert batch.input_ids.tolist() == [20]
    plain.stash_bonus_tokens(rows(2), rows(21))
    assert plain.ledger is None and plain.output_tokens_buf[2] == 21


def test_under_speculation_the_debug_mode_is_off(pool, monkeypatch):
    """Speculative workers read rows several times a step."""
    monkeypatch.setattr(runtime, "settings", Settings(mode="overlap", debug_future_map=True))
    assert FutureMap(torch.device("cpu"), SpeculativeAlgorithm.EAGLE, pool).ledger is None


def test_it_is_upstreams_map_for_everybody_else(future_map):
    assert isinstance(future_map, UpstreamFutureMap)
    assert future_map.output_tokens_buf.shape == (ROWS,)
