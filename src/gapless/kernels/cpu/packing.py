"""Layouts of packed weights: pairs of groups of ``lanes`` rows, blocks of 32 inputs. No Numba here.

A pair is read from its first byte to its last, as one stream: for each block of inputs the quants of both groups,
then their scales (and minima). Within a block the quants of one row lie in runs of four, so a vector holds four
consecutive inputs of every row of a group, which is what the dot-product instructions take. Four-bit vectors hold run
j in their low and run j + 4 in their high nibbles. A pair of floats is ``[n_inputs][2][lanes]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK = 32
PAIR_GROUPS = 2  # groups that a register tile takes
ROW_PAD = 32  # rows are padded to a multiple of this: whole pairs on every instruction set

Layout = Literal["q4", "q8", "q8m", "f32", "f16", "bf16"]

_FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class PackedShape:
    """Shape and strides of one packed matrix.

    q4: unsigned 4 bits with scale and minimum; q8: signed 8 bits with scale; q8m: signed 8 bits with both.
    """

    layout: Layout
    n_rows: int
    n_inputs: int
    lanes: int

    def __post_init__(self) -> None:
        assert self.is_float or self.n_inputs % BLOCK == 0, self

    @property
    def is_float(self) -> bool:
        return self.layout in _FLOAT_BYTES

    @property
    def padded_rows(self) -> int:
        return -(-self.n_rows // ROW_PAD) * ROW_PAD

    @property
    def n_pairs(self) -> int:
        return self.padded_rows // (PAIR_GROUPS * self.lanes)

    @property
    def depth(self) -> int:
        """Steps of a tile through a pair: blocks of 32 inputs, or single inputs of a float layout."""
        return self.n_inputs if self.is_float else self.n_inputs // BLOCK

    @property
    def quant_bytes(self) -> int:
        """Of one group in one block."""
        return self.lanes * (16 if self.layout == "q4" else 32)

    @property
    def n_halves(self) -> int:
        """Half floats of a row in a block: its scale, and its minimum where the layout has one."""
        return 1 if self.layout == "q8" else 2

    @property
    def block_bytes(self) -> int:
        """Of both groups in one block, or in one input of a float layout."""
        if self.is_float:
            return PAIR_GROUPS * self.lanes * _FLOAT_BYTES[self.layout]
        return PAIR_GROUPS * (self.quant_bytes + self.n_halves * self.lanes * 2)

    @property
    def pair_bytes(self) -> int:
        return self.depth * self.block_bytes

    @property
    def nbytes(self) -> int:
        return self.n_pairs * self.pair_bytes
