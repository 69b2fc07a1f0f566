"""The tape under construction: operations in order, and the buffers between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.kernels.cpu import abi
from gapless.kernels.cpu.arena import Arena, address_of
from gapless.kernels.cpu.loader import Kernels
from gapless.kernels.cpu.packing import BLOCK

Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """The largest step that a tape runs."""

    step_tokens: int
    step_samples: int
    n_threads: int


@dataclass(frozen=True)
class Rows:
    """Float32 rows in memory, padded with zeros to 32 elements. Strides are in bytes."""

    address: int
    stride: int
    width: int


@dataclass(frozen=True)
class Quantised:
    """Int8 rows and the scales of their blocks of 32."""

    address: int
    stride: int
    scales: int
    scales_stride: int


class Tape:
    """Collects operations. A buffer is named by its role; its next use takes the same memory."""

    def __init__(self, kernels: Kernels, arena: Arena, limits: Limits) -> None:
        self.limits = limits
        self._kernels = kernels
        self._arena = arena
        self._ops: list[Words] = []
        self.kernels: list[str] = []  # of each operation the name
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}
        self._vectors: dict[tuple[int, int], npt.NDArray[np.float32]] = {}

    def __len__(self) -> int:
        return len(self._ops)

    def emit(self, kernel: str, words: dict[int, int], *, barrier: bool = True) -> None:
        """Append an operation with these words; all threads meet behind it unless the next needs nothing of it."""
        op = np.zeros(abi.OP_WORDS, np.int64)
        for index, value in words.items():
            op[index] = value
        op[abi.OP_KERNEL] = self._kernels.address(kernel)
        op[abi.OP_BARRIER] = int(barrier)
        self._ops.append(op)
        self.kernels.append(kernel)

    def finish(self) -> Words:
        """The tape as (operations, OP_WORDS), 64-byte aligned."""
        data = self._arena.take(len(self._ops) * abi.OP_WORDS * 8).view(np.int64).reshape(-1, abi.OP_WORDS)
        data[:] = self._ops
        return data

    def rows(self, role: str, width: int, *, samples: bool = False, times: int = 1) -> Rows:
        """A float32 buffer of ``times`` rows for every token, or every sample, of a step."""
        stride = padded(width) * 4
        return Rows(self._buffer(role, self._count(samples) * times * stride), stride, width)

    def quantised(self, role: str, width: int, *, samples: bool = False, times: int = 1) -> Quantised:
        n, stride, scales_stride = self._count(samples) * times, padded(width), padded(width) // BLOCK * abi.XD_BYTES
        scales = self._buffer(f"{role}.scales", n * scales_stride)
        return Quantised(self._buffer(role, n * stride), stride, scales, scales_stride)

    def table(self, role: str, n_bytes: int) -> int:
        """Address of so many bytes."""
        return self._buffer(role, n_bytes)

    def scratch(self, role: str, bytes_per_thread: int) -> int:
        """Address of so many bytes for each thread, at that stride."""
        return self._buffer(role, bytes_per_thread * self.limits.n_threads)

    def vector(self, values: npt.NDArray[np.float32]) -> int:
        """Address of a float32 vector, padded with zeros to 32."""
        data = self._arena.take(padded(len(values)) * 4).view(np.float32)
        data[: len(values)] = values
        return address_of(data)

    def _count(self, samples: bool) -> int:
        return self.limits.step_samples if samples else self.limits.step_tokens

    def _buffer(self, role: str, n_bytes: int) -> int:
        buffer = self._buffers.get(role)
        if buffer is None or buffer.nbytes < n_bytes:
            buffer = self._buffers[role] = self._arena.take(n_bytes)
        return address_of(buffer)


def padded(width: int) -> int:
    return -(-width // BLOCK) * BLOCK


def float_bits(value: float) -> int:
    """A float32 as a word of an operation."""
    return int(np.float32(value).view(np.uint32))
