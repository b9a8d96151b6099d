"""Each safety mechanism of the core is taken out once, and the simulation notices.

One schedule of the virtual device per mutation, chosen so that the missing piece is needed; nothing is
random, so nothing flakes. What the virtual GPU shows here needs no test of its own on a real GPU.
"""

from __future__ import annotations

import pytest

from tests.unit.fake_batch import NO_GRAMMAR, Batch, Spec
from tests.unit.fake_scheduler import Limits
from tests.unit.fakes import FakeDevice
from tests.unit.simulation import DEFAULT, Scenario, World, build, submit
from tests.unit.virtual_gpu import EARLY
from zos_sglang.overlap import launch
from zos_sglang.overlap.isolation import PinRing
from zos_sglang.overlap.row_ledger import RowLedger, RowLedgerError
from zos_sglang.overlap.streams import Barrier, Streams


def prompts(grammar: bool = False) -> list[Spec]:
    """Requests that end at different steps, so that the running batch changes."""
    return [
        Spec(
            rid,
            tuple((rid * 7 + i) % 31 for i in range(3 + rid)),
            12 + 3 * rid,
            grammar=rid if grammar else NO_GRAMMAR,
        )
        for rid in range(4)
    ]


def plain(policy: str, limits: Limits = DEFAULT) -> Scenario:
    """Six requests; two arrive while four decode."""
    script = submit(*prompts()) | submit(Spec(9, (4, 5, 6), 9), Spec(10, (1, 2), 5), at=6)
    return Scenario(script, limits, policy)


def world_that_was_right(scenario: Scenario) -> World:
    """The same run with nothing taken out is right; returns a fresh world for the mutated run."""
    build(scenario).run().check()
    return build(scenario)


def assert_wrong_tokens(world: World) -> None:
    assert world.run().answers() != world.right_answers(), "nothing noticed"


def test_without_the_snapshot_a_result_meets_the_requests_of_a_later_batch(monkeypatch):
    world = world_that_was_right(plain(EARLY))
    monkeypatch.setattr(Batch, "copy", lambda batch: batch)
    with pytest.raises(AssertionError, match="a result met another batch"):
        world.run()


class isolate_without_restore:
    """`isolate` that replaces and pins and puts nothing back."""

    def __init__(self, batch, pins):
        batch.sampling_info = batch.sampling_info.copy_for_forward()
        pins.pin(batch, dict(batch.__dict__))

    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


class isolate_without_copy(isolate_without_restore):
    """`isolate` that hands the live sampling parameters to the worker."""

    def __init__(self, batch, pins):
        pins.pin(batch, dict(batch.__dict__))


def test_without_the_restore_the_read_only_copy_stays_and_the_next_step_cannot_penalise(monkeypatch):
    world = world_that_was_right(plain(EARLY))
    monkeypatch.setattr(launch, "isolate", isolate_without_restore)
    with pytest.raises(AssertionError):
        world.run()
    assert world.scheduler.serials == 1


def test_without_the_restore_what_a_speculative_worker_rebound_stays(monkeypatch):
    """The mode stays a verify, which counts as a prefill, so the batch is merged with itself."""
    world = world_that_was_right(plain(EARLY, Limits(speculative=True)))
    monkeypatch.setattr(launch, "isolate", isolate_without_restore)
    with pytest.raises(AssertionError):
        world.run()


def test_without_the_copy_for_the_forward_penalties_count_twice(monkeypatch):
    world = world_that_was_right(plain(EARLY))
    monkeypatch.setattr(launch, "isolate", isolate_without_copy)
    assert_wrong_tokens(world)


def test_without_the_pin_a_forward_reads_memory_that_was_handed_out_again(monkeypatch):
    """The schedule stream runs ahead as far as the fine barrier lets it: behind the shared reads."""
    world = world_that_was_right(plain("schedule"))
    monkeypatch.setattr(PinRing, "pin", lambda *_: None)
    assert_wrong_tokens(world)
    assert "lengths: written over" in world.gpu.hazards


def test_without_the_wait_for_the_schedule_stream_a_forward_reads_what_is_not_there_yet(monkeypatch):
    world = world_that_was_right(plain("forward+copy"))
    monkeypatch.setattr(Streams, "forward_waits_for_schedule", lambda _: None)
    assert_wrong_tokens(world)
    assert "lengths: not written yet" in world.gpu.hazards


def test_without_the_wait_for_the_forward_stream_the_readback_finds_no_tokens(monkeypatch):
    world = world_that_was_right(plain("copy"))
    monkeypatch.setattr(Streams, "copy_waits_for_forward", lambda _: None)
    assert_wrong_tokens(world)
    assert "sampled tokens: not written yet" in world.gpu.hazards


@pytest.mark.parametrize("barrier", ["fine", "coarse"])
def test_without_the_write_after_read_barrier_the_next_batch_overwrites_the_shared_buffer(
    monkeypatch, barrier
):
    world = world_that_was_right(plain("schedule", Limits(barrier=barrier)))
    monkeypatch.setattr(Streams, "war_barrier", lambda *_, **__: Barrier.OFF)
    assert_wrong_tokens(world)
    assert world.gpu.hazards == []  # nothing was freed or unwritten: only the shared buffer is left


def sample_at_once(device: FakeDevice, batch: Batch, rows: object) -> object:
    """A forward that does not leave sampling for later."""
    result = forward(device, batch, rows)
    if result.delay_sample_func is not None:
        result.delay_sample_func()
        result.delay_sample_func = None
    return result


forward = FakeDevice.forward


def test_without_delayed_sampling_the_mask_is_one_token_old(monkeypatch):
    world = world_that_was_right(Scenario(submit(*prompts(grammar=True))))
    assert world.scenario.specs()[0].grammar != NO_GRAMMAR
    monkeypatch.setattr(FakeDevice, "forward", sample_at_once)
    assert_wrong_tokens(world)


def lose_a_relay(device: FakeDevice, batch: Batch, rows: object, result: object) -> None:
    """A defect: the third launch does not hand its tokens on."""
    if result.serial != 3:  # type: ignore[attr-defined]
        relay(device, batch, rows, result)  # type: ignore[arg-type]


relay = FakeDevice.relay


def test_without_the_consume_once_check_a_lost_relay_goes_unnoticed(monkeypatch):
    """The check changes no token; it is what tells that one is wrong."""
    world, silent = world_that_was_right(plain(EARLY)), build(plain(EARLY))
    monkeypatch.setattr(FakeDevice, "relay", lose_a_relay)
    with pytest.raises(RowLedgerError, match="was read without a write"):
        world.run()
    assert world.scheduler.serials == 3
    monkeypatch.setattr(RowLedger, "read", lambda *_: None)
    assert_wrong_tokens(silent)
