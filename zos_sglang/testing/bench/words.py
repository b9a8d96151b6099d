"""A tokenizer for models that have none, and texts of a wanted number of tokens in any tokenizer.

SGLang's own benchmark needs a tokenizer: it makes prompts with it, and times an answer by the text that comes
in. Models made on the spot (`checkpoint.py`) have none, and none can be downloaded where there is no network.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from zos_sglang.testing.bench.checkpoint import vocabulary

_FILE = "tokenizer.json"
_TRIES = 8


def tokenizer_of(model: Path, cache: Path) -> Path:
    """The folder of the model's tokenizer: its own, else one of words, made under `cache` if need be."""
    if (model / _FILE).is_file():
        return model
    size = vocabulary(model)
    return make_words(cache / f"words-{size}", size)


def make_words(out: Path, size: int) -> Path:
    """Write a tokenizer of `size` words w0, w1, ... to folder `out`; the last one ends a sequence.

    A token is a word and a word a token, so text and token ids turn into each other without loss, and
    whatever a random model says is text: bytes that are no UTF-8, which a byte-level tokenizer holds back,
    do not occur. It is quicker than a trained one, in all modes alike, and not in the scheduler's process.
    That of `tiny.write_tokenizer`, which can spell any grammar, takes ten seconds to load at 150,000 tokens,
    and each run of SGLang's benchmark loads its tokenizer twice.
    """
    if (out / _FILE).is_file():
        return out
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=f"w{size - 1}", pad_token="w0", clean_up_tokenization_spaces=False
    )
    partial = out.with_name(out.name + ".partial")
    made.save_pretrained(partial)
    partial.rename(out)
    return out


class Texts:
    """Texts of a wanted number of tokens, of random tokens of the tokenizer in folder `folder`."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(folder / _FILE))
        added = json.loads((folder / _FILE).read_text())["added_tokens"]
        self._special = {token["id"] for token in added if token["special"]}
        self._size = self._tokenizer.get_vocab_size()

    def length(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: int, source: random.Random) -> str:
        """A text of `tokens` tokens; byte-pair merges across its tokens may make it a few shorter."""
        ids: list[int] = []
        for _ in range(_TRIES):
            ids += [self._plain(source) for _ in range(tokens - len(ids))]
            ids = self._tokenizer.encode(self._tokenizer.decode(ids), add_special_tokens=False).ids
            if len(ids) >= tokens:
                break
        text: str = self._tokenizer.decode(ids[:tokens])
        return text

    def _plain(self, source: random.Random) -> int:
        """A token that is text by itself, and not a piece of a character."""
        while True:
            token = source.randrange(self._size)
            text = self._tokenizer.decode([token])
            if token not in self._special and text.isascii() and text.isprintable():
                return token
