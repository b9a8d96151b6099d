"""The model under test, and prompts of exact token lengths in ordinary English.

Everything is drawn from seeded generators, so both servers are sent the same bytes.
"""

from __future__ import annotations

import json
import random
from functools import cached_property
from pathlib import Path
from typing import Any

SUBJECTS = """\
The river
A small boat
The old teacher
My neighbour
The night train
A quiet garden
The museum
Our kitchen
The northern wind
A curious child
The engineer
The library
A green hill
The city
The baker
An honest lawyer
The mountain road
The last ship
A young doctor
The orchestra""".splitlines()
VERBS = """\
carries
remembers
builds
repairs
watches
describes
follows
crosses
measures
paints
answers
protects
collects
explains
forgets
studies
opens
changes
teaches
avoids""".splitlines()
OBJECTS = """\
the long bridge
a broken clock
the harvest of the year
three letters from Paris
the dark water
a map of the coast
the wooden gate
an old song
the price of bread
the number 42
a simple proof
the way home
two cups of tea
the first snow
a strange machine
the history of glass
the sea
a list of names
the shape of a leaf
every second page""".splitlines()
QUESTIONS = """\
What is the capital of France?
Name three colours of the rainbow.
How many days has a week?
Write one sentence about the sea.
What is two plus three?
Why is the sky blue?
Give me a word that rhymes with house.
Who wrote Hamlet?
What do bees make?
Translate good morning into French.
Which animal barks?
What is the opposite of hot?
Name a fruit that is yellow.
What is the largest ocean?
How do plants drink?
Say hello.""".splitlines()


class ModelInfo:
    """A model folder: its tokenizer, its vocabulary and its end-of-sequence ids."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())

    @cached_property
    def eos_ids(self) -> list[int]:
        """Ids that end an answer."""
        extra = self.path / "generation_config.json"
        source = json.loads(extra.read_text()) if extra.is_file() else {}
        eos = source.get("eos_token_id", self.config.get("eos_token_id"))
        return [] if eos is None else list(eos) if isinstance(eos, list) else [eos]

    def lasting(self, tokens: int) -> int:
        """Length of an answer that outlasts a control call: `tokens`, and more for a tiny model,
        which makes 2,000 a second while a busy machine delivers the call late."""
        return tokens * 4 if self.config.get("hidden_size", 0) <= 128 else tokens

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.path / "tokenizer.json"))

    def ids(self, tokens: int, seed: int) -> list[int]:
        """A prompt of exactly `tokens` token ids."""
        text = story(seed, sentences=4 + tokens // 4)
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(found) < tokens:
            raise ValueError(f"{len(found)} tokens in the story, {tokens} wanted")
        return found[:tokens]


def story(seed: int, sentences: int = 3) -> str:
    """A few English sentences; another seed starts with another number, so prefixes differ."""
    rng = random.Random(seed)
    parts = [f"{seed}."]
    for _ in range(sentences):
        parts.append(f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}.")
    return " ".join(parts)


def question(index: int) -> str:
    """A short question in English, the same one every len(QUESTIONS)."""
    return QUESTIONS[index % len(QUESTIONS)]
