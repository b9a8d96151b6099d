"""The shape of a small DeepSeek model, for `checkpoint.make_wide`: latent attention, and experts.

The widths of one head are DeepSeek V3's, which attention kernels for MLA are written for; layers, heads and
experts are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zos_sglang.testing.bench.checkpoint import common_config, mlp


@dataclass(frozen=True)
class LatentShape:
    """Sizes of a DeepSeek V3 model. The first layer is dense, the others have experts."""

    layers: int = 4
    hidden: int = 1024
    heads: int = 16
    q_rank: int = 512
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    inner: int = 2048
    experts: int = 16
    experts_a_token: int = 4
    expert_inner: int = 512
    vocab: int = 32768
    context: int = 8192

    def config(self, dtype: str) -> dict[str, Any]:
        """The model's config.json."""
        return {
            **common_config(self, dtype),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 1,
            "kv_lora_rank": self.kv_rank,
            "moe_intermediate_size": self.expert_inner,
            "moe_layer_freq": 1,
            "n_group": 2,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": self.experts_a_token,
            "num_key_value_heads": self.heads,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": self.q_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": self.context // 4,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 1.0,
            "scoring_func": "sigmoid",
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": self.value_dim,
        }

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name and shape (out, in) of every matrix."""
        found = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "lm_head.weight": (self.vocab, self.hidden),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            found |= self._attention(f"{prefix}.self_attn")
            if layer == 0:
                found |= mlp(f"{prefix}.mlp", self.hidden, self.inner)
                continue
            found[f"{prefix}.mlp.gate.weight"] = (self.experts, self.hidden)
            found |= mlp(f"{prefix}.mlp.shared_experts", self.hidden, self.expert_inner)
            for expert in range(self.experts):
                found |= mlp(f"{prefix}.mlp.experts.{expert}", self.hidden, self.expert_inner)
        return found

    def _attention(self, prefix: str) -> dict[str, tuple[int, int]]:
        query = self.heads * (self.nope_dim + self.rope_dim)
        return {
            f"{prefix}.q_a_proj.weight": (self.q_rank, self.hidden),
            f"{prefix}.q_b_proj.weight": (query, self.q_rank),
            f"{prefix}.kv_a_proj_with_mqa.weight": (self.kv_rank + self.rope_dim, self.hidden),
            f"{prefix}.kv_b_proj.weight": (self.heads * (self.nope_dim + self.value_dim), self.kv_rank),
            f"{prefix}.o_proj.weight": (self.hidden, self.heads * self.value_dim),
        }

    def gains(self) -> dict[str, int]:
        """Name and length of every vector: norms, and the bias of the router."""
        found = {"model.norm.weight": self.hidden}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            found |= {
                f"{prefix}.input_layernorm.weight": self.hidden,
                f"{prefix}.post_attention_layernorm.weight": self.hidden,
                f"{prefix}.self_attn.q_a_layernorm.weight": self.q_rank,
                f"{prefix}.self_attn.kv_a_layernorm.weight": self.kv_rank,
            }
            if layer:
                found[f"{prefix}.mlp.gate.e_score_correction_bias"] = self.experts
        return found
