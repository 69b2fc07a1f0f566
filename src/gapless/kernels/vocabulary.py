"""The operations that every model is written in.

An interpreter implements this protocol for its own handle type ``T`` (an array, a count, a recorded node) and its
own weight type ``W``. Activations have shape (tokens of the step, features). Communication is part of the
vocabulary: on one device the two collectives return their argument.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from gapless.arch.spec import Activation, AttentionSpec, ExpertSpec

T = TypeVar("T")
W = TypeVar("W", contravariant=True)


class Ops(Protocol[T, W]):
    def embed(self, table: W, scale: float) -> T:
        """Rows of ``table`` for the step's token ids, times ``scale``: (tokens, d_model)."""
        ...

    def norm(self, x: T, weight: W, eps: float) -> T:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis (RMSNorm)."""
        ...

    def linear(self, x: T, weights: tuple[W, ...], biases: tuple[W | None, ...]) -> T:
        """``x @ w.T + b`` for each weight, outputs side by side: (tokens, sum of out)."""
        ...

    def rope_cache(
        self, qkv: T, layer: int, attention: AttentionSpec, q_norm: W | None, k_norm: W | None, eps: float
    ) -> T:
        """Split q, k, v; norm q and k per head if asked; rotate both; write k and v to the step's cache slots.

        Returns q, (tokens, q_dim), rotated and not yet scaled.
        """
        ...

    def attention(self, q: T, layer: int, attention: AttentionSpec) -> T:
        """Causal attention of ``q`` over the pages of each request, the step's own tokens included: (tokens, q_dim)."""
        ...

    def gated(self, gate_up: T, activation: Activation) -> T:
        """``act(gate) * up`` of two halves side by side: (tokens, d_ff)."""
        ...

    def experts(self, x: T, router: W, gate: W, up: W, down: W, spec: ExpertSpec, activation: Activation) -> T:
        """Route each token to ``top_k`` gated feed-forwards and sum them by the router's weights: (tokens, d_model)."""
        ...

    def add(self, x: T, y: T) -> T:
        """Residual sum."""
        ...

    def all_reduce(self, x: T) -> T:
        """Sum over the tensor-parallel ranks."""
        ...

    def all_gather(self, x: T) -> T:
        """Concatenate the last axis over the tensor-parallel ranks."""
        ...

    def logits(self, x: T, head: W, softcap: float | None) -> T:
        """Scores over the vocabulary for the step's sampling rows only: (samples, vocab)."""
        ...
