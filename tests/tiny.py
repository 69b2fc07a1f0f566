"""Random models built in memory, in canonical form: no file, no loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.arch.spec import (
    AttentionSpec,
    ExpertSpec,
    LayerSpec,
    LayerWeights,
    ModelSpec,
    ModelWeights,
    RopeSpec,
)
from gapless.models.tensor import WeightTensor


@dataclass(frozen=True)
class TinyModel:
    spec: ModelSpec
    weights: ModelWeights[WeightTensor]


def float_weight(name: str, values: npt.NDArray[np.float32]) -> WeightTensor:
    data = np.ascontiguousarray(values, np.float32).view(np.uint8)
    return WeightTensor(name, "F32", values.shape, data)


def tiny_model(
    *,
    seed: int = 0,
    n_layers: int = 2,
    d_model: int = 64,
    d_ff: int = 96,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 32,
    vocab_size: int = 288,
    context_tokens: int = 512,
    windows: tuple[int | None, ...] = (None,),
    softcap: float | None = None,
    experts: ExpertSpec | None = None,
    bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
) -> TinyModel:
    """A decoder with these features; ``windows`` are dealt to the layers in turn."""
    rope = RopeSpec(tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)))
    layers = tuple(
        LayerSpec(
            AttentionSpec(n_heads, n_kv_heads, head_dim, head_dim**-0.5, rope, windows[i % len(windows)], softcap),
            d_ff,
            experts,
        )
        for i in range(n_layers)
    )
    spec = ModelSpec(
        family="llama",
        vocab_size=vocab_size,
        d_model=d_model,
        layers=layers,
        norm_eps=1e-5,
        activation="silu",
        context_tokens=context_tokens,
        tied_embeddings=True,
        post_norms=post_norms,
        final_softcap=softcap,
    )
    draw = _Draw(seed)
    embed = draw.matrix(vocab_size, d_model, scale=0.3)
    weights = tuple(_layer(draw, spec, layer, bias, qk_norm) for layer in layers)
    return TinyModel(spec, ModelWeights(embed, weights, draw.norm(d_model), embed))


class _Draw:
    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._names: Iterator[str] = (f"w{i}" for i in range(1 << 30))

    def matrix(self, *shape: int, scale: float | None = None) -> WeightTensor:
        spread = shape[-1] ** -0.5 if scale is None else scale
        noise = self._rng.standard_normal(shape, np.float32) * np.float32(spread)
        return float_weight(next(self._names), noise)

    def norm(self, size: int) -> WeightTensor:
        noise = self._rng.standard_normal(size, np.float32)
        return float_weight(next(self._names), 1 + np.float32(0.2) * noise)


def _layer(draw: _Draw, spec: ModelSpec, layer: LayerSpec, bias: bool, qk_norm: bool) -> LayerWeights[WeightTensor]:
    a, d = layer.attention, spec.d_model
    stack = () if layer.experts is None else (layer.experts.n_experts,)
    d_ff = layer.d_ff if layer.experts is None else layer.experts.d_ff
    return LayerWeights(
        attn_norm=draw.norm(d),
        q=draw.matrix(a.q_dim, d, scale=2 * d**-0.5),
        k=draw.matrix(a.kv_dim, d, scale=2 * d**-0.5),
        v=draw.matrix(a.kv_dim, d),
        o=draw.matrix(d, a.q_dim),
        ffn_norm=draw.norm(d),
        gate=draw.matrix(*stack, d_ff, d),
        up=draw.matrix(*stack, d_ff, d),
        down=draw.matrix(*stack, d, d_ff),
        q_bias=draw.matrix(a.q_dim, scale=0.3) if bias else None,
        k_bias=draw.matrix(a.kv_dim, scale=0.3) if bias else None,
        v_bias=draw.matrix(a.kv_dim, scale=0.3) if bias else None,
        q_norm=draw.norm(a.head_dim) if qk_norm else None,
        k_norm=draw.norm(a.head_dim) if qk_norm else None,
        post_attn_norm=draw.norm(d) if spec.post_norms else None,
        post_ffn_norm=draw.norm(d) if spec.post_norms else None,
        router=None if layer.experts is None else draw.matrix(layer.experts.n_experts, d, scale=2 * d**-0.5),
    )
