"""The forward of every decoder family, written once against the kernel vocabulary."""

from __future__ import annotations

from typing import TypeVar

from gapless.arch.spec import LayerSpec, LayerWeights, ModelSpec, ModelWeights
from gapless.kernels.vocabulary import Ops

T = TypeVar("T")
W = TypeVar("W")


def forward(ops: Ops[T, W], spec: ModelSpec, weights: ModelWeights[W]) -> T:
    """Logits of the step's sampling rows, (samples, vocab)."""
    x = ops.embed(weights.embed, spec.embed_scale)
    for index, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        x = _residual(ops, spec, x, _attention(ops, spec, index, layer, w, x), w.post_attn_norm)
        x = _residual(ops, spec, x, _feed_forward(ops, spec, layer, w, x), w.post_ffn_norm)
    x = ops.norm(x, weights.final_norm, spec.norm_eps)
    return ops.all_gather(ops.logits(x, weights.lm_head, spec.final_softcap))


def _residual(ops: Ops[T, W], spec: ModelSpec, x: T, y: T, post_norm: W | None) -> T:
    if post_norm is not None:
        y = ops.norm(y, post_norm, spec.norm_eps)
    return ops.add(x, y)


def _attention(ops: Ops[T, W], spec: ModelSpec, index: int, layer: LayerSpec, w: LayerWeights[W], x: T) -> T:
    h = ops.norm(x, w.attn_norm, spec.norm_eps)
    qkv = ops.linear(h, (w.q, w.k, w.v), (w.q_bias, w.k_bias, w.v_bias))
    q = ops.rope_cache(qkv, index, layer.attention, w.q_norm, w.k_norm, spec.norm_eps)
    return ops.all_reduce(ops.linear(ops.attention(q, index, layer.attention), (w.o,), (None,)))


def _feed_forward(ops: Ops[T, W], spec: ModelSpec, layer: LayerSpec, w: LayerWeights[W], x: T) -> T:
    h = ops.norm(x, w.ffn_norm, spec.norm_eps)
    if layer.experts is not None:
        assert w.router is not None
        y = ops.experts(h, w.router, w.gate, w.up, w.down, layer.experts, spec.activation)
    else:
        hidden = ops.gated(ops.linear(h, (w.gate, w.up), (None, None)), spec.activation)
        y = ops.linear(hidden, (w.down,), (None,))
    return ops.all_reduce(y)
