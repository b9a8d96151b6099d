"""Upstream's own decode runner, batch, buffers, padding and sampler, on the CPU.

Only what needs a device is a stand-in: the model step (its "graph" is a function), and the attention backend.
Used inside the fixture `published`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
    DecodeCudaGraphRunner as UpstreamRunner,
)
from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

VOCABULARY = 97
BUCKETS = (2, 4)
CONTEXT = 100


class FullCudaGraphBackend:
    replay_session = staticmethod(nullcontext)

    def __init__(self) -> None:
        self._graphs: dict[Any, Any] = {}
        self._outputs: dict[Any, Any] = {}


class TritonAttnBackend:
    needs_cpu_seq_lens = use_mla = use_sliding_window_kv_pool = False
    dcp_size = 1

    def __init__(self) -> None:
        #: What each step's metadata was made from.
        self.seen: list[list[int]] = []

    def init_forward_metadata_out_graph(self, view: Any, in_capture: bool = False) -> None:
        assert view.seq_lens_cpu is None or self.seen == [], "host lengths only when the batch is loaded"
        self.seen.append(view.seq_lens.tolist())


class ReqToTokenPool:
    def __init__(self) -> None:
        self.req_to_token = torch.arange(10 * CONTEXT, dtype=torch.int32).view(10, CONTEXT)


class MHATokenToKVPool:
    pass


class DecodeCudaGraphRunner(UpstreamRunner):
    def __init__(self, model_runner: Any) -> None:
        most = max(BUCKETS)
        self.model_runner, self.attn_backend = model_runner, model_runner.attn_backend
        self.backend: Any = FullCudaGraphBackend()
        self.capture_bs, self.max_bs = list(BUCKETS), most
        self.buffers = DecodeInputBuffers.create(
            device="cpu",
            max_bs=most,
            max_num_token=most,
            hidden_size=8,
            next_token_logits_buffer=torch.zeros(most, VOCABULARY),
            dtype=torch.float32,
            num_dp_ranks=1,
            pp_size=1,
            is_encoder_decoder=False,
            require_mlp_tp_gather=False,
            seq_len_fill_value=1,
            encoder_len_fill_value=0,
            num_tokens_per_req=1,
            cache_loc_dtype=torch.int64,
            enable_mamba_track=False,
        )
        self.buffer_registry = build_decode_registry(
            device="cpu",
            max_bs=most,
            max_num_token=most,
            seq_len_fill_value=1,
            cache_loc_dtype=torch.int64,
            source=self.buffers,
        )
        self.deepep_adapter: Any = SimpleNamespace(replay=lambda: None)
        self.capture_hidden_mode, self.capture_forward_mode = CaptureHiddenMode.NULL, ForwardMode.DECODE
        self.captured_req_width = self.pp_size = self.seq_len_fill_value = 1
        self.ragged_verify_mode = self.dllm_uses_input_embeds = self.is_dllm = False
        self.require_mlp_tp_gather = self.require_attn_tp_gather = self.require_mlp_sync = False
        self.enable_two_batch_overlap = self.enable_pdmux = self.is_encoder_decoder = False
        self.record_nolora_graph = self.disable_padding = False
        self.attention_graph_variants = self._metadata_glue = None
        for bucket in BUCKETS:
            key = self._make_graph_key(bucket)
            self.backend._graphs[key] = SimpleNamespace(replay=self._model(bucket))
            self.backend._outputs[key] = LogitsProcessorOutput(
                next_token_logits=self.buffers.next_token_logits_buffer[:bucket]
            )

    def _model(self, bucket: int) -> Callable[[], None]:
        def replay() -> None:
            buffers = self.buffers
            best = token_after(
                buffers.input_ids[:bucket], buffers.positions[:bucket], buffers.out_cache_loc[:bucket]
            )
            logits = buffers.next_token_logits_buffer[:bucket]
            logits.zero_()
            logits.scatter_(1, best[:, None], 1.0)

        return replay


class Model(SimpleNamespace):
    """The attributes of `ModelRunner` that a plain decode step touches."""

    sample = ModelRunner.sample
    _preprocess_logits = ModelRunner._preprocess_logits


class Batch:
    """A schedule batch that was prepared for decode; every field that is not set is None."""

    def __init__(self, table: torch.Tensor, count: int, *, greedy: bool) -> None:
        self.table = table
        self.reqs = [
            SimpleNamespace(lora_id=None, rid=str(i), grammar=None, token_type_ids=None, bootstrap_room=None)
            for i in range(count)
        ]
        self.forward_mode, self.return_hidden_states_mode = ForwardMode.DECODE, CaptureHiddenMode.NULL
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.has_grammar = self.return_logprob = self.is_prefill_only = False
        self.seq_lens = torch.arange(5, 5 + count)
        self.seq_lens_cpu = self.seq_lens.clone()
        self.input_ids = torch.arange(10, 10 + count)
        self.req_pool_indices = torch.arange(1, 1 + count)
        self.out_cache_loc = table[self.req_pool_indices, self.seq_lens - 1].long()
        self.sampling_info = SamplingBatchInfo(
            # So cold that a sampler can only draw the largest logit.
            temperatures=torch.full((count, 1), 1e-4),
            top_ps=torch.ones(count),
            top_ks=torch.ones(count, dtype=torch.int32),
            min_ps=torch.zeros(count),
            is_all_greedy=greedy,
            is_any_greedy=greedy,
            need_top_p_sampling=False,
            need_top_k_sampling=False,
            need_min_p_sampling=False,
            vocab_size=VOCABULARY,
            penalizer_orchestrator=SimpleNamespace(is_required=False, filter=lambda _: None),  # type: ignore[arg-type]
        )

    def left(self, kept: list[int]) -> Batch:
        """As upstream's filter leaves it: lengths as when it was made, no inputs, no slots."""
        rest = copy.copy(self)
        rest.reqs = [self.reqs[row] for row in kept]
        rest.seq_lens, rest.seq_lens_cpu = self.seq_lens[kept], self.seq_lens_cpu[kept]
        rest.req_pool_indices = self.req_pool_indices[kept]
        rest.input_ids = rest.out_cache_loc = None  # type: ignore[assignment]
        rest.sampling_info = copy.copy(self.sampling_info)
        rest.sampling_info.filter_batch(kept, torch.tensor(kept))
        return rest

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        return self.table[self.req_pool_indices, positions].long()

    def prepared(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Batch:
        """For the step that has these inputs and lengths."""
        self.input_ids, self.seq_lens, self.seq_lens_cpu = tokens, lengths, lengths.clone()
        self.out_cache_loc = self.slots(lengths - 1)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def token_after(tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return (3 * tokens + positions + slots) % VOCABULARY


def model_runner() -> Any:
    pool = ReqToTokenPool()
    translator = KVIndexTranslator.__new__(KVIndexTranslator)
    translator.req_to_token, translator.is_translating = pool.req_to_token, False
    translator._spaces = {IdSpaceKind.FULL: IdSpace(key=(IdSpaceKind.FULL, "plain"))}
    sampler = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target = sampler.tp_sync_group = None
    sampler.use_ascend_backend = sampler.use_log_softmax_logprob = False
    sampler.enable_deterministic = True
    made = Model(
        req_to_token_pool=pool,
        token_to_kv_pool=MHATokenToKVPool(),
        kv_index_translator=translator,
        attn_backend=TritonAttnBackend(),
        sampler=sampler,
        device="cpu",
        forward_pass_id=0,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        model_config=SimpleNamespace(model_is_mrope=False, requires_mm_token_modalities=False),
        ngram_embedding_manager=SimpleNamespace(enabled=False, update_after_decode=lambda **_: None),
        model=SimpleNamespace(shared_experts_config=None),
        is_draft_worker=False,
        enable_elastic_ep=False,
        **dict.fromkeys(
            ("lora_manager", "hisparse_coordinator", "sliding_window_size", "watermark_state", "eplb_manager")
        ),
        **dict.fromkeys(("msprobe_debugger", "canary_manager", "device_timer", "sampling_observer")),
    )
    made.decode_cuda_graph_runner = DecodeCudaGraphRunner(made)
    return made
