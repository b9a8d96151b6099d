"""A graceful exit: what is in flight is processed and streamed, within a limit."""

from __future__ import annotations

import logging
import time
from typing import Any

import zmq

from zos_sglang.overlap.account import Account

logger = logging.getLogger(__name__)

_POLL_S = 0.001
#: What the last outputs have to leave in any case: with none a socket drops what it has not passed on yet.
_LAST_OUTPUTS_S = 0.5
#: Between two polls of transfers: each is a collective of the ranks.
_TRANSFER_POLL_S = 0.01


def drain(scheduler: Any, port: Any, account: Account, within_s: float) -> None:
    """Process and stream what is in flight, for at most `within_s` seconds (`ZOS_EXIT_TIMEOUT_S`).

    For a graceful exit only. The exception path must not get here: the device may be stuck.
    """
    deadline = time.monotonic() + within_s
    left = _drain_until(deadline, scheduler.result_queue, port, account)
    _finish_transfers(port, within_s)
    # Also of what was sent before a result that did not come.
    _bound_linger(scheduler, max(_LAST_OUTPUTS_S, deadline - time.monotonic()))
    if left:
        logger.error(
            "zos-sglang: exit: %d results were not ready within ZOS_EXIT_TIMEOUT_S=%g", left, within_s
        )
    else:
        logger.info("zos-sglang: exit: %d results drained", account.paths["drained"])


def _drain_until(deadline: float, queue: Any, port: Any, account: Account) -> int:
    """Process results as they become ready; returns how many are left when the time is over."""
    while queue:
        done = queue[0][1].copy_done
        while done is not None and not done.query():
            if time.monotonic() > deadline:
                return len(queue)
            time.sleep(_POLL_S)
        port.process(*queue.popleft())
        account.passed("drained")
    return 0


def _finish_transfers(port: Any, within_s: float) -> None:
    """Let KV that is on its way arrive. By a count of polls, not by the clock: all ranks poll alike.

    A third of the time-out at most: SGLang kills a scheduler 15 s after it asked it to exit, and
    results may have taken all of it.
    """
    polls = int(within_s / 3 / _TRANSFER_POLL_S)
    while left := port.transfers():
        polls -= 1
        if polls < 0:
            logger.error("zos-sglang: exit: %d KV transfers had not ended in time", left)
            return
        time.sleep(_TRANSFER_POLL_S)


def _bound_linger(scheduler: Any, seconds: float) -> None:
    """Give the last outputs this long to leave; a socket lingers forever by default, also for a dead peer."""
    channels = scheduler.ipc_channels
    for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
        if isinstance(sender.socket, zmq.Socket):
            sender.socket.setsockopt(zmq.LINGER, int(seconds * 1000))
