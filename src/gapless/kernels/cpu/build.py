"""Compile the kernels of one module to object code, in a process of its own.

``python -m gapless.kernels.cpu.build MODULE OUT`` reads the target from the environment (``isa.ISA_ENV``), compiles
every kernel that MODULE lists in ``KERNELS`` and writes one object file and one JSON list of symbols.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from gapless.kernels.cpu import isa

FORMAT = 1  # of what a build writes; raise it to make old caches stale
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
    """Write ``out`` (object code) and ``out.json`` (kernel name to symbol)."""
    from llvmlite import binding as llvm
    from numba import njit, types

    module = importlib.import_module(f"gapless.kernels.cpu.{name}")
    linked = None
    symbols: dict[str, str] = {}
    machine: Any = None
    for kernel, (function, n_args) in module.KERNELS.items():
        signature = types.void(*[types.int64] * n_args)
        compiled = njit(signature, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(
            function
        )
        result = compiled.overloads[signature.args]
        library = result.library
        machine = library.codegen._tm
        final = llvm.parse_assembly(str(library._final_module))
        symbols[kernel] = result.fndesc.llvm_func_name
        if linked is None:
            linked = final
        else:
            linked.link_in(final)
    assert linked is not None
    out.write_bytes(machine.emit_object(linked))
    out.with_suffix(".json").write_text(json.dumps(symbols))


def main() -> None:
    compile_module(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
