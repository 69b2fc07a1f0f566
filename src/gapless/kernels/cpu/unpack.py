"""GGML blocks taken apart into quants, scales and minima per 32, without going through floats where that is exact.

Block layouts: ggml's ggml-quants.h (block_q4_0 ... block_q5_K). Types that have finer scales than one per 32
(Q2_K, Q3_K, Q6_K) are dequantised and rounded again to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.kernels.cpu.packing import BLOCK, Layout
from gapless.models.tensor import WeightTensor

Bytes = npt.NDArray[np.uint8]
Half = npt.NDArray[np.float16]


@dataclass(frozen=True)
class Blocks:
    """Rows of a tensor in blocks of 32.

    ``quants``: (rows, blocks, 16) for 4 bits, byte i holding element i and, in its high half, element i + 16; else
    (rows, blocks, 32) bytes of int8. ``scales``, ``minima``: (rows, blocks); a value is scale * quant + minimum.
    """

    quants: Bytes
    scales: Half
    minima: Half | None


LAYOUTS: dict[str, Layout] = {
    "F32": "f32", "F16": "f16", "BF16": "bf16",
    "Q4_0": "q4", "Q4_1": "q4", "Q4_K": "q4",
    "Q5_0": "q8", "Q8_0": "q8", "IQ4_NL": "q8", "Q2_K": "q8", "Q3_K": "q8", "Q6_K": "q8",
    "Q5_1": "q8m", "Q5_K": "q8m",
}  # fmt: skip
"""The layout that each GGML type is packed to."""

_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # ggml-common.h, kvalues_iq4nl


def unpack(tensor: WeightTensor, layout: Layout) -> Blocks:
    """Blocks of the rows of a matrix, for a quantised ``layout`` that can hold them."""
    blocks = _UNPACK.get(tensor.quant, _requantise)(tensor)
    if layout != LAYOUTS[tensor.quant]:
        assert layout == "q8m", (tensor.quant, layout)
        if blocks.quants.shape[-1] != BLOCK:
            blocks = Blocks(_nibbles(blocks.quants), blocks.scales, blocks.minima)
    if layout == "q8" or blocks.minima is not None:
        return blocks
    return Blocks(blocks.quants, blocks.scales, np.zeros_like(blocks.scales))


def _records(tensor: WeightTensor, *fields: tuple[Any, ...]) -> npt.NDArray[Any]:
    """The rows as (rows, blocks) of a packed structure."""
    return np.ascontiguousarray(tensor.data).view(np.dtype([*fields]))


def _nibbles(pairs: Bytes) -> Bytes:
    return np.concatenate([pairs & 15, pairs >> 4], axis=-1)


def _pair_up(quants: Bytes) -> Bytes:
    """(..., 32) values below 16 to (..., 16) bytes of two."""
    paired: Bytes = quants[..., :16] | quants[..., 16:] << np.uint8(4)
    return paired


_D, _M, _QS = ("d", "<f2"), ("m", "<f2"), ("qs", "u1", (16,))


def _q4_0(t: WeightTensor) -> Blocks:
    r = _records(t, _D, _QS)
    return Blocks(r["qs"], r["d"], r["d"] * np.float16(-8))


def _q4_1(t: WeightTensor) -> Blocks:
    r = _records(t, _D, _M, _QS)
    return Blocks(r["qs"], r["d"], r["m"])


def _q8_0(t: WeightTensor) -> Blocks:
    r = _records(t, _D, ("qs", "u1", (32,)))
    return Blocks(r["qs"], r["d"], None)


def _fifth_bits(words: npt.NDArray[np.uint32]) -> Bytes:
    bits = words[..., None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    fifth: Bytes = bits.astype(np.uint8) << np.uint8(4)
    return fifth


def _q5_0(t: WeightTensor) -> Blocks:
    r = _records(t, _D, ("qh", "<u4"), _QS)
    quants = (_nibbles(r["qs"]) | _fifth_bits(r["qh"])) - np.uint8(16)
    return Blocks(quants, r["d"], None)


def _q5_1(t: WeightTensor) -> Blocks:
    r = _records(t, _D, _M, ("qh", "<u4"), _QS)
    return Blocks(_nibbles(r["qs"]) | _fifth_bits(r["qh"]), r["d"], r["m"])


def _iq4_nl(t: WeightTensor) -> Blocks:
    r = _records(t, _D, _QS)
    return Blocks(_IQ4_NL[_nibbles(r["qs"])].view(np.uint8), r["d"], None)


def _k_scales(r: npt.NDArray[Any]) -> tuple[Half, Half]:
    """Scales and (negated) minima of the 8 blocks of each 256: (rows, blocks)."""
    s = r["scales"]
    low, mid, high = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
    d, m = (r[name].astype(np.float32)[..., None] for name in ("d", "m"))
    rows = len(s)
    return (
        (d * scales).astype(np.float16).reshape(rows, -1),
        (-m * minima).astype(np.float16).reshape(rows, -1),
    )


def _k_nibbles(r: npt.NDArray[Any]) -> Bytes:
    """(rows, superblocks, 8, 32): 32 bytes hold two blocks, one in each half."""
    pairs = r["qs"].reshape(*r.shape, 4, 1, 32)
    blocks: Bytes = np.concatenate([pairs & 15, pairs >> 4], axis=-2)
    return blocks.reshape(*r.shape, 8, 32)


_K_HEAD = (_D, _M, ("scales", "u1", (12,)))


def _q4_k(t: WeightTensor) -> Blocks:
    r = _records(t, *_K_HEAD, ("qs", "u1", (128,)))
    scales, minima = _k_scales(r)
    return Blocks(_pair_up(_k_nibbles(r)).reshape(len(r), -1, 16), scales, minima)


def _q5_k(t: WeightTensor) -> Blocks:
    r = _records(t, *_K_HEAD, ("qh", "u1", (32,)), ("qs", "u1", (128,)))
    scales, minima = _k_scales(r)
    fifth = (r["qh"][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return Blocks((_k_nibbles(r) | fifth).reshape(len(r), -1, BLOCK), scales, minima)


def _requantise(t: WeightTensor) -> Blocks:
    """Round to 8 bits with one scale per 32."""
    x = t.float32().reshape(t.shape[0], -1, BLOCK)
    scales = (np.abs(x).max(axis=-1) / np.float32(127)).astype(np.float16)
    d = scales.astype(np.float32)[..., None]
    quants = np.clip(np.rint(x / np.where(d == 0, np.float32(1), d)), -127, 127).astype(np.int8)
    return Blocks(quants.view(np.uint8), scales, None)


_UNPACK: dict[str, Callable[[WeightTensor], Blocks]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q5_K": _q5_k,
    "Q8_0": _q8_0, "IQ4_NL": _iq4_nl,
}  # fmt: skip
