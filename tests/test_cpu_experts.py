"""Routing, gathering and combining of experts on every instruction set, and the whole against the reference."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest

from cpu_ops import F32, ISA_NAMES, address_of, aligned, float_tensor, operation, quantised, run, step_of
from gapless.arch.spec import Activation, ExpertSpec
from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import Arena
from gapless.kernels.cpu.isa import select
from gapless.kernels.cpu.loader import Kernels, load_kernels
from gapless.kernels.cpu.record import RecordOps, Weights
from gapless.kernels.cpu.tape import Limits, Rows, Tape
from gapless.kernels.reference import ReferenceOps, softmax
from gapless.models.tensor import WeightTensor

MAX_TOKENS = 64


@pytest.fixture(scope="module", params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(select(request.param), None, ("linear", "elementwise", "experts"))


class Routing:
    """Memory of the routing operations for given scores: (tokens, experts)."""

    def __init__(
        self, kernels: Kernels, scores: F32, top_k: int, *, renormalize: bool = True, threads: int = 1
    ) -> None:
        self.kernels, self.threads = kernels, threads
        n, experts = scores.shape
        self.scores = aligned((n, -(-experts // 32) * 32))
        self.scores[:, :experts] = scores
        self.ids, self.shares = aligned((n, top_k), np.int32), aligned((n, top_k))
        self.places, self.tokens = aligned((n, top_k), np.int32), aligned((n * top_k,), np.int32)
        self.ranges = aligned((experts + 1, 2), np.int64)
        for table in (self.ids, self.shares, self.places, self.tokens, self.ranges):
            table[...] = -77
        self.words = {
            "MOE_SCORES": address_of(self.scores), "MOE_SCORES_STRIDE": self.scores.strides[0],
            "MOE_EXPERTS": experts, "MOE_TOP_K": top_k, "MOE_RENORMALIZE": int(renormalize),
            "MOE_IDS": address_of(self.ids), "MOE_SHARES": address_of(self.shares),
            "MOE_PLACES": address_of(self.places), "MOE_TOKENS": address_of(self.tokens),
            "MOE_RANGES": address_of(self.ranges),
        }  # fmt: skip
        self.run("route")
        self.run("dispatch")

    def run(self, kernel: str, **words: int) -> None:
        run(self.kernels, kernel, operation(**self.words, **words), step_of(len(self.ids)), self.threads)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def scores_of(n: int, experts: int, seed: int = 0) -> F32:
    return (rng(seed).standard_normal((n, experts)) * 3).astype(np.float32)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (5, 5), (1, 1), (33, 3)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_and_shares_are_those_of_the_softmax(
    kernels: Kernels, experts: int, top_k: int, renormalize: bool
) -> None:
    scores = scores_of(40, experts)
    routing = Routing(kernels, scores, top_k, renormalize=renormalize)
    exact = softmax(scores.astype(np.float64))
    ids = np.argsort(-exact, axis=1, kind="stable")[:, :top_k]
    shares = np.take_along_axis(exact, ids, axis=1)
    if renormalize:
        shares /= shares.sum(axis=1, keepdims=True)
    assert np.array_equal(routing.ids, ids)
    assert np.allclose(routing.shares, shares, rtol=1e-6, atol=0)


def test_of_equal_scores_the_lower_expert_comes_first(kernels: Kernels) -> None:
    scores = np.float32([[1, 2, 1, 2, 2], [0, 0, 0, 0, 0], [-200, 0, -300, -200, -400]])
    routing = Routing(kernels, scores, 3)
    assert routing.ids.tolist() == [[1, 3, 4], [0, 1, 2], [1, 0, 2]]
    assert routing.shares[1] == pytest.approx([1 / 3] * 3)
    assert routing.shares[2].tolist() == [1, 0, 0]


def test_scores_that_are_not_numbers_keep_ids_within_bounds(kernels: Kernels) -> None:
    routing = Routing(kernels, np.float32([[np.nan] * 4, [np.inf, 0, np.nan, 1], [-np.inf] * 4]), 2)
    assert routing.ids.min() >= 0
    assert routing.ids.max() < 4
    assert routing.ranges[:4, 1].sum() == 6


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("n", "experts", "top_k"), [(1, 8, 2), (50, 8, 2), (7, 64, 6), (3, 4, 4)])
def test_rows_are_sorted_by_expert_then_by_token(
    kernels: Kernels, n: int, experts: int, top_k: int, threads: int
) -> None:
    routing = Routing(kernels, scores_of(n, experts, n), top_k, threads=threads)
    wanted = [(e, t) for e in range(experts) for t in range(n) if e in routing.ids[t]]
    assert routing.tokens.tolist() == [t for _, t in wanted]
    counts = np.bincount(routing.ids.ravel(), minlength=experts)
    assert routing.ranges[:-1, 1].tolist() == counts.tolist()
    assert routing.ranges[:-1, 0].tolist() == (np.cumsum(counts) - counts).tolist()
    assert routing.ranges[-1].tolist() == [0, n * top_k]
    for (token, rank), place in np.ndenumerate(routing.places):
        assert wanted[place] == (routing.ids[token, rank], token)


@pytest.mark.parametrize("threads", [1, 3])
def test_gather_copies_rows_and_their_scales(kernels: Kernels, threads: int) -> None:
    n, top_k = 13, 3
    routing = Routing(kernels, scores_of(n, 6), top_k, threads=threads)
    x, xd = (rng(i).integers(-128, 128, (n, width)).astype(np.int8) for i, width in enumerate((96, 48)))
    y, yd = aligned((n * top_k, 160), np.int8), aligned((n * top_k, 48), np.int8)
    y[:] = 77
    words = {
        "MOE_X": address_of(x), "MOE_X_STRIDE": 96, "MOE_Y": address_of(y), "MOE_Y_STRIDE": 160, "MOE_BYTES": 96,
    }  # fmt: skip
    routing.run("gather", **words)
    assert np.array_equal(y[:, :96], x[routing.tokens])
    assert np.all(y[:, 96:] == 77)
    assert not yd.any()
    scales = {"MOE_XD": address_of(xd), "MOE_XD_STRIDE": 48, "MOE_YD": address_of(yd), "MOE_YD_STRIDE": 48}
    routing.run("gather", **words, **scales, MOE_YD_BYTES=48)
    assert np.array_equal(yd, xd[routing.tokens])


def combined(routing: Routing, outputs: F32) -> F32:
    y = aligned((len(routing.ids), outputs.shape[1]))
    y[:] = 1e9
    routing.run(
        "combine", MOE_X=address_of(outputs), MOE_X_STRIDE=outputs.strides[0],
        MOE_Y=address_of(y), MOE_Y_STRIDE=y.strides[0], MOE_BYTES=y.strides[0],
    )  # fmt: skip
    return y


@pytest.mark.parametrize("threads", [1, 4])
def test_combine_sums_outputs_by_their_shares(kernels: Kernels, threads: int) -> None:
    n, top_k, width = 9, 4, 96
    scores = scores_of(n, 12)
    routing = Routing(kernels, scores, top_k, threads=threads)
    outputs = rng(2).standard_normal((n * top_k, width)).astype(np.float32)
    exact = np.einsum("tr,trw->tw", routing.shares.astype(np.float64), outputs[routing.places].astype(np.float64))
    y = combined(routing, outputs)
    assert np.allclose(y, exact, rtol=0, atol=2e-6)
    # The very sum of a token that is alone.
    for t in range(n):
        alone = Routing(kernels, scores[t : t + 1], top_k)
        rows = np.empty((top_k, width), np.float32)
        rows[alone.places[0]] = outputs[routing.places[t]]
        assert np.array_equal(combined(alone, rows)[0], y[t])


@dataclass(frozen=True)
class Block:
    """A feed-forward of experts: router (E, d), gate and up (E, ff, d), down (E, d, ff)."""

    router: WeightTensor
    gate: WeightTensor
    up: WeightTensor
    down: WeightTensor
    spec: ExpertSpec
    activation: Activation = "silu"

    @classmethod
    def random(cls, spec: ExpertSpec, width: int, quant: str, activation: Activation = "silu") -> Block:
        def stack(rows: int, columns: int, seed: int) -> WeightTensor:
            values = rng(seed).standard_normal((spec.n_experts, rows, columns)) / columns**0.5
            flat = values.astype(np.float32).reshape(-1, columns)
            w = float_tensor(flat) if quant == "F32" else quantised(flat, quant)
            return WeightTensor(w.name, quant, values.shape, w.data.reshape(spec.n_experts, rows, -1))

        router = float_tensor(rng(9).standard_normal((spec.n_experts, width)).astype(np.float32))
        gate, up = stack(spec.d_ff, width, 1), stack(spec.d_ff, width, 2)
        return cls(router, gate, up, stack(width, spec.d_ff, 3), spec, activation)

    def expected(self, x: F32) -> F32:
        ops = ReferenceOps(None, None, lambda w: w.float32())  # type: ignore[arg-type]
        return ops.experts(x, self.router, self.gate, self.up, self.down, self.spec, self.activation)


class Recorded:
    """The block recorded as a tape, to be run over any rows."""

    def __init__(self, kernels: Kernels, block: Block, threads: int = 1) -> None:
        self.kernels, self.threads = kernels, threads
        self.arena = Arena()
        tape = Tape(kernels, self.arena, Limits(MAX_TOKENS, MAX_TOKENS, threads))
        weights = Weights(kernels.isa, self.arena, False, lambda tensor: None)
        self.x = tape.rows("x", block.router.shape[1])
        ops = RecordOps(tape, weights, None)  # type: ignore[arg-type]
        y = ops.experts(self.x, block.router, block.gate, block.up, block.down, block.spec, block.activation)
        assert isinstance(y, Rows)
        self.y, self.ops = y, tape.finish()
        self.names = {address: name for name, address in kernels._addresses.items()}

    def run(self, x: F32) -> F32:
        rows_at(self.x)[: len(x), : self.x.width] = x
        for op in self.ops:
            run(self.kernels, self.names[int(op[abi.OP_KERNEL])], op, step_of(len(x)), self.threads)
        return rows_at(self.y)[: len(x), : self.y.width].copy()


def rows_at(rows: Rows) -> F32:
    raw = (ctypes.c_uint8 * (MAX_TOKENS * rows.stride)).from_address(rows.address)
    return np.frombuffer(raw, np.float32).reshape(MAX_TOKENS, -1)


BLOCKS = {
    "few": (ExpertSpec(4, 2, 96), 64),
    "many": (ExpertSpec(24, 4, 32, renormalize=False), 96),
    "all": (ExpertSpec(3, 3, 64), 32),
}


def text(n: int, width: int) -> F32:
    return rng(n).standard_normal((n, width)).astype(np.float32)


@pytest.mark.parametrize("shape", list(BLOCKS))
@pytest.mark.parametrize(("quant", "tolerance"), [("F32", 3e-6), ("Q8_0", 0.02), ("Q4_1", 0.02)])
def test_agrees_with_the_reference(kernels: Kernels, shape: str, quant: str, tolerance: float) -> None:
    spec, width = BLOCKS[shape]
    block = Block.random(spec, width, quant, "gelu_tanh" if shape == "all" else "silu")
    x = text(MAX_TOKENS, width)
    wanted = block.expected(x)
    error = np.abs(Recorded(kernels, block, threads=2).run(x) - wanted).max() / np.abs(wanted).max()
    assert error < tolerance


@pytest.mark.parametrize("quant", ["F32", "Q4_0"])
def test_a_row_does_not_depend_on_company_or_threads(kernels: Kernels, quant: str) -> None:
    spec, width = BLOCKS["few"]
    block = Block.random(spec, width, quant)
    x = text(MAX_TOKENS, width)
    together = Recorded(kernels, block).run(x)
    apart = Recorded(kernels, block, threads=3)
    for start, count in ((0, 1), (1, 1), (2, 30), (32, 32)):
        assert np.array_equal(apart.run(x[start : start + count]), together[start : start + count])
