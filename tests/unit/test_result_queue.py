"""The queue keeps upstream's deque interface and refuses whatever would lose or repeat a result."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zos_sglang.overlap.result_queue import MAX_DEPTH, QueueInvariantError, ResultQueue


def pair(n):
    return (f"batch {n}", object())


def test_results_come_out_in_the_order_they_went_in():
    queue, a, b = ResultQueue(), pair(1), pair(2)
    queue.append(a)
    queue.append(b)
    assert [queue.popleft(), queue.popleft()] == [a, b]
    assert (queue.launched, queue.processed) == (2, 2)


def test_it_reads_like_the_deque_that_upstream_expects():
    queue, a, b = ResultQueue(), pair(1), pair(2)
    assert not queue and len(queue) == 0
    queue.append(a)
    queue.append(b)
    assert isinstance(queue, deque)
    assert queue and len(queue) == 2 and queue[0] is a
    assert [batch for batch, _ in queue] == ["batch 1", "batch 2"]


def test_a_third_result_is_refused_and_the_two_stay():
    queue = ResultQueue()
    queue.append(pair(1))
    queue.append(pair(2))
    with pytest.raises(QueueInvariantError, match="oldest must be processed first"):
        queue.append(pair(3))
    assert len(queue) == MAX_DEPTH and queue.launched == 2


def test_the_same_result_is_not_queued_twice():
    queue, a = ResultQueue(), pair(1)
    queue.append(a)
    with pytest.raises(QueueInvariantError, match="queued twice"):
        queue.append(("another batch", a[1]))


def test_a_result_is_not_processed_twice():
    queue = ResultQueue()
    queue.append(pair(1))
    queue.popleft()
    with pytest.raises(QueueInvariantError, match="processed already"):
        queue.popleft()
    assert queue.processed == 1


def test_an_empty_queue_holds_no_reference_to_the_last_result():
    class Watched:
        alive = 0

        def __init__(self):
            Watched.alive += 1

        def __del__(self):
            Watched.alive -= 1

    queue = ResultQueue()
    queue.append(("batch", Watched()))
    queue.popleft()
    assert Watched.alive == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q.pop(),
        lambda q: q.appendleft(pair(9)),
        lambda q: q.extend([pair(9)]),
        lambda q: q.extendleft([pair(9)]),
        lambda q: q.insert(0, pair(9)),
        lambda q: q.remove(q[0]),
        lambda q: q.rotate(1),
        lambda q: q.reverse(),
        lambda q: q.clear(),
        lambda q: q.__delitem__(0),
        lambda q: q.__setitem__(0, pair(9)),
        lambda q: q.__iadd__([pair(9)]),
        lambda q: q.__imul__(2),
    ],
)
def test_every_other_way_to_change_it_raises_and_changes_nothing(change):
    queue = ResultQueue()
    queue.append(pair(1))
    queue.append(pair(2))
    before = list(queue)
    with pytest.raises(QueueInvariantError, match="append and popleft only"):
        change(queue)
    assert list(queue) == before


@given(st.lists(st.booleans(), max_size=60))
def test_whatever_the_order_of_calls_no_result_is_lost_or_repeated(pushes):
    queue, pushed, popped = ResultQueue(), [], []
    for n, push in enumerate(pushes):
        try:
            if push:
                queue.append(new := pair(n))
                pushed.append(new)
            else:
                popped.append(queue.popleft())
        except QueueInvariantError:
            assert len(queue) == (MAX_DEPTH if push else 0)
    assert popped + list(queue) == pushed
    assert (queue.launched, queue.processed) == (len(pushed), len(popped))
