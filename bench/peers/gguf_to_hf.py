"""A Hugging Face folder with BF16 weights from a GGUF file of the llama family, for engines without GGUF."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def hf_name(name: str) -> str:
    if name in GLOBAL:
        return GLOBAL[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{LAYER[rest]}"


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the llama family's q and k in the order of interleaved rope; Hugging Face rotates halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    value = reader.get_field(key)
    return default if value is None else value.contents()


def config(reader: GGUFReader, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    heads = field(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field(reader, "llama.embedding_length"),
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv", heads),
        "rms_norm_eps": field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field(reader, "llama.rope.freq_base", 10000.0),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def convert(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    architecture = field(reader, "general.architecture")
    if architecture != "llama":
        raise SystemExit(f"{source} is of architecture {architecture}; only llama is converted")
    heads = field(reader, "llama.attention.head_count")
    heads_kv = field(reader, "llama.attention.head_count_kv", heads)
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = unpermute(weight, heads if ".attn_q." in tensor.name else heads_kv)
        tensors[hf_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config(reader, tensors), indent=1))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("source", type=Path)
    arguments.add_argument("target", type=Path)
    options = arguments.parse_args()
    convert(options.source, options.target)
