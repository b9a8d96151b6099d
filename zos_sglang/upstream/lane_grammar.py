"""Masks of the lane's grammar rows: filled on the host, one copy to the device a step.

SGLang 0.5.23 makes a mask of the whole batch anew in every step: pinned memory for all rows, set to ones,
filled and copied. Here the rows without a grammar have ones on the device that nobody writes, and only the
others' rows are filled and copied. Which rows are filled, and by whose code, is as in
`SamplingBatchInfo.update_regex_vocab_mask`: a row whose request or grammar has ended is not constrained.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask, GrammarRow
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.common import is_pin_memory_available

from zos_sglang.resident.account import LaneAccount

logger = logging.getLogger(__name__)

#: Grammars whose masks are int32 words on the host, one bit a token, where ones allow everything.
_PACKED = (
    ("sglang.srt.constrained.xgrammar_backend", "XGrammarGrammar"),
    ("sglang.srt.constrained.llguidance_backend", "GuidanceGrammar"),
)
#: Defers a grammar until the reasoning has ended, or bounds the reasoning alone.
_WRAPPER = ("sglang.srt.constrained.reasoner_grammar_backend", "ReasonerGrammarObject")
#: What a wrapper without a grammar makes its masks with.
_PACKED_BACKEND = ("sglang.srt.constrained.xgrammar_backend", "XGrammarGrammarBackend.allocate_vocab_mask")


def is_packed(grammar: Any) -> bool:
    """Whether the lane can fill this grammar's mask.

    Not outlines: its masks are bytes that it writes on the device. Nor a grammar of another plugin.
    """
    if _kind(grammar) != _WRAPPER:
        return _kind(grammar) in _PACKED
    if grammar.grammar is not None:
        return _kind(grammar.grammar) in _PACKED
    allocate = grammar.allocate_vocab_mask_fn
    return allocate is not None and (allocate.__module__, allocate.__qualname__) == _PACKED_BACKEND


def _kind(grammar: Any) -> tuple[str, str]:
    return type(grammar).__module__, type(grammar).__qualname__


class MaskedSampling(SamplingBatchInfo):
    """A batch's sampling parameters whose masks come from `opened`, not from new memory for all rows."""

    opened: Opened
    masks: GrammarMasks

    def update_regex_vocab_mask(self) -> None:
        mask = self.masks.fill(self.opened)
        if mask is None:
            super().update_regex_vocab_mask()
        else:
            self.grammar_mask = GrammarMask(self.opened.first, mask)


class Opened(NamedTuple):
    """The grammars of one opening of the lane."""

    #: Any one of them: they all come from one backend.
    first: Any
    grammars: tuple[Any, ...]
    rows: int
    #: Rows of the grammars, int64 on the device; None if each row has one.
    places: Any


class GrammarMasks:
    """Owns the memory of the masks, made when the first grammar opens the lane.

    The host writes one of two pinned buffers while the device may still read the other one. A buffer comes
    round again after two steps, and by then the host has seen the tokens that were sampled behind its copy.

    Args:
        capacity: rows of the largest batch.
        device: of the logits.
        account: counts copies, bytes and faults.
    """

    def __init__(self, capacity: int, device: Any, account: LaneAccount) -> None:
        self.capacity, self.device, self.account = capacity, torch.device(device), account
        # Not under confidential computing: copies are staged there, and block.
        self._pins = self.device.type == "cuda" and is_pin_memory_available(self.device)
        self._host: Any = None
        self._staged: Any = None
        self._mask: Any = None
        self._turn = 0
        self._sound = True

    def attach(self, info: Any) -> bool:
        """Let `info` (this opening's own) fill its masks here; whether it has grammars at all.

        On the stream of the model: what a step before still reads is behind it.
        """
        if not info.grammars:
            return False
        grammars = tuple(grammar for grammar in info.grammars if grammar)
        rows = [row for row, grammar in enumerate(info.grammars) if grammar]
        first = grammars[0]
        words = first.allocate_vocab_mask(vocab_size=info.vocab_size, batch_size=1, device=self.device)
        self._make_room(words)
        # An opening before had its grammars in other rows.
        self._mask.fill_(-1)
        places = None
        if len(rows) < len(info.grammars):
            pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=self._pins)
            places = pinned.to(self.device, non_blocking=True)
        info.__class__ = MaskedSampling
        info.masks, info.opened = self, Opened(first, grammars, len(info.grammars), places)
        return True

    def fill(self, opened: Opened) -> Any:
        """Masks of all rows, int32 [rows, words] on the device, as the grammars are now; queues one copy.

        None after a fault of ours; upstream then fills its own.
        """
        if not self._sound:
            self.account.mask_faults += 1
            return None
        try:
            return self._fill(opened)
        except Exception:
            logger.exception("zos-sglang: masks of the lane failed; upstream's own are used from here on")
            self._sound = False
            self.account.fault("mask")
            self.account.mask_faults += 1
            return None

    def _fill(self, opened: Opened) -> Any:
        self._turn ^= 1
        packed = self._host[self._turn, : len(opened.grammars)]
        packed.fill_(-1)
        opened.first.fill_vocab_mask_batched(
            [
                GrammarRow(row=place, grammar=grammar)
                for place, grammar in enumerate(opened.grammars)
                if not grammar.finished and not grammar.is_terminated()
            ],
            packed,
        )
        mask = self._mask[: opened.rows]
        if self.device.type == "cuda":
            self.account.h2d_copies += 1
        if opened.places is None:
            mask.copy_(packed, non_blocking=True)
        else:
            staged = self._staged[: len(opened.grammars)]
            staged.copy_(packed, non_blocking=True)
            mask.index_copy_(0, opened.places, staged)
        return mask

    def _make_room(self, words: Any) -> None:
        """Memory for masks like `words`, [1, words], which upstream made.

        Raises ValueError if they are not what `is_packed` promises.
        """
        if words.dtype != torch.int32 or words.device.type != "cpu":
            raise ValueError(f"masks of {words.dtype} on {words.device}, not int32 on the CPU")
        width = words.shape[1]
        if self._host is not None and self._host.shape[2] == width:
            return
        self._host = torch.full((2, self.capacity, width), -1, dtype=torch.int32, pin_memory=self._pins)
        self._mask = torch.full((self.capacity, width), -1, dtype=torch.int32, device=self.device)
        self._staged = torch.empty_like(self._mask)
        self.account.pinned_bytes += self._host.nbytes
        self.account.device_bytes += 2 * self._mask.nbytes
