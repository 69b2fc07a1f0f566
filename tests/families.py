"""A tiny random model of every family, as a Hugging Face folder, made without torch.

``data/families.json`` holds what ``save_pretrained`` wrote for each config below: ``config.json`` and the
names and shapes of the tensors. The values come from NumPy's generator: everyone makes the same folder.
``data/families.npz`` holds logits that transformers computed from the folders of seed 0, in float32 and with
eager attention. ``record_families.py`` writes both files anew.
"""

from __future__ import annotations

import json
import math
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Array = npt.NDArray[np.float32]

DATA = Path(__file__).parent / "data"
BOS, EOS = 256, 257

# The text that logits are recorded for: longer than every window and than longrope's original context.
TOKEN_IDS: tuple[int, ...] = tuple(np.random.default_rng(7).integers(0, 256, 56).tolist())
# Recorded: every 5th position and every 7th score, which keeps the file small.
RECORDED = (slice(None, None, 5), slice(None, None, 7))

_BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [1.5 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": 32,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

# Name, class of the config, and what differs from the base.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-5, "hidden_size": 128, "head_dim": 32}),
    "llama31": ("LlamaConfig", {"rope_parameters": _LLAMA3, "head_dim": 32}),
    "smollm2": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 16, "head_dim": 32, "num_attention_heads": 2}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "vocab_size": 307, "hidden_size": 128}),
    "qwen3": (
        "Qwen3Config",
        {"head_dim": 64, "num_key_value_heads": 1, "rope_parameters": {"rope_theta": 1e6}},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 24, "hidden_size": 128, "num_key_value_heads": 4}),
    "phi3_longrope": (
        "Phi3Config",
        {"hidden_size": 128, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 32},
    ),
    "phi4_mini": (
        "Phi3Config",
        {
            "hidden_size": 128,
            "tie_word_embeddings": True,
            "rope_parameters": {
                **_LONGROPE,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 12,
                "long_factor": [1.0 + i for i in range(12)],
            },
            "original_max_position_embeddings": 32,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "tie_word_embeddings": True,
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "tie_word_embeddings": True,
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 4,
            "rope_parameters": _GEMMA3_ROPE,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "head_dim": 32,
        },
    ),
    "qwen3_moe_renormalized": (
        "Qwen3MoeConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "head_dim": 32,
        },
    ),
}


def families() -> list[str]:
    """Names that ``make_hf_folder`` takes."""
    return list(TINY)


def tiny_config(name: str) -> dict[str, Any]:
    """Keyword arguments of the family's config class."""
    return {**_BASE, **TINY[name][1]}


def make_hf_folder(name: str, path: Path, seed: int = 0, *, legacy: bool = False) -> Path:
    """Write config.json, model.safetensors (float32) and a byte-level tokenizer into ``path``, and return it.

    ``legacy`` writes the config with the fields of transformers 4, as most folders on the hub have it.
    """
    recorded = _recorded()[name]
    path.mkdir(parents=True, exist_ok=True)
    config = _legacy_config(recorded["config"]) if legacy else recorded["config"]
    (path / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(path, recorded["tensors"], seed)
    _write_tokenizer(path)
    return path


def golden_logits(name: str) -> Array:
    """What transformers computes for ``TOKEN_IDS`` from the folder of seed 0, at the ``RECORDED`` places."""
    with np.load(DATA / "families.npz") as file:
        logits: Array = file[name]
    return logits


def write_weights(path: Path, shapes: dict[str, list[int]], seed: int) -> None:
    """Random tensors of these names; a value depends on seed, name and place alone."""
    save_file(
        {name: _values(name, tuple(shape), seed) for name, shape in shapes.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )


def _values(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Every part matters: norms differ by channel, biases count, attention and routing are sharp."""
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, np.float32)
    if "norm" in name:
        return 1 + np.float32(0.2) * noise
    if name.endswith("bias"):
        return np.float32(0.5) * noise
    if "embed_tokens" in name:
        return np.float32(0.25) * noise
    sharp = any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "gate.weight"))
    return noise * np.float32((1.5 if sharp else 1.0) / math.sqrt(shape[-1]))


@cache
def _recorded() -> dict[str, dict[str, Any]]:
    recorded: dict[str, dict[str, Any]] = json.loads((DATA / "families.json").read_text())
    return recorded


def _legacy_config(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as folders on the hub have it from transformers 4."""
    config = dict(config)
    config.pop("layer_types", None)  # Gemma 2 alternates; Gemma 3 has a pattern
    if config["model_type"] == "qwen2":
        config |= {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        local = rope["sliding_attention"]
        rope = rope["full_attention"]
        config["rope_local_base_freq"] = local["rope_theta"]
        config["sliding_window_pattern"] = 3
        del config["_sliding_window_pattern"]
    scaling = dict(rope)
    config["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        config["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    config["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if scaling.get("rope_type") == "longrope":
        scaling["type"] = scaling.pop("rope_type")
        scaling.pop("original_max_position_embeddings", None)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    return config


def _write_tokenizer(path: Path) -> None:
    vocab = {char: id_ for id_, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    assert tokenizer.token_to_id("<|bos|>") == BOS
    assert tokenizer.token_to_id("<|eos|>") == EOS
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
