"""Compile the kernels of one module to object code, in a process of its own.

``python -m gapless.kernels.cpu.build MODULE OUT`` reads the target from the environment (``isa.ISA_ENV``), compiles
every kernel that MODULE lists in ``KERNELS`` and writes one object file and one JSON list of symbols.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from gapless.kernels.cpu import isa

FORMAT = 2  # of what a build writes; raise it to make old caches stale
NOT_WRITTEN = 4  # exit code: the disk, not the compiler
MODULES = ("walk", "linear", "elementwise", "attention", "sample", "experts")


def target_settings(target: isa.Isa) -> dict[str, str]:
    """Settings of the compiler for ``target``. Vectorisation is ours alone: nothing may reorder a sum."""
    return {
        isa.ISA_ENV: target.name,
        "NUMBA_CPU_NAME": target.cpu,
        "NUMBA_CPU_FEATURES": target.features,
        "NUMBA_OPT": "3",
        "NUMBA_LOOP_VECTORIZE": "0",
        "NUMBA_SLP_VECTORIZE": "0",
    }


def target_environment(target: isa.Isa) -> dict[str, str]:
    """Environment in which a build process compiles for ``target``."""
    return {**os.environ, **target_settings(target)}


def compile_module(name: str, out: Path) -> None:
    """Write ``out`` (object code) and ``out.json`` (symbols by kernel, and the digest of the object code)."""
    from llvmlite import binding as llvm

    module = importlib.import_module(f"gapless.kernels.cpu.{name}")
    linked = None
    symbols: dict[str, str] = {}
    machine: Any = None
    for kernel, (function, n_args) in module.KERNELS.items():
        result = compile_kernel(function, n_args)
        library = result.library
        machine = library.codegen._tm
        final = llvm.parse_assembly(str(library._final_module))
        symbols[kernel] = result.fndesc.llvm_func_name
        if linked is None:
            linked = final
        else:
            linked.link_in(final)
    assert linked is not None
    code = machine.emit_object(linked)
    write_whole(out, code)
    write_whole(out.with_suffix(".json"), manifest(code, symbols))


def compile_kernel(function: Any, n_args: int) -> Any:
    """Numba's result for a kernel that takes ``n_args`` words."""
    from numba import njit, types

    signature = types.void(*[types.int64] * n_args)
    compiler = njit(signature, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
    return compiler(function).overloads[signature.args]


def manifest(code: bytes, symbols: dict[str, str]) -> bytes:
    return json.dumps({"sha256": _digest(code, symbols), "symbols": symbols}).encode()


def _digest(code: bytes, symbols: Any) -> str:
    return hashlib.sha256(json.dumps(symbols, sort_keys=True).encode() + b"\0" + code).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write through to the disk, so that a rename afterwards cannot outlive its content in a crash."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_whole(path: Path) -> tuple[bytes, dict[str, str]] | None:
    """Object code at ``path`` and its symbols; None where they are not there, or not what was written.

    Code that a full disk has cut or a bad one has changed would be run all the same.
    """
    try:
        code = path.read_bytes()
        found = json.loads(path.with_suffix(".json").read_bytes())
        symbols: dict[str, str] = found["symbols"]
        return (code, symbols) if found["sha256"] == _digest(code, symbols) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def die_with_parent() -> None:
    """Be killed when the process that waits for this build goes, whatever ends it: nobody would use what is built."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def main() -> int:
    die_with_parent()
    try:
        compile_module(sys.argv[1], Path(sys.argv[2]))
    except OSError as problem:
        print(f"{problem.filename or sys.argv[2]}: {problem.strerror}", file=sys.stderr)
        return NOT_WRITTEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
