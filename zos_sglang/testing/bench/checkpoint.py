"""A random checkpoint of Qwen3-0.6B's shape, made on the spot in seconds.

Weights as `--load-format dummy` makes them repeat one token whatever the prompt, so equal digests would
prove nothing. Wide ones make the next token depend on the whole context.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zos_sglang.testing.models import build

_VERSION = 1
_SHARD = "model.safetensors"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 model; the defaults are Qwen3-0.6B's (its head untied)."""

    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 3072
    vocab: int = 151936
    context: int = 40960

    def config(self, dtype: str) -> dict[str, Any]:
        """The model's config.json."""
        return {
            **common_config(self, dtype),
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "head_dim": self.head_dim,
            "num_key_value_heads": self.kv_heads,
            "rope_theta": 1000000,
        }

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name and shape (out, in) of every matrix."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "lm_head.weight": (self.vocab, self.hidden),
        }
        for layer in range(self.layers):
            attention = f"model.layers.{layer}.self_attn"
            found |= {
                f"{attention}.q_proj.weight": (q, self.hidden),
                f"{attention}.k_proj.weight": (kv, self.hidden),
                f"{attention}.v_proj.weight": (kv, self.hidden),
                f"{attention}.o_proj.weight": (self.hidden, q),
                **mlp(f"model.layers.{layer}.mlp", self.hidden, self.inner),
            }
        return found

    def gains(self) -> dict[str, int]:
        """Name and length of every norm's weight."""
        found = {"model.norm.weight": self.hidden}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            found |= {
                f"{prefix}.input_layernorm.weight": self.hidden,
                f"{prefix}.post_attention_layernorm.weight": self.hidden,
                f"{prefix}.self_attn.q_norm.weight": self.head_dim,
                f"{prefix}.self_attn.k_norm.weight": self.head_dim,
            }
        return found


class Sizes(Protocol):
    """What a checkpoint is made from: `Shape`, or that of another kind of model."""

    def config(self, dtype: str) -> dict[str, Any]:
        """The model's config.json."""

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name and shape (out, in) of every matrix."""

    def gains(self) -> dict[str, int]:
        """Name and length of every vector."""


def common_config(shape: Any, dtype: str) -> dict[str, Any]:
    """What the config.json of every model here has; sizes are attributes of `shape`."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": shape.vocab - 1,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.inner,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Name and shape (out, in) of the matrices of one gated MLP."""
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def make_wide(out: Path, shape: Sizes | None = None, *, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write config and wide random weights to folder `out` (about 1.5 GB at the default shape).

    On the GPU where there is one. Returns at once if `out` already holds the same model.
    """
    wanted = shape or Shape()
    spec = {"model": "wide", "shape": repr(wanted), "dtype": dtype, "seed": seed, "version": _VERSION}
    build(out, spec, lambda folder: _write_wide(folder, wanted, dtype, seed))
    return out


def _write_wide(out: Path, shape: Sizes, dtype: str, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    kind = getattr(torch, dtype)
    weights = {}
    for name, size in shape.matrices().items():
        noise = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        weights[name] = noise.mul_(_gain(name) * size[1] ** -0.5).to(kind).cpu()
    for name, length in shape.gains().items():
        gain = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
        weights[name] = torch.full((length,), gain, dtype=kind)
    save_file(weights, out / _SHARD, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(shape.config(dtype), indent=1))
    if device == "cuda":
        torch.cuda.empty_cache()


def write_config(out: Path, shape: Shape | None = None, *, dtype: str = "bfloat16") -> Path:
    """Only a config.json, for `--load-format dummy`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps((shape or Shape()).config(dtype), indent=1))
    return out


def vocabulary(model: Path) -> int:
    """Number of token ids of the model in folder `model`."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def context(model: Path) -> int:
    """Number of positions of the model in folder `model`."""
    return int(json.loads((model / "config.json").read_text())["max_position_embeddings"])


def _gain(name: str) -> float:
    # Embeddings of unit variance per element, and a residual stream that the blocks dominate.
    return 4.0 if "embed_tokens" in name or "lm_head" in name else 2.0
