"""From weights as files have them to weights as the kernels read them, a run of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.kernels.cpu.arena import Arena, address_of
from gapless.kernels.cpu.isa import Isa
from gapless.kernels.cpu.packing import BLOCK, PAIR_GROUPS, Layout, PackedShape
from gapless.kernels.cpu.unpack import LAYOUTS, unpack
from gapless.models.tensor import WeightTensor

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.intp]
Tensors = Sequence[WeightTensor]

RUN_ELEMENTS = 4 << 20  # taken at a time, to bound what exists beside the source and the result

_FLOATS = frozenset(("f32", "f16", "bf16"))


@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix in memory; ``data`` keeps it alive."""

    shape: PackedShape
    data: Bytes

    @property
    def address(self) -> int:
        return address_of(self.data)


def layout_of(tensors: Tensors, float_weights: bool = False) -> Layout:
    """The layout that holds all of these; ``float_weights`` asks for float32 whatever the file has."""
    layouts: set[Layout] = {LAYOUTS[t.quant] for t in tensors}
    if float_weights:
        return "f32"
    if len(layouts) > 1:
        layouts = {"f32"} if layouts & _FLOATS else {"q8m"}
    layout = layouts.pop()
    return layout if layout in _FLOATS or tensors[0].shape[-1] % BLOCK == 0 else "f32"


def pack_stacked(tensors: Tensors, layout: Layout, isa: Isa, arena: Arena) -> PackedMatrix:
    """Rows of the tensors (out, in) one below the other."""
    n_rows = sum(t.shape[0] for t in tensors)
    starts = np.cumsum([0, *(t.shape[0] for t in tensors)])
    return _pack(tensors, layout, isa, arena, n_rows, lambda which, row: starts[which] + row)


def pack_interleaved(gate: WeightTensor, up: WeightTensor, layout: Layout, isa: Isa, arena: Arena) -> PackedMatrix:
    """Groups of gate and up in turn, each padded to 32 rows, as the ``gated`` kernels take them."""
    n, lanes = PackedShape(layout, gate.shape[0], gate.shape[1], isa.lanes).padded_rows, isa.lanes

    def place(which: int, row: Rows) -> Rows:
        return (row // lanes * 2 + which) * lanes + row % lanes

    return _pack((gate, up), layout, isa, arena, 2 * n, place)


@np.errstate(all="ignore")  # numbers that damage has made too large show in the scores
def _pack(
    tensors: Tensors, layout: Layout, isa: Isa, arena: Arena, n_rows: int, place: Callable[[int, Rows], Rows]
) -> PackedMatrix:
    shape = PackedShape(layout, n_rows, tensors[0].shape[1], isa.lanes)
    packed = PackedMatrix(shape, arena.take(shape.nbytes))
    pairs = packed.data.reshape(shape.n_pairs, shape.depth, shape.block_bytes)
    if shape.is_float:
        write = _float_writer(shape, pairs)
    else:
        write = _quant_writer(shape, pairs, biased=isa.dot.startswith("vnni") and layout != "q4")
    for which, tensor in enumerate(tensors):
        for first, rows in _runs(tensor):
            write(rows, place(which, np.arange(first, first + rows.shape[0])))
    return packed


def _runs(tensor: WeightTensor) -> Iterator[tuple[int, WeightTensor]]:
    step = max(32, RUN_ELEMENTS // tensor.shape[1] // 32 * 32)
    for first in range(0, tensor.shape[0], step):
        yield first, tensor[first : first + step]


Writer = Callable[[WeightTensor, Rows], None]


def _quant_writer(shape: PackedShape, pairs: Bytes, biased: bool) -> Writer:
    n_runs, lanes, end = shape.quant_bytes // (4 * shape.lanes), shape.lanes, PAIR_GROUPS * shape.quant_bytes
    blocks_first = (shape.n_pairs, shape.depth, PAIR_GROUPS)
    runs = _view(pairs[:, :, :end], np.uint32, (*blocks_first, n_runs, lanes))
    halves = _view(pairs[:, :, end:], np.float16, (*blocks_first, shape.n_halves, lanes))
    if biased:
        # A padding row is all zeros, whose stored form is 128; scales of 0 hide it, but keep it clean.
        pairs[:, :, :end] = 128

    def write(rows: WeightTensor, target: Rows) -> None:
        blocks = unpack(rows, shape.layout)
        quants = np.ascontiguousarray(blocks.quants ^ np.uint8(128) if biased else blocks.quants)
        _scatter(runs, quants.view(np.uint32).reshape(len(target), shape.depth, n_runs), target)
        _scatter(halves[:, :, :, 0], blocks.scales, target)
        if blocks.minima is not None and shape.n_halves == 2:
            _scatter(halves[:, :, :, 1], blocks.minima, target)

    return write


def _float_writer(shape: PackedShape, pairs: Bytes) -> Writer:
    element = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}[shape.layout]
    values = _view(pairs, element, (shape.n_pairs, shape.depth, PAIR_GROUPS, shape.lanes))

    def write(rows: WeightTensor, target: Rows) -> None:
        source = rows.float32() if shape.layout == "f32" else np.ascontiguousarray(rows.data).view(element)
        _scatter(values, source, target)

    return write


def _view(part: Bytes, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A window into the pairs' bytes as an array: the last axis of ``part`` becomes all axes but the first two."""
    typed = part.view(dtype)
    inner = [typed.itemsize * math.prod(shape[k + 1 :]) for k in range(2, len(shape))]
    return np.lib.stride_tricks.as_strided(typed, shape, (*part.strides[:2], *inner))


def _scatter(view: npt.NDArray[Any], rows: npt.NDArray[Any], target: Rows) -> None:
    """Row i to lane ``target[i] % lanes`` of its group: (pairs, depth, 2, ..., lanes) from (rows, depth, ...)."""
    lanes = view.shape[-1]
    group, lane = target // lanes, target % lanes
    pair, side = group // PAIR_GROUPS, group % PAIR_GROUPS
    if len(target) % lanes == 0 and (lane == np.arange(len(target)) % lanes).all():
        # Whole groups: one copy for each side of the pairs.
        in_groups = np.moveaxis(rows.reshape(-1, lanes, *rows.shape[1:]), 1, -1)
        for s in range(PAIR_GROUPS):
            chosen = np.flatnonzero(side[::lanes] == s)
            view[pair[::lanes][chosen], :, s] = in_groups[chosen]
    else:
        np.moveaxis(view, (2, -1), (1, 2))[pair, side, lane] = rows
