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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gapless.arch.decoder import forward
from gapless.arch.sizes import WeightInfo
from gapless.arch.spec import Activation, AttentionSpec, ExpertSpec, ModelSpec, ModelWeights
from gapless.step import StepPlan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
KEPT_BASES = 4096  # works of numbers of tokens and samples that are remembered


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


_ATTENTION = list(OpKind).index(OpKind.ATTENTION)


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
        self._bases: dict[tuple[int, int], Floats] = {}
        self._of_history: dict[int | None, tuple[Floats, Floats]] = {}

    def count(self, spans: Sequence[tuple[int, int]], n_samples: int | None = None) -> StepWork:
        """The work of spans of (start, count); ``n_samples`` rows of logits, one for each span if None."""
        total = self._total(Step(spans, len(spans) if n_samples is None else n_samples))
        by_kind = {kind: Work(*map(round, self._units(sums))) for kind, sums in total.items()}
        return StepWork(by_kind, sum(by_kind.values(), Work()))

    def count_plan(self, plan: StepPlan) -> StepWork:
        """The work of a plan."""
        return self.count([(span.start, span.count) for span in plan.spans], plan.n_samples)

    def count_steps(self, steps: Steps) -> dict[OpKind, npt.NDArray[np.int64]]:
        """The work of many steps at once, as ``count`` gives it: of each kind the fields of ``Work`` by step.

        Few steps differ in their tokens and samples; what history adds to that is in proportion to it.
        """
        alike, of = np.unique((steps.tokens << 32) + steps.samples, return_inverse=True)
        without = np.stack([self._without_history(int(key) >> 32, int(key) & 0xFFFFFFFF) for key in alike], axis=2)
        found = np.rint(without).astype(np.int64)[:, :, of]
        attention = without[_ATTENTION][:, of]
        for window, (of_pair, of_position) in self._history().items():
            pairs, positions = steps.seen(window)
            attention = attention + np.outer(of_pair, pairs) + np.outer(of_position, positions)
        found[_ATTENTION] = np.rint(attention)
        return dict(zip(OpKind, found, strict=True))

    def _without_history(self, tokens: int, samples: int) -> Floats:
        """(kinds, fields of ``Work``), if tokens saw nothing at all."""
        key = tokens, samples
        if key not in self._bases:
            if len(self._bases) >= KEPT_BASES:
                self._bases.clear()
            self._bases[key] = self._fields(_Shape(tokens, samples, {}))
        return self._bases[key]

    def _history(self) -> dict[int | None, tuple[Floats, Floats]]:
        """What a query-key pair and a position that is read add to the fields of ``Work``, by window."""
        if not self._of_history:
            nothing = self._fields(_Shape(0, 0, {}))[_ATTENTION]
            for window in {layer.attention.window for spec, _, _ in self._kinds for layer in spec.layers}:
                pair, position = (
                    self._fields(_Shape(0, 0, {window: seen}))[_ATTENTION] - nothing for seen in ((1, 0), (0, 1))
                )
                self._of_history[window] = pair, position
        return self._of_history

    def _fields(self, shape: Shape) -> Floats:
        return np.array([self._units(sums) for sums in self._total(shape).values()], np.float64)

    def _total(self, shape: Shape) -> Tally:
        bare = self._tally(shape, *self._bare)
        total = {kind: list(sums) for kind, sums in bare.items()}
        for spec, weights, n in self._kinds:
            for kind, sums in self._tally(shape, spec, weights).items():
                total[kind] = [t + n * (x - x0) for t, x, x0 in zip(total[kind], sums, bare[kind], strict=True)]
        return total

    def _tally(self, shape: Shape, spec: ModelSpec, weights: ModelWeights[WeightInfo]) -> Tally:
        ops = CountOps(shape, self._tp)
        forward(ops, spec, weights)
        return ops.tally

    def _units(self, sums: list[Any]) -> tuple[Any, ...]:
        """A tally with its elements as bytes."""
        kv, act = self._kv_element_bytes, self._activation_element_bytes
        flops, weights, kv_read, kv_write, activations, messages, link = sums
        return flops, weights, kv_read * kv, kv_write * kv, activations * act, messages, link * act


# For each kind the fields of Work in their order; cache, activations and link in elements.
Tally = dict[OpKind, list[Any]]


class Step:
    """The shape of one step: spans of (start, count), and rows of logits."""

    def __init__(self, spans: Sequence[tuple[int, int]], samples: int) -> None:
        self._spans = spans
        self._seen: dict[int | None, tuple[int, int]] = {}
        self.tokens = sum(count for _, count in spans)
        self.samples = samples

    def seen(self, window: int | None) -> tuple[int, int]:
        """Query-key pairs of the step, and the positions whose keys and values are read."""
        if window not in self._seen:
            each = [_reach(start, count, window) for start, count in self._spans]
            self._seen[window] = sum(pairs for pairs, _ in each), sum(positions for _, positions in each)
        return self._seen[window]


class Steps:
    """The shapes of many steps.

    Args:
        n_steps: how many.
        step: of each span its step, 0 .. ``n_steps`` - 1.
        start, count: of each span.
        samples: of each step its rows of logits.
    """

    def __init__(self, n_steps: int, step: Ints, start: Ints, count: Ints, samples: Ints) -> None:
        self.n_steps = n_steps
        self._step, self._start, self._count = step, start, count
        self.tokens = self._sum(count)
        self.samples = samples

    def _sum(self, of_spans: Ints) -> Ints:
        """The sum over each step's spans; exact, for int64 is added up."""
        total: Ints = np.zeros(self.n_steps, np.int64)
        np.add.at(total, self._step, of_spans)
        return total

    def seen(self, window: int | None) -> tuple[Ints, Ints]:
        """As ``Step.seen``, of each step."""
        pairs, positions = _reaches(self._start, self._count, window)
        return self._sum(pairs), self._sum(positions)


class _Shape:
    """A step of which only sums are given: pairs and positions by window, 0 where there are none."""

    def __init__(self, tokens: int, samples: int, seen: dict[int | None, tuple[int, int]]) -> None:
        self.tokens, self.samples = tokens, samples
        self._seen = seen

    def seen(self, window: int | None) -> tuple[int, int]:
        return self._seen.get(window, (0, 0))


Shape = Step | _Shape


class Extent(NamedTuple):
    """The shape of an activation."""

    rows: int
    features: int

    @property
    def size(self) -> int:
        return self.rows * self.features


class CountOps:
    """Implements ``Ops[Extent, WeightInfo]`` for a step, adding up in ``tally``."""

    def __init__(self, shape: Shape, tp: int = 1) -> None:
        self._shape = shape
        self._tokens = shape.tokens
        self._samples = shape.samples
        self._tp = tp
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
        pairs, positions = self._shape.seen(a.window)
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
        touched = min(x.rows * spec.top_k, spec.n_experts)
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
            weight_bytes=head.nbytes * min(self._samples, 1),
            activations=self._samples * x.features + out.size,
        )
        return out

    def _collective(self, kind: OpKind, elements: Any) -> None:
        if self._tp > 1:
            share = (self._tp - 1) / self._tp
            self._add(kind, messages=min(elements, 1), link_elements=elements * share)

    def _add(
        self,
        kind: OpKind,
        *,
        flops: Any = 0,
        weight_bytes: Any = 0,
        kv_read: Any = 0,
        kv_write: Any = 0,
        activations: Any = 0,
        messages: Any = 0,
        link_elements: Any = 0,
    ) -> None:
        found = (flops, weight_bytes, kv_read, kv_write, activations, messages, link_elements)
        self.tally[kind] = [x + y for x, y in zip(self.tally[kind], found, strict=True)]


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


def _reaches(start: Ints, count: Ints, window: int | None) -> tuple[Ints, Ints]:
    """``_reach`` of many spans."""
    end = start + count
    whole: Ints = count * (start + 1 + end) // 2
    if window is None:
        return whole, end
    growing = np.maximum(0, window - start)
    pairs = growing * (start + 1 + start + growing) // 2 + (count - growing) * window
    fits = end <= window
    return np.where(fits, whole, pairs), np.where(fits, end, end - np.maximum(0, start + 1 - window))
