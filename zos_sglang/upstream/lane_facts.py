"""What a server's resolved arguments say about the lane, and one condition on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zos_sglang.resident.eligibility import Refusal

#: Attention backends whose decode step the lane can run by itself on a device.
COVERED_BACKENDS = ("triton", "fa3")
FULL, DISABLED = "full", "disabled"


@dataclass(frozen=True)
class Facts:
    """What is known before a server starts.

    `args` are its resolved arguments by attribute, `model` is SGLang's ModelConfig; `has_state`: the model
    keeps recurrent state beside its KV cache.
    """

    args: Any
    model: Any
    has_state: bool

    @property
    def on_cpu(self) -> bool:
        """Whether forwards run on the CPU: no graphs then, and any attention backend."""
        return str(self.args.device).partition(":")[0] == "cpu"

    @property
    def graphs(self) -> str:
        """How decode steps are captured: `full`, another kind, or `disabled`."""
        return DISABLED if self.on_cpu else str(self.args.cuda_graph_config.decode.backend)

    @property
    def backends(self) -> tuple[str, str]:
        """Attention backends of prefill and of decode."""
        base = self.args.attention_backend
        return self.args.prefill_attention_backend or base, self.args.decode_attention_backend or base


Test = Callable[[Facts], Any]


@dataclass(frozen=True)
class Condition:
    """Keeps the lane closed where it applies. `flag` is what to look at, `change` what to do about it.

    `covers` are the phrases that the running server has for it; default: `words`.
    """

    refusal: Refusal
    flag: str
    words: str
    change: str
    applies: Test
    covers: tuple[str, ...] = ()

    @property
    def phrases(self) -> tuple[str, ...]:
        """What the running server says."""
        return self.covers or (self.words,)


def without(refusal: Refusal, flags: str, words: str, *covers: str) -> Condition:
    """Applies where one of the flags is given; their fields have the same names."""
    fields = [flag.strip().removeprefix("--").replace("-", "_") for flag in flags.split(",")]
    return Condition(
        refusal,
        flags,
        words,
        f"leave {flags} out",
        lambda facts: any(getattr(facts.args, field) for field in fields),
        covers,
    )


def unset(refusal: Refusal, names: str, words: str, *covers: str, graphs: bool = False) -> Condition:
    """Applies where one of SGLang's variables is set (with `graphs`: only to steps as CUDA graphs)."""

    def applies(facts: Facts) -> bool:
        from sglang.srt.environ import envs

        return (not graphs or facts.graphs == FULL) and any(
            bool(getattr(envs, name.strip()).get()) for name in names.split(",")
        )

    return Condition(refusal, names, words, f"unset {names}", applies, covers)


def of_model(refusal: Refusal, words: str, applies: Test, *covers: str) -> Condition:
    """Applies to a kind of model."""
    return Condition(refusal, "--model-path", words, "nothing: another model would ride", applies, covers)
