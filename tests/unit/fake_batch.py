"""Requests, batches and results of the fake scheduler, and the one right answer of a request.

The token of a step is a function of everything that a step may read: the request's whole history (through
the KV cache), its length, a buffer shared with the schedule stream, accumulated penalties, a sampling
parameter and a grammar state. One stale input and all tokens after it differ from `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

from tests.unit.virtual_gpu import Gpu, Tensor

VOCABULARY = 31
EOS = 0
NO_GRAMMAR = -1


def fold(digest: int, tokens: Iterable[int]) -> int:
    for token in tokens:
        digest = hash((digest, token))
    return digest


def location(rid: int, length: int) -> int:
    return hash((rid, length, 5)) % 100_003


def temperature(rid: int) -> int:
    return hash((rid, 77)) % 1009


def next_state(state: int, token: int) -> int:
    return hash((state, token)) % 97


def pick(digest: int, length: int, place: int, penalty: int, *, temp: int, state: int) -> int:
    """The token of one step."""
    words = range(VOCABULARY)
    if state != NO_GRAMMAR:
        words = [t for t in words if hash((state, t, 3)) % 3] or [1]
    return words[hash((digest, length, place, penalty, temp)) % len(words)]


@dataclass(frozen=True)
class Spec:
    """What a client asks for."""

    rid: int
    prompt: tuple[int, ...]
    max_new: int = 8
    stream: bool = False
    grammar: int = NO_GRAMMAR


def reference(spec: Spec) -> list[int]:
    """The answer of a machine that does one request at a time, one step at a time."""
    digest, length, state, out = fold(0, spec.prompt), len(spec.prompt), spec.grammar, []
    while len(out) < spec.max_new:
        place, temp = location(spec.rid, length), temperature(spec.rid)
        token = pick(digest, length, place, len(out) + 1, temp=temp, state=state)
        out.append(token)
        if token == EOS:
            break
        digest, length = fold(digest, [token]), length + 1
        state = next_state(state, token) if state != NO_GRAMMAR else state
    return out


class Mode(Enum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    VERIFY = 4

    def is_extend(self) -> bool:
        return self is not Mode.DECODE

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_mixed(self) -> bool:
        return self is Mode.MIXED


@dataclass(frozen=True)
class SpecAlgorithm:
    on: bool = False

    def is_none(self) -> bool:
        return not self.on

    def supports_grammar_overlap(self) -> bool:
        return False

    def is_dspark(self) -> bool:
        return False


class Request:
    def __init__(self, spec: Spec) -> None:
        self.spec, self.rid, self.stream = spec, spec.rid, spec.stream
        self.sampling_params = SimpleNamespace(max_new_tokens=spec.max_new)
        self.output: list[int] = []
        self.state = spec.grammar
        self.row: int | None = None
        self.prefilled = 0
        self.inflight_middle_chunks = 0
        self.retracted = self.aborted = False
        self.ended: str | None = None

    def finished(self) -> bool:
        return self.ended is not None

    def tokens(self) -> list[int]:
        return [*self.spec.prompt, *self.output]

    def accept(self, token: int) -> None:
        self.output.append(token)
        if token == EOS:
            self.ended = "eos"
        elif len(self.output) >= self.spec.max_new:
            self.ended = "length"
        elif self.aborted:
            self.ended = "abort"
        elif self.state != NO_GRAMMAR:
            self.state = next_state(self.state, token)


class SamplingInfo:
    """Sampling parameters of a batch; penalties grow each time somebody accumulates them."""

    has_custom_logit_processor = False

    def __init__(self, gpu: Gpu, reqs: list[Request]) -> None:
        self.gpu, self.reqs = gpu, reqs
        self.temps = gpu.tensor([temperature(r.rid) for r in reqs])
        self.orchestrator: list[int] | None = [len(r.output) for r in reqs]
        self.penalties: Tensor | None = None

    def update_penalties(self) -> None:
        assert self.orchestrator is not None
        self.orchestrator = [n + 1 for n in self.orchestrator]
        self.penalties = self.gpu.tensor(self.orchestrator)

    def copy_for_forward(self) -> SamplingInfo:
        self.update_penalties()
        out = object.__new__(SamplingInfo)
        out.__dict__.update(self.__dict__, orchestrator=None)
        return out

    def keep(self, rows: list[int]) -> None:
        self.reqs = [self.reqs[i] for i in rows]
        self.temps = self.gpu.tensor([temperature(r.rid) for r in self.reqs])
        assert self.orchestrator is not None
        self.orchestrator = [self.orchestrator[i] for i in rows]

    def merge(self, other: SamplingInfo) -> None:
        self.reqs = self.reqs + other.reqs
        self.temps = self.gpu.tensor([temperature(r.rid) for r in self.reqs])
        assert self.orchestrator is not None and other.orchestrator is not None
        self.orchestrator = self.orchestrator + other.orchestrator


class Batch:
    """`ScheduleBatch`, as far as a step goes. Tensors live on the schedule stream's pool."""

    def __init__(self, gpu: Gpu, reqs: list[Request], mode: Mode, algorithm: SpecAlgorithm) -> None:
        self.gpu, self.reqs, self.forward_mode, self.spec_algorithm = gpu, reqs, mode, algorithm
        self.sampling_info: SamplingInfo | None = None
        self.input_ids: Tensor | None = None
        self.prefill_input_ids_cpu: list[int] | None = None
        self.mix_running_indices: Tensor | None = None
        self.mix_rows: list[int] = []
        self.req_pool_indices: Tensor | None = None
        self.seq_lens: Tensor | None = None
        self.rows: list[int] = []
        self.lens: list[int] = []
        self.extend_lens: list[int] = []
        self.prefix_lens: list[int] = []
        self.extend_num_tokens = 0
        self.is_extend_in_batch = mode.is_extend()
        self.chunked_req: Request | None = None
        self.spec_info: Any = None
        self.forward_iter = 0
        self.after_idle_gap = False
        self.launch_ts = 0.0
        self.return_logprob = self.return_hidden_states = False

    @property
    def batch_size(self) -> int:
        return len(self.reqs)

    @property
    def has_grammar(self) -> bool:
        return any(r.spec.grammar != NO_GRAMMAR for r in self.reqs)

    def grammar_needs_sync(self) -> bool:
        return self.has_grammar

    def copy(self) -> Batch:
        """Only what processing needs: no device tensor stays alive through it."""
        out = Batch(self.gpu, self.reqs[:], self.forward_mode, self.spec_algorithm)
        out.is_extend_in_batch, out.chunked_req = self.is_extend_in_batch, self.chunked_req
        out.forward_iter = self.forward_iter
        return out

    def filter(self, leave_out: Iterable[Request | None] = ()) -> None:
        gone = list(leave_out)
        kept = [i for i, r in enumerate(self.reqs) if not r.finished() and r not in gone]
        if len(kept) == len(self.reqs):
            return
        self.reqs = [self.reqs[i] for i in kept]
        self.lens = [self.lens[i] for i in kept]
        if self.reqs:
            assert self.sampling_info is not None
            self.sampling_info.keep(kept)
            self._tensors()

    def merge(self, other: Batch) -> None:
        assert self.sampling_info is not None and other.sampling_info is not None
        self.reqs, self.lens = self.reqs + other.reqs, self.lens + other.lens
        self.sampling_info.merge(other.sampling_info)
        self._tensors()

    def prepare_for_extend(self, pieces: list[list[int]]) -> None:
        """Chunks of prompts; `pieces` are the tokens of each request in this launch."""
        self.extend_lens = [len(p) for p in pieces]
        self.prefix_lens = [r.prefilled - len(p) for r, p in zip(self.reqs, pieces, strict=True)]
        self.extend_num_tokens = sum(self.extend_lens)
        self.lens = [r.prefilled for r in self.reqs]
        self.prefill_input_ids_cpu = [t for p in pieces for t in p]
        self.sampling_info = SamplingInfo(self.gpu, self.reqs)
        self._tensors()

    def prepare_for_decode(self) -> None:
        self.forward_mode, self.is_extend_in_batch, self.chunked_req = Mode.DECODE, False, None
        self.extend_lens = self.prefix_lens = []
        self.extend_num_tokens = 0
        self.lens = [n + 1 for n in self.lens]
        self.seq_lens = self.gpu.tensor(self.lens)
        self.input_ids = None

    def mix_with(self, running: Batch) -> None:
        running.prepare_for_decode()
        self.forward_mode = Mode.MIXED
        self.mix_running_indices, self.mix_rows = running.req_pool_indices, running.rows
        self.extend_lens = self.extend_lens + [1] * len(running.reqs)
        self.prefix_lens = self.prefix_lens + [n - 1 for n in running.lens]
        self.merge(running)

    def write_shared(self) -> None:
        """The schedule stream fills the buffer that the forward reads."""
        values = tuple(location(r.rid, n) for r, n in zip(self.reqs, self.lens, strict=True))
        gpu = self.gpu
        gpu.schedule.enqueue(lambda: setattr(gpu, "shared", values))

    def _tensors(self) -> None:
        self.rows = [r.row if r.row is not None else 0 for r in self.reqs]
        self.req_pool_indices = self.gpu.tensor(self.rows)
        self.seq_lens = self.gpu.tensor(self.lens)


class Result:
    """What a launch leaves behind; `host` is pinned memory that the readback fills."""

    def __init__(self, serial: int, n: int) -> None:
        self.serial = serial
        self.host = [-1] * n
        self.next_token_ids: Tensor | None = None
        self.copy_done: Any = None
        self.delay_sample_func: Callable[[], Any] | None = None
        self.extra_keep_alive_refs: Any = None
        self.future_indices: Any = None
        self.logits_output = SimpleNamespace(next_token_logits=object())
        self.next_draft_input: Any = None
        self.copy_to_cpu: Callable[..., None] = lambda **_: None
