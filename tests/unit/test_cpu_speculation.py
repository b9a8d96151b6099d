"""Kernels of speculation in plain torch: draft trees, their verification, and where their slots go."""

from __future__ import annotations

from random import Random

import pytest
import torch

from zos_sglang.testing import cpu_speculation as kernels


def mask_of(parents: list[int]) -> torch.Tensor:
    """Bool [nodes, nodes]: whether node j is an ancestor of node i, or i itself."""
    found = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            found[node] |= found[parent]
    return found


def links(trees: list[list[int]], lengths: list[int]):
    rows, nodes = len(trees), len(trees[0])
    mask = torch.stack([mask_of(tree) for tree in trees])
    positions = torch.zeros(rows * nodes, dtype=torch.int64)
    index, child, sibling = (torch.zeros(rows, nodes, dtype=torch.int64) for _ in range(3))
    kernels.reconstruct_tree(
        mask.flatten(), torch.tensor(lengths), positions, index, child, sibling, rows, nodes
    )
    return positions.view(rows, nodes).tolist(), index.tolist(), child.tolist(), sibling.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_links_of_random_trees_are_those_of_their_parents(seed: int) -> None:
    source = Random(seed)
    trees = [[-1] + [source.randrange(node) for node in range(1, 6)] for _ in range(3)]
    positions, index, child, sibling = links(trees, [10, 20, 30])
    assert index == [[row * 6 + node for node in range(6)] for row in range(3)]
    for row, parents in enumerate(trees):
        for node in range(6):
            depth, above = 0, parents[node]
            while above >= 0:
                depth, above = depth + 1, parents[above]
            assert positions[row][node] == 10 * (row + 1) + depth
            below = [k for k in range(6) if parents[k] == node]
            assert child[row][node] == (below[0] if below else -1)
            beside = [k for k in range(node + 1, 6) if parents[k] == parents[node] >= 0]
            assert sibling[row][node] == (beside[0] if beside else -1)


def verify(parents: list[int], drafts: list[int], wanted: list[int]):
    """Accepted nodes, the tokens that come out, and how many drafts were right; of one tree."""
    _, index, child, sibling = links([parents], [0])
    nodes = len(parents)
    predicts = torch.zeros(nodes, dtype=torch.int32)
    accepted = torch.full((1, nodes), -1, dtype=torch.int32)
    right = torch.zeros(1, dtype=torch.int32)
    kernels.verify_tree(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=right,
        candidates=torch.tensor([drafts]),
        retrieve_index=torch.tensor(index),
        retrieve_next_token=torch.tensor(child),
        retrieve_next_sibling=torch.tensor(sibling),
        target_predict=torch.tensor([wanted]),
    )
    chosen = [node for node in accepted[0].tolist() if node >= 0]
    return chosen, predicts[chosen].tolist(), int(right)


def test_a_chain_is_accepted_up_to_the_first_draft_that_is_wrong() -> None:
    # Node 0 is the token before; the target's choice behind the last accepted node is the bonus.
    assert verify([-1, 0, 1, 2], [1, 5, 6, 7], [5, 6, 9, 8]) == ([0, 1, 2], [5, 6, 9], 2)
    assert verify([-1, 0, 1, 2], [1, 5, 6, 7], [4, 6, 9, 8]) == ([0], [4], 0)
    assert verify([-1, 0, 1, 2], [1, 5, 6, 7], [5, 6, 7, 8]) == ([0, 1, 2, 3], [5, 6, 7, 8], 3)


def test_of_siblings_the_one_that_is_right_is_taken() -> None:
    assert verify([-1, 0, 0, 2], [1, 5, 6, 7], [6, 0, 7, 8]) == ([0, 2, 3], [6, 7, 8], 2)


def test_slots_are_read_and_written_row_by_row() -> None:
    table = torch.arange(20).view(2, 10)
    rows, start, end = torch.tensor([1, 0]), torch.tensor([2, 5]), torch.tensor([4, 8])
    found = kernels.extend_slots(
        req_pool_indices=rows, req_to_token=table, start_offset=start, end_offset=end, batch_size=2
    )
    assert found.tolist() == [12, 13, 5, 6, 7]
    kernels.write_slots(rows, table, start, end, torch.tensor([100, 101, 102, 103, 104]), 2)
    assert table[1, 2:4].tolist() == [100, 101] and table[0, 5:8].tolist() == [102, 103, 104]


def test_accepted_slots_are_packed_from_the_front() -> None:
    slots, out = torch.arange(100, 108), torch.zeros(8, dtype=torch.int64)
    kernels.fill_front(torch.tensor([2, 1]), slots, out)
    assert out.tolist() == [100, 101, 104, 0, 0, 0, 0, 0]
    out.zero_()
    kernels.fill_accepted(torch.tensor([[0, 2, -1, -1], [4, -1, -1, -1]]), slots, out, 8)
    assert out.tolist() == [100, 102, 104, 0, 0, 0, 0, 0]


def test_without_the_platform_nothing_of_upstream_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import speculative_hook

    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    before = speculative_hook._disable_overlap_schedule_for_cpu
    kernels.register()
    assert speculative_hook._disable_overlap_schedule_for_cpu is before
