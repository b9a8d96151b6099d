"""The lane's kernels and graphs on a CUDA device: real compiler, real capture, nothing that waits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.unit.lane_kernel_cases import CASES, compare
from tests.unit.test_graph_executor import DEPTH, prompts
from tests.unit.toy_decode import Rows, ToyDecode
from zos_sglang.resident import kernels
from zos_sglang.resident.capture import Capture
from zos_sglang.resident.graph_executor import GraphExecutor
from zos_sglang.testing.server import cuda_available

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_available(), reason="no CUDA device"),
]
ROUNDS = 100


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CASES)
def test_kernel_writes_what_its_reference_writes(name: str) -> None:
    for number in range(ROUNDS):
        torch.manual_seed(number)
        CASES[name](random.Random(number), "cuda")


def test_gather_of_long_rows() -> None:
    from zos_sglang.resident.triton_kernels import launch_gather_slots

    table = torch.randint(0, 2**31 - 1, (300, 40_000), dtype=torch.int32, device="cuda")
    for bucket in (1, 5, 256):
        seq_lens = torch.randint(1, 40_000, (bucket,), device="cuda")
        arguments = (
            seq_lens,
            torch.randperm(300, device="cuda")[:bucket],
            table,
            torch.zeros(bucket + 1, dtype=torch.int32, device="cuda"),
            torch.zeros(int(seq_lens.sum()) + 100, dtype=torch.int64, device="cuda"),
        )
        compare(launch_gather_slots, kernels.gather_slots_reference, arguments)


@pytest.mark.parametrize("page", [1, 16])
def test_one_compilation_serves_every_reservation(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling in the middle of serving would stall every row."""
    import triton

    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **call: compiled.append(call["repr"]))
    table = torch.zeros(64, 1008, dtype=torch.int32, device="cuda")
    kernels.prepare_write_slots(table, page)
    done = len(compiled)
    slots = torch.arange(5000, device="cuda")
    for n, steps, offset in ((1, 1, 0), (1, 16, 1), (16, 3, 3), (33, 16, 0), (48, 7, 2)):
        rows, seq_lens = torch.arange(n + 1, device="cuda")[1:], torch.full((n + 1,), 5, device="cuda")[1:]
        with nothing_waits():
            kernels.write_slots(table, rows, seq_lens, slots[offset:], steps, page_size=page)
    assert compiled[done:] == []


def test_in_place_kernels_do_not_race() -> None:
    """A block smaller than the launch is replicated over warps: no warp may load what another stored."""
    step = kernels.StepBuffers(
        *(torch.ones(2, dtype=torch.int64, device="cuda") for _ in range(5)),
        torch.zeros(2, 20_000, dtype=torch.int32, device="cuda"),
    )
    ring = torch.zeros(3, 2, dtype=torch.int64, device="cuda")
    counter, live = (torch.full((1,), value, dtype=torch.int64, device="cuda") for value in (0, 2))
    tokens = torch.ones(2, dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        kernels.advance(step, tokens, live)
        kernels.emit(step.positions, tokens, ring, counter, live)
    assert step.seq_lens.tolist() == [10_001, 10_001]
    assert counter.item() == 10_000


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("capture", [False, True])
def test_executor_runs_windows_without_waiting(capture: bool, greedy: bool) -> None:
    decode = ToyDecode("cuda")
    decode.greedy = greedy
    executor = GraphExecutor(decode, depth=DEPTH, capture=capture)
    executor.capture_all()
    assert executor.capture.failures == 0
    assert executor.capture.graphs == (7 if capture else 0)
    rows = Rows(decode, prompts(7))
    for dropped in (None, 3, 0, 1, 0):
        if dropped is not None:
            rows.drop(dropped)
        batch = rows.batch()
        executor.open(batch)
        rows.reserve(batch, 9)
        expected, got = [], []
        for _ in range(10):
            slot = decode.steps % DEPTH
            with nothing_waits():
                executor.step()
            got.append(executor.ring[slot, : len(rows.numbers)].clone())
            expected.append(rows.expect())
        assert [tokens.tolist() for tokens in got] == expected
        assert executor.last_tokens().tolist() == expected[-1]
        assert executor.floor_us(5) > 0
        executor.close()


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("capture", [False, True])
def test_rows_go_and_the_rest_rides_on_without_waiting(capture: bool, greedy: bool) -> None:
    decode = ToyDecode("cuda")
    decode.greedy = greedy
    executor = GraphExecutor(decode, depth=DEPTH, capture=capture)
    executor.capture_all()
    for bucket in decode.buckets:
        decode.replay(bucket)
    rows = Rows(decode, prompts(8))
    batch = rows.batch()
    executor.open(batch)
    rows.reserve(batch, 20)
    expected, got = [], []
    for gone in ([6], [0, 3], [1, 2, 3], [0], []):
        for _ in range(3):
            slot = decode.steps % DEPTH
            with nothing_waits():
                executor.step()
            got.append(executor.ring[slot, : len(rows.numbers)].clone())
            expected.append(rows.expect())
        kept = [row for row in range(len(rows.numbers)) if row not in gone]
        batch = rows.left(batch, kept)
        index = torch.tensor(kept, device="cuda")
        with nothing_waits():
            assert executor.keeping(kept)
            executor.keep(batch, index)
        for place in reversed(gone):
            rows.drop(place)
    assert [tokens.tolist() for tokens in got] == expected
    assert executor.last_tokens().tolist() == [history[-1] for history in rows.histories]


def test_work_that_cannot_be_captured_stays_eager(caplog: pytest.LogCaptureFixture) -> None:
    value = torch.zeros(1, device="cuda")

    def waits() -> None:
        value.add_(1)
        value.item()

    capture = Capture(enabled=True)
    work = capture("work that waits", waits)
    assert "work that waits cannot be captured" in caplog.text
    before = value.item()
    work()
    assert value.item() == before + 1
    other = capture("other work", lambda: value.add_(10))
    before = value.item()
    other()
    assert value.item() == before + 10
    assert (capture.graphs, capture.failures) == (1, 1)
