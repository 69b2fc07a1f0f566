"""The vocabulary in plain NumPy float32: slow, short, and the truth that faster interpreters are held to.

Results do not depend on what else is in the step. Matrix products run in tiles of a fixed number of rows, so
that BLAS sums every row in the same order however many there are; attention looks at one query at a time,
over exactly the positions it may see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from gapless.arch.spec import Activation, AttentionSpec, ExpertSpec, ModelSpec, RopeSpec
from gapless.models.tensor import WeightTensor
from gapless.step import Span

Array = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]
KvDtype = Literal["f32", "f16", "int8"]

TILE_ROWS = 8


class PagedKV:
    """The key-value cache: for each layer (pages, page_tokens, n_kv_heads, head_dim) of keys and of values.

    Stored in float32; ``dtype`` rounds what is written as a cache of that type would ("int8": one scale, the
    largest magnitude over 127, per token and head). It starts as NaN: reading what nobody wrote shows.
    """

    def __init__(self, spec: ModelSpec, n_pages: int, page_tokens: int, dtype: KvDtype = "f32") -> None:
        self.page_tokens = page_tokens
        self.dtype = dtype
        heads = [(x.attention.n_kv_heads, x.attention.head_dim) for x in spec.layers]
        shapes = [(n_pages, page_tokens, *h) for h in heads]
        self._keys = [np.full(shape, np.nan, np.float32) for shape in shapes]
        self._values = [np.full(shape, np.nan, np.float32) for shape in shapes]

    def write(self, layer: int, span: Span, keys: Array, values: Array) -> None:
        """Store (count, n_kv_heads, head_dim) at the span's positions."""
        page, offset = self._places(span.pages, span.start, span.end)
        self._keys[layer][page, offset] = _rounded(keys, self.dtype)
        self._values[layer][page, offset] = _rounded(values, self.dtype)

    def read(self, layer: int, pages: Sequence[int], first: int, end: int) -> tuple[Array, Array]:
        """Keys and values of positions ``first .. end``, each (n_kv_heads, end - first, head_dim)."""
        page, offset = self._places(pages, first, end)
        keys, values = self._keys[layer][page, offset], self._values[layer][page, offset]
        return np.ascontiguousarray(keys.transpose(1, 0, 2)), np.ascontiguousarray(values.transpose(1, 0, 2))

    def _places(self, pages: Sequence[int], first: int, end: int) -> tuple[Indices, Indices]:
        positions = np.arange(first, end)
        return np.asarray(pages, np.intp)[positions // self.page_tokens], positions % self.page_tokens


class DenseWeights:
    """Float32 copies of quantised weights, kept first come, first kept, up to ``budget_bytes``.

    A step visits all weights in a cycle, where keeping the first beats keeping the most recent.
    """

    def __init__(self, budget_bytes: int = 1 << 30) -> None:
        self._left_bytes = budget_bytes
        self._kept: dict[tuple[int, tuple[int, ...]], Array] = {}

    def __call__(self, w: WeightTensor) -> Array:
        # The address names a weight: the model keeps it in place for as long as it runs.
        key = (int(w.data.__array_interface__["data"][0]), w.shape)
        kept = self._kept.get(key)
        if kept is None:
            kept = w.float32()
            if kept.nbytes <= self._left_bytes:
                self._left_bytes -= kept.nbytes
                self._kept[key] = kept
        return kept


@dataclass(frozen=True)
class StepInput:
    """What a step runs on: its spans, their token ids side by side, and the rows whose logits are wanted."""

    spans: tuple[Span, ...]
    token_ids: Indices
    logit_rows: Indices

    @cached_property
    def positions(self) -> Indices:
        return np.concatenate([np.arange(span.start, span.end) for span in self.spans])

    @cached_property
    def rows(self) -> tuple[slice, ...]:
        """The rows of each span."""
        ends = np.cumsum([span.count for span in self.spans]).tolist()
        return tuple(slice(end - span.count, end) for span, end in zip(self.spans, ends, strict=True))


class ReferenceOps:
    """Implements ``Ops[Array, WeightTensor]`` for one step."""

    def __init__(self, step: StepInput, cache: PagedKV, dense: DenseWeights) -> None:
        self._step = step
        self._cache = cache
        self._dense = dense

    def embed(self, table: WeightTensor, scale: float) -> Array:
        return table[self._step.token_ids].float32() * np.float32(scale)

    def norm(self, x: Array, weight: WeightTensor, eps: float) -> Array:
        return rms_norm(x, self._dense(weight), eps)

    def linear(self, x: Array, weights: tuple[WeightTensor, ...], biases: tuple[WeightTensor | None, ...]) -> Array:
        parts = [matmul(x, self._dense(w)) for w in weights]
        for part, bias in zip(parts, biases, strict=True):
            if bias is not None:
                part += self._dense(bias)
        return np.concatenate(parts, axis=1)

    def rope_cache(
        self,
        qkv: Array,
        layer: int,
        attention: AttentionSpec,
        q_norm: WeightTensor | None,
        k_norm: WeightTensor | None,
        eps: float,
    ) -> Array:
        a = attention
        q, k, v = np.split(qkv, [a.q_dim, a.q_dim + a.kv_dim], axis=1)
        q, k, v = (part.reshape(len(qkv), -1, a.head_dim) for part in (q, k, v))
        if q_norm is not None:
            q = rms_norm(q, self._dense(q_norm), eps)
        if k_norm is not None:
            k = rms_norm(k, self._dense(k_norm), eps)
        q, k = (rotate(part, self._step.positions, a.rope) for part in (q, k))
        for span, rows in zip(self._step.spans, self._step.rows, strict=True):
            self._cache.write(layer, span, k[rows], v[rows])
        return q.reshape(len(qkv), a.q_dim)

    def attention(self, q: Array, layer: int, attention: AttentionSpec) -> Array:
        out = np.empty_like(q)
        for span, rows in zip(self._step.spans, self._step.rows, strict=True):
            first = _first_seen(span.start, attention.window)
            keys, values = self._cache.read(layer, span.pages, first, span.end)
            for row, position in zip(range(rows.start, rows.stop), range(span.start, span.end), strict=True):
                seen = slice(_first_seen(position, attention.window) - first, position + 1 - first)
                out[row] = _attend(q[row], keys[:, seen], values[:, seen], attention)
        return out

    def gated(self, gate_up: Array, activation: Activation) -> Array:
        gate, up = np.split(gate_up, 2, axis=1)
        return activate(gate, activation) * up

    def experts(
        self,
        x: Array,
        router: WeightTensor,
        gate: WeightTensor,
        up: WeightTensor,
        down: WeightTensor,
        spec: ExpertSpec,
        activation: Activation,
    ) -> Array:
        scores = softmax(matmul(x, self._dense(router)))
        chosen = np.argsort(-scores, axis=1, kind="stable")[:, : spec.top_k]
        shares = np.take_along_axis(scores, chosen, axis=1)
        if spec.renormalize:
            shares /= shares.sum(axis=1, keepdims=True)
        out = np.zeros_like(x)
        for expert in np.unique(chosen).tolist():
            rows, rank = np.nonzero(chosen == expert)
            h = self.linear(x[rows], (gate[expert], up[expert]), (None, None))
            y = matmul(self.gated(h, activation), self._dense(down[expert]))
            out[rows] += shares[rows, rank, None] * y
        return out

    def add(self, x: Array, y: Array) -> Array:
        return x + y

    def all_reduce(self, x: Array) -> Array:
        return x

    def all_gather(self, x: Array) -> Array:
        return x

    def logits(self, x: Array, head: WeightTensor, softcap: float | None) -> Array:
        scores = matmul(x[self._step.logit_rows], self._dense(head))
        return scores if softcap is None else _capped(scores, softcap)


def matmul(x: Array, weight: Array) -> Array:
    """``x @ weight.T``: (rows, in) by (out, in) to (rows, out), each row bit for bit as if it were alone."""
    n_tiles = -(-len(x) // TILE_ROWS)
    padded = np.zeros((n_tiles * TILE_ROWS, x.shape[1]), np.float32)
    padded[: len(x)] = x
    out = np.empty((len(padded), len(weight)), np.float32)
    for start in range(0, len(padded), TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        np.matmul(padded[tile], weight.T, out=out[tile])
    return out[: len(x)]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    mean_square: Array = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    e /= e.sum(axis=-1, keepdims=True)
    return e


def rotate(x: Array, positions: Indices, rope: RopeSpec) -> Array:
    """Rotary embedding of (tokens, heads, head_dim): dimension ``i`` pairs with ``i + rotary_dim / 2``.

    Angles are formed in float64, since at long contexts float32 loses the fraction of a turn.
    """
    angles = np.outer(positions, np.asarray(rope.inv_freq, np.float64))[:, None, :]
    cos = (np.cos(angles) * rope.scale).astype(np.float32)
    sin = (np.sin(angles) * rope.scale).astype(np.float32)
    half = rope.rotary_dim // 2
    a, b, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def activate(x: Array, activation: Activation) -> Array:
    if activation == "silu":
        # Where exp would overflow, the result is as good as 0.
        sigmoid: Array = 1 / (1 + np.exp(-np.maximum(x, np.float32(-80))))
        return x * sigmoid
    tanh: Array = np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x))
    return np.float32(0.5) * x * (1 + tanh)


def _attend(q: Array, keys: Array, values: Array, a: AttentionSpec) -> Array:
    """One query (q_dim) over the (n_kv_heads, seen, head_dim) that it sees: (q_dim)."""
    grouped = q.reshape(a.n_kv_heads, a.n_heads // a.n_kv_heads, a.head_dim)
    scores: Array = np.matmul(grouped, keys.transpose(0, 2, 1)) * np.float32(a.scale)
    if a.softcap is not None:
        scores = _capped(scores, a.softcap)
    mixed: Array = np.matmul(softmax(scores), values)
    return mixed.reshape(a.q_dim)


def _capped(x: Array, cap: float) -> Array:
    tanh: Array = np.tanh(x / np.float32(cap))
    return np.float32(cap) * tanh


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position + 1 - window)


def _rounded(x: Array, dtype: KvDtype) -> Array:
    if dtype == "f32":
        return x
    if dtype == "f16":
        return x.astype(np.float16).astype(np.float32)
    scale: Array = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    levels: Array = np.rint(x / np.where(scale == 0, np.float32(1), scale))
    return levels * scale
