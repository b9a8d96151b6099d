"""What the lane needs from the scheduler and the device; `upstream.lane_port` has it over SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zos_sglang.resident.eligibility import Refusal
from zos_sglang.resident.rows import RowTable
from zos_sglang.resident.window import Window


class LanePort(Protocol):
    """The scheduler's and the device's side of the lane."""

    def receive(self) -> bool:
        """The first half of upstream's intake; whether anything waits to be dispatched."""

    def dispatch(self) -> None:
        """The second half: dispatch what was received."""

    def refuses(self, batch: Any) -> Refusal | None:
        """Why this batch may not ride."""

    def table(self, batch: Any, pending: Any) -> RowTable:
        """The batch's rows; `pending` is the batch whose result is not processed yet, or None."""

    def count_launch(self, batch: Any) -> None:
        """What upstream counts and stamps on each launch."""

    def uncount_launch(self, batch: Any) -> None:
        """Take `count_launch` back."""

    def selected_again(self) -> None:
        """What selection does on every decode step, besides selecting."""

    def forward_context(self) -> Any:
        """Make the forward stream current."""

    def forward_waits_for_schedule(self) -> None:
        """Order the next launch behind the schedule stream."""

    def schedule_waits_for_forward(self) -> None:
        """Order what the schedule stream does next behind every launch so far."""

    def resolve_inputs(self, batch: Any) -> None:
        """Materialise `batch.input_ids` from the future map."""

    def relay(self, batch: Any, tokens: Any) -> None:
        """Put the newest tokens of all rows into the future map."""

    def pin(self, batch: Any, references: list[Any]) -> None:
        """Keep references alive for as long as a launch may read them."""

    def reserve(self, batch: Any, done: int, wanted: int) -> Window | None:
        """Slots for up to `wanted` more steps of `batch`, which is `done` steps further than it knows."""

    def set_allocated(self, table: RowTable, launched: int, reserved: int) -> None:
        """Write each row's KV lengths: committed `launched` more, allocated `reserved` beyond that."""

    def write_back(self, batch: Any, table: RowTable, steps: int) -> None:
        """Move the batch on by `steps` decode steps that it does not know of yet."""

    @property
    def skips_finishing(self) -> bool:
        """Whether selection leaves out rows whose length limit the result under way reaches."""

    def on_device(self, rows: Sequence[int]) -> Any:
        """Row numbers, int64, on the device, by the schedule stream."""

    def has_room(self, batch: Any, rows: Sequence[int], done: int) -> bool:
        """Whether these rows of `batch`, `done` steps further than it knows, find one more slot each."""

    def rest_rides(self) -> bool:
        """Whether selection would go on with the open batch once some of its rows are gone: nobody waits."""

    def leave(self, batch: Any, table: RowTable, rows: Sequence[int], steps: int) -> None:
        """Keep only `rows` (ascending) of the batch; the others have moved on by `steps` decode steps."""

    def result(self, table: RowTable, step: int, tokens: Any, arrived: Any) -> Any:
        """What processing gets for step `step` (from 1) of `table`.

        `tokens` None: the step is not sampled yet; `sampled` follows.
        """

    def sampled(self, result: Any, tokens: Any, arrived: Any) -> None:
        """Give the result of a step that was not sampled its tokens."""
