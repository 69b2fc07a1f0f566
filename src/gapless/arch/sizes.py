"""The weights of a model by size alone, from a loaded model or from its description."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gapless.arch.spec import LayerSpec, LayerWeights, ModelSpec, ModelWeights, map_weights


@dataclass(frozen=True)
class WeightInfo:
    """A weight without its values: logical shape, and the bytes that it takes as stored."""

    shape: tuple[int, ...]
    nbytes: int


class Stored(Protocol):
    """A weight that knows its logical shape and its stored size, as ``WeightTensor`` does."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Stored)


def weight_infos(weights: ModelWeights[S]) -> ModelWeights[WeightInfo]:
    """Descriptors of loaded weights."""
    return map_weights(lambda w: WeightInfo(w.shape, w.nbytes), weights)


def planned_weights(
    spec: ModelSpec,
    bits: float,
    *,
    embed_bits: float | None = None,
    vector_bits: float = 32,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelWeights[WeightInfo]:
    """Descriptors for a model that is only described.

    Args:
        bits: for each element of a matrix, scales included (8.5 for GGUF's Q8_0, 5 for Q4_1, 16 for BF16).
        embed_bits: for the embedding and the head; ``bits`` if None.
        vector_bits: for norms and biases.
    """
    sizes = _Sizes(bits, bits if embed_bits is None else embed_bits, vector_bits)
    embed = sizes.table(spec.vocab_size, spec.d_model)
    head = embed if spec.tied_embeddings else sizes.table(spec.vocab_size, spec.d_model)
    layers = tuple(_planned_layer(spec, layer, sizes, qkv_bias, qk_norm) for layer in spec.layers)
    return ModelWeights(embed, layers, sizes.vector(spec.d_model), head)


@dataclass(frozen=True)
class _Sizes:
    bits: float
    embed_bits: float
    vector_bits: float

    def matrix(self, *shape: int) -> WeightInfo:
        return _info(shape, self.bits)

    def table(self, *shape: int) -> WeightInfo:
        return _info(shape, self.embed_bits)

    def vector(self, size: int) -> WeightInfo:
        return _info((size,), self.vector_bits)


def _info(shape: tuple[int, ...], bits: float) -> WeightInfo:
    return WeightInfo(shape, math.ceil(math.prod(shape) * bits / 8))


def _planned_layer(
    spec: ModelSpec, layer: LayerSpec, sizes: _Sizes, qkv_bias: bool, qk_norm: bool
) -> LayerWeights[WeightInfo]:
    a, d, experts = layer.attention, spec.d_model, layer.experts
    stack = () if experts is None else (experts.n_experts,)
    d_ff = layer.d_ff if experts is None else experts.d_ff
    norm, head_norm = sizes.vector(d), sizes.vector(a.head_dim) if qk_norm else None
    q_bias, kv_bias = (sizes.vector(n) if qkv_bias else None for n in (a.q_dim, a.kv_dim))
    return LayerWeights(
        attn_norm=norm,
        q=sizes.matrix(a.q_dim, d),
        k=sizes.matrix(a.kv_dim, d),
        v=sizes.matrix(a.kv_dim, d),
        o=sizes.matrix(d, a.q_dim),
        ffn_norm=norm,
        gate=sizes.matrix(*stack, d_ff, d),
        up=sizes.matrix(*stack, d_ff, d),
        down=sizes.matrix(*stack, d, d_ff),
        q_bias=q_bias,
        k_bias=kv_bias,
        v_bias=kv_bias,
        q_norm=head_norm,
        k_norm=head_norm,
        post_attn_norm=norm if spec.post_norms else None,
        post_ffn_norm=norm if spec.post_norms else None,
        router=None if experts is None else sizes.matrix(experts.n_experts, d),
    )
