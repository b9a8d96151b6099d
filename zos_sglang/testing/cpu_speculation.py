"""Speculative decoding on the plain-CPU platform: SGLang's own NGRAM worker, its kernels in plain torch.

Upstream's workers call kernels that need a GPU or the CPU build of sgl-kernel. The few that NGRAM needs stand
here, so that the worker itself, the future map's relay of drafts and accepted lengths, and the processing of
several tokens a row run as they are, in both loops. Upstream turns overlap off for speculation on the device
`cpu`; this platform does not, as there is nothing on it that would need it off.

`NGRAM` drafts on the host, so upstream holds it back for a grammar (`supports_grammar_overlap()` is false).
`NGRAM_BARRIER` is the same worker registered by upstream's API for plugins, with the barrier inside verify:
the other half of that rule.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch

BARRIER = "NGRAM_BARRIER"
_TREES = "sglang.kernels.ops.speculative.reconstruct_tree"


def register() -> None:
    """Entry point of group `sglang.srt.plugins`: make both algorithms known, in every process of a server."""
    if os.environ.get("SGLANG_PLATFORM") != "zos_cpu":
        return
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None
    os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")  # the other move is a Triton kernel
    _register_barrier()


def replace_kernels() -> None:
    """Put the kernels in place, in a process that runs a model."""
    if _TREES not in sys.modules:
        trees = ModuleType(_TREES)
        trees.reconstruct_indices_from_tree_mask_func = reconstruct_tree  # type: ignore[attr-defined]
        sys.modules[_TREES] = trees
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import eagle_utils, spec_utils

    MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: None  # of the Triton kernel
    allocation.assign_req_to_token_pool_func = write_slots
    eagle_utils.verify_tree_greedy_func = verify_tree
    spec_utils.fill_front_out_cache_loc_func = fill_front
    spec_utils.fill_accept_out_cache_loc_func = fill_accepted


def _register_barrier() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

    if get_spec(BARRIER) is not None:
        return

    class Algorithm(CustomSpecAlgo):
        """NGRAM whose verify step advances the grammar by itself."""

        create_future_map = SpeculativeAlgorithm.create_future_map

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def supports_grammar_overlap(self) -> bool:
            return True

        def handle_server_args(self, server_args: Any) -> None:
            from sglang.srt.arg_groups.speculative_hook import _handle_ngram

            _handle_ngram(server_args)

    @SpeculativeAlgorithm.register(BARRIER, supports_overlap=True, spec_class=Algorithm)
    def worker(server_args: Any) -> type:
        return _barrier_worker()


def _barrier_worker() -> type:
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class BarrierWorker(NGRAMWorker):
        """Calls the barrier where the mask is built next: nothing else here waits for the host."""

        def forward_batch_generation(
            self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, **more: Any
        ) -> Any:
            if grammar_barrier is not None and batch.has_grammar:
                grammar_barrier()
            return super().forward_batch_generation(batch, on_publish=on_publish, **more)

    return BarrierWorker


# ------------------------------------------------------------ kernels


def reconstruct_tree(  # noqa: PLR0917
    mask: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    rows: int,
    nodes: int,
) -> None:
    """Fill `positions` [rows * nodes] and the links [rows, nodes] of the draft trees.

    `mask` is bool [rows * nodes * nodes]: whether node j is an ancestor of node i, or i itself. A link is
    the number of a node, -1 for none: the first child, and the next child of the same parent.
    """
    order = torch.arange(nodes)
    earlier = order[None, :] < order[:, None]
    ancestors = mask.view(rows, nodes, nodes).bool() & earlier
    positions.copy_((ancestors.sum(-1) + lengths[:, None]).flatten())
    index.copy_(torch.arange(rows * nodes).view(rows, nodes))
    parents = torch.where(ancestors, order, -1).amax(-1)
    next_token.copy_(_first(ancestors.transpose(1, 2), nodes))
    siblings = (parents[:, :, None] == parents[:, None, :]) & earlier.T & (parents >= 0)[:, :, None]
    next_sibling.copy_(_first(siblings, nodes))


def _first(where: torch.Tensor, nodes: int) -> torch.Tensor:
    """The first index of the last dimension that is set, -1 where none is."""
    found = torch.where(where, torch.arange(nodes), nodes).amin(-1)
    return torch.where(found == nodes, -1, found)


def verify_tree(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each row's tree along the target's own choices, and count the drafts that were right.

    `candidates` and `target_predict` are [rows, nodes]; `accept_index` [rows, depth] keeps -1 behind the
    last accepted node.
    """
    flat, depth = retrieve_index.tolist(), accept_index.shape[1]
    drafts, wanted = candidates.tolist(), target_predict.tolist()
    children, siblings = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    for row, targets in enumerate(wanted):
        node, right = 0, 0
        accept_index[row, 0] = flat[row][0]
        while True:
            predicts[flat[row][node]] = targets[node]
            child = children[row][node]
            while child != -1 and drafts[row][child] != targets[node]:
                child = siblings[row][child]
            if child == -1 or right + 1 == depth:
                break
            node, right = child, right + 1
            accept_index[row, right] = flat[row][node]
        accept_token_num[row] = right
    return predicts, accept_index, accept_token_num


def extend_slots(
    *, req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, **_: Any
) -> torch.Tensor:
    """The KV slots of every row from `start_offset` to `end_offset`, one row behind the other (int64)."""
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end].long() for row, start, end in bounds])


def write_slots(
    rows: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    _: int,
) -> None:
    """Write `slots` to the rows of `table`, from `start` to `end` of each, one row behind the other."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = slots[taken : taken + last - first]
        taken += last - first


def fill_front(count: torch.Tensor, slots: torch.Tensor, front: torch.Tensor) -> None:
    """Pack the first `count` slots of each row's window into `front`."""
    windows = slots.view(count.numel(), -1)
    packed = torch.cat([window[:n] for window, n in zip(windows, count.tolist(), strict=True)])
    front[: packed.numel()] = packed


def fill_accepted(accepted: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, size: int) -> None:
    """Pack the slots of the accepted nodes (-1: none) into `out`."""
    chosen = accepted.flatten()
    packed = slots[chosen[chosen >= 0].long()]
    out[: packed.numel()] = packed
