"""The recording interpreter: runs a model's forward once and leaves a tape that a compiled function replays.

An operation is held back until it is known where its result goes: a norm until it is known whether int8 or float32
is wanted, a product until it is known whether it adds to the residual, feeds a gate or stands alone. So the fused
operations come out of the one forward, in one pass and without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from gapless.arch.spec import Activation, AttentionSpec, ExpertSpec
from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import Arena
from gapless.kernels.cpu.isa import Isa
from gapless.kernels.cpu.kv import KvPool
from gapless.kernels.cpu.pack import PackedMatrix, layout_of, pack_interleaved, pack_stacked
from gapless.kernels.cpu.packing import BLOCK
from gapless.kernels.cpu.tape import Quantised, Rows, Tape, float_bits
from gapless.models.tensor import WeightTensor

TOKEN_BLOCK_BYTES = 512 << 10  # activations that a product keeps in the second-level cache
TILE_TOKENS = 8
UNIT_SCRATCH_BYTES = TILE_TOKENS * 2 * BLOCK * 4

ACTIVATIONS: dict[Activation, int] = {"silu": abi.ACT_SILU, "gelu_tanh": abi.ACT_GELU_TANH}


@dataclass(frozen=True, eq=False)
class Normed:
    """``norm(x)``, not yet computed; for the step's samples only if ``samples``."""

    x: Rows
    weight: WeightTensor
    eps: float
    samples: bool = False


@dataclass(frozen=True, eq=False)
class Product:
    """``x @ w.T + b`` of each weight side by side, not yet computed."""

    x: Node
    weights: tuple[WeightTensor, ...]
    biases: tuple[WeightTensor | None, ...]

    @property
    def width(self) -> int:
        return sum(w.shape[0] for w in self.weights)


@dataclass(frozen=True, eq=False)
class Gated:
    """``act(gate) * up`` of a product, not yet computed."""

    gate_up: Product
    activation: Activation


Node = Rows | Normed | Product | Gated


class Weights:
    """Packs weights once each; ``release`` is told of every tensor that is no longer needed."""

    def __init__(self, isa: Isa, arena: Arena, float_weights: bool, release: Callable[[WeightTensor], None]) -> None:
        self._isa = isa
        self._arena = arena
        self._float = float_weights
        self._release = release
        self.nbytes = 0  # of packed weights
        self._stacked: dict[tuple[int, ...], PackedMatrix] = {}

    def stacked(self, tensors: Sequence[WeightTensor]) -> PackedMatrix:
        """Matrices one below the other. The same tensors give the same matrix (a tied head)."""
        key = tuple(t.data.__array_interface__["data"][0] for t in tensors)
        if key not in self._stacked:
            layout = layout_of(tensors, self._float)
            self._stacked[key] = pack_stacked(tensors, layout, self._isa, self._arena)
            self._done(tensors, self._stacked[key])
        return self._stacked[key]

    def interleaved(self, gate: WeightTensor, up: WeightTensor) -> PackedMatrix:
        packed = pack_interleaved(gate, up, layout_of((gate, up), self._float), self._isa, self._arena)
        self._done((gate, up), packed)
        return packed

    def is_float(self, tensors: Sequence[WeightTensor]) -> bool:
        return layout_of(tensors, self._float) in ("f32", "f16", "bf16")

    def runs(self, tensors: Sequence[WeightTensor]) -> list[list[WeightTensor]]:
        """Consecutive tensors that pack to one layout."""
        return [list(run) for _, run in groupby(tensors, lambda t: layout_of((t,), self._float))]

    def _done(self, tensors: Sequence[WeightTensor], packed: PackedMatrix) -> None:
        self.nbytes += packed.shape.nbytes
        for tensor in tensors:
            self._release(tensor)


class RecordOps:
    """Implements ``Ops[Node, WeightTensor]``."""

    def __init__(self, tape: Tape, weights: Weights, attention: KvPool) -> None:
        self._tape = tape
        self._weights = weights
        self._attention = attention
        self._fed: tuple[Node, bool, Rows | Quantised] | None = None
        self.logits_rows: Rows | None = None

    def embed(self, table: WeightTensor, scale: float) -> Node:
        packed = self._weights.stacked((table,))
        x = self._tape.rows("residual", table.shape[1])
        words = {
            abi.ROW_X: packed.address,
            abi.ROW_PAIR_BYTES: packed.shape.pair_bytes,
            abi.ROW_Y: x.address,
            abi.ROW_Y_STRIDE: x.stride,
            abi.ROW_WIDTH: x.width,
            abi.ROW_SCALAR: float_bits(scale),
        }
        self._tape.emit(f"embed_{packed.shape.layout}", words)
        return x

    def norm(self, x: Node, weight: WeightTensor, eps: float) -> Node:
        return Normed(self._materialised(x, "branch"), weight, eps)

    def linear(self, x: Node, weights: tuple[WeightTensor, ...], biases: tuple[WeightTensor | None, ...]) -> Node:
        return Product(x, weights, biases)

    def rope_cache(
        self,
        qkv: Node,
        layer: int,
        attention: AttentionSpec,
        q_norm: WeightTensor | None,
        k_norm: WeightTensor | None,
        eps: float,
    ) -> Node:
        norms = [None if w is None else self._tape.vector(w.float32()) for w in (q_norm, k_norm)]
        return self._attention.rope_cache(self._materialised(qkv, "qkv"), layer, attention, norms[0], norms[1], eps)

    def attention(self, q: Node, layer: int, attention: AttentionSpec) -> Node:
        assert isinstance(q, Rows)
        return self._attention.attention(q, layer, attention)

    def gated(self, gate_up: Node, activation: Activation) -> Node:
        assert isinstance(gate_up, Product)
        return Gated(gate_up, activation)

    def experts(
        self,
        x: Node,
        router: WeightTensor,
        gate: WeightTensor,
        up: WeightTensor,
        down: WeightTensor,
        spec: ExpertSpec,
        activation: Activation,
    ) -> Node:
        routing = self._route(x, router, spec)
        gathered = self._gather(x, self._weights.is_float((gate[0], up[0])), spec, routing)
        hidden = self._expert_products(gathered, gate, up, down, spec, activation, routing)
        out = self._tape.rows("branch", down.shape[1])
        combine = routing | {
            abi.MOE_X: hidden.address,
            abi.MOE_X_STRIDE: hidden.stride,
            abi.MOE_Y: out.address,
            abi.MOE_Y_STRIDE: out.stride,
            abi.MOE_BYTES: out.stride,
        }
        self._tape.emit("combine", combine)
        return out

    def _route(self, x: Node, router: WeightTensor, spec: ExpertSpec) -> dict[int, int]:
        """Choose experts and places of rows; returns the words that the routing operations share."""
        scores = self._tape.rows("router", spec.n_experts)
        self._product(Product(x, (router,), (None,)), scores)
        n = self._tape.limits.step_tokens * spec.top_k
        words = {
            abi.MOE_SCORES: scores.address,
            abi.MOE_SCORES_STRIDE: scores.stride,
            abi.MOE_EXPERTS: spec.n_experts,
            abi.MOE_TOP_K: spec.top_k,
            abi.MOE_RENORMALIZE: int(spec.renormalize),
            abi.MOE_IDS: self._tape.table("experts.ids", 4 * n),
            abi.MOE_SHARES: self._tape.table("experts.shares", 4 * n),
            abi.MOE_PLACES: self._tape.table("experts.places", 4 * n),
            abi.MOE_TOKENS: self._tape.table("experts.tokens", 4 * n),
            abi.MOE_RANGES: self._tape.table("experts.ranges", 16 * (spec.n_experts + 1)),
        }
        self._tape.emit("route", words)
        self._tape.emit("dispatch", words)
        return words

    def _gather(self, x: Node, as_float: bool, spec: ExpertSpec, routing: dict[int, int]) -> Rows | Quantised:
        fed = self._feed(x, as_float)
        words = routing | {abi.MOE_X: fed.address, abi.MOE_X_STRIDE: fed.stride, abi.MOE_BYTES: fed.stride}
        out: Rows | Quantised
        if isinstance(fed, Rows):
            out = self._tape.rows("gathered", fed.width, times=spec.top_k)
        else:
            out = self._tape.quantised("gathered.int8", fed.stride, times=spec.top_k)
            words |= {
                abi.MOE_XD: fed.scales,
                abi.MOE_XD_STRIDE: fed.scales_stride,
                abi.MOE_YD: out.scales,
                abi.MOE_YD_STRIDE: out.scales_stride,
                abi.MOE_YD_BYTES: fed.scales_stride,
            }
        self._tape.emit("gather", words | {abi.MOE_Y: out.address, abi.MOE_Y_STRIDE: out.stride})
        return out

    def _expert_products(
        self,
        gathered: Rows | Quantised,
        gate: WeightTensor,
        up: WeightTensor,
        down: WeightTensor,
        spec: ExpertSpec,
        activation: Activation,
        routing: dict[int, int],
    ) -> Rows:
        """All gated products, then all outputs: experts do not wait for each other."""
        hidden: Rows | Quantised
        if self._weights.is_float((down[0],)):
            hidden = self._tape.rows("experts.hidden", spec.d_ff, times=spec.top_k)
        else:
            hidden = self._tape.quantised("experts.hidden.int8", spec.d_ff, times=spec.top_k)
        out = self._tape.rows("experts.out", down.shape[1], times=spec.top_k)
        last = spec.n_experts - 1
        for e in range(spec.n_experts):
            rows = routing[abi.MOE_RANGES] + 16 * e
            packed = self._weights.interleaved(gate[e], up[e])
            words = self._fed_words(gathered, packed) | self._gated_words(activation) | _gated_target(hidden)
            self._tape.emit(f"gated_{packed.shape.layout}", words | {abi.OP_ROWS: rows}, barrier=e == last)
        for e in range(spec.n_experts):
            rows = routing[abi.MOE_RANGES] + 16 * e
            packed = self._weights.stacked((down[e],))
            words = self._fed_words(hidden, packed) | {abi.LIN_Y: out.address, abi.LIN_Y_STRIDE: out.stride}
            self._tape.emit(f"linear_{packed.shape.layout}", words | {abi.OP_ROWS: rows}, barrier=e == last)
        return out

    def add(self, x: Node, y: Node) -> Node:
        """In place: the forward has no further use for the old residual."""
        assert isinstance(x, Rows)
        if isinstance(y, Product):
            self._product(y, x, add=True)
        elif isinstance(y, Normed):
            self._tape.emit("norm_add", self._norm_words(y) | _target(x))
        else:
            assert isinstance(y, Rows)
            self._tape.emit("add", _source(y) | _target(x))
        self._fed = None
        return x

    def all_reduce(self, x: Node) -> Node:
        return x

    def all_gather(self, x: Node) -> Node:
        return x

    def logits(self, x: Node, head: WeightTensor, softcap: float | None) -> Node:
        assert isinstance(x, Normed)
        sampled = Normed(x.x, x.weight, x.eps, samples=True)
        rows = self._tape.rows("logits", head.shape[0], samples=True)
        self._product(Product(sampled, (head,), (None,)), rows, rows_word=abi.ROWS_SAMPLES)
        if softcap is not None:
            self._tape.emit(
                "softcap", _target(rows) | {abi.OP_ROWS: abi.ROWS_SAMPLES, abi.ROW_SCALAR: float_bits(softcap)}
            )
        self.logits_rows = rows
        return rows

    def _materialised(self, node: Node, role: str) -> Rows:
        """The node as float32 rows; computes a held-back product."""
        if isinstance(node, Rows):
            return node
        if isinstance(node, Product):
            rows = self._tape.rows(role, node.width)
            self._product(node, rows)
            return rows
        return self._float_rows(node)

    def _product(self, node: Product, y: Rows, *, add: bool = False, rows_word: int = abi.ROWS_TOKENS) -> None:
        """Compute into ``y``: one operation for each run of weights of one layout."""
        column = 0
        for run in self._weights.runs(node.weights):
            packed = self._weights.stacked(run)
            first = node.weights.index(run[0])
            words = self._linear_words(node.x, packed) | {
                abi.OP_ROWS: rows_word,
                abi.LIN_Y: y.address + 4 * column,
                abi.LIN_Y_STRIDE: y.stride,
                abi.LIN_ADD: int(add),
                abi.LIN_BIAS: self._bias(run, node.biases[first : first + len(run)]),
            }
            self._tape.emit(f"linear_{packed.shape.layout}", words)
            column += sum(w.shape[0] for w in run)

    def _linear_words(self, x: Node, packed: PackedMatrix) -> dict[int, int]:
        return self._fed_words(self._feed(x, packed.shape.is_float), packed)

    def _fed_words(self, fed: Rows | Quantised, packed: PackedMatrix) -> dict[int, int]:
        shape = packed.shape
        words = {
            abi.LIN_WEIGHTS: packed.address,
            abi.LIN_PAIR_BYTES: shape.pair_bytes,
            abi.LIN_PAIRS: shape.n_pairs,
            abi.LIN_DEPTH: shape.depth,
            abi.LIN_X: fed.address,
            abi.LIN_X_STRIDE: fed.stride,
            abi.LIN_TOKEN_BLOCK: _token_block(fed),
        }
        if isinstance(fed, Quantised):
            words |= {abi.LIN_XD: fed.scales, abi.LIN_XD_STRIDE: fed.scales_stride}
        return words

    def _bias(self, weights: Sequence[WeightTensor], biases: Sequence[WeightTensor | None]) -> int:
        if all(b is None for b in biases):
            return 0
        import numpy as np

        parts = [
            np.zeros(w.shape[0], np.float32) if b is None else b.float32() for w, b in zip(weights, biases, strict=True)
        ]
        return self._tape.vector(np.concatenate(parts))

    def _feed(self, x: Node, as_float: bool) -> Rows | Quantised:
        """The node as a product takes it, computed once however many products take it."""
        if self._fed is not None and self._fed[0] is x and self._fed[1] == as_float:
            return self._fed[2]
        fed = self._float_rows(x) if as_float else self._quantised(x)
        self._fed = (x, as_float, fed)
        return fed

    def _float_rows(self, x: Node) -> Rows:
        if isinstance(x, Rows):
            return x
        if isinstance(x, Normed):
            rows = self._tape.rows(_sampled("normed", x.samples), x.x.width, samples=x.samples)
            self._tape.emit("norm", self._norm_words(x) | _target(rows))
            return rows
        assert isinstance(x, Gated)
        rows = self._tape.rows("hidden", x.gate_up.width // 2)
        self._gated(x, rows)
        return rows

    def _quantised(self, x: Node) -> Quantised:
        if isinstance(x, Gated):
            out = self._tape.quantised("hidden.int8", x.gate_up.width // 2)
            self._gated(x, out)
            return out
        if isinstance(x, Normed):
            out = self._tape.quantised(_sampled("normed.int8", x.samples), x.x.width, samples=x.samples)
            words = self._norm_words(x) | {abi.ROW_SCRATCH: self._tape.scratch("norm", 4 * BLOCK)}
            self._tape.emit("norm_quantise", words | _quantised_target(out))
            return out
        rows = self._materialised(x, "branch")
        out = self._tape.quantised("rows.int8", rows.width)
        self._tape.emit("quantise", _source(rows) | _quantised_target(out))
        return out

    def _gated(self, x: Gated, target: Rows | Quantised) -> None:
        gate, up = x.gate_up.weights
        assert all(bias is None for bias in x.gate_up.biases)
        packed = self._weights.interleaved(gate, up)
        words = self._linear_words(x.gate_up.x, packed) | self._gated_words(x.activation) | _gated_target(target)
        self._tape.emit(f"gated_{packed.shape.layout}", words)

    def _gated_words(self, activation: Activation) -> dict[int, int]:
        return {
            abi.LIN_ACTIVATION: ACTIVATIONS[activation],
            abi.LIN_SCRATCH: self._tape.scratch("gated", UNIT_SCRATCH_BYTES),
            abi.LIN_SCRATCH_STRIDE: UNIT_SCRATCH_BYTES,
        }

    def _norm_words(self, node: Normed) -> dict[int, int]:
        return _source(node.x) | {
            abi.OP_ROWS: abi.ROWS_SAMPLES if node.samples else abi.ROWS_TOKENS,
            abi.ROW_WEIGHT: self._tape.vector(node.weight.float32()),
            abi.ROW_SCALAR: float_bits(node.eps),
        }


def _sampled(role: str, samples: bool) -> str:
    return f"samples.{role}" if samples else role


def _token_block(fed: Rows | Quantised) -> int:
    row_bytes = fed.stride + (fed.scales_stride if isinstance(fed, Quantised) else 0)
    return max(TOKEN_BLOCK_BYTES // row_bytes // TILE_TOKENS, 4) * TILE_TOKENS


def _source(rows: Rows) -> dict[int, int]:
    return {abi.ROW_X: rows.address, abi.ROW_X_STRIDE: rows.stride, abi.ROW_WIDTH: rows.width}


def _target(rows: Rows) -> dict[int, int]:
    return {abi.ROW_Y: rows.address, abi.ROW_Y_STRIDE: rows.stride, abi.ROW_WIDTH: rows.width}


def _gated_target(out: Rows | Quantised) -> dict[int, int]:
    words = {abi.LIN_Y: out.address, abi.LIN_Y_STRIDE: out.stride}
    if isinstance(out, Quantised):
        words |= {abi.LIN_YD: out.scales, abi.LIN_YD_STRIDE: out.scales_stride}
    return words


def _quantised_target(out: Quantised) -> dict[int, int]:
    return {
        abi.ROW_Y: out.address,
        abi.ROW_Y_STRIDE: out.stride,
        abi.ROW_YD: out.scales,
        abi.ROW_YD_STRIDE: out.scales_stride,
    }
