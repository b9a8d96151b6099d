"""A toy in place of upstream's decode graphs: a model whose next token depends on all of a row's KV slots.

`token(n + 1) = (sum of the row's tokens so far + length) mod VOCABULARY`, read through the request table as
attention would. Works on the CPU and on a CUDA device, where its model step is a CUDA graph like upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from zos_sglang.resident import kernels
from zos_sglang.resident.capture import no_collection
from zos_sglang.resident.eligibility import Refusal

VOCABULARY = 211
CONTEXT = 96
PADDING_LENGTH = 1


class ToyDecode:
    """`graph_executor.Decode` over a toy model with one KV pool of token numbers."""

    buckets = (2, 4, 8)

    def __init__(self, device: str = "cpu", requests: int = 12, slots: int = 2000) -> None:
        self.device = torch.device(device)
        self.capacity = max(self.buckets)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        c = self.capacity
        table = zeros(requests, CONTEXT, dtype=torch.int32)
        self.buffers = kernels.StepBuffers(zeros(c), zeros(c), zeros(c), zeros(c), zeros(c), table)
        self.buffers.seq_lens.fill_(PADDING_LENGTH)
        self.pool = zeros(slots)
        self.columns = torch.arange(CONTEXT, device=device)
        self.logits_buffer = zeros(c, VOCABULARY, dtype=torch.float32)
        #: What the metadata graph writes and the model reads, as attention does.
        self.lengths = zeros(c, dtype=torch.int32)
        self.greedy = True
        self.can_keep = True
        self.steps = 0
        self.reloaded: list[int] = []
        self._graphs: dict[int, Any] = {}

    def metadata(self, live: Any) -> Any:
        def write(bucket: int) -> None:
            self.lengths[:bucket].copy_(self.buffers.seq_lens[:bucket])

        return SimpleNamespace(write=write)

    def bucket(self, rows: int) -> int:
        return min(bucket for bucket in self.buckets if bucket >= rows)

    def logits(self, bucket: int) -> Any:
        return self.logits_buffer[:bucket]

    def refuses(self, batch: Any) -> Refusal | None:
        return None if len(batch.reqs) <= self.capacity else Refusal.BATCH_SIZE

    def count_step(self) -> None:
        self.steps += 1

    def reload_metadata(self, bucket: int) -> None:
        self.reloaded.append(bucket)

    def model(self, bucket: int) -> None:
        step = self.buffers.first(bucket)
        self.pool.index_put_((step.out_cache_loc,), step.input_ids)
        mask = self.columns < self.lengths[:bucket, None]
        sums = (self.pool[step.table[step.rows].long()] * mask).sum(1)
        best = (sums + step.positions + 1) % VOCABULARY
        logits = self.logits(bucket)
        logits.zero_()
        logits.scatter_(1, best[:, None], 1.0)

    def capture(self, work: Callable[[], None]) -> Any:
        work()
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        return graph

    def replay(self, bucket: int) -> Callable[[], None]:
        if self.device.type != "cuda":
            return lambda: self.model(bucket)
        if bucket not in self._graphs:
            self._graphs[bucket] = self.capture(lambda: self.model(bucket))
        replay: Callable[[], None] = self._graphs[bucket].replay
        return replay

    def load(self, batch: Any) -> Any:
        rows = len(batch.reqs)
        bucket = self.bucket(rows)
        step = self.buffers
        for buffer, values, padding in (
            (step.input_ids, batch.input_ids, None),
            (step.seq_lens, batch.seq_lens, PADDING_LENGTH),
            (step.positions, batch.seq_lens - 1, 0),
            (step.out_cache_loc, batch.out_cache_loc, 0),
            (step.rows, batch.req_pool_indices, 0),
        ):
            buffer[:rows] = values
            if padding is not None:
                buffer[rows:bucket] = padding
        self.lengths[:bucket].copy_(step.seq_lens[:bucket])
        return self._loaded(rows, bucket)

    def _loaded(self, rows: int, bucket: int) -> Any:
        return SimpleNamespace(
            rows=rows,
            bucket=bucket,
            greedy=self.greedy,
            model=self.replay(bucket),
            sample=lambda: self.logits(rows).argmax(-1).to(torch.int32),
            mask=None,
        )

    def keeps(self, loaded: Any, rows: int) -> bool:
        return self.can_keep

    def keep(self, loaded: Any, batch: Any, kept: Any) -> Any:
        rows = len(kept)
        for buffer, padding in zip(self.buffers[:-1], (None, 0, PADDING_LENGTH, 0, 0), strict=True):
            buffer[:rows] = buffer[kept]
            if padding is not None:
                buffer[rows : loaded.rows] = padding
        return self._loaded(rows, self.bucket(rows))


class Rows:
    """Requests on the host: what upstream's batch would hold, and the tokens they must produce."""

    def __init__(self, decode: ToyDecode, prompts: list[list[int]]) -> None:
        self.decode = decode
        self.histories = [list(prompt) for prompt in prompts]
        self.numbers = list(range(1, len(prompts) + 1))
        self._slot = 1
        for number, history in zip(self.numbers, self.histories, strict=True):
            for position, token in enumerate(history[:-1]):
                slot = self._next_slot()
                decode.buffers.table[number, position] = slot
                decode.pool[slot] = token

    def _next_slot(self) -> int:
        self._slot += 1
        return self._slot - 1

    def drop(self, place: int) -> None:
        del self.histories[place], self.numbers[place]

    def batch(self) -> Any:
        """Prepared for the next step: the last token has a slot, and the lengths count it."""
        slots = [self._next_slot() for _ in self.numbers]
        for number, history, slot in zip(self.numbers, self.histories, slots, strict=True):
            self.decode.buffers.table[number, len(history) - 1] = slot

        def int64(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.decode.device)

        return SimpleNamespace(
            reqs=list(self.numbers),
            input_ids=int64([history[-1] for history in self.histories]),
            seq_lens=int64([len(history) for history in self.histories]),
            out_cache_loc=int64(slots),
            req_pool_indices=int64(self.numbers),
        )

    @staticmethod
    def left(batch: Any, kept: list[int]) -> Any:
        """`batch` as upstream's filter leaves it: lengths as when it was made, no inputs, no slots."""
        return SimpleNamespace(
            reqs=[batch.reqs[row] for row in kept],
            input_ids=None,
            seq_lens=batch.seq_lens[kept],
            out_cache_loc=None,
            req_pool_indices=batch.req_pool_indices[kept],
        )

    def reserve(self, batch: Any, steps: int) -> None:
        slots = torch.tensor(
            [self._next_slot() for _ in range(steps * len(self.numbers))], device=self.decode.device
        )
        kernels.write_slots(self.decode.buffers.table, batch.req_pool_indices, batch.seq_lens, slots, steps)

    def expect(self) -> list[int]:
        """The next token of every row, which is then part of it."""
        tokens = [(sum(history) + len(history)) % VOCABULARY for history in self.histories]
        for history, token in zip(self.histories, tokens, strict=True):
            history.append(token)
        return tokens
