"""Memory for kernels: 64-byte aligned pieces of large anonymous mappings on huge pages."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from gapless.errors import ResourceError

CHUNK_BYTES = 32 << 20
ALIGNMENT = 64
HUGE_PAGE = 2 << 20


class Arena:
    """Hands out zeroed byte arrays that live until the arena is dropped. Addresses are stable."""

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._used = 0
        self.nbytes = 0

    def take(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        """``n_bytes`` zero bytes, at a multiple of 64. Raises ResourceError."""
        size = -(-max(n_bytes, 1) // ALIGNMENT) * ALIGNMENT
        if not self._chunks or self._used + size > self._chunks[-1].nbytes:
            self._chunks.append(_map(max(size, CHUNK_BYTES)))
            self._used = 0
        piece = self._chunks[-1][self._used : self._used + n_bytes]
        self._used += size
        self.nbytes += size
        return piece


def _map(n_bytes: int) -> npt.NDArray[np.uint8]:
    size = -(-n_bytes // HUGE_PAGE) * HUGE_PAGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as problem:
        raise ResourceError(
            f"cannot reserve {size} bytes of memory ({problem})", "use a smaller model, context or cache"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Without huge pages in the operating system it is slower, not wrong.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def address_of(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])
