"""The lane's port over SGLang's own names: its rows, a step, and the state that stock goes on from."""

from __future__ import annotations

import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.utils import GenerationBatchResult

from tests.unit.fake_batch import EOS
from tests.unit.lane_fakes import LaneRequest, LaneSpec
from tests.unit.lane_recorder import Executing, Recorder
from tests.unit.lane_standins import plain_scheduler, port_over
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.eligibility import Refusal
from zos_sglang.upstream.lane_port import SglangLane

pytestmark = pytest.mark.usefixtures("published")


# ---------------------------------------------------------------- rows


def requests(count: int = 3) -> list[Any]:
    return [LaneRequest(LaneSpec(i, (1, 2), max_new=10 + i)) for i in range(count)]


def table_of(reqs: list[Any], pending: Any = None, opened_think: Any = None) -> Any:
    scheduler = plain_scheduler()
    scheduler.model_config.self_opened_think_start_ids = opened_think
    return port_over(scheduler).table(SimpleNamespace(reqs=reqs), pending)


def test_stop_ids_are_those_of_all_rows_that_may_stop_on_one() -> None:
    reqs = requests(4)
    reqs[0].sampling_params.stop_token_ids = {41}
    reqs[1].sampling_params.stop_token_ids = None
    reqs[1].eos_token_ids = None
    reqs[1].tokenizer = SimpleNamespace(eos_token_id=42, additional_stop_token_ids={43})
    reqs[2].tokenizer = SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None)
    reqs[3].sampling_params.ignore_eos, reqs[3].sampling_params.stop_token_ids = True, {44}
    assert table_of(reqs).stop_ids == {EOS, 41, 42, 43}


@pytest.mark.parametrize(
    "watch",
    [
        lambda req: setattr(req.sampling_params, "stop_strs", ["x"]),
        lambda req: setattr(req.sampling_params, "stop_regex_strs", ["x.*"]),
        lambda req: setattr(req, "require_reasoning", True),
    ],
)
def test_rows_with_stop_strings_or_reasoning_are_watched(watch: Callable[[Any], None]) -> None:
    reqs = requests()
    watch(reqs[1])
    assert table_of(reqs).watched == (1,)
    assert table_of(requests()).watched == ()


def test_a_model_that_opens_its_reasoning_itself_has_every_row_watched() -> None:
    assert table_of(requests(), opened_think=[7]).watched == (0, 1, 2)


def test_rows_whose_result_is_pending_are_one_token_further() -> None:
    reqs = requests()
    reqs[0].output_ids.append(5)
    assert table_of(reqs).limits == [9, 11, 12]
    assert table_of(reqs, SimpleNamespace(reqs=[reqs[2], LaneRequest(LaneSpec(9, (1,)))])).limits == [
        9,
        11,
        11,
    ]
    assert table_of(reqs).reqs == reqs


def test_the_batch_is_judged_by_the_scheduler_of_the_port() -> None:
    scheduler = plain_scheduler()
    port = port_over(scheduler)
    assert port.refuses(scheduler.running_batch) is None
    scheduler.chunked_req = object()
    assert port.refuses(scheduler.running_batch) is Refusal.CHUNKED_PREFILL


# ---------------------------------------------------------------- lengths and the way back


def test_lengths_move_on_by_what_was_launched_and_hold_what_is_reserved() -> None:
    reqs = requests(2)
    for row, req in enumerate(reqs):
        req.kv = SimpleNamespace(req_pool_idx=row + 1, kv_committed_len=20 + row, kv_allocated_len=99)
    port, table = port_over(plain_scheduler()), table_of(reqs)
    port.set_allocated(table, 3, 8)
    assert [(r.kv.kv_committed_len, r.kv.kv_allocated_len) for r in reqs] == [(23, 31), (24, 32)]
    reqs[0].kv.req_pool_idx = None  # released meanwhile: its lengths are nobody's
    port.set_allocated(table, 1, 0)
    assert [(r.kv.kv_committed_len, r.kv.kv_allocated_len) for r in reqs] == [(23, 31), (25, 25)]


def decode_batch() -> Any:
    return SimpleNamespace(
        input_ids="tokens",
        seq_lens=torch.tensor([4, 9]),
        seq_lens_cpu=torch.tensor([4, 9]),
        orig_seq_lens=torch.tensor([4, 9]),
        seq_lens_sum=13,
        out_cache_loc="slots",
        req_pool_indices=torch.tensor([3, 1]),
    )


def test_writing_back_moves_the_batch_on_with_new_tensors() -> None:
    """New ones, because a launch in flight may still read those that it was given."""
    reqs, batch = requests(2), decode_batch()
    reqs[1].decode_batch_idx = 5
    old = batch.seq_lens, batch.seq_lens_cpu, batch.orig_seq_lens
    port_over(plain_scheduler()).write_back(batch, table_of(reqs), 6)
    for name in ("seq_lens", "seq_lens_cpu", "orig_seq_lens"):
        assert getattr(batch, name).tolist() == [10, 15], name
    assert all(tensor.tolist() == [4, 9] for tensor in old)
    assert [req.decode_batch_idx for req in reqs] == [6, 11]
    assert batch.input_ids is batch.seq_lens_sum is batch.out_cache_loc is None


def test_after_the_prepared_step_alone_nothing_has_moved() -> None:
    reqs, batch = requests(2), decode_batch()
    port_over(plain_scheduler()).write_back(batch, table_of(reqs), 0)
    assert batch.input_ids is None and batch.seq_lens.tolist() == [4, 9]
    assert (batch.seq_lens_sum, batch.out_cache_loc) == (13, "slots")
    assert [req.decode_batch_idx for req in reqs] == [0, 0]


def test_rows_that_go_have_all_steps_and_upstreams_filter_takes_them_out() -> None:
    reqs = requests(4)
    filtered: list[list[int]] = []

    def filter_batch(*, keep_indices: list[int]) -> None:
        filtered.append(keep_indices)

    batch = SimpleNamespace(batch_is_full=True, filter_batch=filter_batch)
    port_over(plain_scheduler()).leave(batch, table_of(reqs), (0, 2), 6)
    assert filtered == [[0, 2]] and batch.batch_is_full is False
    assert [req.decode_batch_idx for req in reqs] == [0, 6, 0, 6], "the rest gets its steps at closing"


@pytest.mark.parametrize(
    "somebody",
    [
        {"waiting_queue": ["a request"]},
        {"chunked_req": "a prompt in chunks"},
        {"grammar_manager": SimpleNamespace(has_waiting_grammars=lambda: True)},
    ],
    ids=lambda somebody: next(iter(somebody)),
)
def test_the_rest_rides_on_only_while_nobody_waits(somebody: dict[str, Any]) -> None:
    scheduler = plain_scheduler()
    port = port_over(scheduler)
    assert port.rest_rides()
    vars(scheduler).update(somebody)
    assert not port.rest_rides()


def test_the_newest_tokens_go_into_the_rows_of_upstreams_map() -> None:
    scheduler = plain_scheduler()
    scheduler.future_map = SimpleNamespace(output_tokens_buf=torch.zeros(5, dtype=torch.int64))
    scheduler.future_map.stash_bonus_tokens = types.MethodType(
        FutureMap.stash_bonus_tokens, scheduler.future_map
    )
    port_over(scheduler).relay(decode_batch(), torch.tensor([70, 80]))
    assert scheduler.future_map.output_tokens_buf.tolist() == [0, 80, 0, 70, 0]


def test_a_closing_pins_the_batchs_fields_and_what_the_step_reads_for_two_launches() -> None:
    pins, batch = PinRing(), decode_batch()
    port_over(plain_scheduler(), pins=pins).pin(batch, ["held"])
    slots = batch.out_cache_loc
    batch.out_cache_loc = None
    kept = pins.slots[pins.newest]
    assert kept[0] is batch and kept[1]["lane"] == ["held"] and kept[1]["out_cache_loc"] is slots


@pytest.mark.parametrize("graphs", [True, False])
def test_a_result_is_upstreams_and_knows_its_rows_and_step(graphs: bool) -> None:
    port, table = port_over(plain_scheduler()), table_of(requests())
    port.graphs = graphs
    result = port.result(table, 4, "tokens", "event")
    assert isinstance(result, GenerationBatchResult)
    assert (result.table, result.step) == (table, 4)
    assert (result.next_token_ids, result.copy_done, result.can_run_cuda_graph) == ("tokens", "event", graphs)


def test_launches_count_wait_and_resolve_through_device_and_streams() -> None:
    log: list[Any] = []

    def say(name: str, answer: Any = None) -> Callable[..., Any]:
        return lambda *given: log.append((name, *given)) or answer

    device = SimpleNamespace(
        prepare=say("prepare"),
        undo_prepare=say("undo"),
        resolve_inputs=say("resolve"),
        forward_context=say("context", "stream"),
    )
    streams = SimpleNamespace(forward_waits_for_schedule=say("forward waits"), war_barrier=say("barrier"))
    scheduler = plain_scheduler()
    scheduler.new_token_ratio_tracker = SimpleNamespace(decay_step=say("decay"))
    port = port_over(scheduler, device=device, streams=streams)
    port.count_launch("b")
    port.uncount_launch("b")
    port.resolve_inputs("b")
    assert port.forward_context() == "stream"
    port.forward_waits_for_schedule()
    port.schedule_waits_for_forward()
    port.selected_again()
    # Without an event of its own the barrier is the one behind the whole forward stream.
    assert log == [
        ("prepare", "b"),
        ("undo", "b"),
        ("resolve", "b"),
        ("context",),
        ("forward waits",),
        ("barrier", None),
        ("decay",),
    ]


def test_slots_are_reserved_behind_the_batchs_own_step() -> None:
    scheduler = plain_scheduler()
    batch = decode_batch()
    window = port_over(scheduler).reserve(batch, 2, 3)
    assert window is not None and window.steps == 3
    table = scheduler.req_to_token_pool.req_to_token
    assert [row.nonzero().flatten().tolist() for row in table[[3, 1]]] == [[6, 7, 8], [11, 12, 13]]


def test_launches_of_the_lane_count_as_upstreams_stage() -> None:
    stages: list[str] = []
    recorder = Recorder()
    port: Any = recorder
    port.refuses = port.port_refuses
    port.scheduler = SimpleNamespace(
        scheduler_stage_metrics=SimpleNamespace(
            _trace_stage=None, enter=lambda s: stages.append(s) or "before", exit=stages.append
        )
    )
    executing: Any = Executing(recorder)
    lane = SglangLane(port, executing, executing, LaneAccount(), window=4)
    batch = SimpleNamespace(reqs=requests(), seq_lens_cpu=torch.tensor([3, 3, 3]), input_ids="inputs")
    assert lane.enter(batch, None) is not None and stages == ["run_batch", "before"]
    assert lane.ride() is not None and stages == ["run_batch", "before"] * 2
