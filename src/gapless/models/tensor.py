"""A weight as it lies in its file: quantised rows over a memory map, dequantised on demand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class WeightTensor:
    """Rows of a matrix (or of stacked matrices, or one vector), stored as raw bytes of one GGML type.

    Attributes:
        name: the name in the file, for errors.
        quant: GGML type name: "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", ... (upper case).
        shape: logical shape in elements, last axis contiguous (the input axis of a matrix).
        data: uint8 array of shape ``shape[:-1] + (row_bytes,)``, usually a view of a memory map.
    """

    name: str
    quant: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    def __getitem__(self, index: int | slice | npt.NDArray[np.intp]) -> WeightTensor:
        """Select along the first axis: an expert of a stack, or some rows of a matrix."""
        data = self.data[index]
        return WeightTensor(self.name, self.quant, (*data.shape[:-1], self.shape[-1]), data)

    def float32(self) -> npt.NDArray[np.float32]:
        """The dequantised values, of ``shape``."""
        from gapless.models.quant import dequantize

        return dequantize(self)


@dataclass(frozen=True)
class TensorStack(WeightTensor):
    """Matrices of one shape stored apart (experts), seen as one tensor (count, out, in) without a copy."""

    parts: tuple[WeightTensor, ...] = ()

    @classmethod
    def of(cls, parts: list[WeightTensor]) -> TensorStack:
        first = parts[0]
        return cls(first.name, first.quant, (len(parts), *first.shape), first.data, tuple(parts))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, index: int | slice | npt.NDArray[np.intp]) -> WeightTensor:
        assert isinstance(index, int)
        return self.parts[index]

    def float32(self) -> npt.NDArray[np.float32]:
        return np.stack([part.float32() for part in self.parts])
