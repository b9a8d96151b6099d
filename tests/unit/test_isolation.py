"""What a forward may change on a batch, and how long its tensors stay referenced."""

import weakref

import pytest

from tests.unit.fake_batch import SpecAlgorithm
from zos_sglang.overlap.isolation import PINNED_LAUNCHES, PinRing, isolate


class Held:
    """Something that can be watched: a tensor, a read-only copy."""


class Sampling(Held):
    def __init__(self):
        self.copies = []

    def copy_for_forward(self):
        copy = Held()
        self.copies.append(weakref.ref(copy))
        return copy


class Batch:
    def __init__(self, speculative=False, sampling=True):
        self.sampling_info = Sampling() if sampling else None
        self.spec_algorithm = SpecAlgorithm(speculative)
        self.input_ids = Held()
        self.seq_lens = Held()
        self.forward_mode = "decode"


def rebind(batch):
    batch.forward_mode, batch.seq_lens, batch.sampling_info = "verify", Held(), "changed"


def test_the_forward_sees_a_copy_and_the_batch_gets_its_own_back():
    batch = Batch()
    own = batch.sampling_info
    with isolate(batch, PinRing()):
        assert batch.sampling_info is own.copies[0]()
    assert batch.sampling_info is own and len(own.copies) == 1


def test_without_speculation_only_the_sampling_info_is_put_back():
    batch = Batch()
    own, lens = batch.sampling_info, batch.seq_lens
    with isolate(batch, PinRing()):
        rebind(batch)
    assert batch.sampling_info is own
    assert batch.forward_mode == "verify" and batch.seq_lens is not lens


def test_with_speculation_every_field_is_put_back():
    batch = Batch(speculative=True)
    before = dict(batch.__dict__)
    with isolate(batch, PinRing()):
        rebind(batch)
    assert batch.__dict__ == before


@pytest.mark.parametrize("speculative", [False, True])
def test_a_failed_forward_leaves_the_batch_as_it_was(speculative):
    batch = Batch(speculative)
    own = batch.sampling_info
    with pytest.raises(RuntimeError, match="out of memory"), isolate(batch, PinRing()):
        batch.sampling_info = "changed"
        raise RuntimeError("out of memory")
    assert batch.sampling_info is own


def test_a_batch_that_does_not_sample_is_left_alone():
    batch = Batch(sampling=False)
    with isolate(batch, PinRing()):
        assert batch.sampling_info is None
    assert batch.sampling_info is None


def test_the_copy_that_the_forward_reads_is_pinned():
    """The copy, not the original: it is what the kernels were given."""
    batch, pins = Batch(), PinRing()
    with isolate(batch, pins):
        pass
    assert batch.sampling_info.copies[0]() is not None
    pins.slots[:] = [None] * PINNED_LAUNCHES
    assert batch.sampling_info.copies[0]() is None


def test_a_pinned_field_lives_for_two_launches():
    batch, pins = Batch(), PinRing()
    watched = weakref.ref(batch.seq_lens)
    alive = []
    with isolate(batch, pins):
        pass
    batch.seq_lens = Held()
    for _ in range(PINNED_LAUNCHES + 1):
        alive.append(watched() is not None)
        with isolate(Batch(), pins):
            pass
    assert alive == [True, True, False]


def test_more_references_live_as_long_as_the_newest_launch():
    pins, extra = PinRing(), Held()
    watched = weakref.ref(extra)
    with isolate(Batch(), pins):
        pins.pin_more([extra])
    del extra
    with isolate(Batch(), pins):
        pass
    assert watched() is not None
    with isolate(Batch(), pins):
        pass
    assert watched() is None


def test_upstreams_buffer_is_used_where_there_is_one():
    slots = [None, None]
    batch = Batch()
    with isolate(batch, PinRing(slots)):
        pass
    assert [entry[0] for entry in slots if entry] == [batch]
