"""Upstream's captured decode steps (`DecodeCudaGraphRunner`, SGLang 0.5.23) as the lane's executor uses them.

What `ModelRunner.forward` and the worker do around a plain decode step, and where it went:

* `ForwardBatch`, sampling information, buffers, padding and metadata: once, in `load`, by upstream's code.
* The forward counter: every step. Recorders, dumpers, capturers: `decode_coverage` refuses them.
* KV canary and device timer: around every replay, as upstream has them.
* `shared_read_done_event`: none is recorded. It lets the schedule stream rewrite shared tables (request
  table, pool) while a forward that no longer reads them still runs. While the lane is open the schedule
  stream writes such tables only behind every launched position, so nothing can be overwritten early; when
  the lane is left, one fence on the whole forward stream covers all its steps.

Closing has nothing to undo: `load_batch` rewrites all rows of its bucket, the padding included, and the
metadata from them (FA3's page tables, Triton's splits), before stock replays a graph.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.runtime_context import get_parallel

from zos_sglang.resident.eligibility import Refusal
from zos_sglang.resident.kernels import StepBuffers
from zos_sglang.upstream.decode_metadata import Metadata, UpstreamMetadata, own_metadata
from zos_sglang.upstream.lane_grammar import GrammarMasks
from zos_sglang.upstream.lane_model import build_forward_batch

#: Whose rows these are, for the token oracle of upstream's KV canary, and what upstream pads them with.
_ORACLE_ROWS = (("rids_int", 0), ("bootstrap_room_ids_int", -1))


class Loaded(NamedTuple):
    """One batch in upstream's buffers, ready for its next step."""

    rows: int
    bucket: int
    #: Upstream's forward batch.
    forward: Any
    #: Whether plain argmax over the logits, masked before, is what upstream's sampler would do.
    greedy: bool
    #: Replay the model on what the buffers hold.
    model: Callable[[], None]
    #: Upstream's sampler on the logits: tokens [rows], int32 or int64, new on each call. It masks, too.
    sample: Callable[[], Any]
    #: Mask the logits in place, as the grammars are now; None without grammars.
    mask: Callable[[], None] | None = None


class DecodeGraphs:
    """The model runner's decode graphs and their static buffers.

    Args:
        model_runner: upstream's `ModelRunner`, for which `decode_coverage.uncovered` found nothing.
        metadata: "upstream" or "own", see `decode_metadata`.
        masks: where grammars' masks are made, made for this object's capacity; None: as upstream makes them.
    """

    def __init__(
        self,
        model_runner: Any,
        metadata: str = "upstream",
        masks: Callable[[int, Any], GrammarMasks] | None = None,
    ) -> None:
        if metadata not in ("upstream", "own"):
            raise ValueError(f"metadata is upstream or own, not {metadata!r}")
        self._model_runner = model_runner
        self._runner = runner = model_runner.decode_cuda_graph_runner
        self._own_metadata = metadata == "own"
        self._plain_sampler = _plain_sampler(model_runner)
        self._upstream_metadata = UpstreamMetadata(runner)
        buffers = runner.buffers
        self.device = buffers.seq_lens.device
        self.buckets: list[int] = list(runner.capture_bs)
        self.capacity: int = max(self.buckets)
        self._masks = masks(self.capacity, self.device) if masks is not None else None
        # Static for the life of the runner: captured graphs hold their addresses.
        self.buffers = StepBuffers(
            buffers.input_ids,
            buffers.positions,
            buffers.seq_lens,
            buffers.out_cache_loc,
            buffers.req_pool_indices,
            model_runner.req_to_token_pool.req_to_token,
        )

    @property
    def stale(self) -> bool:
        """Whether upstream has captured anew (a role switch, say), so that this object must be rebuilt."""
        return self._model_runner.decode_cuda_graph_runner is not self._runner

    def metadata(self, live: Any) -> Metadata:
        """The metadata writer; `live` is int64 [1] on the device, the number of rows that are requests."""
        if self._own_metadata:
            return own_metadata(self._runner, live)
        return self._upstream_metadata

    def bucket(self, rows: int) -> int:
        return int(self._runner._pad_to_bucket(rows, self.buckets))

    def logits(self, bucket: int) -> Any:
        """What the graph of `bucket` writes: logits [bucket, vocabulary], at a fixed address."""
        return self._runner.backend._outputs[self._runner._make_graph_key(bucket)].next_token_logits

    def refuses(self, batch: Any) -> Refusal | None:
        """Why the graphs cannot run this decode batch; reads host values only."""
        rows = len(batch.reqs)
        if self.stale:
            return Refusal.ATTENTION_BACKEND
        if rows == 0 or rows > self.capacity:
            return Refusal.BATCH_SIZE
        if self._runner.disable_padding and rows not in self.buckets:
            return Refusal.BATCH_SIZE
        if batch.replace_embeds is not None or batch.input_embeds is not None:
            return Refusal.MULTIMODAL
        return None

    def load(self, batch: Any) -> Loaded:
        """Fill the buffers, the tail included, and the metadata for the step that `batch` is prepared for.

        As upstream's worker and runner would, up to the replay; runs on the current stream.
        """
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        runner = self._runner
        forward = build_forward_batch(batch, self._model_runner)
        with (
            runner.model_context(),
            forward_context(
                ForwardContext(attn_backend=self._model_runner.attn_backend), forward_batch=forward
            ),
            runner.backend.replay_session(),
        ):
            runner.load_batch(forward)
        return self._loaded(forward, runner.raw_bs, runner.bs, runner._replay_graph_key)

    def _loaded(self, forward: Any, rows: int, bucket: int, key: Any) -> Loaded:
        """`forward`, whose rows are the first ones of the buffers, on the graph of this key."""
        backend = self._runner.backend
        output = backend._outputs[key]
        # What upstream reads from the batch during later steps (seeded samplers, the canary) moves on with
        # the buffers.
        live = self.buffers.first(rows)
        forward.input_ids = live.input_ids
        forward.positions = live.positions
        forward.seq_lens = live.seq_lens
        forward.out_cache_loc = live.out_cache_loc
        mask = self._masking(forward.sampling_info, output, rows)
        return Loaded(
            rows,
            bucket,
            forward,
            self._plain_sampler and _plain_greedy(forward.sampling_info, masked=mask is not None),
            self._replay(forward, backend._graphs[key].replay),
            self._sampling(forward, output, rows),
            mask,
        )

    def keeps(self, loaded: Loaded, rows: int) -> bool:
        """Whether `keep` can go on with so many rows and has everything of `loaded` that depends on them.

        Not masks, nor the canary's token ids, nor the number of rows that some MoE kernels read.
        """
        from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded

        return (
            loaded.mask is None
            and loaded.forward.req_all_ids_lens is None
            and not enable_num_token_non_padded()
            and not (self._runner.disable_padding and rows not in self.buckets)
        )

    def keep(self, loaded: Loaded, batch: Any, kept: Any) -> Loaded:
        """`loaded` with only some of its rows, moved to the front; on the current stream, behind their step.

        Args:
            loaded: what `keeps` said yes to.
            batch: upstream's, filtered.
            kept: int64 [rows left], ascending, on the device.

        What depends on lengths is still missing: `reload_metadata` has to follow.
        """
        rows = len(kept)
        bucket = self.bucket(rows)
        # As upstream's registry pads: inputs of padding are not read.
        padding = (None, 0, self._runner.seq_len_fill_value, 0, 0)
        for buffer, value in zip(self.buffers[:-1], padding, strict=True):
            buffer[:rows] = buffer[kept]
            if value is not None:
                buffer[rows : loaded.rows].fill_(value)
        forward = copy.copy(loaded.forward)
        forward.batch_size = rows
        forward.req_pool_indices, forward.req_pool_indices_cpu = self.buffers.rows[:rows], None
        forward.seq_lens_cpu, forward.orig_seq_lens = batch.seq_lens_cpu, batch.orig_seq_lens
        forward.sampling_info = batch.sampling_info.copy_for_forward()
        forward.sampling_info.grammars = None
        for name, filler in _ORACLE_ROWS:
            if (owners := getattr(loaded.forward, name)) is not None:
                staying = owners[kept]
                setattr(forward, name, staying)
                setattr(forward.sampling_info, name, staying)
                static = getattr(self._runner.buffers, name)
                static[:rows] = staying
                static[rows : loaded.rows].fill_(filler)
        return self._loaded(forward, rows, bucket, self._runner._make_graph_key(bucket))

    def reload_metadata(self, bucket: int) -> None:
        """Read the request table again for the lengths that the buffers hold; their slots may have moved."""
        self._upstream_metadata.write(bucket)

    def count_step(self) -> None:
        """What upstream counts for every forward."""
        self._model_runner.forward_pass_id += 1

    def _timed(self, replay: Callable[[], None]) -> Callable[[], None]:
        """`replay` inside upstream's device timer, where there is one."""
        timer = self._model_runner.device_timer
        if timer is None:
            return replay

        def inside() -> None:
            with timer.wrap(metadata={"category": "decode"}):
                replay()

        return inside

    def _replay(self, forward: Any, replay: Callable[[], None]) -> Callable[[], None]:
        replay = self._timed(replay)
        canary = self._model_runner.canary_manager
        if canary is None:
            return replay

        def inside() -> None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(
                    canary.with_ops_outside_graph(
                        single_forward_indices=[0], maybe_inaccurate_forward_batch=forward
                    )
                )
                stack.enter_context(canary.with_active_single_forward_manager(0))
                replay()

        return inside

    def _masking(self, info: Any, output: Any, rows: int) -> Callable[[], None] | None:
        if self._masks is None or not self._masks.attach(info):
            return None
        logits = output.next_token_logits[:rows]

        def mask() -> None:
            info.update_regex_vocab_mask()
            info.grammar_mask.apply(logits)
            info.grammar_mask = None

        return mask

    def _sampling(self, forward: Any, output: Any, rows: int) -> Callable[[], Any]:
        sliced = dataclasses.replace(
            output,
            next_token_logits=output.next_token_logits[:rows],
            full_logits=None,
            hidden_states=None,
        )
        sample = self._model_runner.sample
        return lambda: sample(sliced, forward)


def _plain_sampler(model_runner: Any) -> bool:
    """Whether a greedy batch ends in `torch.argmax` over the logits and nothing else."""
    from sglang.srt.environ import envs
    from sglang.srt.layers import sampler

    return (
        type(model_runner.sampler) is sampler.Sampler
        and model_runner.sampling_observer is None
        and not sampler.SYNC_TOKEN_IDS_ACROSS_TP
        and not sampler._use_aiter
        and not envs.SGLANG_SANITIZE_NAN_LOGITS.get()
        and not envs.SGLANG_ENABLE_NAN_LOGITS_CHECK.get()
        and not envs.SGLANG_ENABLE_ASYNC_ASSERT.get()
        and not envs.SGLANG_TRACE_SAMPLER_E2E.get()
    )


def _plain_greedy(info: Any, *, masked: bool) -> bool:
    """Whether this batch's sampling information leaves the logits alone and takes the largest one.

    `masked`: grammars' masks are applied by somebody else. Several ranks agree on the tokens of a batch with
    grammars inside upstream's sampler, so there it must run.
    """
    others = info.grammars and not (masked and get_parallel().tp_size == 1)
    return bool(info.is_all_greedy) and not (
        others
        or info.has_custom_logit_processor
        or info.logit_bias is not None
        or info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or info.sampling_mask_batch_indices is not None
    )
