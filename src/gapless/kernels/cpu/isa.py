"""Instruction sets that the kernels are built for, and which of them this machine runs."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass

from gapless.errors import GaplessError

ISA_ENV = "GAPLESS_KERNEL_ISA"


@dataclass(frozen=True)
class Isa:
    """A target of the kernel compiler.

    Attributes:
        name: what ``--isa`` takes.
        lanes: float32 lanes of a vector; matrices are packed in groups of so many rows.
        dot: how four int8 products are summed: "vnni512", "vnni256" (one instruction), "maddubs" (three), "widen".
        cpu, features: LLVM target.
        needs: CPU flags that the machine must have, by LLVM's names.
    """

    name: str
    lanes: int
    dot: str
    cpu: str
    features: str
    needs: tuple[str, ...] = ()


_X86 = (
    Isa("avx512vnni", 16, "vnni512", "x86-64-v4", "+avx512vnni,-prefer-256-bit",
        ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512vnni")),
    Isa("avxvnni", 8, "vnni256", "x86-64-v3", "+avxvnni", ("avx2", "fma", "f16c", "bmi2", "avxvnni")),
    Isa("avx2", 8, "maddubs", "x86-64-v3", "", ("avx2", "fma", "f16c", "bmi2")),
    Isa("portable", 8, "widen", "x86-64", ""),
)  # fmt: skip
_ARM = (Isa("portable", 8, "widen", "generic", "+neon,+fp-armv8"),)


def known() -> tuple[Isa, ...]:
    """Instruction sets of this processor's architecture, best first."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return _X86
    if machine in ("aarch64", "arm64"):
        return _ARM
    raise GaplessError(f"processor architecture {machine!r} is not supported", "run on x86-64 or ARM64")


@functools.cache
def cpu_features() -> frozenset[str]:
    """Feature flags of this processor, by LLVM's names."""
    from llvmlite import binding as llvm

    try:
        flags = llvm.get_host_cpu_features()
    except RuntimeError:
        return frozenset()
    return frozenset(name for name, present in flags.items() if present)


def supported(isa: Isa) -> bool:
    return all(flag in cpu_features() for flag in isa.needs)


def detect() -> Isa:
    """The best instruction set that this machine runs."""
    return next(isa for isa in known() if supported(isa))


def select(name: str | None) -> Isa:
    """The instruction set of that name, or the best one. Raises GaplessError if the machine lacks it."""
    if name is None:
        return detect()
    by_name = {isa.name: isa for isa in known()}
    usable = ", ".join(isa.name for isa in known() if supported(isa))
    if not isinstance(name, str) or name not in by_name:
        raise GaplessError(f"isa = {name!r} is not known here", f"choose one of {usable}")
    if not supported(by_name[name]):
        raise GaplessError(f"isa = {name!r} is not supported by this processor", f"choose one of {usable}")
    return by_name[name]


def target() -> Isa:
    """The instruction set that this process compiles kernels for (set by the environment in a build process)."""
    name = os.environ.get(ISA_ENV)
    if name is None:
        return detect()
    return next(isa for isa in known() if isa.name == name)
