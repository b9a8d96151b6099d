"""A model of PyTorch kernels on the asynchronous device, and the lane's kernels there.

The next token of a row is a weighted sum over all of its KV slots, found through the page table as attention
does it, up to the row's length and no further. KV slots hold token numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from tests.unit.fake_batch import VOCABULARY
from tests.unit.lane_fakes import LaneSpec, ends
from tests.unit.toy_decode import ToyDecode
from zos_sglang.resident import greedy, kernels
from zos_sglang.testing.races.tensors import DEVICE, Simulated

CONTEXT = 96


def next_token(history: list[int]) -> int:
    return sum((i + 1) * token for i, token in enumerate(history)) % VOCABULARY


def right_answer(spec: LaneSpec) -> list[int]:
    output: list[int] = []
    while not output or not ends(spec, output):
        output.append(next_token([*spec.prompt, *output]))
    return output


def attend(  # noqa: PLR0917 - a kernel's operands
    kv: Any, tokens: Any, slots: Any, indptr: Any, indices: Any, out: Any
) -> None:
    """Write the new tokens' KV, then sample each row: `indices[indptr[i]:indptr[i + 1]]` are its slots."""
    kv[slots] = tokens
    bounds = indptr.tolist()
    for row, (start, end) in enumerate(pairwise(bounds)):
        values = kv[indices[start:end]]
        out[row] = (values * torch.arange(1, end - start + 1)).sum() % VOCABULARY


def attend_to_logits(*args: Any) -> None:
    *operands, logits = args
    sampled = torch.zeros(logits.shape[0], dtype=torch.int64)
    attend(*operands, sampled)
    logits.zero_()
    logits.scatter_(1, sampled[:, None], 1.0)


class Model:
    """`eager.ModelStep`, and the forward of the ordinary path."""

    def __init__(self, on: Simulated, kv: Any, table: Any) -> None:
        self.on, self.kv, self.table = on, kv, table

    def build(self, batch: Any) -> Any:
        # Positions as upstream makes them, which every step after the first replaces.
        return SimpleNamespace(rows=batch.req_pool_indices, positions=batch.seq_lens - 1)

    def metadata(self, rows: Any, lengths: Any) -> tuple[Any, Any]:
        indptr = torch.zeros(len(rows) + 1, dtype=torch.int32, device=DEVICE)
        indices = self.on.empty(len(rows) * CONTEXT, torch.int64)
        kernels.gather_slots(lengths, rows, self.table, indptr, indices)
        return indptr, indices

    def attend(self, plan: tuple[Any, Any], tokens: Any, slots: Any) -> Any:
        out = self.on.empty(plan[0].shape[0] - 1, torch.int64)
        self.on.launch("attention", attend, self.kv, tokens, slots, *plan, out)
        return out

    def forward(self, template: Any, _done: int, tokens: Any, lengths: Any, slots: Any) -> Any:
        out = self.attend(self.metadata(template.rows, lengths), tokens, slots)
        return lambda: out

    def floor_us(self, _template: Any, _replays: int) -> float:
        return 1.0


class Decode(ToyDecode):
    """`graph_executor.Decode`: static buffers over the model above."""

    def __init__(self, model: Model) -> None:
        super().__init__("meta")
        self.of = model
        self.buffers = self.buffers._replace(table=model.table)
        self.logits_buffer = torch.zeros(self.capacity, VOCABULARY, device=DEVICE)
        self.indptr = torch.zeros(self.capacity + 1, dtype=torch.int32, device=DEVICE)
        self.indices = torch.zeros(self.capacity * CONTEXT, dtype=torch.int64, device=DEVICE)

    def metadata(self, live: Any) -> Any:
        return SimpleNamespace(write=self.write)

    def write(self, bucket: int) -> None:
        step = self.buffers.first(bucket)
        indptr = self.indptr[: bucket + 1]
        kernels.gather_slots(step.seq_lens, step.rows, step.table, indptr, self.indices)

    def reload_metadata(self, bucket: int) -> None:
        self.write(bucket)

    def load(self, batch: Any) -> Any:
        loaded = super().load(batch)
        self.write(loaded.bucket)
        return loaded

    def model(self, bucket: int) -> None:
        step, of = self.buffers.first(bucket), self.of
        operands = of.kv, step.input_ids, step.out_cache_loc, self.indptr[: bucket + 1], self.indices
        of.on.launch("attention", attend_to_logits, *operands, self.logits(bucket))


@contextmanager
def lane_kernels(on: Simulated) -> Iterator[None]:
    """In place of the Triton kernels: the reference of each, as one kernel of the asynchronous device."""
    name = "zos_sglang.resident.triton_kernels"
    references = {
        "advance": kernels.advance_reference,
        "emit": kernels.emit_reference,
        "write_slots": kernels.write_slots_reference,
        "gather_slots": kernels.gather_slots_reference,
        "largest_of_parts": greedy.largest_of_parts_reference,
        "hand_on": greedy.hand_on_reference,
    }
    launchers = {f"launch_{what}": partial(on.launch, what, ref) for what, ref in references.items()}
    before = sys.modules.get(name)
    sys.modules[name] = SimpleNamespace(  # type: ignore[assignment]
        **launchers, compile_write_slots=lambda *_: None
    )
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
