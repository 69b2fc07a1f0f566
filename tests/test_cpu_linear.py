"""Products, gates and row operations of every instruction set against NumPy, and their independence of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from cpu_ops import F32, ISA_NAMES, address_of, aligned, float_bits, float_tensor, operation, quantised, run, step_of
from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import Arena
from gapless.kernels.cpu.isa import select
from gapless.kernels.cpu.loader import Kernels, load_kernels
from gapless.kernels.cpu.pack import PackedMatrix, layout_of, pack_interleaved, pack_stacked
from gapless.kernels.reference import activate
from gapless.models.tensor import WeightTensor

QUANTS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
FLOATS = ("F32", "F16", "BF16")
MODULES = ("linear", "elementwise")


@pytest.fixture(scope="module", params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(select(request.param), None, MODULES)


@dataclass
class Activations:
    """Rows of float32 and the same as int8, with what the int8 stand for."""

    rows: F32
    quants: npt.NDArray[np.int8]
    scales: F32

    @property
    def values(self) -> F32:
        n = len(self.rows)
        return (self.quants.reshape(n, -1, 32) * self.scales[:, :, :1]).reshape(n, -1)

    def words(self, as_float: bool) -> dict[str, int]:
        x = self.rows if as_float else self.quants
        found = {"LIN_X": address_of(x), "LIN_X_STRIDE": x.strides[0]}
        return (
            found if as_float else found | {"LIN_XD": address_of(self.scales), "LIN_XD_STRIDE": self.scales.strides[0]}
        )


def activations(kernels: Kernels, n: int, width: int, seed: int = 1) -> Activations:
    rows = aligned((n, width))
    rows[:] = np.random.default_rng(seed).standard_normal((n, width)) * 3
    found = Activations(rows, aligned((n, width), np.int8), aligned((n, width // 32, 4)))
    op = operation(
        ROW_X=address_of(rows), ROW_X_STRIDE=rows.strides[0], ROW_WIDTH=width,
        ROW_Y=address_of(found.quants), ROW_Y_STRIDE=width,
        ROW_YD=address_of(found.scales), ROW_YD_STRIDE=found.scales.strides[0],
    )  # fmt: skip
    run(kernels, "quantise", op, step_of(n))
    return found


def weight(n_rows: int, width: int, quant: str, seed: int = 2) -> WeightTensor:
    values = np.random.default_rng(seed).standard_normal((n_rows, width)).astype(np.float32)
    return quantised(values, quant)


def matrix_words(packed: PackedMatrix, block: int) -> dict[str, int]:
    shape = packed.shape
    return {
        "LIN_WEIGHTS": packed.address, "LIN_PAIR_BYTES": shape.pair_bytes, "LIN_PAIRS": shape.n_pairs,
        "LIN_DEPTH": shape.depth, "LIN_TOKEN_BLOCK": block,
    }  # fmt: skip


def linear(
    kernels: Kernels, tensors: list[WeightTensor], x: Activations, *, threads: int = 1, block: int = 16,
    bias: F32 | None = None, y: F32 | None = None,
) -> F32:  # fmt: skip
    layout = layout_of(tensors)
    packed = pack_stacked(tensors, layout, kernels.isa, Arena())
    out = aligned((len(x.rows), packed.shape.padded_rows))
    if y is not None:
        out[:, : y.shape[1]] = y
    padded_bias = aligned((packed.shape.padded_rows,))
    if bias is not None:
        padded_bias[: len(bias)] = bias
    op = operation(
        **matrix_words(packed, block), **x.words(packed.shape.is_float), LIN_Y=address_of(out),
        LIN_Y_STRIDE=out.strides[0], LIN_ADD=int(y is not None),
        LIN_BIAS=0 if bias is None else address_of(padded_bias),
    )  # fmt: skip
    run(kernels, f"linear_{layout}", op, step_of(len(x.rows)), threads)
    return out[:, : sum(t.shape[0] for t in tensors)].copy()


@pytest.mark.parametrize("quant", QUANTS + FLOATS)
def test_products_agree_with_numpy(kernels: Kernels, quant: str) -> None:
    tensors = [weight(40, 96, quant), weight(24, 96, quant, seed=3), weight(5, 96, quant, seed=4)]
    x = activations(kernels, 11, 96)
    values = x.rows if quant in FLOATS else x.values
    wanted = values.astype(np.float64) @ np.concatenate([t.float32() for t in tensors]).astype(np.float64).T
    assert np.allclose(linear(kernels, tensors, x), wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("quant", ["Q4_0", "Q5_1", "Q8_0", "BF16"])
def test_bias_and_residual_are_added(kernels: Kernels, quant: str) -> None:
    tensors, x = [weight(64, 64, quant)], activations(kernels, 3, 64)
    rng = np.random.default_rng(5)
    bias, y = rng.standard_normal(64).astype(np.float32), rng.standard_normal((3, 64)).astype(np.float32)
    plain = linear(kernels, tensors, x)
    assert np.array_equal(linear(kernels, tensors, x, bias=bias), plain + bias)
    assert np.array_equal(linear(kernels, tensors, x, y=y), y + plain)
    assert np.array_equal(linear(kernels, tensors, x, bias=bias, y=y), y + (plain + bias))


@pytest.mark.parametrize("quant", QUANTS + FLOATS)
def test_a_row_does_not_depend_on_batch_block_or_threads(kernels: Kernels, quant: str) -> None:
    tensors, x = [weight(96, 160, quant)], activations(kernels, 29, 160)
    together = linear(kernels, tensors, x, threads=3, block=8)
    assert np.array_equal(together, linear(kernels, tensors, x, block=32))
    for row in (0, 7, 8, 28):
        alone = Activations(*(aligned_copy(a[row : row + 1]) for a in (x.rows, x.quants, x.scales)))
        assert np.array_equal(linear(kernels, tensors, alone)[0], together[row]), row


def aligned_copy(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    copy = aligned(values.shape, values.dtype)
    copy[:] = values
    return copy


@pytest.mark.parametrize("extreme", [127, -127])
@pytest.mark.parametrize("quant", QUANTS)
def test_integer_sums_do_not_overflow(kernels: Kernels, quant: str, extreme: int) -> None:
    """The largest quants against the largest activations, of either sign."""
    tensor = weight(32, 64, quant)
    fill = 0xFF if quant.startswith(("Q4", "Q5")) else 0x81
    block = tensor.data.reshape(-1, {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}[quant])
    block[:, {"Q4_0": 2, "Q4_1": 4, "Q5_0": 2, "Q5_1": 4, "Q8_0": 2}[quant] :] = fill
    x = activations(kernels, 9, 64)
    x.quants[:] = extreme
    x.scales[:, :, 0] = 0.5
    x.scales[:, :, 1] = 0.5 * extreme * 32
    x.scales.view(np.int32)[:, :, 2] = abi.ROUNDER_BITS - 128 * extreme * 32
    x.scales[:, :, 3] = -abi.ROUNDER * 0.5
    wanted = x.values.astype(np.float64) @ tensor.float32().astype(np.float64).T
    assert np.allclose(linear(kernels, [tensor], x), wanted, rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0", "Q5_1", "F32"])
def test_gated_products_agree_with_numpy(kernels: Kernels, quant: str, activation: str) -> None:
    gate, up = weight(64, 96, quant), weight(64, 96, quant, seed=3)
    x = activations(kernels, 10, 96)
    values = x.rows if quant == "F32" else x.values
    wanted = activate(values @ gate.float32().T, activation) * (values @ up.float32().T)  # type: ignore[arg-type]
    exact = gated(kernels, gate, up, x, activation, as_float=True)
    assert np.allclose(exact, wanted, rtol=0, atol=4e-6 * np.abs(wanted).max())
    rounded = gated(kernels, gate, up, x, activation, as_float=False)
    step = np.abs(wanted.reshape(10, -1, 32)).max(axis=-1, keepdims=True) / 127
    assert (np.abs(rounded - wanted).reshape(10, -1, 32) <= 0.51 * step).all()


def gated(kernels: Kernels, gate: WeightTensor, up: WeightTensor, x: Activations, act: str, as_float: bool) -> F32:
    layout = layout_of((gate, up))
    packed = pack_interleaved(gate, up, layout, kernels.isa, Arena())
    n, width = len(x.rows), gate.shape[0]
    out = Activations(aligned((n, width)), aligned((n, width), np.int8), aligned((n, width // 32, 4)))
    scratch = aligned((2, 8 * 64))
    target = (
        {"LIN_Y": address_of(out.rows), "LIN_Y_STRIDE": out.rows.strides[0]}
        if as_float
        else {"LIN_Y": address_of(out.quants), "LIN_Y_STRIDE": width, "LIN_YD": address_of(out.scales),
              "LIN_YD_STRIDE": out.scales.strides[0]}
    )  # fmt: skip
    op = operation(
        **matrix_words(packed, 8), **x.words(packed.shape.is_float), **target, LIN_SCRATCH=address_of(scratch),
        LIN_SCRATCH_STRIDE=scratch.strides[0],
        LIN_ACTIVATION={"silu": abi.ACT_SILU, "gelu_tanh": abi.ACT_GELU_TANH}[act],
    )  # fmt: skip
    run(kernels, f"gated_{layout}", op, step_of(n), 2)
    return out.rows if as_float else out.values


@pytest.mark.parametrize("width", [64, 96, 100])
def test_norms_agree_with_numpy(kernels: Kernels, width: int) -> None:
    stride = -(-width // 32) * 32
    rng = np.random.default_rng(6)
    x, y, w = aligned((5, stride)), aligned((5, stride)), aligned((stride,))
    x[:, :width] = rng.standard_normal((5, width)) * 10
    y[:, :width] = start = rng.standard_normal((5, width)).astype(np.float32)
    w[:width] = rng.standard_normal(width)
    wanted = x[:, :width] / np.sqrt(np.mean(np.square(x[:, :width], dtype=np.float64), axis=1, keepdims=True) + 1e-5)
    wanted = wanted * w[:width]
    words = {
        "ROW_X": address_of(x), "ROW_X_STRIDE": stride * 4, "ROW_Y": address_of(y), "ROW_Y_STRIDE": stride * 4,
        "ROW_WIDTH": width, "ROW_WEIGHT": address_of(w), "ROW_SCALAR": float_bits(1e-5),
    }  # fmt: skip
    run_rows(kernels, "norm_add", words, 5)
    assert np.allclose(y[:, :width], start + wanted, rtol=1e-5, atol=1e-5)
    run_rows(kernels, "norm", words, 5)
    assert np.allclose(y[:, :width], wanted, rtol=1e-5, atol=1e-6)
    assert not y[:, width:].any()
    if width % 32 == 0:
        quants, scales, scratch = aligned((5, width), np.int8), aligned((5, width // 32, 4)), aligned((3, 32))
        words |= {"ROW_Y": address_of(quants), "ROW_Y_STRIDE": width, "ROW_YD": address_of(scales),
                  "ROW_YD_STRIDE": scales.strides[0], "ROW_SCRATCH": address_of(scratch)}  # fmt: skip
        run_rows(kernels, "norm_quantise", words, 5)
        assert np.abs(Activations(x, quants, scales).values - wanted).max() <= 0.51 * np.abs(wanted).max() / 127


def run_rows(kernels: Kernels, name: str, words: dict[str, int], n: int, threads: int = 3) -> None:
    run(kernels, name, operation(**words), step_of(n), threads)


def test_quantised_blocks_carry_their_sums(kernels: Kernels) -> None:
    x = activations(kernels, 4, 128)
    x.rows[1] = 0
    x.rows[2, :32] = 1e-38
    again = activations(kernels, 4, 128)
    sums = again.quants.reshape(4, 4, 32).astype(np.int64).sum(axis=-1)
    assert np.array_equal(again.scales.view(np.int32)[:, :, 2], abi.ROUNDER_BITS - 128 * sums)
    assert np.array_equal(again.scales[:, :, 3].astype(np.float64), -abi.ROUNDER * again.scales[:, :, 0].astype(float))
    assert np.allclose(again.scales[:, :, 1], again.scales[:, :, 0] * sums)


@pytest.mark.parametrize("quant", QUANTS + FLOATS)
def test_embedding_reads_rows_of_a_packed_table(kernels: Kernels, quant: str) -> None:
    table = weight(50, 64, quant)
    layout = layout_of([table])
    packed = pack_stacked([table], layout, kernels.isa, Arena())
    ids = np.array([49, 0, 17, 17, 33], np.int32)
    addresses = address_of(ids) + 4 * np.arange(5)
    out = aligned((5, 64))
    step = step_of(5)
    step[abi.TOKEN_IDS] = address_of(addresses)
    op = operation(
        ROW_X=packed.address, ROW_PAIR_BYTES=packed.shape.pair_bytes,
        ROW_Y=address_of(out), ROW_Y_STRIDE=256, ROW_WIDTH=64, ROW_SCALAR=float_bits(1.5),
    )  # fmt: skip
    run(kernels, f"embed_{layout}", op, step, 2)
    assert np.allclose(out, table.float32()[ids] * np.float32(1.5), rtol=1e-6, atol=1e-6)


def test_softcap_agrees_with_numpy(kernels: Kernels) -> None:
    rows = aligned((3, 64))
    rows[:] = np.linspace(-200, 200, 3 * 64).reshape(3, 64)
    wanted = 30 * np.tanh(rows / 30)
    words = {"ROW_Y": address_of(rows), "ROW_Y_STRIDE": 256, "ROW_WIDTH": 64, "ROW_SCALAR": float_bits(30)}
    run_rows(kernels, "softcap", words, 3, threads=2)
    assert np.allclose(rows, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quant", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_finer_types_keep_their_values(kernels: Kernels, quant: str) -> None:
    """Types that the ``gguf`` package reads but does not write: random blocks with tame scales."""
    tensor = random_blocks(quant, 64, 256)
    x = activations(kernels, 2, 256)
    wanted = x.values.astype(np.float64) @ tensor.float32().astype(np.float64).T
    coarse = 0.02 if quant in ("Q2_K", "Q3_K", "Q6_K") else 2e-3
    assert np.abs(linear(kernels, [tensor], x) - wanted).max() <= coarse * np.abs(wanted).max()


def random_blocks(quant: str, n_rows: int, width: int) -> WeightTensor:
    elements, size, halves = {
        "Q2_K": (256, 84, (80, 82)), "Q3_K": (256, 110, (108,)), "Q4_K": (256, 144, (0, 2)),
        "Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,)), "IQ4_NL": (32, 18, (0,)),
    }[quant]  # fmt: skip
    rng = np.random.default_rng(8)
    data = rng.integers(0, 256, (n_rows, width // elements, size), np.uint8)
    for at in halves:
        scale = (0.01 + 0.01 * rng.random(data.shape[:2])).astype(np.float16)
        data[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    return WeightTensor("w", quant, (n_rows, width), data.reshape(n_rows, -1))


def test_mixed_types_share_a_layout(kernels: Kernels) -> None:
    gate, up = weight(32, 64, "Q4_0"), weight(32, 64, "Q8_0")
    assert layout_of((gate, up)) == "q8m"
    x = activations(kernels, 2, 64)
    wanted = x.values @ np.concatenate([gate.float32(), up.float32()]).T
    assert np.allclose(linear(kernels, [gate, up], x), wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())


def test_a_matrix_of_floats_beside_float32_activations_matches(kernels: Kernels) -> None:
    tensor = float_tensor(np.random.default_rng(1).standard_normal((33, 40)).astype(np.float32))
    x = Activations(aligned((3, 64)), aligned((3, 64), np.int8), aligned((3, 2, 4)))
    x.rows[:, :40] = np.random.default_rng(2).standard_normal((3, 40))
    assert np.allclose(linear(kernels, [tensor], x), x.rows[:, :40] @ tensor.float32().T, rtol=1e-4, atol=1e-5)
