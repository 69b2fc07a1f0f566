"""What distinguishes one decoder family from another, as data.

One forward reads these; no family has code of its own. Weights are canonical when they reach it: rotary
halves are split (NeoX order), norm weights carry their offset, fused matrices are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Generic, Literal, TypeVar

W = TypeVar("W")
V = TypeVar("V")

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one layer: ``angle(pos, i) = pos * inv_freq[i]``, cos and sin times ``scale``.

    ``inv_freq`` has ``rotary_dim / 2`` entries with any long-context scaling (linear, llama3, yarn, longrope)
    already applied; dimensions beyond ``rotary_dim`` pass through unrotated.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer. ``window`` counts the positions seen, the own one included."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec
    window: int | None = None
    softcap: float | None = None

    @property
    def q_dim(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.n_kv_heads * self.head_dim


@dataclass(frozen=True)
class ExpertSpec:
    """A routed feed-forward: softmax over all of the router's scores, then the ``top_k`` experts.

    With ``renormalize`` the weights of the chosen ones are made to sum to 1.
    """

    n_experts: int
    top_k: int
    d_ff: int
    renormalize: bool = True


@dataclass(frozen=True)
class LayerSpec:
    attention: AttentionSpec
    d_ff: int
    experts: ExpertSpec | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A decoder, complete but for its weights.

    ``post_norms`` adds a norm after attention and after the feed-forward, before each residual sum (Gemma).
    ``embed_scale`` multiplies the embeddings; ``final_softcap`` bounds the logits by ``c * tanh(x / c)``.
    """

    family: str
    vocab_size: int
    d_model: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    activation: Activation
    context_tokens: int
    tied_embeddings: bool
    embed_scale: float = 1.0
    post_norms: bool = False
    final_softcap: float | None = None

    @property
    def n_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class LayerWeights(Generic[W]):
    """Canonical weights of one layer. Matrices are (out, in); biases and norms are vectors.

    A dense layer has ``gate``, ``up`` (d_ff, d_model) and ``down`` (d_model, d_ff). An expert layer has
    ``router`` (n_experts, d_model) and the same three stacked over experts: (n_experts, out, in).
    """

    attn_norm: W
    q: W
    k: W
    v: W
    o: W
    ffn_norm: W
    gate: W
    up: W
    down: W
    q_bias: W | None = None
    k_bias: W | None = None
    v_bias: W | None = None
    q_norm: W | None = None
    k_norm: W | None = None
    post_attn_norm: W | None = None
    post_ffn_norm: W | None = None
    router: W | None = None


@dataclass(frozen=True)
class ModelWeights(Generic[W]):
    """Canonical weights of a model; ``lm_head`` is the embedding itself where the two are tied."""

    embed: W
    layers: tuple[LayerWeights[W], ...]
    final_norm: W
    lm_head: W


def map_weights(convert: Callable[[W], V], weights: ModelWeights[W]) -> ModelWeights[V]:
    """Convert every weight once; a head tied to the embedding stays the same object as it."""

    def layer(w: LayerWeights[W]) -> LayerWeights[V]:
        present = {f.name: getattr(w, f.name) for f in fields(w) if getattr(w, f.name) is not None}
        return LayerWeights(**{name: convert(x) for name, x in present.items()})

    embed = convert(weights.embed)
    tied = weights.lm_head is weights.embed
    return ModelWeights(
        embed=embed,
        layers=tuple(layer(w) for w in weights.layers),
        final_norm=convert(weights.final_norm),
        lm_head=embed if tied else convert(weights.lm_head),
    )
