"""What this machine offers, measured, and the least time that a model can take per token on it."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gapless import measured
from gapless.arch.sizes import WeightInfo
from gapless.arch.spec import ModelSpec, ModelWeights
from gapless.ceilings import Ceilings
from gapless.kernels.count import StepCounter, Work
from gapless.machine import allowed_cores

_PACKAGES = ("gapless", "numpy", "numba", "llvmlite", "tokenizers", "huggingface_hub")
_TELLING = ("sse4.2", "avx", "avx2", "fma", "f16c", "avx512", "avxvnni", "amx", "neon", "dotprod", "i8mm", "sve")


@dataclass(frozen=True)
class MachineReport:
    """The processor as gapless sees and uses it."""

    processor: str
    architecture: str
    features: tuple[str, ...]
    isa: str
    isa_choices: tuple[str, ...]
    cores_present: int
    cores_allowed: int
    threads: int
    memory_bytes: int | None
    working_set_bytes: int
    ceilings: Ceilings


@dataclass(frozen=True)
class FloorReport:
    """The least that one request's next token costs on this machine, with ``context_tokens`` behind it."""

    model: str
    family: str
    step_bytes: int
    step_flops: int
    context_tokens: int
    kv_bytes_per_token: int
    floor_tpot_s: float
    floor_tokens_per_s: float
    bound: str


def known_ceilings(threads: int, working_set_bytes: int, isa: str) -> Ceilings | None:
    """Those that were measured before."""
    found = measured.stored(processor_name(), threads, isa)
    return None if found is None else found.ceilings(working_set_bytes)


def measure_ceilings(
    threads: int, working_set_bytes: int, isa: str | None = None, progress: Callable[[str], None] | None = None
) -> Ceilings:
    """Time plain reads over ``working_set_bytes`` and the kernels' own multiply-adds. Takes a second or two."""
    from gapless.executor import measure

    bandwidth = measure.memory_bandwidth(threads, isa, n_bytes=working_set_bytes, progress=progress)
    return Ceilings(
        bandwidth,
        measure.int8_rate(threads, isa, progress=progress),
        measure.float_rate(threads, isa, progress=progress),
    )


def inspect_machine(
    threads: int | None, isa: str | None, working_set_bytes: int, progress: Callable[[str], None] | None = None
) -> MachineReport:
    """Raises GaplessError for an instruction set that this machine lacks."""
    from gapless.kernels.cpu import isa as targets

    chosen = targets.select(isa)
    allowed = allowed_cores()
    threads = threads or allowed
    return MachineReport(
        processor=processor_name(),
        architecture=platform.machine(),
        features=tuple(sorted(f for f in targets.cpu_features() if f.startswith(_TELLING))),
        isa=chosen.name,
        isa_choices=tuple(known.name for known in targets.known() if targets.supported(known)),
        cores_present=os.cpu_count() or 1,
        cores_allowed=allowed,
        threads=threads,
        memory_bytes=_memory_bytes(),
        working_set_bytes=working_set_bytes,
        ceilings=measure_ceilings(threads, working_set_bytes, isa, progress),
    )


def decode_work(
    spec: ModelSpec, weights: ModelWeights[WeightInfo], *, batch: int, context_tokens: int, kv_element_bytes: float
) -> Work:
    """The work of one step that gives each of ``batch`` requests its next token."""
    return StepCounter(spec, weights, kv_element_bytes=kv_element_bytes).count([(context_tokens, 1)] * batch).total


def floor_of(
    name: str, spec: ModelSpec, weights: ModelWeights[WeightInfo], kv_element_bytes: float, context_tokens: int,
    ceilings: Ceilings,
) -> FloorReport:  # fmt: skip
    """The floor of a single request's decode step, with weights as they are held."""
    work = decode_work(spec, weights, batch=1, context_tokens=context_tokens, kv_element_bytes=kv_element_bytes)
    one_more = decode_work(spec, weights, batch=1, context_tokens=context_tokens + 1, kv_element_bytes=kv_element_bytes)
    floor = ceilings.floor_s(work)
    return FloorReport(
        model=name,
        family=spec.family,
        step_bytes=work.memory_bytes,
        step_flops=work.flops,
        context_tokens=context_tokens,
        kv_bytes_per_token=one_more.kv_read_bytes - work.kv_read_bytes,
        floor_tpot_s=floor,
        floor_tokens_per_s=1 / floor,
        bound=ceilings.bound(work),
    )


def versions() -> dict[str, str | None]:
    """Python and the packages that results depend on; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def can_write(folder: Path) -> bool:
    """Whether files can be put into a folder, which may have to be made first."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        # Rights alone do not tell: a file system may be read-only, or take no files at all.
        with tempfile.TemporaryDirectory(prefix=".gapless-", dir=there):
            return True
    except OSError:
        return False


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
