"""What the core needs from a scheduler, a batch and a device: nothing more is reachable from here.

`zos_sglang.upstream.port` implements these over SGLang; `tests/unit/fakes.py` over a virtual GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Batch(Protocol):
    """A batch on its way through select, launch and processing (upstream's `ScheduleBatch`)."""

    reqs: Sequence[Any]
    forward_mode: Any
    sampling_info: Any
    input_ids: Any
    req_pool_indices: Any
    is_extend_in_batch: bool
    chunked_req: Any
    has_grammar: bool
    spec_algorithm: Any

    def copy(self) -> Batch: ...

    def grammar_needs_sync(self) -> bool: ...


class Device(Protocol):
    """The forward's side of a launch: everything that touches tensors."""

    def prepare(self, batch: Batch) -> None:
        """Count and stamp the launch; nothing is queued on the device yet."""

    def undo_prepare(self, batch: Batch) -> None:
        """Take `prepare` back, so that the stock path can launch this batch instead."""

    def resolve_inputs(self, batch: Batch) -> None:
        """Materialise the input tokens on the forward stream, from the host or the future map."""

    def forward(self, batch: Batch, rows: Any) -> Any:
        """Run the model (and sampling, unless delayed) on the forward stream; queue its event."""

    def delayed_sample(self, result: Any) -> Callable[[], Any] | None:
        """The closure that samples this result later, or None if it is sampled already."""

    def relay(self, batch: Batch, rows: Any, result: Any) -> None:
        """Write the sampled tokens to the future map's `rows`, on the forward stream."""

    def relay_upstream(self, batch: Batch, rows: Any, result: Any) -> None:
        """The same by upstream's own call, after a fault of ours."""

    def readback(self, batch: Batch, result: Any) -> None:
        """Queue the copy to the host on the copy stream, which waits for the forward already."""

    def readback_here(self, batch: Batch, result: Any) -> None:
        """The same by upstream's own call on the current stream, after a fault of ours."""

    def hold_sample(self, rows: Any, result: Any) -> None:
        """Remember in which rows of the future map a delayed sample belongs."""

    def release_sample(self, result: Any) -> None:
        """Drop closure, logits and mask of a delayed sample."""

    def finish(self, batch: Batch, rows: Any, result: Any) -> None:
        """Leave the batch ready for the next step, and copy onto the result what may change then."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Make the forward stream current."""

    def copy_context(self) -> AbstractContextManager[Any]:
        """Make the copy stream current."""

    def take_read_done(self) -> Any:
        """The event after the runner's last read of shared buffers, cleared; None if there is none."""


class SchedulerPort(Protocol):
    """The host's side of an iteration: upstream's duties, each at its place."""

    last_batch: Any
    #: Requests that wait, as of the last selection.
    waiting: int

    def exiting(self) -> bool: ...

    def paused(self) -> bool: ...

    def intake(self) -> None: ...

    def note_paused(self) -> None: ...

    def select(self) -> Any | None: ...

    def between(self) -> None:
        """At a boundary where the forward stream is idle (a launch that does not overlap)."""

    def launch_upstream(self, batch: Any) -> Any:
        """Upstream's own launch, for configurations and faults that ours does not cover."""

    def process(self, batch: Any, result: Any) -> None: ...

    def note_no_batch(self) -> None: ...

    def idle(self) -> None: ...

    def settled(self) -> None:
        """The results that this iteration processes are processed; a delayed sample is still to come."""

    def end_of_step(self) -> None: ...


class Decisions(Protocol):
    """Logs what this rank decides; see `zos_sglang.ranks.log`. Must not raise, must not wait."""

    def launching(self, batch: Any, action: str, reason: str, reserved: int) -> None:
        """A launch is decided on, and nothing has come of it yet; `reserved` steps have their slots."""

    def resting(self, action: str) -> None:
        """No launch in this iteration: idle or paused."""

    def processed(self, result: Any) -> None:
        """A result was processed."""


class Lane(Protocol):
    """A stretch of decode steps that needs no selection; see `zos_sglang.resident.lane`."""

    batch: Any
    #: The result of a launched step whose sampling waits for the result before; None otherwise.
    unsampled: Any

    @property
    def is_open(self) -> bool: ...

    def enter(self, batch: Any, pending: Any) -> Any:
        """Open on a selected batch and launch it; its result, or None if it goes the ordinary way."""

    def ride(self) -> Any:
        """Intake and one more launch; its result, or None if the lane has closed, with this intake done."""

    def sample(self) -> None:
        """The result before `unsampled` was processed: sample that step."""

    def settle(self) -> None:
        """A result was processed: close if that ends the stretch."""

    def shut(self) -> None:
        """Close, if open, because the event loop ends."""
