"""GGML tensor types: their sizes, and their values as float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gapless.models.tensor import WeightTensor

# Type name: (elements of a block, bytes of a block), as ggml's ggml-common.h has them.
QUANTS: dict[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "IQ4_NL": (32, 18),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip


def row_bytes(quant: str, n_elements: int) -> int:
    """Bytes of a row of ``n_elements``, a multiple of the type's block."""
    elements, size = QUANTS[quant]
    assert n_elements % elements == 0, (quant, n_elements)
    return n_elements // elements * size


@np.errstate(all="ignore")  # a damaged scale overflows; the scores show it
def dequantize(tensor: WeightTensor) -> npt.NDArray[np.float32]:
    """Values of ``tensor.shape``."""
    data = np.ascontiguousarray(tensor.data)
    if tensor.quant == "F32":
        return data.view(np.float32).reshape(tensor.shape)
    if tensor.quant == "F16":
        return data.view(np.float16).reshape(tensor.shape).astype(np.float32)
    if tensor.quant == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as dequantize_blocks

    values: npt.NDArray[np.float32] = dequantize_blocks(data, GGMLQuantizationType[tensor.quant])
    return values.reshape(tensor.shape)
