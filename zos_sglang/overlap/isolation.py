"""What one forward may change on a batch, and how long what it reads stays alive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zos_sglang.overlap.protocols import Batch

#: A launch's tensors may be read until the launch after the next one is queued.
PINNED_LAUNCHES = 2


class PinRing:
    """References to the batches of the last launches and to all their fields.

    Tensors made on the schedule stream are freed by Python when the batch moves on, and the caching
    allocator may hand the memory out again while the forward stream still reads it. A reference for
    two launches outlasts every such read. `slots` is upstream's `batch_record_buf`, so a worker's
    `extra_keep_alive_refs` and a switch of the event loop find it where they expect it.
    """

    __slots__ = ("newest", "slots")

    def __init__(self, slots: list[Any] | None = None) -> None:
        self.slots: list[Any] = [None] * PINNED_LAUNCHES if slots is None else slots
        self.newest = 0

    def pin(self, batch: Batch, fields: dict[str, Any]) -> None:
        """Keep `batch` and the values of `fields` alive for `PINNED_LAUNCHES` launches."""
        self.newest = (self.newest + 1) % PINNED_LAUNCHES
        self.slots[self.newest] = [batch, fields]

    def pin_more(self, refs: list[Any]) -> None:
        """Keep `refs` alive as long as the newest launch."""
        self.slots[self.newest].extend(refs)


@contextmanager
def isolate(batch: Batch, pins: PinRing) -> Iterator[None]:
    """Make a batch transactional across one forward.

    `sampling_info` is replaced by a read-only copy: the worker would otherwise accumulate penalties
    once more for every forward batch it builds. Speculative workers rebind most fields while they
    run, so with speculation all fields are put back; without it only `sampling_info` is, since the
    batch then carries its other fields forward on purpose. Pinning happens after the replacement:
    the copy's tensors are the ones that the forward reads.
    """
    before = dict(batch.__dict__)
    try:
        if batch.sampling_info is not None:
            batch.sampling_info = batch.sampling_info.copy_for_forward()
        pins.pin(batch, dict(batch.__dict__))
        yield
    finally:
        if batch.spec_algorithm.is_none():
            batch.sampling_info = before["sampling_info"]
        else:
            batch.__dict__.update(before)
