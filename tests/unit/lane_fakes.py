"""Requests and batches of the lane's simulation, and the one right answer of a request.

A token is a function of the request's whole history as it is read through the page table: what a step writes
into its KV slot depends on every slot before it, and what it samples on all of them, in order. A wrong
slot, position, length, row or page anywhere shows in that answer and in every one after it. Under a grammar
all tokens so far count in one more way: a mask that is one token old allows other tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from tests.unit.fake_batch import EOS, NO_GRAMMAR, VOCABULARY, Mode, SpecAlgorithm, next_state, temperature
from tests.unit.lane_memory import LaneGpu, Memory
from tests.unit.virtual_gpu import Tensor

Key = tuple[int, ...]


@dataclass(frozen=True)
class LaneSpec:
    """What a client asks for. `stop_pair` stands for a stop string: two tokens in a row.

    `rides` False is a request that the lane refuses. `vocabulary` below `VOCABULARY` makes tokens occur that
    are outside of it, which end the request. `grammar` is the state that its grammar begins in.
    """

    rid: int
    prompt: Key
    max_new: int = 8
    stream: bool = False
    stop_ids: Key = ()
    stop_pair: Key = ()
    ignore_eos: bool = False
    vocabulary: int = VOCABULARY
    rides: bool = True
    grammar: int = NO_GRAMMAR


def kv_of(before: Iterable[int], token: int, position: int) -> int:
    """What a step writes into its slot after reading all slots before it."""
    return hash((tuple(before), token, position))


def logits(slots: Iterable[int], length: int, temp: int) -> int:
    """What the model knows of the next token; `choose` takes it from there."""
    return hash((tuple(slots), length, temp))


def choose(logit: int, state: int) -> int:
    """The token, of those that a grammar in `state` allows."""
    words = allowed(state)
    return words[logit % len(words)]


def allowed(state: int) -> Sequence[int]:
    if state == NO_GRAMMAR:
        return range(VOCABULARY)
    return [t for t in range(VOCABULARY) if hash((state, t, 3)) % 3] or [1]


class Grammar:
    """As upstream's: advanced by the host, token by token; nothing is masked once it or its request ended."""

    def __init__(self, state: int) -> None:
        self.state, self.finished = state, False

    def is_terminated(self) -> bool:
        return self.state % 11 == 3

    def accept_token(self, token: int) -> None:
        if not self.is_terminated():
            assert token in allowed(self.state), "sampled under another mask than the grammar's"
            self.state = next_state(self.state, token)

    def mask(self) -> int:
        return NO_GRAMMAR if self.finished or self.is_terminated() else self.state


def ends(spec: LaneSpec, output: list[int]) -> str | None:
    """Why a request ends with its last token, in upstream's order of precedence."""
    token = output[-1]
    if token >= spec.vocabulary:
        return "vocabulary"
    if spec.stop_pair and tuple(output[-2:]) == spec.stop_pair:
        return "stop string"
    if not spec.ignore_eos and (token == EOS or token in spec.stop_ids):
        return "eos"
    return "length" if len(output) >= spec.max_new else None


def right_answer(spec: LaneSpec) -> list[int]:
    """The answer of a machine that does one request at a time, one step at a time."""
    slots: list[int] = []
    output: list[int] = []
    grammar = None if spec.grammar == NO_GRAMMAR else Grammar(spec.grammar)
    for token in spec.prompt:
        slots.append(kv_of(slots, token, len(slots)))
    while True:
        state = NO_GRAMMAR if grammar is None else grammar.mask()
        output.append(choose(logits(slots, len(slots), temperature(spec.rid)), state))
        if ends(spec, output) or (grammar is not None and grammar.is_terminated()):
            return output
        if grammar is not None:
            grammar.accept_token(output[-1])
        slots.append(kv_of(slots, output[-1], len(slots)))


class LaneRequest:
    """Upstream's names (which the lane reads) and the fake scheduler's, for the same things."""

    inflight_middle_chunks = 0
    session = session_id = multimodal_inputs = beam_group = lora_id = tokenizer = None
    require_reasoning = False

    def __init__(self, spec: LaneSpec) -> None:
        self.spec, self.rid, self.stream, self.vocab_size = spec, spec.rid, spec.stream, spec.vocabulary
        self.eos_token_ids = {EOS}
        self.grammar = None if spec.grammar == NO_GRAMMAR else Grammar(spec.grammar)
        self.sampling_params = SimpleNamespace(
            max_new_tokens=spec.max_new,
            ignore_eos=spec.ignore_eos,
            stop_token_ids=set(spec.stop_ids),
            stop_strs=["pair"] if spec.stop_pair else [],
            stop_regex_strs=[],
        )
        self.time_stats = SimpleNamespace(
            enable_metrics=False, trace_ctx=SimpleNamespace(tracing_enable=False), last_decode_finish_time=0.0
        )
        self.output_ids: list[int] = []
        self.kv = SimpleNamespace(
            req_pool_idx=None, kv_committed_len=0, kv_allocated_len=0, cache_protected_len=0
        )
        self.locked: list[Key] = []
        self.prefilled = self.sent = self.decode_batch_idx = 0
        self.is_retracted = self.finished_output = False
        self.to_finish: str | None = None
        self.finished_reason: str | None = None
        #: Tokens of each message to the client; how often a result was processed for it.
        self.messages: list[list[int]] = []

    def finished(self) -> bool:
        return self.finished_reason is not None

    def tokens(self) -> list[int]:
        return [*self.spec.prompt, *self.output_ids]

    def update_finish_state(self, _accepted: int = 1) -> None:
        assert not self.finished(), "a token for a request that has ended"
        terminated = self.grammar is not None and self.grammar.is_terminated()
        why = self.to_finish or ends(self.spec, self.output_ids) or ("grammar" if terminated else None)
        self.finished_reason, self.to_finish = why, None

    def accept(self, token: int) -> None:
        """Result processing gives the grammar its token, after the finish check."""
        if self.grammar is not None:
            self.grammar.accept_token(token)
            self.grammar.finished = self.finished()

    # What the fake scheduler of the overlap core calls these.

    @property
    def row(self) -> int | None:
        return self.kv.req_pool_idx

    @property
    def ended(self) -> str | None:
        return self.finished_reason

    @ended.setter
    def ended(self, why: str) -> None:
        self.finished_reason = why

    @property
    def aborted(self) -> bool:
        return self.to_finish is not None

    @aborted.setter
    def aborted(self, _: bool) -> None:
        if not self.finished():
            self.to_finish = "abort"


class Sampling:
    """Sampling parameters of a batch, on the device."""

    has_custom_logit_processor = False

    def __init__(self, gpu: LaneGpu, reqs: list[LaneRequest]) -> None:
        self.temps = gpu.tensor([temperature(r.rid) for r in reqs])

    def copy_for_forward(self) -> Sampling:
        return self


class LaneBatch:
    """`ScheduleBatch`, as far as a step goes: tensors from the schedule stream, lengths also on the host."""

    prefill_input_ids_cpu: list[int] | None = None
    mix_running_indices: Tensor | None = None
    chunked_req: Any = None
    spec_info = seq_lens_sum = None
    return_logprob = return_hidden_states = after_idle_gap = False
    forward_iter = extend_num_tokens = 0
    launch_ts = 0.0
    req_pool_indices: Any
    seq_lens: Any
    orig_seq_lens: Any

    def __init__(self, memory: Memory, reqs: list[LaneRequest], mode: Mode) -> None:
        self.memory, self.gpu, self.reqs, self.forward_mode = memory, memory.gpu, reqs, mode
        self.spec_algorithm = SpecAlgorithm()
        self.is_extend_in_batch = mode.is_extend()
        self.mix_rows: list[int] = []
        self.decoding: list[LaneRequest] = []
        self.extend_lens: list[int] = []
        self.rows: list[int] = []
        self.input_ids: Tensor | None = None
        self.out_cache_loc: Tensor | None = None
        self.sampling_info: Sampling | None = None
        self.seq_lens_cpu: torch.Tensor = torch.zeros(0, dtype=torch.int64)

    @property
    def has_grammar(self) -> bool:
        return any(req.grammar for req in self.reqs)

    def masks(self) -> list[int]:
        """The rows' masks as their grammars are now."""
        return [NO_GRAMMAR if req.grammar is None else req.grammar.mask() for req in self.reqs]

    def grammar_needs_sync(self) -> bool:
        return False

    def write_shared(self) -> None:
        """What the forward reads of the schedule stream's here is the page table."""

    def copy(self) -> LaneBatch:
        """Only what processing needs: no device tensor stays alive through it."""
        out = LaneBatch(self.memory, self.reqs[:], self.forward_mode)
        out.is_extend_in_batch, out.chunked_req = self.is_extend_in_batch, self.chunked_req
        out.decoding, out.forward_iter = self.decoding, self.forward_iter
        return out

    def filter(self, leave_out: Iterable[LaneRequest | None] = ()) -> None:
        gone = list(leave_out)
        self.filter_batch([i for i, r in enumerate(self.reqs) if not r.finished() and r not in gone])

    def filter_batch(self, keep_indices: list[int]) -> None:
        if len(keep_indices) < len(self.reqs):
            self._load([self.reqs[i] for i in keep_indices], self.seq_lens_cpu[keep_indices].tolist())

    def merge(self, other: LaneBatch) -> None:
        self._load(self.reqs + other.reqs, [*self.seq_lens_cpu.tolist(), *other.seq_lens_cpu.tolist()])

    def prepare_for_extend(self, pieces: list[list[int]]) -> None:
        """Chunks of prompts, whose slots are in the page table already."""
        self.extend_lens = [len(p) for p in pieces]
        self.extend_num_tokens = sum(self.extend_lens)
        self.prefill_input_ids_cpu = [t for p in pieces for t in p]
        self._load(self.reqs, [r.prefilled for r in self.reqs])

    def prepare_for_decode(self) -> None:
        """One more slot for each row, and everything one further."""
        self.forward_mode, self.is_extend_in_batch, self.chunked_req = Mode.DECODE, False, None
        self.extend_lens, self.extend_num_tokens, self.decoding = [], 0, []
        slots = [self.memory.extend(r, r.kv.kv_committed_len + 1)[0] for r in self.reqs]
        for req in self.reqs:
            req.decode_batch_idx += 1
        self.seq_lens_cpu = self.seq_lens_cpu + 1
        self.seq_lens = self.seq_lens + 1
        self.orig_seq_lens = self.orig_seq_lens + 1
        self.out_cache_loc = self.gpu.tensor(slots)
        self.input_ids = None

    def mix_with(self, running: LaneBatch) -> None:
        running.prepare_for_decode()
        self.forward_mode, self.decoding = Mode.MIXED, running.reqs[:]
        self.mix_running_indices, self.mix_rows = running.req_pool_indices, running.rows
        self.extend_lens = self.extend_lens + [1] * len(running.reqs)
        self.merge(running)

    def _load(self, reqs: list[LaneRequest], lengths: list[int]) -> None:
        gpu = self.gpu
        self.reqs, self.seq_lens_cpu = reqs, torch.tensor(lengths, dtype=torch.int64)
        if not reqs:
            return
        self.rows = [r.row for r in reqs]  # type: ignore[misc]
        self.sampling_info = Sampling(gpu, reqs)
        self.req_pool_indices = gpu.tensor(self.rows)
        self.seq_lens, self.orig_seq_lens = gpu.tensor(lengths), gpu.tensor(lengths)
        gpu.hosted[self.req_pool_indices.address] = tuple(self.rows)
