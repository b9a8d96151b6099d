"""Two ranks of DP attention in one process: upstream's own row of numbers, exchanged between two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.scheduler_components import dp_attn

from tests.unit.fake_batch import Mode, SpecAlgorithm
from zos_sglang.overlap.guards import PrefillRule, make_guard
from zos_sglang.upstream.first_token import FirstTokenExchange

RANKS = 2
MODES = {"prefill": Mode.EXTEND, "decode": Mode.DECODE, "mixed": Mode.MIXED}


@dataclass(eq=False)
class Waiting:
    """A request of a batch; `middle`: this launch is a chunk of its prompt that is not the last."""

    stream: bool = False
    max_new: int = 16
    done: bool = False
    middle: bool = False
    #: Counts the chunk of the launch before, while that is in flight: no rule may trust it at selection.
    inflight_middle_chunks: int = 1

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(max_new_tokens=self.max_new)

    def finished(self) -> bool:
        return self.done

    @property
    def is_owed(self) -> bool:
        """Said once more in other words than the code's."""
        if self.middle or self.done:
            return False
        return self.stream or self.max_new == 1


@dataclass
class Local:
    """What one rank selects: nothing (`idle`), or requests."""

    kind: str
    reqs: list[Waiting] = field(default_factory=list)

    @property
    def prefills(self) -> bool:
        return self.kind in ("prefill", "mixed")

    @property
    def is_owed(self) -> bool:
        return self.prefills and any(req.is_owed for req in self.reqs)

    def batch(self) -> Any:
        if self.kind == "idle":
            return None
        mode = MODES[self.kind]
        return SimpleNamespace(
            forward_mode=mode,
            is_extend_in_batch=mode.is_extend(),
            chunked_req=next((req for req in self.reqs if req.middle), None),
            reqs=self.reqs,
            spec_algorithm=SpecAlgorithm(False),
            grammar_needs_sync=lambda: False,
        )


class Wire:
    """The all-gather: every rank gives its row, every rank gets all rows."""

    def __init__(self) -> None:
        self.rows: list[Any] = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=30)
        self.calls = 0

    def exchange(self, everybody: torch.Tensor, mine: torch.Tensor, group: int) -> None:
        self.calls += 1
        self.rows[group] = mine.clone()
        self.barrier.wait()
        everybody.copy_(torch.cat(self.rows))
        self.barrier.wait()


class Rank:
    """One rank's exchange and guard; `plugin` False: as SGLang does it without us."""

    def __init__(self, number: int, rule: PrefillRule, plugin: bool = True) -> None:
        self.number = number
        self.first_token = FirstTokenExchange()
        self.first_token.active = plugin and rule is PrefillRule.FIRST_TOKEN
        self.decide = make_guard(rule, dp_attention=True)
        self.pending: Any = None

    def step(self, local: Local) -> Any:
        """Select, exchange, decide, launch. Returns the decision, or None if no rank has anything."""
        batch = self.first_token.prepare(self._prepare, None, local.batch())
        if batch is None:
            self.pending = None
            return None
        decision = self.decide(batch, self.pending)
        self.pending = SimpleNamespace(**vars(batch))  # the snapshot
        return decision

    def _prepare(self, adapter: Any, local: Any) -> Any:
        """The part of `prepare_mlp_sync_batch_raw` that matters here."""
        info = dp_attn.MLPSyncBatchInfo(
            num_dp_ranks=RANKS,
            tp_size=1,
            cp_size=1,
            num_tokens=0 if local is None else len(local.reqs),
            num_tokens_for_logprob=0,
            can_run_decode_cuda_graph=True,
            can_run_draft_cuda_graph=True,
            can_run_prefill_cuda_graph=True,
            is_extend_in_batch=local is not None and local.forward_mode.is_extend(),
            local_can_run_tbo=False,
            local_forward_mode=1,
        )
        self.first_token.gather(dp_attn.MLPSyncBatchInfo.all_gather, info, device="cpu", group=self.number)
        if max(info.global_num_tokens) == 0:
            return None
        batch = Local("decode").batch() if local is None else local
        batch.is_extend_in_batch = info.is_extend_in_batch
        return batch


def run_ranks(monkeypatch: Any, ranks: Sequence[Rank], steps: Sequence[Sequence[Local]]) -> list[list[Any]]:
    """All steps on all ranks, one thread each; the decisions of each rank."""
    wire = Wire()
    everybody = SimpleNamespace(tp_group=SimpleNamespace(active_ranks_cpu=torch.ones(RANKS)))
    with monkeypatch.context() as patch:
        patch.setattr(dp_attn, "exchange_sync_rows", wire.exchange)
        patch.setattr(dp_attn, "get_parallel", lambda: everybody)
        decisions: list[list[Any]] = [[] for _ in ranks]

        def run(rank: Rank) -> None:
            for locals_ in steps:
                decisions[rank.number].append(rank.step(locals_[rank.number]))

        _in_threads([lambda rank=rank: run(rank) for rank in ranks])
    assert wire.calls == RANKS * len(steps), "one exchange a step, no more than upstream's"
    return decisions


def _in_threads(work: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
