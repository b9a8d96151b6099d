"""The rank-consensus check over SGLang 0.5.23: which ranks, over what, and how a server is stopped."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_exec, get_parallel

from zos_sglang.ranks.checker import Checker
from zos_sglang.ranks.exchange import Exchange
from zos_sglang.ranks.log import DecisionLog
from zos_sglang.ranks.peers import peers_of
from zos_sglang.resident.account import LaneAccount
from zos_sglang.settings import Settings
from zos_sglang.upstream.rank_board import StoreBoard

logger = logging.getLogger(__name__)

#: What the launcher gets to end all processes, then this one ends itself. Upstream's takes over a minute:
#: stacks (SGLANG_PYSPY_DUMP_BEFORE_CRASH) and core dumps (SGLANG_CUDA_COREDUMP_BEFORE_CRASH) come first.
_GRACE_S = 90.0


@dataclass
class RankCheck:
    """Everything of one process."""

    every: int
    log: DecisionLog
    exchange: Exchange
    checker: Checker

    def report(self) -> dict[str, Any]:
        """The block `ranks` of `/server_info`."""
        exchange = self.exchange
        return {
            "every": self.every,
            "sound": self.log.sound,
            "peers": [peer.rank for peer in exchange.peers],
            "decisions": self.log.rows,
            "agreed": exchange.agreed,
            "blocks": exchange.blocks,
            "differences": exchange.differences,
            "thread_cpu_s": round(self.checker.cpu_s, 6),
        }

    def describe(self) -> str:
        """One line for the stall report."""
        agreed = self.exchange.agreed
        told = f"agreed up to decision {agreed - 1}" if agreed else "no decision compared yet"
        return f"ranks: {told}; this rank has made {self.log.rows}"

    def close(self) -> None:
        self.checker.close()


def build_rank_check(
    scheduler: Any, settings: Settings, lane_account: LaneAccount, attachment: int
) -> RankCheck | None:
    """The check, running; None where it is off, or, logged, where it cannot be had.

    `attachment`: see `StoreBoard`.
    """
    if not settings.check_ranks:
        return None
    if get_parallel().tp_group.world_size < 2:
        logger.info("zos-sglang: ZOS_CHECK_RANKS: there is one rank, nothing to compare")
        return None
    try:
        check = _build(scheduler, settings.check_ranks, lane_account, attachment)
    except Exception:
        logger.exception("zos-sglang: ZOS_CHECK_RANKS: ranks cannot be compared here")
        return None
    if not check.exchange.peers:
        logger.info("zos-sglang: ZOS_CHECK_RANKS: this rank has no other to be compared with")
        return None
    check.checker.start()
    told = ", ".join(f"rank {peer.rank}" for peer in check.exchange.peers)
    logger.info("zos-sglang: decisions are compared with %s, %d at a time", told, check.every)
    return check


def _build(scheduler: Any, every: int, lane_account: LaneAccount, attachment: int) -> RankCheck:
    parallel = get_parallel()
    group = parallel.tp_group

    def free_slots() -> int:
        # Asked of the scheduler each time: upstream may rebuild the allocator.
        return int(scheduler.token_to_kv_pool_allocator.available_size())

    log = DecisionLog(lane_account, free_slots, tokens)
    groups = parallel.attn_dp_size if parallel.attn_dp_enabled else 1
    why_not = why_groups_differ(parallel) if parallel.attn_dp_enabled else None
    if why_not is not None:
        logger.info("zos-sglang: ZOS_CHECK_RANKS: only within attention groups, because of %s", why_not)
    peers = peers_of(group.rank, group.ranks, groups, in_step=why_not is None)
    board = StoreBoard.of_this_group(attachment)
    exchange = Exchange(board, group.rank, peers, every, log.take)
    launcher = psutil.Process().parent()

    def unsound() -> None:
        log.sound = False

    checker = Checker(exchange, lambda: stop_server(launcher), unsound)
    return RankCheck(every, log, exchange, checker)


def why_groups_differ(parallel: Any) -> str | None:
    """What lets the attention groups of this server go out of step without any fault, or None.

    Upstream's `arg_groups/parallel_hook.py` sets them, `scheduler_components/dp_attn.py` and the intake obey.
    """
    if parallel.dwdp_size > 1:
        return "DWDP: ranks run by themselves"  # It sets both others, too.
    if parallel.enable_dp_attention_local_control_broadcast:
        # A switch or a pause reaches each group by itself. The Rust server and elastic EP set it.
        return "--enable-dp-attention-local-control-broadcast"
    if envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get():
        return "SGLANG_SCHEDULER_SKIP_ALL_GATHER: is_extend_in_batch is of the rank alone"
    return None


def in_step(group: Any) -> bool:
    """Whether all ranks of `group` (tensor-parallel) take the same control calls in the same iteration.

    Then they can wait for one another there. Under elastic EP a rank may be gone, or have come later.
    """
    if group.world_size < 2:
        return True
    parallel = get_parallel()
    by_themselves = parallel.attn_dp_enabled and why_groups_differ(parallel) is not None
    return not by_themselves and get_exec().moe.elastic_ep_backend is None


def tokens(result: Any) -> Any:
    """The tokens of a processed result as a buffer, or None where it has none on the host."""
    found = getattr(result, "next_token_ids", None)
    if isinstance(found, torch.Tensor) and not found.is_cuda:
        return found.numpy()
    return None


def stop_server(launcher: psutil.Process | None) -> None:
    """As `run_scheduler_process` does on an exception; and if nothing comes of it, this process ends.

    The scheduler thread may hang in a collective, so it cannot be asked to raise.
    """
    try:
        if launcher is not None:
            launcher.send_signal(signal.SIGQUIT)
    except psutil.Error:
        logger.exception("zos-sglang: the launcher could not be told")
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
