"""KV slots ahead of time: how many steps fit, which slots they get, and that exactly the rest goes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.lane_memory import LaneGpu, LanePool, Memory
from zos_sglang.resident.window import Window, affordable, new_pages


class Pool:
    """A pool of page numbers that writes nothing."""

    def __init__(self, pages, page_size, unused=0):
        self.page_size, self.free, self.back, self.written = page_size, list(range(pages)), [], []
        self.unused = list(range(pages, pages + unused))

    def free_slots(self):
        return len(self.free) * self.page_size

    def make_room(self, slots):
        while len(self.free) * self.page_size < slots and self.unused:
            self.free.append(self.unused.pop(0))

    def take(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, taken):
        assert taken, "an empty return costs a launch"
        self.back += taken

    def write(self, taken, steps):
        self.written.append((taken, steps))

    def pick(self, taken, indices):
        return [taken[i] for i in indices]


def reserve(lengths, wanted, pages, page_size=1, unused=0):
    pool = Pool(pages, page_size, unused)
    return Window.reserve(pool, np.array(lengths), wanted), pool


# ------------------------------------------------------------ how many


def test_new_pages_counts_the_pages_that_further_tokens_begin():
    lengths = np.array([1, 3, 4, 5])
    assert new_pages(lengths, 0, 4).tolist() == [0, 0, 0, 0]
    assert new_pages(lengths, 1, 4).tolist() == [0, 0, 1, 0]
    assert new_pages(lengths, 4, 4).tolist() == [1, 1, 1, 1]
    assert new_pages(lengths, 5, 1).tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize(("free", "steps"), [(100, 8), (24, 8), (23, 7), (3, 1), (2, 0), (0, 0)])
def test_without_pages_the_free_slots_are_shared_evenly(free, steps):
    assert affordable(np.array([5, 9, 2]), 8, 1, free) == steps


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_full_pool_is_relieved_of_what_stock_would_evict_for_one_step(page_size):
    window, pool = reserve([16, 32], 30, pages=0, page_size=page_size, unused=100)
    assert 100 - len(pool.unused) == 2
    assert window.steps == page_size, "as far as the pages for one step reach"


def test_nothing_is_evicted_while_one_step_fits():
    window, pool = reserve([16, 32], 30, pages=2, unused=100)
    assert window.steps == 1 and len(pool.unused) == 100


def test_there_is_no_window_where_too_little_can_be_evicted():
    window, pool = reserve([16, 32], 30, pages=0, unused=1)
    assert window is None and len(pool.free) == 1


def test_with_pages_a_window_begins_one_new_page_a_row_at_most():
    assert affordable(np.array([5, 9]), 64, 4, 1000) == 4


def test_with_too_few_free_pages_the_window_is_halved_until_it_fits():
    lengths = np.array([13, 14, 15, 16])  # of pages of 16: the last one begins a page at once
    assert affordable(lengths, 16, 16, 64) == 16
    assert affordable(lengths, 16, 16, 48) == 2
    assert affordable(lengths, 16, 16, 31) == 1
    assert affordable(lengths, 16, 16, 15) == 0


def test_rows_within_their_pages_need_no_free_page():
    window, pool = reserve([1, 2], 2, pages=0, page_size=4)
    assert window.steps == 2 and pool.written == [([], 2)]
    window.give_back()
    assert pool.back == []


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_no_room_for_one_step_is_no_window_and_takes_nothing(page_size):
    window, pool = reserve([16, 32], 8, pages=1, page_size=page_size)
    assert window is None and len(pool.free) == 1 and pool.written == []


def test_nothing_wanted_is_no_window():
    window, pool = reserve([3], 0, pages=9)
    assert window is None and len(pool.free) == 9


# ------------------------------------------------------------ what goes back


def test_a_new_window_has_all_its_steps_left():
    window, _ = reserve([3, 4], 5, pages=100)
    assert (window.steps, window.used, window.left) == (5, 0, 5)


def test_without_pages_the_slots_of_the_steps_that_did_not_happen_go_back():
    window, pool = reserve([3, 4], 3, pages=100)
    window.used = 1
    window.give_back()
    assert pool.written == [([0, 1, 2, 3, 4, 5], 3)] and pool.back == [2, 3, 4, 5]


@pytest.mark.parametrize(("used", "back"), [(0, [0, 1, 2]), (1, [1, 2]), (2, [1]), (3, []), (4, [])])
def test_with_pages_a_page_goes_back_unless_a_step_has_begun_it(used, back):
    """Rows of 4, 1, 2 and 3 tokens begin a page with their step 1, never, 3 and 2."""
    window, pool = reserve([4, 1, 2, 3], 3, pages=100, page_size=4)
    assert pool.written == [([0, 1, 2], 3)]
    window.used = min(used, 3)
    window.give_back()
    assert pool.back == back


def test_a_window_used_up_gives_nothing_back():
    window, pool = reserve([3], 2, pages=100)
    window.used = 2
    window.give_back()
    assert pool.back == [] and window.left == 0


def test_a_window_gives_back_once():
    window, pool = reserve([3], 2, pages=100)
    window.give_back()
    window.give_back()
    assert pool.back == [0, 1]


def test_slots_that_cannot_be_written_are_given_back_and_the_error_goes_on():
    pool = Pool(10, 1)

    def write(taken, steps):
        raise RuntimeError("no kernel")

    pool.write = write
    with pytest.raises(RuntimeError, match="no kernel"):
        Window.reserve(pool, np.array([3, 4]), 2)
    assert pool.back == [0, 1, 2, 3]


# ------------------------------------------------------------ with a page table


class Row:
    """A request's length and pages, as stock's accounting sees them."""

    def __init__(self, memory, row, length):
        self.kv = type("kv", (), {"req_pool_idx": row, "kv_committed_len": 0, "cache_protected_len": 0})
        self.kv.kv_allocated_len = 0
        self.locked = []
        memory.extend(self, length)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 4, 16]),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 20),
    st.integers(0, 20),
    st.integers(0, 40),
)
def test_after_giving_back_each_row_owns_exactly_the_pages_of_its_length(
    page_size, lengths, wanted, used, spare
):
    """And inside the window each token has a slot of its own, in the right place of its page."""
    needed = sum(-(-n // page_size) for n in lengths)
    memory = Memory(LaneGpu(), len(lengths), needed + spare, page_size)
    rows = [Row(memory, i, n) for i, n in enumerate(lengths)]
    pool = LanePool(memory)
    pool.rows, pool.lengths = list(range(len(rows))), lengths
    window = Window.reserve(pool, np.array(lengths), wanted)
    if window is None:
        assert len(memory.free) * page_size < affordable_slots(lengths, page_size)
        memory.check(rows)
        return
    slots = [s for row, n in zip(memory.mirror, lengths, strict=True) for s in row[: n + window.steps]]
    assert len(set(slots)) == len(slots) and min(slots) >= page_size
    for row, n in zip(memory.mirror, lengths, strict=True):
        assert all(slot % page_size == at % page_size for at, slot in enumerate(row[: n + window.steps]))
    window.used = min(used, window.steps)
    window.give_back()
    for row in rows:
        row.kv.kv_committed_len += window.used
        row.kv.kv_allocated_len = row.kv.kv_committed_len
    memory.check(rows)


def affordable_slots(lengths, page_size):
    """Slots that one more step of every row takes."""
    return int(new_pages(np.array(lengths), 1, page_size).sum()) * page_size
