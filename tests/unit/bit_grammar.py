"""A grammar of one rule by upstream's protocol: which tokens may follow depends on the one before.

Its masks are packed as xgrammar's: int32 words on the host, a bit a token.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject

BITS = 32


class BitGrammar(BaseGrammarObject):
    """After token `t` every token of the same parity as `t + shift` may follow; ends after `last` tokens."""

    def __init__(self, vocabulary: int, shift: int = 0, last: int = 10**9) -> None:
        super().__init__()
        self.vocabulary, self.shift, self.last = vocabulary, shift, last
        self.token = self.accepted = 0

    def allows(self, token: int) -> bool:
        return (token + self.token + self.shift) % 2 == 0

    def accept_token(self, token: int) -> None:
        if not self.is_terminated():
            if not self.allows(token):
                raise ValueError(f"token {token} after {self.token}")
            self.token, self.accepted = token, self.accepted + 1

    def is_terminated(self) -> bool:
        return self.accepted >= self.last

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
        return torch.full((batch_size, -(-vocab_size // BITS)), -1, dtype=torch.int32)

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        # Only what is forbidden is cleared: a row that was not set to ones before shows.
        words = vocab_mask[idx].tolist()
        for token in range(self.vocabulary):
            if not self.allows(token):
                word = (words[token // BITS] & 0xFFFFFFFF) & ~(1 << token % BITS)
                words[token // BITS] = word - (1 << BITS) if word >> (BITS - 1) else word
        vocab_mask[idx] = torch.tensor(words, dtype=torch.int32)

    @staticmethod
    def move_vocab_mask(vocab_mask: torch.Tensor, device: Any) -> torch.Tensor:
        return vocab_mask.to(device, non_blocking=True)

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        bits = torch.arange(BITS, device=logits.device, dtype=torch.int32)
        allowed = ((vocab_mask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits.masked_fill_(~allowed, float("-inf"))
