"""PyTorch on the asynchronous device, and the real loop, lane, executors, pool and future map on it.

What runs is not made up, save the model: the executors' own PyTorch calls, the references of the lane's
kernels and SGLang's allocator, request table and future map are queued and run later on other threads, and
every element that they touch is shown to the race detector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from tests.unit.bit_grammar import BitGrammar
from tests.unit.fake_scheduler import Script
from tests.unit.lane_fakes import LaneSpec
from tests.unit.tensor_model import right_answer
from tests.unit.tensor_world import TensorLimits, TensorWorld, tensor_world
from tests.unit.test_race_mutations import Patch, everywhere, one_slot, out_of
from tests.unit.virtual_gpu import EARLY, LATE, POLICIES, RANDOM
from zos_sglang.overlap.event_loop import EventLoop
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.launch import Launcher
from zos_sglang.overlap.streams import Barrier, Streams
from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.lane import Lane
from zos_sglang.testing.races.device import Device, Event
from zos_sglang.testing.races.tensors import DEVICE, DeviceTensor, Simulated
from zos_sglang.upstream.lane_grammar import GrammarMasks
from zos_sglang.upstream.lane_results import LaneResults

# ------------------------------------------------------------ tensors


def test_an_operation_is_queued_and_its_result_is_there_for_whoever_waits():
    with Device(LATE) as device, Simulated(device):
        a = torch.arange(4, device=DEVICE)
        b = a * 2
        assert isinstance(b, DeviceTensor) and device.schedule.done == 0
        assert b.tolist() == [0, 2, 4, 6]
        assert int(b.sum()) == 12


def test_views_share_memory_and_are_made_at_once():
    with Device(LATE) as device, Simulated(device):
        a = torch.zeros(6, dtype=torch.int64, device=DEVICE)
        queued = device.schedule.queued
        part = a[2:4]
        assert device.schedule.queued == queued
        part.fill_(7)
        assert a.tolist() == [0, 0, 7, 7, 0, 0]


def test_without_a_wait_another_stream_finds_what_the_last_owner_left():
    with Device("forward") as device, Simulated(device):
        a = torch.ones(4, dtype=torch.int64, device=DEVICE)
        with device.on(device.forward):
            b = a + 1
        assert b.tolist() == [1, 1, 1, 1]  # the ones are not written yet
        assert "read 'add'" in device.detector.report()


def test_memory_without_an_owner_is_handed_out_again_and_a_late_reader_finds_the_next_owners_numbers():
    with Device("schedule") as device, Simulated(device):
        a = torch.ones(4, dtype=torch.int64, device=DEVICE)
        device.forward.wait_stream(device.schedule)
        with device.on(device.forward):
            b = a + 1
        del a
        c = torch.full((4,), 50, dtype=torch.int64, device=DEVICE)
        with device.on(device.forward):
            assert b.tolist() == [51, 51, 51, 51]
        assert c.tolist() == [50, 50, 50, 50] and device.detector.report()


def test_memory_that_a_stream_was_said_to_use_is_kept_for_it():
    with Device("schedule") as device, Simulated(device):
        a = torch.ones(4, dtype=torch.int64, device=DEVICE)
        device.forward.wait_stream(device.schedule)
        with device.on(device.forward):
            b = a + 1
        a.record_stream(device.forward)
        del a
        torch.full((4,), 50, dtype=torch.int64, device=DEVICE)
        with device.on(device.forward):
            assert b.tolist() == [2, 2, 2, 2]
        assert device.detector.report() == ""


def test_other_entries_of_one_table_do_not_race():
    with Device(EARLY) as device, Simulated(device):
        table = torch.zeros((4, 8), dtype=torch.int32, device=DEVICE)
        rows = torch.tensor([1, 2]).to(DEVICE)
        device.finish()
        with device.on(device.forward):
            table[rows, rows]
        table[rows, rows + 1] = rows.to(torch.int32)
        device.finish()
        assert device.detector.report() == ""
        with device.on(device.forward):
            table[rows, rows]
        table[rows, rows] = rows.to(torch.int32)
        assert "write 'index_put_' in 'aten.index_put_.default' on schedule" in device.detector.report()


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_reads_pinned_memory_only_behind_the_copy(waits):
    with Device("copy" if waits else LATE) as device, Simulated(device):
        a = torch.arange(4, device=DEVICE)
        home = torch.empty_like(a, device="cpu")
        device.copy.wait_stream(device.schedule)
        with device.on(device.copy):
            home.copy_(a, non_blocking=True)
            event = Event(device)
            event.record()
        if waits:
            event.synchronize()
        home.tolist()
        device.finish()
        assert ("the host" in device.detector.report()) is not waits


# ------------------------------------------------------------ masks of grammars


def masked_steps(device: Device, on: Simulated, *, waits: bool) -> list[list[int]]:
    """Six steps of the lane's masks: fill, one kernel that reads them, tokens home; the host waits as the
    lane does, for the step before. Returns the masks that each step's kernel found."""
    masks = GrammarMasks(4, DEVICE, LaneAccount())
    grammars = [BitGrammar(31, shift) for shift in (0, 1)]
    info = object.__new__(SamplingBatchInfo)
    info.grammars, info.vocab_size = [grammars[0], None, grammars[1]], 31
    with device.on(device.forward):
        assert masks.attach(info)
    on.memory.watch_host(masks._host, "pinned masks")
    found: list[list[int]] = []
    before: Event | None = None
    for step in range(6):
        if waits and before is not None:
            before.synchronize()
        with device.on(device.forward):
            info.update_regex_vocab_mask()
            mask = info.grammar_mask.vocab_mask
            on.launch("sampling", lambda m: found.append(m.flatten().tolist()), mask.clone())
            before = Event(device)
            before.record()
        for grammar in grammars:
            grammar.token = (step + 1) // 2
    device.finish()
    return found


def parity(mask: list[int]) -> int:
    """Which tokens the first grammar allows."""
    return mask[0] & 1


RIGHT = [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("schedule", [LATE, EARLY, RANDOM])
def test_the_lanes_masks_are_written_behind_the_copies_that_read_them(schedule):
    with Device(schedule, 3) as device, Simulated(device) as on:
        masks = masked_steps(device, on, waits=True)
        assert list(map(parity, masks)) == RIGHT and {mask[1] for mask in masks} == {-1}
        assert device.detector.report() == ""


@pytest.mark.parametrize(("schedule", "lucky"), [(EARLY, True), (LATE, False)])
def test_a_host_that_does_not_wait_rewrites_masks_that_a_copy_still_reads(schedule, lucky):
    with Device(schedule) as device, Simulated(device) as on:
        masks = masked_steps(device, on, waits=False)
        assert (list(map(parity, masks)) == RIGHT) is lucky
        assert "pinned masks" in device.detector.report()


# ------------------------------------------------------------ the lane and the loop


@st.composite
def scripts(draw: Callable[..., Any]) -> Script:
    """Clients that come at any time, some of whom abort."""
    script: Script = {}
    for rid in range(draw(st.integers(1, 5))):
        prompt = tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=9)))
        spec = LaneSpec(
            rid,
            prompt,
            draw(st.integers(1, 16)),
            stream=draw(st.booleans()),
            ignore_eos=draw(st.booleans()),
            rides=draw(st.integers(0, 5)) > 0,
            stop_ids=tuple(draw(st.lists(st.integers(1, 30), max_size=2))),
        )
        at = draw(st.integers(1, 20))
        script.setdefault(at, []).append(("submit", spec))
        if draw(st.integers(0, 3)) == 0:
            script.setdefault(at + draw(st.integers(1, 12)), []).append(("abort", rid))
    return script


LIMITS = st.builds(
    TensorLimits,
    rows=st.integers(1, 4),
    window=st.integers(1, 6),
    depth=st.integers(3, 4),
    graphs=st.booleans(),
    greedy=st.booleans(),
    fine=st.booleans(),
    in_place=st.booleans(),
)


RUNS = settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@RUNS
@given(scripts(), LIMITS, st.sampled_from(POLICIES), st.integers(0, 2**16))
def test_every_access_is_ordered_and_every_answer_right(script, limits, policy, seed):
    with tensor_world(script, limits, policy, seed) as world:
        world.run().check()
        assert world.device.detector.report() == ""


def long(rid: int, prompt: tuple[int, ...], steps: int, **more: Any) -> LaneSpec:
    return LaneSpec(rid, prompt, steps, ignore_eos=True, **more)


def script_of(*specs: LaneSpec, later: LaneSpec | None = None) -> Script:
    script: Script = {1: [("submit", spec) for spec in specs]}
    return script | ({9: [("submit", later)]} if later else {})


#: Three requests that end by length one after the other, and one more while they decode.
LENGTHS = script_of(
    *(long(rid, tuple((rid * 7 + i) % 30 + 1 for i in range(3 + rid)), 12 + 3 * rid) for rid in range(3)),
    later=long(9, (4, 5, 6), 9),
)
#: The same without the lane.
ORDINARY = {
    at: [(name, replace(spec, rides=False)) for name, spec in actions] for at, actions in LENGTHS.items()
}


def ending_after(tokens: int) -> Script:
    """A request that ends on a stop token, a long way before its limit, beside one that goes on."""
    for first in range(1, 31):
        prompt = (first, 7, 9)
        answer = right_answer(long(1, prompt, tokens))
        if len(set(answer)) == tokens and 0 not in answer:
            return script_of(LaneSpec(1, prompt, 40, stop_ids=(answer[-1],)), long(2, (3, 4), 20))
    raise AssertionError("no such prompt")


ENDING = ending_after(6)
#: The lane opens while the result of the prefill, which ends the request, is on its way.
ENDING_AT_ONCE = ending_after(1)


@dataclass(frozen=True)
class Mutation:
    """As in `test_race_mutations`; `label` is part of the name of one of the two accesses."""

    script: Script
    take_out: Callable[[Patch], None]
    adversary: str | None
    edge: tuple[str, str]
    label: str
    limits: TensorLimits = TensorLimits()  # noqa: RUF009 - frozen
    lucky: bool = True


MUTATIONS = {
    "launch: forward waits for schedule": Mutation(
        ORDINARY,
        out_of(Launcher, "_launch", Streams, "forward_waits_for_schedule"),
        "forward+copy",
        ("schedule", "forward"),
        "index",
    ),
    "readback: copy waits for forward": Mutation(
        ORDINARY,
        out_of(Launcher, "_hand_on", Streams, "copy_waits_for_forward"),
        "copy",
        ("forward", "copy"),
        "copy_",
    ),
    "barrier, fine": Mutation(
        {at: [(n, replace(s, rides=False)) for n, s in a] for at, a in ENDING.items()},
        out_of(EventLoop, "_launch", Streams, "war_barrier", Barrier.OFF),
        None,  # the row that is written belongs to a request that has ended
        ("forward", "schedule"),
        "cat",
    ),
    "launch: the batch is pinned": Mutation(
        ORDINARY, everywhere(PinRing, "pin"), "schedule", ("forward", "schedule"), ""
    ),
    "processing: the host waits for the copy": Mutation(
        LENGTHS, everywhere(Event, "synchronize"), LATE, ("copy", "host"), "tolist"
    ),
    "opening: forward waits for schedule": Mutation(
        LENGTHS,
        out_of(Lane, "_open", Streams, "forward_waits_for_schedule"),
        "forward+copy",
        ("schedule", "forward"),
        "index",
    ),
    "opening: schedule waits for forward before a pending result": Mutation(
        ENDING_AT_ONCE,
        out_of(Lane, "_open", Streams, "war_barrier", Barrier.OFF),
        None,
        ("forward", "schedule"),
        "cat",
    ),
    "window: forward waits for the reservation": Mutation(
        LENGTHS,
        out_of(Lane, "_has_slots", Streams, "forward_waits_for_schedule"),
        "forward+copy",
        ("schedule", "forward"),
        "index",
    ),
    "step: copy waits for forward": Mutation(
        LENGTHS,
        out_of(Lane, "_launched", Streams, "copy_waits_for_forward"),
        "copy",
        ("forward", "copy"),
        "copy_",
    ),
    "step: more than one slot in the ring": Mutation(
        LENGTHS,
        one_slot,
        "forward",
        ("copy", "forward"),
        "copy_",
        limits=TensorLimits(depth=1),
        lucky=False,
    ),
    "processing: the host waits for the copy of a step": Mutation(
        LENGTHS,
        out_of(LaneResults, "_process_tokens", Event, "synchronize"),
        LATE,
        ("copy", "host"),
        "tolist",
    ),
    "a row ends: schedule waits for forward before its release": Mutation(
        ENDING,
        out_of(LaneResults, "_finish", Streams, "war_barrier", Barrier.OFF),
        None,
        ("forward", "schedule"),
        "cat",
    ),
    "rows go: forward waits for schedule": Mutation(
        LENGTHS,
        out_of(Lane, "_let_rows_go", Streams, "forward_waits_for_schedule"),
        None,
        ("schedule", "forward"),
        "sub",
        limits=TensorLimits(graphs=False),
    ),
    "rows go: what the steps under way read is pinned": Mutation(
        LENGTHS,
        out_of(Lane, "_let_rows_go", PinRing, "pin"),
        "schedule",
        ("forward", "schedule"),
        "",
        limits=TensorLimits(graphs=False),
    ),
    "closing: what the last step reads is pinned": Mutation(
        LENGTHS,
        out_of(Lane, "close", PinRing, "pin"),
        "schedule",
        ("forward", "schedule"),
        "",
        limits=TensorLimits(in_place=False),
    ),
}
ALL = [
    pytest.param(m, replace(m.limits, graphs=graphs), id=f"{name} ({'graphs' if graphs else 'eager'})")
    for name, m in MUTATIONS.items()
    for graphs in (
        (True, False) if m.script in (LENGTHS, ENDING, ENDING_AT_ONCE) and m.limits.graphs else (False,)
    )
]


def outcome(world: TensorWorld) -> bool:
    try:
        world.run()
    except (AssertionError, ValueError, IndexError, RuntimeError):
        return False
    return world.answers() == world.right_answers()


@pytest.mark.parametrize(("mutation", "limits"), ALL)
def test_it_is_reported_although_everything_happens_to_run_in_order(monkeypatch, mutation, limits):
    mutation.take_out(monkeypatch)
    with tensor_world(mutation.script, limits, EARLY) as world:
        assert outcome(world) is mutation.lucky
        found = [
            race
            for race in world.device.detector.races
            if (race.first.op.where, race.second.op.where) == mutation.edge
            and (mutation.label in race.first.label or mutation.label in race.second.label)
        ]
        assert found, world.device.detector.report()


@pytest.mark.parametrize(("mutation", "limits"), [p for p in ALL if p.values[0].adversary is not None])
def test_an_adversary_makes_the_answers_wrong(monkeypatch, mutation, limits):
    with tensor_world(mutation.script, replace(limits, depth=3), mutation.adversary) as world:
        assert outcome(world) and world.device.detector.report() == ""
    mutation.take_out(monkeypatch)
    with tensor_world(mutation.script, limits, mutation.adversary) as world:
        assert not outcome(world)
