"""The vector operations that all kernels are made of, on every instruction set."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cpu_ops import F32, ISAS
from gapless.kernels.cpu.build import target_environment
from gapless.kernels.cpu.isa import Isa

Array = npt.NDArray[Any]

SCRIPT = Path(__file__).with_name("vec_operations.py")
NAN, INF = float("nan"), float("inf")
LARGEST_HALF = 65504.0


def padded(values: Any, dtype: npt.DTypeLike = np.float32) -> Array:
    """One array, brought to a multiple of 16 with zeros."""
    flat = np.concatenate([np.asarray(v, dtype).ravel() for v in values])
    return np.concatenate([flat, np.zeros(-len(flat) % 16, dtype)])


def pairs(values: list[float]) -> tuple[F32, F32]:
    grid = np.meshgrid(np.float32(values), np.float32(values))
    return padded([grid[0]]), padded([grid[1]])


def halves() -> F32:
    """Every finite half, the number halfway to the next one and the float32 on either side of that; and more."""
    bits = np.arange(0x7C00, dtype=np.uint16)
    exact = bits.view(np.float16).astype(np.float32)
    halfway = (exact[:-1] + exact[1:]) / np.float32(2)
    around = [np.nextafter(halfway, np.float32(to)) for to in (0, INF)]
    beyond = [65519.9, 65520.0, 1e6, 3e38, INF, 1e-9, 1e-30, 1e-45]
    positive = np.concatenate([exact, halfway, *around, np.float32(beyond)])
    return padded([positive, -positive])


def numbers(n: int, spread: float = 10.0, seed: int = 0) -> F32:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def integers(n: int, limit: int = 2**31, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(-limit, limit, n).astype(np.int32)


EXPONENTS = padded([np.linspace(-90, 89, 200_000), [0.0, -0.0, -INF, -1e30, INF, NAN, -87.33654, 88.3762, 1e-40]])
HALVES, BIT_PATTERNS = halves(), np.arange(1 << 16, dtype=np.uint16)
SPECIAL = pairs([0.0, -0.0, 1.0, -2.5, INF, -INF, NAN, 1e-45, 3e38])
MASKS = np.tile(np.int32([0, -1, 1, 7]), 16)
EIGHTH_STEPS = padded([np.arange(-40000, 40000) / 8, [2.0**21 + 0.5, -(2.0**21) - 0.5, 2.0**22 - 1]])

OPERANDS: dict[str, tuple[Array, ...]] = {
    "exp": (EXPONENTS,),
    "exp_f32": (EXPONENTS,),
    "round": (EIGHTH_STEPS,),
    "load_f16": (BIT_PATTERNS,),
    "f16_bits": (BIT_PATTERNS,),
    "store_f16": (HALVES,),
    "st_f16": (HALVES,),
    "load_bf16": (BIT_PATTERNS,),
    "load_i8": (np.arange(-128, 128).astype(np.int8),),
    "store_i8": (np.arange(-512, 512, dtype=np.int32),),
    "to_float": (integers(256),),
    "add_i32": (integers(256), integers(256, seed=1)),
    "mul_i32": (integers(256), integers(256, seed=1)),
    "abs": (SPECIAL[0],),
    "max": SPECIAL,
    "min": SPECIAL,
    "div": (numbers(256), numbers(256, seed=1)),
    "fma": (numbers(256), numbers(256, seed=1), numbers(256, 30.0, seed=2)),
    "greater": SPECIAL,
    "less_i32": (integers(256, 3), integers(256, 3, seed=1)),
    "select": (MASKS, numbers(64), numbers(64, seed=1)),
    "select_i32": (MASKS, integers(64), integers(64, seed=1)),
    "bits": (numbers(64),),
    "from_bits": (numbers(64).view(np.int32),),
    "sum": (numbers(1024, 1e4),),
    "largest": (numbers(1024),),
    "sum_i32": (integers(1024, 2**26),),
}


@dataclass(frozen=True)
class Results:
    """What each operation made of its operands on one instruction set."""

    isa: Isa
    found: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.found[name]


@functools.cache
def results_of(isa: Isa) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "in.npz"), Path(folder, "out.npz")
        np.savez(given, **{f"{name}.{i}": a for name, arrays in OPERANDS.items() for i, a in enumerate(arrays)})
        command = [sys.executable, str(SCRIPT), str(given), str(out)]
        done = subprocess.run(command, env=target_environment(isa), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return Results(isa, dict(np.load(out)))


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def results(request: pytest.FixtureRequest) -> Results:
    return results_of(request.param)


def same(found: Array, wanted: Array) -> None:
    """Equal bit for bit, signs of zero included; one NaN is as good as another."""
    assert found.dtype == wanted.dtype
    if wanted.dtype != np.float32:
        assert np.array_equal(found, wanted)
        return
    differ = (found.view(np.int32) != wanted.view(np.int32)) & ~(np.isnan(found) & np.isnan(wanted))
    assert not differ.any(), (np.flatnonzero(differ)[:5], found[differ][:5], wanted[differ][:5])


def test_exp_is_accurate(results: Results) -> None:
    x, found = EXPONENTS.astype(np.float64), results["exp"].astype(np.float64)
    inside = (x > -87.3365) & (x < 88.3762)
    exact = np.exp(x[inside])
    assert np.abs(found[inside] / exact - 1).max() < 2e-7
    assert np.all(found[x < -87.3366] == 0)
    assert np.all(np.isfinite(found[~np.isnan(x)]))
    assert np.isnan(found[np.isnan(x)]).all()
    assert np.all(found[x == 0] == 1)


def test_exp_of_one_number_is_that_of_a_lane(results: Results) -> None:
    same(results["exp_f32"], results["exp"])


def test_exp_is_the_same_wherever_it_runs(results: Results) -> None:
    """Every step of it is written out, so instruction sets agree to the last bit."""
    same(results["exp"], results_of(ISAS[0])["exp"])


def test_rounding_is_to_nearest_even(results: Results) -> None:
    same(results["round"], np.rint(EIGHTH_STEPS).astype(np.int32))


def test_every_half_widens_exactly(results: Results) -> None:
    wanted = BIT_PATTERNS.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(wanted)
    for name in ("load_f16", "f16_bits"):
        same(results[name][numbers], wanted[numbers])
        assert np.isnan(results[name][~numbers]).all(), "which of its NaNs a processor takes is its own matter"


def test_halves_are_rounded_to_nearest_even_and_saturate(results: Results) -> None:
    wanted = np.clip(HALVES, -LARGEST_HALF, LARGEST_HALF).astype(np.float16).view(np.uint16)
    same(results["store_f16"], wanted)
    same(results["st_f16"], wanted)


def test_every_bfloat16_widens_exactly(results: Results) -> None:
    same(results["load_bf16"], (BIT_PATTERNS.astype(np.uint32) << 16).view(np.float32))


def test_int8_is_extended_and_cut_off(results: Results) -> None:
    same(results["load_i8"], OPERANDS["load_i8"][0].astype(np.int32))
    same(results["store_i8"], OPERANDS["store_i8"][0].astype(np.int8))


def test_int32_arithmetic_wraps(results: Results) -> None:
    a, b = OPERANDS["add_i32"]
    same(results["add_i32"], a + b)
    same(results["mul_i32"], a * b)
    same(results["to_float"], OPERANDS["to_float"][0].astype(np.float32))


def test_maximum_and_minimum_take_the_second_where_the_first_is_not_greater_or_less(results: Results) -> None:
    a, b = SPECIAL
    same(results["max"], np.where(a > b, a, b))
    same(results["min"], np.where(a < b, a, b))
    same(results["greater"], np.where(a > b, np.int32(-1), np.int32(0)))
    same(results["abs"], np.abs(a))


def test_selection_by_masks(results: Results) -> None:
    a, b = OPERANDS["less_i32"]
    same(results["less_i32"], np.where(a < b, np.int32(-1), np.int32(0)))
    for name in ("select", "select_i32"):
        mask, x, y = OPERANDS[name]
        same(results[name], np.where(mask != 0, x, y))


def test_bits_are_left_alone(results: Results) -> None:
    x = OPERANDS["bits"][0]
    same(results["bits"], x.view(np.int32))
    same(results["from_bits"], x)


def test_division_and_fused_product_are_rounded_once(results: Results) -> None:
    a, b = OPERANDS["div"]
    same(results["div"], a / b)
    x, y, z = (v.astype(np.longdouble) for v in OPERANDS["fma"])
    same(results["fma"], (x * y + z).astype(np.float32))


def folded(x: Array, combine: Any) -> Array:
    """Lanes joined in the documented order: the first half with the second, again and again."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = combine(x[:, :half], x[:, half:])
    return x[:, 0].copy()


def test_reductions_have_one_fixed_order(results: Results) -> None:
    lanes = results.isa.lanes
    same(results["sum"], folded(OPERANDS["sum"][0].reshape(-1, lanes), np.add))
    same(results["largest"], folded(OPERANDS["largest"][0].reshape(-1, lanes), np.maximum))
    same(results["sum_i32"], OPERANDS["sum_i32"][0].reshape(-1, lanes).sum(axis=1, dtype=np.int64))
