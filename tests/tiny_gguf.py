"""Small GGUF files with a tokenizer, written by the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tokenizers import pre_tokenizers

from cpu_ops import quantised
from families import make_hf_folder
from gapless.models.load import load_model
from gapless.models.tensor import WeightTensor

MERGES = ["Ġ t", "h e", "Ġt he"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_gguf(path: Path, family: str = "llama", quant: str = "F32", *, scratch: Path | None = None) -> Path:
    """The random model of that family (see ``families``) as one GGUF file in ``path``."""
    model = load_model(make_hf_folder(family, scratch or path.parent / f"{path.stem}-folder"))
    spec = model.spec
    arch = {"llama": "llama", "llama31": "llama", "smollm2": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe",
            "qwen3_moe_renormalized": "qwen3moe"}.get(family, spec.family)  # fmt: skip
    writer = GGUFWriter(str(path), arch)
    a = spec.layers[0].attention
    writer.add_block_count(spec.n_layers)
    writer.add_context_length(spec.context_tokens)
    writer.add_embedding_length(spec.d_model)
    writer.add_feed_forward_length(spec.layers[0].d_ff)
    writer.add_head_count(a.n_heads)
    writer.add_head_count_kv(a.n_kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(1e6 if family in ("qwen3", "mixtral") else 10000.0)
    if any(layer.attention.window for layer in spec.layers):
        writer.add_sliding_window(next(x.attention.window for x in spec.layers if x.attention.window))
    experts = spec.layers[0].experts
    if experts is not None:
        writer.add_expert_count(experts.n_experts)
        writer.add_expert_used_count(experts.top_k)
        writer.add_expert_feed_forward_length(experts.d_ff)
    _add_tokenizer(writer)
    _add_tensors(writer, model.weights, spec, arch, quant)
    if family == "llama31":
        plain = 10000.0 ** (-2 * np.arange(a.head_dim // 2) / a.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / np.array(a.rope.inv_freq)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter) -> None:
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*chars, "<|bos|>", "<|eos|>", *(m.replace(" ", "") for m in MERGES)])
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 2 + [TokenType.NORMAL] * len(MERGES))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)


def _add_tensors(writer, weights, spec, arch, quant) -> None:  # type: ignore[no-untyped-def]
    def add(name: str, tensor: WeightTensor, heads: int = 0) -> None:
        values = tensor.float32()
        if heads and arch == "llama":
            half = values.shape[0] // heads // 2
            values = values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if len(values.shape) == 1 or quant == "F32" or values.shape[-1] % 32 or "gate_inp" in name:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
            return
        q = quantised(values.reshape(-1, values.shape[-1]), quant)
        data = q.data.reshape(*values.shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[quant])

    add("token_embd.weight", weights.embed)
    add("output_norm.weight", weights.final_norm)
    if weights.lm_head is not weights.embed:
        add("output.weight", weights.lm_head)
    for i, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        a, b = layer.attention, f"blk.{i}."
        add(b + "attn_norm.weight", w.attn_norm)
        add(b + "attn_q.weight", w.q, a.n_heads)
        add(b + "attn_k.weight", w.k, a.n_kv_heads)
        add(b + "attn_v.weight", w.v)
        add(b + "attn_output.weight", w.o)
        add(b + "ffn_norm.weight", w.ffn_norm)
        for name, bias, heads in (("q", w.q_bias, a.n_heads), ("k", w.k_bias, a.n_kv_heads), ("v", w.v_bias, 0)):
            if bias is not None:
                add(f"{b}attn_{name}.bias", bias, heads)
        for name, norm in (
            ("attn_q_norm", w.q_norm), ("attn_k_norm", w.k_norm), ("post_attention_norm", w.post_attn_norm),
            ("post_ffw_norm", w.post_ffn_norm),
        ):  # fmt: skip
            if norm is not None:
                add(f"{b}{name}.weight", norm)
        suffix = "" if layer.experts is None else "_exps"
        for name, tensor in (("gate", w.gate), ("up", w.up), ("down", w.down)):
            add(f"{b}ffn_{name}{suffix}.weight", tensor)
        if w.router is not None:
            add(b + "ffn_gate_inp.weight", w.router)
