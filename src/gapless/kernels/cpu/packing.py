"""Layouts of packed weights: groups of ``lanes`` rows, blocks of 32 inputs. No Numba here.

A quantised group is ``[quants: n_blocks * lanes * 32 * bits / 8][scales: n_blocks * (1 or 2) * lanes halves]``, padded
to 64 bytes. Within a block the quants of one row lie in runs of four, so a vector holds four consecutive inputs of
every row of the group, which is what the dot-product instructions take. Four-bit vectors hold run j in their low and
run j + 4 in their high nibbles. A float group is ``[n_inputs][lanes]``.
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
    def n_groups(self) -> int:
        return self.padded_rows // self.lanes

    @property
    def n_blocks(self) -> int:
        return self.n_inputs // BLOCK

    @property
    def scales_offset(self) -> int:
        """Bytes from a group's start to its scales."""
        return self.n_blocks * self.lanes * (16 if self.layout == "q4" else 32)

    @property
    def group_bytes(self) -> int:
        if self.is_float:
            return _round64(self.n_inputs * self.lanes * _FLOAT_BYTES[self.layout])
        halves = 1 if self.layout == "q8" else 2
        return _round64(self.scales_offset + self.n_blocks * self.lanes * 2 * halves)

    @property
    def nbytes(self) -> int:
        return self.n_groups * self.group_bytes


def _round64(n: int) -> int:
    return -(-n // 64) * 64
