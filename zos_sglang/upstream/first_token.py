"""One more value in the exchange that DP attention makes on every step: is a first token waited for?

Under DP attention all ranks gather one row of numbers each before a launch (`MLPSyncBatchInfo`). A rule that
looks at the requests of one rank may not decide alone, or ranks decide differently. So the answer rides in
that row, without another collective: the column that says "this rank prefills" holds 3 instead of 1 where the
prefill owes a token that a client waits for.

- Whoever reads the column asks whether it is zero: this rank's upstream code, and a rank without our plugin.
  No row gets longer, so ranks with and without the plugin still fit together.
- Only a prefill owes a first token, so the value never needs to ride on a zero.
- It is told when the batch is selected, one step before the decision that it is for: `guards` looks at the
  value of the batch that is pending then, as gathered at its own selection. All ranks hold the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zos_sglang.overlap.guards import DUE_MARK, someone_will_wait_for_first_token

logger = logging.getLogger(__name__)

#: Where `MLPSyncBatchInfo._get_local_tensor` puts `is_extend_in_batch`.
COLUMN = 3
#: A prefill that owes a first token; one that does not is sent as 1, no prefill as 0.
DUE = 3


class FirstTokenExchange:
    """This rank's side of the exchange; does nothing unless `active` (our loop, rule `first-token`)."""

    def __init__(self) -> None:
        self.active = False
        self._mine = False
        self._gathered: bool | None = None
        self._failed = False

    def prepare(self, original: Callable[..., Any], adapter: Any, local_batch: Any) -> Any:
        """Around `SchedulerDPAttnAdapter.prepare_mlp_sync_batch`: mark the batch with what was gathered."""
        if not self.active:
            return original(adapter, local_batch)
        self._mine, self._gathered = self._due(local_batch), None
        batch = original(adapter, local_batch)
        if batch is not None:
            batch.__dict__[DUE_MARK] = self._agreed()
        return batch

    def gather(self, original: Callable[..., None], info: Any, *args: Any, **kwargs: Any) -> None:
        """Around `MLPSyncBatchInfo.all_gather`: send ours with this rank's row, read everybody's."""
        if not self.active:
            original(info, *args, **kwargs)
            return
        if self._mine and info.is_extend_in_batch:
            info.is_extend_in_batch = DUE  # upstream sends int() of it, and overwrites it with the answer
        original(info, *args, **kwargs)
        # The field is everybody's by now: where nobody prefills there is nothing to look for.
        prefills = bool(info.is_extend_in_batch)
        self._gathered = prefills and int(info.tp0_info_cpu[:, COLUMN].max()) >= DUE

    def _due(self, batch: Any) -> bool:
        """This rank's value. A fault of ours means "no": every rank reads the same "no"."""
        try:
            if batch is None or not batch.forward_mode.is_extend():
                return False
            return someone_will_wait_for_first_token(batch)
        except Exception:
            if not self._failed:
                logger.exception("zos-sglang: who waits for a first token is unknown; such launches overlap")
            self._failed = True
            return False

    def _agreed(self) -> bool:
        if self._gathered is not None:
            return self._gathered
        # Nothing was gathered. One attention-DP rank: its TP ranks see the same requests. More of them, and
        # SGLANG_SCHEDULER_SKIP_ALL_GATHER is set: nobody knows, so nobody waits.
        from sglang.srt.runtime_context import get_parallel

        return self._mine and bool(get_parallel().num_dp_ranks == 1)
