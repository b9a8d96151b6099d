"""The lane's reservations over SGLang's own allocators, request table and prefix tree."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from zos_sglang.resident.account import LaneAccount
from zos_sglang.resident.window import Window, new_pages
from zos_sglang.upstream import lane_pool
from zos_sglang.upstream.lane_pool import SglangKvPool

PAGED = 16
SLOTS = 40 * PAGED
CONTEXT = 128
PAGE_SIZES = pytest.mark.parametrize("page", [1, PAGED])


class World:
    """Rows with a prompt each, as after a prefill, over upstream's memory."""

    def __init__(self, page: int, lengths: list[int], *, tree: bool = True, need_sort: bool = False) -> None:
        arguments = {"dtype": torch.int64, "device": "cpu", "kvcache": None, "need_sort": need_sort}
        self.page = page
        self.allocator: Any = (
            TokenToKVPoolAllocator(SLOTS, **arguments)
            if page == 1
            else PagedTokenToKVPoolAllocator(SLOTS, page, **arguments)
        )
        # The paged one then checks that no page is freed twice.
        self.allocator.debug_mode = True
        self.table_pool = ReqToTokenPool(len(lengths) + 2, CONTEXT, "cpu", False)
        self.table = self.table_pool.req_to_token
        self.tree = RadixCache(CacheInitParams(not tree, self.table_pool, self.allocator, page))
        self.rows = list(range(len(lengths) + 1, 1, -1))
        for row, length in zip(self.rows, lengths, strict=True):
            self.table[row, :length] = self.take(length)[:length]
        self.account = LaneAccount()
        self.scheduler = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            req_to_token_pool=self.table_pool,
        )
        self.pool = SglangKvPool(self.scheduler, self.account)
        self.batch = SimpleNamespace(
            req_pool_indices=torch.tensor(self.rows),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
        )

    def take(self, tokens: int) -> torch.Tensor:
        return self.allocator.alloc(-(-tokens // self.page) * self.page)

    def fill_tree(self, leave: int) -> None:
        """Give all free slots but `leave` to the prefix tree, a page an entry."""
        number = 0
        while self.allocator.available_size() > leave:
            number += 1
            key = RadixKey(array("q", [1000 + number] * self.page))
            self.tree.insert(InsertParams(key=key, value=self.take(self.page)))

    def owned(self, more: int) -> list[int]:
        """The pages of every row with `more` tokens than its prompt, each page once a row."""
        lengths = self.batch.seq_lens + more
        return [
            page
            for row, length in zip(self.rows, lengths.tolist(), strict=True)
            for page in dict.fromkeys((self.table[row, :length] // self.page).tolist())
        ]

    def free(self) -> list[int]:
        return self.allocator.get_all_free_pages().tolist()

    def conserved(self, more: int) -> None:
        """Every page has one owner: a row, the tree or the free list. Page 0 is upstream's for padding."""
        tree = self.tree.all_values_flatten() // self.page if self.tree.root_node.children else []
        pages = sorted([*self.owned(more), *self.free(), *{int(page) for page in tree}])
        assert pages == list(range(1, SLOTS // self.page + 1))

    def continued(self, more: int) -> None:
        """Slots of a row lie as attention over pages needs them."""
        for row, length in zip(self.rows, (self.batch.seq_lens + more).tolist(), strict=True):
            slots = self.table[row, :length]
            assert torch.equal(slots % self.page, torch.arange(length) % self.page)
            assert len(set((slots // self.page).tolist())) == -(-length // self.page)
            assert int(self.table[row, length:].abs().sum()) == 0


@given(
    st.sampled_from([1, PAGED]),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(0, 2),
    st.data(),
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_reservation_continues_its_rows_and_gives_back_what_no_step_used(
    page: int, lengths: list[int], wanted: int, done: int, data: Any
) -> None:
    world = World(page, lengths, need_sort=data.draw(st.booleans()))
    if done:
        first = world.pool.reserve(world.batch, 0, done)
        assert first is not None and first.steps == done
    window = world.pool.reserve(world.batch, done, wanted)
    assert window is not None
    assert window.steps == (wanted if page == 1 else min(wanted, page))
    world.continued(done + window.steps)
    world.conserved(done + window.steps)
    window.used = data.draw(st.integers(0, window.steps))
    window.give_back()
    world.conserved(done + window.used)
    free = world.allocator.available_size()
    window.give_back()
    assert world.allocator.available_size() == free, "a spent window gives back nothing more"


@PAGE_SIZES
def test_what_was_given_back_can_be_had_again(page: int) -> None:
    world = World(page, [15, 16, 17])
    before = world.allocator.available_size()
    for _ in range(5):
        window = world.pool.reserve(world.batch, 0, 12)
        assert window is not None and world.allocator.available_size() < before
        window.give_back()
        assert world.allocator.available_size() == before


def test_a_page_that_is_not_full_is_used_first() -> None:
    world = World(PAGED, [3, 20])
    before = world.allocator.available_size()
    window = world.pool.reserve(world.batch, 0, 12)
    assert window is not None and window.steps == 12
    assert world.allocator.available_size() == before, "both rows have room in their last page"
    window.give_back()
    assert world.allocator.available_size() == before


@PAGE_SIZES
def test_prefixes_that_no_one_uses_make_room_for_one_step_and_no_more(page: int) -> None:
    world = World(page, [16, 32, 48])
    world.fill_tree(leave=0)
    world.conserved(0)
    window = world.pool.reserve(world.batch, 0, 12)
    assert window is not None and window.steps == (1 if page == 1 else 12)
    evicted = SLOTS - 96 - world.tree.evictable_size()
    assert evicted == 3 * page
    world.continued(window.steps)
    world.conserved(window.steps)


@PAGE_SIZES
def test_prefixes_in_use_stay(page: int) -> None:
    world = World(page, [16, 32, 48])
    world.fill_tree(leave=0)
    for leaf in list(world.tree.evictable_leaves):
        world.tree.inc_lock_ref(leaf)
    protected = world.tree.protected_size()
    assert world.pool.reserve(world.batch, 0, 12) is None
    assert protected == world.tree.protected_size() == SLOTS - 96
    world.conserved(0)


@PAGE_SIZES
def test_free_slots_are_taken_before_anything_is_evicted(page: int) -> None:
    world = World(page, [16, 32, 48])
    world.fill_tree(leave=3 * 16)
    kept = world.tree.evictable_size()
    window = world.pool.reserve(world.batch, 0, 16)
    assert window is not None and window.steps == 16
    assert world.tree.evictable_size() == kept and world.allocator.available_size() == 0
    world.conserved(16)


@PAGE_SIZES
def test_without_a_prefix_tree_a_full_pool_has_no_room(page: int) -> None:
    """Upstream's cache with the tree switched off holds nothing that could go."""
    world = World(page, [16, 32, 48], tree=False)
    hog = world.take(world.allocator.available_size())
    table = world.table.clone()
    assert world.pool.reserve(world.batch, 0, 12) is None
    assert torch.equal(world.table, table) and world.allocator.available_size() == 0
    world.allocator.free(hog[: 3 * 16])
    smaller = world.pool.reserve(world.batch, 0, 40)
    assert smaller is not None and smaller.steps == 16
    world.continued(16)


@PAGE_SIZES
def test_taking_hands_out_whole_pages_once(page: int) -> None:
    world = World(page, [5])
    free = set(world.free())
    taken, more = world.pool.take(3), world.pool.take(2)
    assert len({*taken.tolist(), *more.tolist()}) == 5 <= len(free)
    assert {*taken.tolist(), *more.tolist()} <= free
    assert world.pool.free_slots() == (len(free) - 5) * page
    world.pool.give_back(taken)
    world.pool.give_back(more)
    assert set(world.free()) == free


@PAGE_SIZES
def test_an_allocator_that_takes_its_word_back_is_an_error(page: int, monkeypatch: Any) -> None:
    world = World(page, [16])
    monkeypatch.setattr(world.allocator, "alloc", lambda _: None)
    with pytest.raises(RuntimeError, match="reported them free"):
        world.pool.reserve(world.batch, 0, 4)
    assert world.pool._rows is None and world.pool._lengths is None


@PAGE_SIZES
def test_slots_that_could_not_be_written_go_back(page: int, monkeypatch: Any) -> None:
    world = World(page, [16, 32])
    monkeypatch.setattr(lane_pool, "write_slots", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        world.pool.reserve(world.batch, 0, 4)
    world.conserved(0)
    assert world.pool._rows is None, "the batch is not held beyond the call"


@PAGE_SIZES
def test_memory_that_upstream_rebuilt_is_used_from_then_on(page: int) -> None:
    world, other = World(page, [16, 32]), World(page, [16, 32])
    world.fill_tree(leave=0)
    other.fill_tree(leave=0)
    for name, rebuilt in vars(other.scheduler).items():
        setattr(world.scheduler, name, rebuilt)
    window = world.pool.reserve(other.batch, 0, 4)
    assert window is not None and world.allocator.available_size() == 0
    other.continued(window.steps)
    other.conserved(window.steps)
    world.conserved(0)


def test_pages_are_picked_by_their_place_and_the_copy_is_counted() -> None:
    world = World(PAGED, [16])
    taken = torch.tensor([7, 5, 9, 11])
    assert world.pool.pick(taken, [3, 1]).tolist() == [11, 5]
    assert world.account.h2d_copies == 1


def test_only_rows_that_begin_a_page_take_one_and_only_pages_not_begun_go_back() -> None:
    lengths = [10, 16, 30]
    world = World(PAGED, lengths)
    before = world.allocator.available_size()
    window = world.pool.reserve(world.batch, 0, 10)
    assert isinstance(window, Window) and len(window.taken) == 3
    window.used = 1
    begun = int(new_pages(np.array(lengths), 1, PAGED).sum())
    window.give_back()
    assert begun == 1 and world.allocator.available_size() == before - begun * PAGED
    assert world.account.h2d_copies == 1
    world.conserved(1)
