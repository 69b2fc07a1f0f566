"""The vocabulary as work: what a step must compute, read, write and send, known before it runs.

The forward is interpreted with sizes in the place of arrays, from the spans' (start, count) alone; no weights
are read, so a model can be priced from its config. Everything is what one rank does.

Conventions. A multiply-add is 2 FLOPs; a compare, exp, tanh, division or square root is 1. A weight is read
once a step. Keys and values are read once for each span (a tile of queries shares them), however many spans
share a page. Activations are read and written once by each operation; an implementation that fuses operations
or keeps activations on the chip undercuts that, so ``Work.memory_bytes`` leaves them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import NamedTuple

from gapless.arch.decoder import forward
from gapless.arch.sizes import WeightInfo
from gapless.arch.spec import Activation, AttentionSpec, ExpertSpec, ModelSpec, ModelWeights
from gapless.step import StepPlan


class OpKind(StrEnum):
    """The operations of the vocabulary, by name."""

    EMBED = "embed"
    NORM = "norm"
    LINEAR = "linear"
    ROPE_CACHE = "rope_cache"
    ATTENTION = "attention"
    GATED = "gated"
    EXPERTS = "experts"
    ADD = "add"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    LOGITS = "logits"


@dataclass(frozen=True)
class Work:
    """What must be done, whatever it takes. Works add.

    ``messages`` counts collectives that cross ranks; ``link_bytes`` is the least that one rank sends in them.
    """

    flops: int = 0
    weight_bytes: int = 0
    kv_read_bytes: int = 0
    kv_write_bytes: int = 0
    activation_bytes: int = 0
    messages: int = 0
    link_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def memory_bytes(self) -> int:
        """What must cross the memory bus at least: weights and cache."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes


@dataclass(frozen=True)
class StepWork:
    """The work of a step, by operation and in total."""

    by_kind: dict[OpKind, Work]
    total: Work


class StepCounter:
    """The work of any step of one model.

    Args:
        spec, weights: the model, or with ``tp`` tensor-parallel ranks the shard of one of them.
        kv_element_bytes: of the cache, scales included (2 for 16 bits; 1 + 2 / head_dim for 8 with a scale).
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights[WeightInfo],
        *,
        kv_element_bytes: float = 2,
        activation_element_bytes: float = 4,
        tp: int = 1,
    ) -> None:
        self._kv_element_bytes = kv_element_bytes
        self._activation_element_bytes = activation_element_bytes
        self._tp = tp
        # Work is a sum over layers, so layers that are alike are counted once and multiplied: the model
        # without layers, and for each kind of layer the model that has it alone, beyond the one without.
        alike = Counter(zip(spec.layers, weights.layers, strict=True))
        self._bare = replace(spec, layers=()), replace(weights, layers=())
        self._kinds = [
            (replace(spec, layers=(layer,)), replace(weights, layers=(w,)), n) for (layer, w), n in alike.items()
        ]

    def count(self, spans: Sequence[tuple[int, int]], n_samples: int | None = None) -> StepWork:
        """The work of spans of (start, count); ``n_samples`` rows of logits, one for each span if None."""
        samples = len(spans) if n_samples is None else n_samples
        bare = self._tally(spans, samples, *self._bare)
        total = {kind: list(sums) for kind, sums in bare.items()}
        for spec, weights, n in self._kinds:
            for kind, sums in self._tally(spans, samples, spec, weights).items():
                total[kind] = [t + n * (x - x0) for t, x, x0 in zip(total[kind], sums, bare[kind], strict=True)]
        by_kind = {kind: self._work(sums) for kind, sums in total.items()}
        return StepWork(by_kind, sum(by_kind.values(), Work()))

    def count_plan(self, plan: StepPlan) -> StepWork:
        """The work of a plan."""
        return self.count([(span.start, span.count) for span in plan.spans], plan.n_samples)

    def _tally(
        self,
        spans: Sequence[tuple[int, int]],
        n_samples: int,
        spec: ModelSpec,
        weights: ModelWeights[WeightInfo],
    ) -> Tally:
        ops = CountOps(spans, n_samples, self._tp)
        forward(ops, spec, weights)
        return ops.tally

    def _work(self, sums: list[float]) -> Work:
        kv, act = self._kv_element_bytes, self._activation_element_bytes
        flops, weights, kv_read, kv_write, activations, messages, link = sums
        exact = (flops, weights, kv_read * kv, kv_write * kv, activations * act, messages, link * act)
        return Work(*map(round, exact))


# For each kind the fields of Work in their order; cache, activations and link in elements.
Tally = dict[OpKind, list[float]]


class Extent(NamedTuple):
    """The shape of an activation."""

    rows: int
    features: int

    @property
    def size(self) -> int:
        return self.rows * self.features


class CountOps:
    """Implements ``Ops[Extent, WeightInfo]`` for one step, adding up in ``tally``."""

    def __init__(self, spans: Sequence[tuple[int, int]], n_samples: int, tp: int = 1) -> None:
        self._spans = spans
        self._tokens = sum(count for _, count in spans)
        self._samples = n_samples
        self._tp = tp
        self._reach: dict[int | None, tuple[int, int]] = {}
        self.tally: Tally = {kind: [0] * len(fields(Work)) for kind in OpKind}

    def embed(self, table: WeightInfo, scale: float) -> Extent:
        n_rows, features = table.shape
        out = Extent(self._tokens, features)
        touched = min(self._tokens, n_rows)
        self._add(
            OpKind.EMBED,
            flops=out.size if scale != 1.0 else 0,
            weight_bytes=table.nbytes * touched / n_rows,
            activations=out.size,
        )
        return out

    def norm(self, x: Extent, weight: WeightInfo, eps: float) -> Extent:
        self._add(OpKind.NORM, flops=4 * x.size, weight_bytes=weight.nbytes, activations=2 * x.size)
        return x

    def linear(self, x: Extent, weights: tuple[WeightInfo, ...], biases: tuple[WeightInfo | None, ...]) -> Extent:
        out = Extent(x.rows, sum(w.shape[0] for w in weights))
        present = [b for b in biases if b is not None]
        self._add(
            OpKind.LINEAR,
            flops=2 * x.rows * x.features * out.features + x.rows * sum(b.shape[0] for b in present),
            weight_bytes=sum(w.nbytes for w in weights) + sum(b.nbytes for b in present),
            activations=x.size + out.size,
        )
        return out

    def rope_cache(
        self,
        qkv: Extent,
        layer: int,
        attention: AttentionSpec,
        q_norm: WeightInfo | None,
        k_norm: WeightInfo | None,
        eps: float,
    ) -> Extent:
        a = attention
        normed = (q_norm is not None) * a.q_dim + (k_norm is not None) * a.kv_dim
        rotated = (a.n_heads + a.n_kv_heads) * a.rope.rotary_dim
        self._add(
            OpKind.ROPE_CACHE,
            flops=qkv.rows * (3 * rotated + 4 * normed),  # a pair: two multiply-adds and two products
            weight_bytes=sum(w.nbytes for w in (q_norm, k_norm) if w is not None),
            kv_write=2 * qkv.rows * a.kv_dim,
            activations=qkv.size + qkv.rows * a.q_dim,
        )
        return Extent(qkv.rows, a.q_dim)

    def attention(self, q: Extent, layer: int, attention: AttentionSpec) -> Extent:
        a = attention
        pairs, positions = self._seen(a.window)
        # A pair: q . k and its part of the values; scale, subtract, exp, sum, divide, compare; a capping.
        per_pair = a.n_heads * (4 * a.head_dim + 6 + (3 if a.softcap is not None else 0))
        self._add(OpKind.ATTENTION, flops=pairs * per_pair, kv_read=2 * positions * a.kv_dim, activations=2 * q.size)
        return q

    def gated(self, gate_up: Extent, activation: Activation) -> Extent:
        out = Extent(gate_up.rows, gate_up.features // 2)
        flops = out.size * (_ACTIVATION_FLOPS[activation] + 1)
        self._add(OpKind.GATED, flops=flops, activations=gate_up.size + out.size)
        return out

    def experts(
        self,
        x: Extent,
        router: WeightInfo,
        gate: WeightInfo,
        up: WeightInfo,
        down: WeightInfo,
        spec: ExpertSpec,
        activation: Activation,
    ) -> Extent:
        """Weight bytes are those of the experts that the step can touch at most."""
        touched = min(spec.n_experts, x.rows * spec.top_k)
        routed = x.rows * spec.top_k
        matrices = 2 * 3 * x.features * spec.d_ff
        gating = spec.d_ff * (_ACTIVATION_FLOPS[activation] + 1)
        routing = x.rows * spec.n_experts * (2 * x.features + 5)
        self._add(
            OpKind.EXPERTS,
            flops=routing + routed * (matrices + gating + 2 * x.features),
            weight_bytes=router.nbytes + (gate.nbytes + up.nbytes + down.nbytes) * touched / spec.n_experts,
            activations=2 * x.size + routed * 6 * spec.d_ff,
        )
        return x

    def add(self, x: Extent, y: Extent) -> Extent:
        self._add(OpKind.ADD, flops=x.size, activations=3 * x.size)
        return x

    def all_reduce(self, x: Extent) -> Extent:
        """A rank sends at least 2 (p - 1) / p of the data (Patarasuk and Yuan, JPDC 69, 2009)."""
        self._collective(OpKind.ALL_REDUCE, 2 * x.size)
        return x

    def all_gather(self, x: Extent) -> Extent:
        """A rank sends at least (p - 1) / p of the whole: its own part passed on to every other."""
        out = Extent(x.rows, x.features * self._tp)
        self._collective(OpKind.ALL_GATHER, out.size)
        return out

    def logits(self, x: Extent, head: WeightInfo, softcap: float | None) -> Extent:
        out = Extent(self._samples, head.shape[0])
        capping = 3 * out.size if softcap is not None else 0
        self._add(
            OpKind.LOGITS,
            flops=2 * out.size * x.features + capping,
            weight_bytes=head.nbytes if self._samples else 0,
            activations=self._samples * x.features + out.size,
        )
        return out

    def _collective(self, kind: OpKind, elements: int) -> None:
        if self._tp > 1 and elements:
            self._add(kind, messages=1, link_elements=elements * (self._tp - 1) / self._tp)

    def _seen(self, window: int | None) -> tuple[int, int]:
        """Query-key pairs of the step, and the positions whose keys and values are read."""
        if window not in self._reach:
            each = [_reach(start, count, window) for start, count in self._spans]
            self._reach[window] = sum(pairs for pairs, _ in each), sum(positions for _, positions in each)
        return self._reach[window]

    def _add(
        self,
        kind: OpKind,
        *,
        flops: float = 0,
        weight_bytes: float = 0,
        kv_read: int = 0,
        kv_write: int = 0,
        activations: int = 0,
        messages: int = 0,
        link_elements: float = 0,
    ) -> None:
        sums = self.tally[kind]
        sums[0] += flops
        sums[1] += weight_bytes
        sums[2] += kv_read
        sums[3] += kv_write
        sums[4] += activations
        sums[5] += messages
        sums[6] += link_elements


# silu: exp, add, divide, negate, multiply. gelu_tanh: tanh around a cubic, then half of x times one plus it.
_ACTIVATION_FLOPS: dict[Activation, int] = {"silu": 5, "gelu_tanh": 9}


def _reach(start: int, count: int, window: int | None) -> tuple[int, int]:
    """Pairs and positions of one span: query ``p`` sees ``min(p + 1, window)`` keys, its own included."""
    end = start + count
    if window is None or end <= window:
        return count * (start + 1 + end) // 2, end
    growing = max(0, window - start)  # queries that see fewer than a window, or just one
    pairs = growing * (start + 1 + start + growing) // 2 + (count - growing) * window
    return pairs, end - max(0, start + 1 - window)
