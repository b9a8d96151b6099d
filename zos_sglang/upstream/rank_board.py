"""What ranks write for one another without meeting: the store by which their process group was made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

logger = logging.getLogger(__name__)

_NAMESPACE = "zos_sglang"
_POLL_S = 0.01
#: Who waits for longer says so.
_QUIET_S = 10.0
_YES, _NO = b"yes", b"no"


class StoreBoard:
    """`zos_sglang.ranks.exchange.Board` over a store of torch.distributed.

    Rank 0 serves the store from a native thread, so it answers while Python hangs there.

    Args:
        store: of torch.distributed, the same on all ranks.
        attachment: how often this process has attached to a scheduler. A server that changes its role does it
            again over the same store, and must not read what was written before.
    """

    def __init__(self, store: Any, attachment: int) -> None:
        # A connection of its own: the group's may be inside a call that waits.
        self.store = PrefixStore(f"{_NAMESPACE}/{attachment}", store.clone())

    @classmethod
    def of_this_group(cls, attachment: int) -> StoreBoard:
        """Over the store of this process's group."""
        return cls(_get_default_store(), attachment)

    def put(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes | None:
        if not self.store.check([key]):
            return None
        found: bytes = self.store.get(key)
        return found

    def remove(self, key: str) -> None:
        self.store.delete_key(key)

    def put_first(self, key: str, value: bytes) -> bytes:
        """Write `value` unless something stands there. Returns what stands there now, the same for all."""
        found: bytes = self.store.compare_set(key, "", value.decode())
        return found


def all_ranks_have(
    what: str, here: bool, group: Any, make_board: Callable[[], StoreBoard], within_s: float
) -> bool:
    """Whether every rank of `group` (upstream's coordinator) says that it has `what`. Once for each board.

    A rank without it does not wait. One that says nothing within `within_s` seconds counts as without, and so
    does one that cannot reach the others. No collective: a rank that could not attach would never come to it.

    A rank may run out of patience just before the last answer comes, and another one just after. So what the
    first of them concludes is written down, and holds for all.
    """
    if group.world_size < 2:
        return here
    conclusion = f"{what}/all/{group.ranks[0]}"
    board = None
    try:
        board = make_board()
        board.put(f"{what}/{group.rank}", _YES if here else _NO)
        agreed = here and all(_says_yes(board, f"{what}/{rank}", within_s) for rank in group.ranks)
        return board.put_first(conclusion, _YES if agreed else _NO) == _YES
    except Exception:
        logger.exception("zos-sglang: other ranks cannot be asked whether they have %s", what)
        return board is not None and _concluded_in_spite(board, conclusion)


def _concluded_in_spite(board: StoreBoard, conclusion: str) -> bool:
    """Conclude "no" after a fault, or learn that another rank was first to say "yes"."""
    try:
        return board.put_first(conclusion, _NO) == _YES
    except Exception:
        return False  # Out of reach: the one case in which others, with all answers already, may say "yes".


def _says_yes(board: StoreBoard, key: str, within_s: float) -> bool:
    begun, told = time.monotonic(), False
    while (found := board.get(key)) is None:
        waited = time.monotonic() - begun
        if waited > within_s:
            logger.warning("zos-sglang: no answer at %s (what/rank) within %.0f s", key, within_s)
            return False
        if waited > _QUIET_S and not told:
            told = True
            logger.warning("zos-sglang: waiting for %s (what/rank), for up to %.0f s", key, within_s)
        time.sleep(_POLL_S)
    return found == _YES
