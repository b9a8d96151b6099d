"""Lane steps without CUDA graphs, on any device: the same order of work, one operation at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from zos_sglang.resident.eligibility import Refusal


class ModelStep(Protocol):
    """The model with its sampler."""

    def build(self, batch: Any) -> Any:
        """What stays the same from step to step (upstream's `ForwardBatch`)."""

    def forward(
        self,
        template: Any,
        done: int,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
    ) -> Callable[[], torch.Tensor]:
        """One decode step, `done` steps after the one that `template` was built for.

        Returns what samples it, once: the sample, [rows]. It holds the logits.
        """

    def floor_us(self, template: Any, replays: int) -> float:
        """Mean microseconds of the model alone."""


class EagerExecutor:
    """`Executor` whose steps are ordinary forwards.

    Args:
        model: the model's step.
        req_to_token: upstream's page table, int32 [requests, positions].
        depth, capacity: shape of the ring.
    """

    graphs = False

    def __init__(self, model: ModelStep, req_to_token: torch.Tensor, *, depth: int, capacity: int) -> None:
        self.model = model
        self.req_to_token = req_to_token
        self.capacity = capacity
        self.ring = torch.empty((depth, capacity), dtype=torch.int64, device=req_to_token.device)
        self._count = 0
        self._forget()

    def _forget(self) -> None:
        self._template: Any = None
        self._rows = self._lengths = self._slots = self._tokens = self.ring[0, :0]
        self._sample: Callable[[], torch.Tensor] = _not_begun
        self._done = 0
        self._fresh = False

    def refuses(self, batch: Any) -> Refusal | None:
        return Refusal.BATCH_SIZE if len(batch.reqs) > self.capacity else None

    def open(self, batch: Any) -> None:
        self._template = self.model.build(batch)
        self._rows = batch.req_pool_indices
        self._lengths = batch.seq_lens
        self._slots = batch.out_cache_loc
        self._tokens = batch.input_ids
        self._done = 0
        self._fresh = True

    def step(self) -> None:
        self.begin()
        self.finish()

    def begin(self) -> None:
        if self._fresh:
            self._fresh = False
        else:
            self._done += 1
            # New tensors, not in place: the step before may still read its own.
            self._lengths = self._lengths + 1
            self._slots = self.req_to_token[self._rows, self._lengths - 1].to(self._slots.dtype)
        self._sample = self.model.forward(
            self._template, self._done, self._tokens, self._lengths, self._slots
        )

    def finish(self) -> None:
        # Let go of before anything is queued behind it: it holds the step's logits.
        draw, self._sample = self._sample, _not_begun
        sample = draw()
        del draw
        slot = self.ring[self._count % self.ring.shape[0], : len(sample)]
        slot.copy_(sample)
        self._count += 1
        # A copy, because the slot is written again while this is still an input.
        self._tokens = slot.clone()

    def refresh(self) -> None:
        """Nothing to do: every step reads `req_to_token` itself."""

    def keeping(self, rows: Sequence[int]) -> bool:
        return True

    def keep(self, batch: Any, kept: torch.Tensor) -> None:
        self._tokens = self._tokens[kept]
        self._lengths, self._slots = self._lengths[kept], self._slots[kept]
        self._rows = batch.req_pool_indices
        # The batch has the lengths of the opening, as the template needs them.
        batch.input_ids, batch.out_cache_loc = self._tokens, self._slots
        try:
            self._template = self.model.build(batch)
        finally:
            batch.input_ids = batch.out_cache_loc = None

    def held(self) -> list[Any]:
        return [self._template, self._rows, self._lengths, self._slots, self._tokens]

    def last_tokens(self) -> torch.Tensor:
        return self._tokens

    def floor_us(self, replays: int) -> float:
        return self.model.floor_us(self._template, replays)

    def close(self) -> list[Any]:
        held = self.held()
        self._forget()
        return held


def _not_begun() -> torch.Tensor:
    raise RuntimeError("no step waits to be sampled")
