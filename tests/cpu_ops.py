"""Rows, operations and weights for tests of single CPU kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import address_of
from gapless.kernels.cpu.isa import known, supported
from gapless.kernels.cpu.loader import Kernels
from gapless.models.tensor import WeightTensor

F32 = npt.NDArray[np.float32]
ISAS = [isa for isa in known() if supported(isa)]
ISA_NAMES = [isa.name for isa in ISAS]


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[np.generic]:
    """Zeros at a multiple of 64 bytes."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(n_bytes + 64, np.uint8)
    start = -address_of(raw) % 64
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


def operation(**words: int) -> npt.NDArray[np.int64]:
    """A row of the tape with these words of ``abi`` set."""
    op = np.zeros(abi.OP_WORDS, np.int64)
    for name, value in words.items():
        op[getattr(abi, name)] = value
    return op


def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def step_of(n_tokens: int, n_samples: int = 0) -> npt.NDArray[np.int64]:
    step = np.zeros(abi.STEP_WORDS, np.int64)
    step[abi.N_TOKENS], step[abi.N_SAMPLES] = n_tokens, n_samples
    return step


def float_tensor(values: F32) -> WeightTensor:
    return WeightTensor("w", "F32", values.shape, np.ascontiguousarray(values, np.float32).view(np.uint8))


def quantised(values: F32, quant: str) -> WeightTensor:
    """``values`` rounded to a GGML type by the ``gguf`` package, or random blocks where it cannot round to it."""
    from gguf import GGMLQuantizationType as Type
    from gguf.quants import quantize

    data = quantize(np.ascontiguousarray(values, np.float32), Type[quant])
    return WeightTensor("w", quant, values.shape, np.ascontiguousarray(data).view(np.uint8))


def run(kernels: Kernels, name: str, op: npt.NDArray[np.int64], step: npt.NDArray[np.int64], threads: int = 1) -> None:
    """The shares of all threads, one after the other."""
    for tid in range(threads):
        kernels.call(name, address_of(op), address_of(step), tid, threads)
