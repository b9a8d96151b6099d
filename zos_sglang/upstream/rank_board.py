"""What ranks write for one another without meeting: the store by which their process group was made."""

from __future__ import annotations

import logging
import time
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

logger = logging.getLogger(__name__)

_NAMESPACE = "zos_sglang"
#: Ranks capture their graphs at about the same time; one that does not come is not waited for any longer.
_AGREEMENT_S = 300.0
_POLL_S = 0.01
_YES, _NO = b"yes", b"no"


class StoreBoard:
    """`zos_sglang.ranks.exchange.Board` over a store of torch.distributed.

    Rank 0 serves the store from a native thread, so it answers while Python hangs there.
    """

    def __init__(self, store: Any) -> None:
        # A connection of its own: the group's may be inside a call that waits.
        self.store = PrefixStore(_NAMESPACE, store.clone())

    @classmethod
    def of_this_group(cls) -> StoreBoard:
        """Over the store of this process's group."""
        return cls(_get_default_store())

    def put(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes | None:
        if not self.store.check([key]):
            return None
        found: bytes = self.store.get(key)
        return found

    def remove(self, key: str) -> None:
        self.store.delete_key(key)


def all_ranks_have(what: str, here: bool, group: Any, board: StoreBoard | None = None) -> bool:
    """Whether every rank of `group` (upstream's coordinator) says that it has `what`. Once for each `what`.

    A rank without it does not wait. One that says nothing within five minutes counts as without.
    """
    if group.world_size < 2:
        return here
    try:
        board = board or StoreBoard.of_this_group()
        board.put(f"{what}/{group.rank}", _YES if here else _NO)
        return here and all(_says_yes(board, f"{what}/{rank}") for rank in group.ranks)
    except Exception:
        logger.exception("zos-sglang: other ranks cannot be asked whether they have %s", what)
        return here


def _says_yes(board: StoreBoard, key: str) -> bool:
    deadline = time.monotonic() + _AGREEMENT_S
    while (found := board.get(key)) is None:
        if time.monotonic() > deadline:
            logger.warning("zos-sglang: no answer at %s within %.0f s", key, _AGREEMENT_S)
            return False
        time.sleep(_POLL_S)
    return found == _YES
