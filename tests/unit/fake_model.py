"""Future map and model over the virtual GPU: kernels that know addresses only."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.unit.fake_batch import NO_GRAMMAR, Batch, Mode, Result, SamplingInfo, fold, pick
from tests.unit.virtual_gpu import Event, Gpu, Tensor
from zos_sglang.overlap.row_ledger import RowLedger


class FutureMap:
    """Row of a request to the token that the host has not seen; a read takes the token out."""

    needs_cpu_seq_lens = False

    def __init__(self, gpu: Gpu, generations: list[int]) -> None:
        self.gpu, self.generations = gpu, generations
        self.ledger: RowLedger | None = RowLedger()

    def check(self, batch: Batch) -> None:
        if self.ledger is None:
            return
        if batch.prefill_input_ids_cpu is not None:
            rows = batch.mix_rows if batch.mix_running_indices is not None else []
        else:
            rows = batch.rows if batch.input_ids is None else []
        self.ledger.read(rows, [self.generations[r] for r in rows])

    def resolve(self, batch: Batch) -> None:
        gpu = self.gpu
        if batch.prefill_input_ids_cpu is None and batch.input_ids is not None:
            return
        prompt = tuple(batch.prefill_input_ids_cpu or ())
        decode = batch.req_pool_indices if batch.prefill_input_ids_cpu is None else batch.mix_running_indices
        n = len(batch.rows) if batch.prefill_input_ids_cpu is None else len(batch.mix_rows)
        if batch.mix_running_indices is not None:
            batch.mix_running_indices.record_stream(gpu.current)  # as upstream: no one else keeps it
        out = gpu.empty()

        def gather(to: Any = out.address, rows: Any = decode and decode.address) -> None:
            found = gpu.load(rows, n, "rows of the future map") if rows is not None else ()
            gpu.store(to, prompt + tuple(gpu.future.pop(r, -1) for r in found))

        gpu.current.enqueue(gather)
        batch.input_ids = out
        batch.prefill_input_ids_cpu, batch.mix_running_indices, batch.mix_rows = None, None, []

    def resolve_seq_lens_cpu(self, batch: Batch) -> None:
        pass

    def publish(self, rows: Tensor, lengths: Tensor) -> None:
        pass

    def stash(self, rows: Tensor, tokens: Tensor, hosted: list[int]) -> None:
        gpu, n = self.gpu, len(hosted)

        def scatter(at: Any = rows.address, source: Any = tokens.address) -> None:
            found = gpu.load(at, n, "rows to relay to")
            gpu.future.update(zip(found, gpu.load(source, n, "tokens to relay"), strict=True))

        gpu.current.enqueue(scatter)
        if self.ledger is not None:
            self.ledger.wrote(hosted, [self.generations[r] for r in hosted])


class Runner:
    """Upstream's model runner: its forward can be wrapped."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def forward(self, batch: Batch, info: SamplingInfo) -> None:
        self.worker._model(batch, info)


class Worker:
    """The model: kernels on the current stream, which know addresses only."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.shared_read_done_event: Event | None = None
        self.model_runner = Runner(self)

    def forward_batch_generation(self, batch: Batch, **_: Any) -> Result:
        world, gpu = self.world, self.world.gpu
        result = Result(world.next_serial(), len(batch.reqs))
        info = batch.sampling_info
        assert info is not None
        for _build in range(2):  # one forward batch for the target, one for its draft or its other half
            if info.orchestrator is not None:
                info.update_penalties()
        self.model_runner.forward(batch, info)
        sample = partial(self._sample, batch, info, result)
        if not batch.spec_algorithm.is_none():
            self._rebind(batch)
            result.next_draft_input = SimpleNamespace(dsa_topk_indices=None)
            sample()
        elif batch.has_grammar or world.delay_all:
            result.delay_sample_func = sample
        else:
            sample()
        result.copy_to_cpu = partial(world.copy_to_cpu, result)
        assert gpu.current is gpu.forward
        return result

    def _model(self, batch: Batch, info: SamplingInfo) -> None:
        gpu, n = self.world.gpu, len(batch.reqs)
        lens = batch.extend_lens or [1] * n
        prefixes = batch.prefix_lens or [-1] * n
        seen: list[tuple[int, ...]] = []
        assert batch.input_ids and batch.req_pool_indices and batch.seq_lens and info.penalties
        at = {
            "input tokens": (batch.input_ids.address, sum(lens)),
            "rows of requests": (batch.req_pool_indices.address, n),
            "lengths": (batch.seq_lens.address, n),
            "penalties": (info.penalties.address, n),
        }
        gpu.forward.enqueue(lambda: seen.append((*gpu.shared, *[-1] * n)[:n]))
        if self.world.records_read_done():
            self.shared_read_done_event = Event(gpu)
            self.shared_read_done_event.record(gpu.forward)

        def model() -> None:
            tokens, rows, lengths, penalties = (gpu.load(a, k, what) for what, (a, k) in at.items())
            out, start = [], 0
            for i, row in enumerate(rows):
                before = 0 if prefixes[i] == 0 else gpu.kv.get(row, 0)
                gpu.kv[row] = fold(before, tokens[start : start + lens[i]])
                out.append((gpu.kv[row], lengths[i], seen[0][i], penalties[i]))
                start += lens[i]
            gpu.logits = tuple(out)

        gpu.forward.enqueue(model)

    def _sample(self, batch: Batch, info: SamplingInfo, result: Result) -> Result:
        """The mask comes from the grammar's state on the host, as it is now."""
        gpu, n = self.world.gpu, len(info.reqs)
        mask = gpu.tensor([r.state for r in info.reqs])
        early, begun = self.world.limits.masks_early, [(r.rid, r.spec.grammar) for r in info.reqs]
        result.next_token_ids = gpu.empty()

        def sample(
            to: Any = result.next_token_ids.address, m: Any = mask.address, t: Any = info.temps.address
        ) -> None:
            states, temps = gpu.load(m, n, "grammar mask"), gpu.load(t, n, "sampling parameters")
            if early:
                for rid, state in begun:
                    if state != NO_GRAMMAR:
                        gpu.touch(("mask", rid), "grammar mask", writes=False)
                states = tuple(gpu.masks.get(rid, state) for rid, state in begun)
            rows = (*gpu.logits, *[(0, 0, 0, 0)] * n)[:n]
            gpu.store(to, tuple(pick(*rows[i], temp=temps[i], state=states[i]) for i in range(n)))

        gpu.current.enqueue(sample)
        return result

    def _rebind(self, batch: Batch) -> None:
        """What speculative workers do to the batch while they run."""
        batch.forward_mode = Mode.VERIFY
        batch.seq_lens = self.world.gpu.tensor([0] * len(batch.reqs))
        batch.input_ids = batch.seq_lens
        batch.lens = [0] * len(batch.reqs)
        batch.spec_info = "verify input"

    def forward_batch_embedding(self, batch: Batch) -> Any:
        gpu, n = self.world.gpu, len(batch.reqs)
        assert batch.input_ids is not None
        out, lens = gpu.empty(), batch.extend_lens

        def pool(to: Any = out.address, tokens: Any = batch.input_ids.address) -> None:
            found, start, values = gpu.load(tokens, sum(lens), "input tokens"), 0, []
            for k in lens:
                values.append(fold(0, found[start : start + k]))
                start += k
            gpu.store(to, tuple(values))

        gpu.current.enqueue(pool)
        result = Result(self.world.next_serial(), n)
        result.next_token_ids = out
        return result
