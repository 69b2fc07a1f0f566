"""Runs operations of ``vec`` over arrays: ``python vec_operations.py IN.npz OUT.npz``, a process for each target.

IN holds the operands of an operation NAME, ``NAME.0``, ``NAME.1``, ..., all of one length that is a multiple of 16.
OUT gets NAME: its results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from gapless.kernels.cpu import vec
from gapless.kernels.cpu.mem import ld_f32, ld_u16, st_f32, st_i64
from gapless.kernels.cpu.vec import VL


class Access(NamedTuple):
    """How one or many elements are loaded or stored, and what they are in memory."""

    move: Any
    dtype: type

    @property
    def size(self) -> int:
        return np.dtype(self.dtype).itemsize


class Operation(NamedTuple):
    run: Callable[..., None]  # of the addresses of three operands and of the result, and the number of elements
    dtype: type
    reduces: bool = False  # a number for each vector


F32 = Access(vec.vload, np.float32)
I32 = Access(vec.vload_i32, np.int32)
TO_F32 = Access(vec.vstore, np.float32)
TO_I32 = Access(vec.vstore_i32, np.int32)
same = njit(lambda v: v)


def lanes(op: Any, *loads: Access, store: Access = TO_F32) -> Operation:
    """The operation on each vector of its operands."""
    put, size = store.move, store.size
    (load0, size0), (load1, size1), (load2, size2) = [(a.move, a.size) for a in (*loads, F32, F32)[:3]]

    def one(a, b, c, out, n):  # type: ignore[no-untyped-def]
        for i in range(0, n, VL):
            put(out + size * i, op(load0(a + size0 * i)))

    def two(a, b, c, out, n):  # type: ignore[no-untyped-def]
        for i in range(0, n, VL):
            put(out + size * i, op(load0(a + size0 * i), load1(b + size1 * i)))

    def three(a, b, c, out, n):  # type: ignore[no-untyped-def]
        for i in range(0, n, VL):
            put(out + size * i, op(load0(a + size0 * i), load1(b + size1 * i), load2(c + size2 * i)))

    return Operation((one, two, three)[len(loads) - 1], store.dtype)


def elements(op: Any, load: Access, store: Access) -> Operation:
    """The operation on one element after the other."""
    get, size, put, out_size = load.move, load.size, store.move, store.size

    def run(a, b, c, out, n):  # type: ignore[no-untyped-def]
        for i in range(n):
            put(out + out_size * i, op(get(a + size * i)))

    return Operation(run, store.dtype)


def reduction(op: Any, load: Access, store: Access) -> Operation:
    get, size, put, out_size = load.move, load.size, store.move, store.size

    def run(a, b, c, out, n):  # type: ignore[no-untyped-def]
        for i in range(n // VL):
            put(out + out_size * i, op(get(a + size * VL * i)))

    return Operation(run, store.dtype, reduces=True)


ONE_F32 = Access(ld_f32, np.float32)
PUT_F32 = Access(st_f32, np.float32)

OPERATIONS: dict[str, Operation] = {
    "exp": lanes(vec.vexp, F32),
    "exp_f32": elements(vec.exp_f32, ONE_F32, PUT_F32),
    "round": lanes(vec.vround, F32, store=TO_I32),
    "load_f16": lanes(same, Access(vec.vload_f16, np.uint16)),
    "f16_bits": elements(vec.f16_bits_f32, Access(ld_u16, np.uint16), PUT_F32),
    "store_f16": lanes(same, F32, store=Access(vec.vstore_f16, np.uint16)),
    "st_f16": elements(same, ONE_F32, Access(vec.st_f16, np.uint16)),
    "load_bf16": lanes(same, Access(vec.vload_bf16, np.uint16)),
    "load_i8": lanes(same, Access(vec.vload_i8, np.int8), store=TO_I32),
    "store_i8": lanes(same, I32, store=Access(vec.vstore_i8, np.int8)),
    "to_float": lanes(vec.vtof, I32),
    "add_i32": lanes(vec.viadd, I32, I32, store=TO_I32),
    "mul_i32": lanes(vec.vimul, I32, I32, store=TO_I32),
    "abs": lanes(vec.vabs, F32),
    "max": lanes(vec.vmax, F32, F32),
    "min": lanes(vec.vmin, F32, F32),
    "div": lanes(vec.vdiv, F32, F32),
    "fma": lanes(vec.vfma, F32, F32, F32),
    "greater": lanes(vec.vgt_mask, F32, F32, store=TO_I32),
    "less_i32": lanes(vec.vlt_i32_mask, I32, I32, store=TO_I32),
    "select": lanes(vec.vselect, I32, F32, F32),
    "select_i32": lanes(vec.vselect_i32, I32, I32, I32, store=TO_I32),
    "bits": lanes(vec.vbits, F32, store=TO_I32),
    "from_bits": lanes(vec.vfrombits, I32),
    "sum": reduction(vec.vhsum, F32, PUT_F32),
    "largest": reduction(vec.vhmax, F32, PUT_F32),
    "sum_i32": reduction(vec.vhsum_i32, I32, Access(st_i64, np.int64)),
}


def apply(name: str, operands: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    operation, n = OPERATIONS[name], len(operands[0])
    out = np.zeros(n // VL if operation.reduces else n, operation.dtype)
    addresses = [a.ctypes.data for a in operands] + [0] * (3 - len(operands))
    njit(operation.run)(*addresses, out.ctypes.data, n)
    return out


def main() -> None:
    given = dict(np.load(sys.argv[1]))
    names = dict.fromkeys(key.split(".")[0] for key in given)
    operands = {name: [a for key, a in given.items() if key.split(".")[0] == name] for name in names}
    np.savez(sys.argv[2], **{name: apply(name, arrays) for name, arrays in operands.items()})


if __name__ == "__main__":
    main()
