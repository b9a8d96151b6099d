"""Upstream's device-side map from request-pool row to unseen token, with a debug mode.

A subclass, so that the speculative workers keep working with it. Rows are request-pool slots, which a
request keeps for as long as it runs: they stay where they are when batches change.
"""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap as UpstreamFutureMap
from sglang.srt.managers.overlap_utils import resolve_forward_inputs

from zos_sglang.overlap.row_ledger import RowLedger
from zos_sglang.overlap.watch import OFF, Watch
from zos_sglang.upstream.runtime import runtime


def waits_for_lengths(future_map: UpstreamFutureMap, batch: Any) -> bool:
    """Whether `resolve_seq_lens_cpu` has to wait for lengths that only the device knows yet."""
    draft = batch.spec_info
    return bool(future_map.needs_cpu_seq_lens and draft is not None and draft.future_indices is not None)


class FutureMap(UpstreamFutureMap):
    """`FutureMap` of SGLang that can check who reads what (`ZOS_DEBUG_FUTURE_MAP`).

    With the debug mode off it adds nothing to a step.
    """

    ledger: RowLedger | None = None
    #: Told of how long the scheduler's thread waits here.
    watch: Watch = OFF

    def __init__(
        self,
        device: Any,
        spec_algo: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> None:
        super().__init__(device, spec_algo, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)
        self.generations = req_to_token_pool.req_generation
        if runtime.settings.debug_future_map and spec_algo.is_none():
            self.ledger = RowLedger()

    def resolve(self, batch: Any) -> None:
        """Materialise `batch.input_ids` (int64, one per token) at forward entry.

        Raises:
            RowLedgerError: debug mode found a row that holds no token for its reader.
        """
        if self.ledger is not None:
            rows = _rows_to_read(batch)
            if rows is not None:
                self.ledger.read(*self._owners(rows))
        resolve_forward_inputs(batch, self)

    def resolve_seq_lens_cpu(self, batch: Any, *order: Any, **named: Any) -> None:
        # `order`: by stream or by event; 0.5.22 knows events only.
        if not waits_for_lengths(self, batch):
            super().resolve_seq_lens_cpu(batch, *order, **named)
            return
        begun = time.perf_counter_ns()
        super().resolve_seq_lens_cpu(batch, *order, **named)
        self.watch.blocked("host-lengths", time.perf_counter_ns() - begun)

    def stash(self, future_indices: Any, payload: Any) -> None:
        super().stash(future_indices, payload)
        if self.ledger is not None:
            self.ledger.wrote(*self._owners(future_indices))

    def stash_bonus_tokens(self, indices: Any, bonus_tokens: Any) -> None:
        super().stash_bonus_tokens(indices, bonus_tokens)
        if self.ledger is not None:
            self.ledger.wrote(*self._owners(indices))

    def _owners(self, rows: Any) -> tuple[list[int], list[int]]:
        indices = rows.tolist()
        return indices, self.generations[indices].tolist()


def _rows_to_read(batch: Any) -> Any:
    """The rows whose tokens this launch takes as input, or None if it takes none."""
    if batch.prefill_input_ids_cpu is not None:
        return batch.mix_running_indices
    return batch.req_pool_indices if batch.input_ids is None else None
