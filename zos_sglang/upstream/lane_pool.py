"""The lane's view of SGLang 0.5.23's KV allocator and page table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.utils.common import is_pin_memory_available

from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.kernels import prepare_write_slots, write_slots
from zos_sglang.resident.window import Window


class SglangKvPool:
    """`KvPool` over `TokenToKVPoolAllocator` and `PagedTokenToKVPoolAllocator`. Schedule stream only.

    Allocator, tree and table are asked of the scheduler each time: one that upstream rebuilds is not kept
    alive.
    """

    def __init__(self, scheduler: Any, account: LaneAccount) -> None:
        self.account = account
        self.scheduler = scheduler
        self.page_size = int(self.allocator.page_size)
        # Compiled now, not by the first reservation.
        prepare_write_slots(self.table, self.page_size)
        self._rows: Any = None
        self._lengths: Any = None

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    @property
    def table(self) -> torch.Tensor:
        table: torch.Tensor = self.scheduler.req_to_token_pool.req_to_token
        return table

    def reserve(self, batch: Any, done: int, wanted: int) -> Window | None:
        """Slots for the steps after `batch`'s own and `done` more."""
        self._rows = batch.req_pool_indices
        self._lengths = batch.seq_lens + done
        try:
            return Window.reserve(self, batch.seq_lens_cpu.numpy() + done, wanted)
        finally:
            self._rows = self._lengths = None

    def free_slots(self) -> int:
        return int(self.allocator.available_size())

    def make_room(self, slots: int) -> None:
        evict_from_tree_cache(self.scheduler.tree_cache, slots)

    def take(self, count: int) -> torch.Tensor:
        """Slots, int64 [count], or page ids, int64 [count]; from free pages."""
        taken = self.allocator.alloc(count * self.page_size)
        if taken is None:
            raise RuntimeError(f"the KV allocator has no {count} pages although it reported them free")
        return taken if self.page_size == 1 else taken[:: self.page_size] // self.page_size

    def give_back(self, taken: torch.Tensor) -> None:
        self.allocator.free_page_ids(taken)

    def write(self, taken: torch.Tensor, steps: int) -> None:
        write_slots(self.table, self._rows, self._lengths, taken, steps, page_size=self.page_size)

    def pick(self, taken: torch.Tensor, indices: list[int]) -> torch.Tensor:
        return taken[self.on_device(indices)]

    def on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """Small numbers, int64, on the device; one copy, which the host does not wait for."""
        device = self.table.device
        self.account.h2d_copies += 1
        pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=is_pin_memory_available(device))
        return pinned.to(device, non_blocking=True)
