"""Tiny random checkpoints whose greedy output is worth comparing.

A checkpoint with the usual narrow initialisation repeats one token whatever the prompt, and
parity on it proves nothing. Here attention is sharp and the residual stream is dominated by
what the blocks write, so the next token depends on the whole context; the vocabulary is small,
so end-of-sequence and stop tokens occur by chance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ARCHS = ("gpt2", "qwen3", "llama", "deepseek")
TINY_VERSION = 1  # raise when the weights or the tokenizer change, so old folders are rebuilt

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 64, 2, 4, 2, 128, 4096
VOCAB = 384  # a multiple of 64: no padding rows, and tensor parallelism divides it
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = "<|im_end|>"

# Byte pairs that English text uses most, in merge order; "Ġ" is the byte-level space.
MERGES = (
    "Ġ t|h e|i n|Ġ a|e r|o n|r e|Ġt he|Ġ s|a t|Ġ w|Ġ o|e n|o r|Ġ c|i s|e s|i t|a n|Ġ b|e d|Ġ f|"
    "in g|Ġ p|o u|Ġa n|a l|a r|Ġ m|Ġo f|Ġ in|Ġ d|Ġ h|Ġan d|i c|l e|Ġt o|a s|l l|o m|i on|Ġ l|e l|"
    "en t|Ġ n|Ġ re|Ġ e|s t|Ġb e|Ġ g|r o|i l|Ġi s|o w|v e|i d|Ġ on|u r|Ġ y|e t|o t|l y|i m|c h|"
    "Ġy ou|u t|v er|Ġ T|Ġ A|Ġ I|Ġ S|Ġ it|Ġf or|Ġ th|s e|c e|Ġ st|a m|a y|i g|i r|Ġth at|u n|o l|"
    "a d|Ġw h|a c|o o|k e|Ġ (|t h|i s|Ġ u|Ġ k|Ġ v|Ġ r|Ġ j|Ġ C|Ġ M|Ġ W|Ġ 1|Ġ 2|Ġ The|T h|Th e"
)
# Special tokens in the role markers, so that one turn cannot forge another.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny(folder: Path, arch: str, seed: int) -> None:
    """Write config, float32 weights, tokenizer and chat template of a tiny `arch` model."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    eos = tokenizer.convert_tokens_to_ids(EOS)
    model = _model(arch, eos)
    _initialise(model, tokenizer, seed)
    model.save_pretrained(folder, safe_serialization=True)


def write_tokenizer(folder: Path, vocab: int) -> Path:
    """Write the same tokenizer with `vocab` tokens, for a model that has none; the folder."""
    if not (folder / "tokenizer.json").is_file():
        _tokenizer(vocab).save_pretrained(folder)
    return folder


def _tokenizer(vocab_size: int = VOCAB) -> Any:
    """Byte-level BPE: every byte is a token, so any text encodes and any grammar is spellable."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for left, right in (merge.split(" ") for merge in MERGES.split("|")):
        if left in pieces and right in pieces and left + right not in pieces:
            merges.append((left, right))
            pieces.append(left + right)
    vocab = {piece: index for index, piece in enumerate(pieces)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(SPECIALS))
    # Room up to the size: ordinary words, so that every id the model can emit has a text.
    bpe.add_tokens([f"<w{index}>" for index in range(vocab_size - bpe.get_vocab_size())])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _model(arch: str, eos: int) -> Any:
    import transformers

    common = {"vocab_size": VOCAB, "eos_token_id": eos, "bos_token_id": None, "dtype": "float32"}
    if arch == "gpt2":
        config = transformers.GPT2Config(
            n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_inner=INNER, n_positions=CONTEXT, **common
        )
        return transformers.GPT2LMHeadModel(config)
    shape = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": INNER,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        **common,
    }
    if arch == "deepseek":
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**shape | _latent()))
    if arch == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def _latent() -> dict[str, Any]:
    """DeepSeek V3's own parts: multi-head latent attention, and experts in all layers but the first.

    SGLang's rotary embedding without kernels knows only DeepSeek's YaRN.
    """
    yarn = {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    return {
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS + 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_intermediate_size": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": CONTEXT // 4,
            **yarn,
        },
    }


def _initialise(model: Any, tokenizer: Any, seed: int) -> None:
    """Overwrite every weight from a seeded generator (see the module's docstring for the aim)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                scale = torch.rand(weight.shape, generator=generator)
                weight.copy_(
                    _norm_gain(name) * (0.5 + scale) if name.endswith("weight") else 0.1 * (scale - 0.5)
                )
                continue
            fan_in = weight.shape[0] if _is_conv1d(name) else weight.shape[-1]
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * (_gain(name, tied) * fan_in**-0.5))
        _rebalance(model, tokenizer)


def _is_conv1d(name: str) -> bool:
    # GPT-2 stores its projections transposed, input dimension first.
    return ".c_attn." in name or ".c_proj." in name or ".c_fc." in name


def _norm_gain(name: str) -> float:
    # Qwen3 normalises q and k per head; without this its attention would be a flat average.
    return 2.0 if "q_norm" in name or "k_norm" in name else 1.0


def _gain(name: str, tied: bool) -> float:
    """Standard deviation of the output of the weight `name`, for inputs of unit variance."""
    if "wte" in name or "embed_tokens" in name:
        # A tied head scores the last input token highest: keep that token's trace small.
        return 0.5 if tied else 4.0
    if "wpe" in name:
        return 0.25  # of the order of wte: the output must follow the text, not the position
    return 4.0 if "lm_head" in name or "c_proj" in name else 2.0


def _rebalance(model: Any, tokenizer: Any) -> None:
    """Make bytes that are no text on their own rare.

    Otherwise a third of the output would be broken UTF-8, which the detokenizer holds back.
    """
    head = model.get_output_embeddings().weight
    for piece, index in tokenizer.get_vocab().items():
        text = tokenizer.decode([index])
        if len(piece) == 1 and (text == "\ufffd" or not text.isprintable()):
            head[index] *= 0.7
