"""How many joules this machine's processors and GPUs use, as their own counters have it.

The library zeus (``pip install 'gapless[energy]'``) finds the counters: RAPL's for the processor's packages and their
memory, NVML's or AMD SMI's for GPUs. A counter is of a whole device: it holds what every process on the machine used,
and not what this one did. What is not known is None or left out, never 0.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

INSTALL = "pip install 'gapless[energy]'"

_MOST_W = 1000.0  # what a package or its memory draws at most; zeus assumes the same
_STILL_S = 5.0  # counters that work are renewed many times a second


class EnergyMeter(Protocol):
    """
    Attributes:
        parts: what is measured: "cpu package 0", "dram of package 0", "gpu 0 NVIDIA H200". A package or a GPU is
            measured whole, whoever uses it. GPUs are those that CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES admit.
        left_out: what was asked for and is not measured, and why.
        failed: why readings have ended, in a sentence; None while they go on.
    """

    parts: tuple[str, ...]
    left_out: tuple[str, ...]
    failed: str | None

    def read_j(self) -> float | None:
        """Joules of all parts together since the meter was opened. May be called from any thread.

        None for good once a part could not be read, its counter stood still for seconds or was set back, or the meter
        was closed; None in a process forked from the one that opened it. RAPL's counters begin anew at 0, some
        after a minute at 1 kW, so readings must not lie further apart than a minute: one that comes too late to tell
        how often a counter began anew is such a failure. Another meter can be opened then.
        """
        ...

    def resume_j(self) -> float | None:
        """``read_j`` after a pause of any length: what was used since the last reading is left out."""
        ...

    def close(self) -> None:
        """May be called twice."""
        ...


@dataclass(frozen=True)
class NoMeter:
    """Nothing can be measured.

    Attributes:
        why: one sentence.
    """

    why: str


def open_meter(cpus: bool = True, gpus: bool = True) -> EnergyMeter | NoMeter:
    """A meter of what this machine can measure of its processor's packages and its GPUs; raises nothing.

    Starts no thread and no process. Importing zeus takes a tenth of a second; where there are AMD GPUs, zeus compares
    their counters with their power for half a second. The devices that it found first are those of the whole process.
    """
    found = _Found()
    with _quiet():
        missing = _import_problem()
        if missing:
            return NoMeter(missing)
        for wanted, look in ((cpus, _look_for_packages), (gpus, _look_for_gpus)):
            if wanted:
                try:
                    look(found)
                except Exception as problem:  # drivers and their bindings raise what they like
                    found.left_out.append(_said(problem))
    if not found.parts:
        return NoMeter(f"no counter of energy: {'; '.join(found.left_out) or 'none was asked for'}")
    return _Meter(tuple(found.parts), tuple(found.left_out))


class _Unknown(Exception):
    """A counter's reading says nothing about the energy used."""


class _Counter(Protocol):
    """
    Attributes:
        range_j: where it begins anew at 0; None if that lies beyond a machine's life.
    """

    range_j: float | None

    def read_j(self) -> float: ...

    def close(self) -> None: ...


class _RaplFile:
    """A counter in sysfs, kept open.

    zeus' own reading is passed by: it starts a process for each counter, which runs the user's main module once more,
    and it falls back by a whole range for up to a second where the counter has just begun anew.
    """

    def __init__(self, file: Any) -> None:
        self.range_j: float | None = file.max_energy_range_uj / 1e6
        self._file = io.FileIO(file.energy_uj_path)

    def read_j(self) -> float:
        return int(os.pread(self._file.fileno(), 32, 0)) / 1e6

    def close(self) -> None:
        self._file.close()


class _Call:
    """A counter of a driver or a daemon, which see to it that it never begins anew."""

    range_j: float | None = None

    def __init__(self, read_mj: Callable[[], float]) -> None:
        self._read_mj = read_mj

    def read_j(self) -> float:
        return self._read_mj() / 1e3

    def close(self) -> None:
        pass


class _Part:
    """What one counter adds up to since it was opened. Raises what the counter raises, _Unknown if it stands at 0."""

    def __init__(self, name: str, counter: _Counter) -> None:
        self.name = name
        self._counter = counter
        self._opened_s = self._last_s = monotonic()
        self._last_j = counter.read_j()
        self._used_j = 0.0
        if self._last_j == 0:
            raise _Unknown("its counter stands at 0")

    def used_j(self) -> float:
        """Raises what the counter raises, and _Unknown where it does not tell."""
        now_s, now_j = monotonic(), self._counter.read_j()
        self._used_j += self._step_j(now_s - self._last_s, now_j)
        self._last_s, self._last_j = now_s, now_j
        if self._used_j == 0 and now_s - self._opened_s > _STILL_S:
            raise _Unknown("its counter stands still")
        return self._used_j

    def resume(self) -> None:
        """Count on from now, whatever was used since the last reading. Raises what the counter raises."""
        self._last_j = self._counter.read_j()
        self._opened_s = self._last_s = monotonic()

    def close(self) -> None:
        self._counter.close()

    def _step_j(self, elapsed_s: float, now_j: float) -> float:
        step_j, range_j = now_j - self._last_j, self._counter.range_j
        if range_j is not None:
            if elapsed_s * _MOST_W > range_j:
                raise _Unknown(f"read after {elapsed_s:.0f} s, its counter may have begun anew more than once")
            # A machine that slept may have set its counters to 0: that is not the end of their range.
            if step_j < 0 and step_j + range_j <= _MOST_W * (elapsed_s + 1):
                step_j += range_j
        if step_j < 0:
            raise _Unknown("its counter was set back")
        return step_j


class _Meter:
    def __init__(self, parts: tuple[_Part, ...], left_out: tuple[str, ...]) -> None:
        self.parts = tuple(part.name for part in parts)
        self.left_out = left_out
        self.failed: str | None = None
        self._open = parts
        self._lock = threading.Lock()
        self._process = os.getpid()

    def resume_j(self) -> float | None:
        return self._read(resume=True)

    def read_j(self) -> float | None:
        return self._read(resume=False)

    def _read(self, *, resume: bool) -> float | None:
        if os.getpid() != self._process:  # a lock taken when the process forked is never released in the child
            return None
        with self._lock:
            if not self._open:
                return None
            used_j = 0.0
            for part in self._open:
                try:
                    if resume:
                        part.resume()
                    used_j += part.used_j()
                except Exception as problem:  # the work goes on without the joules, whatever a driver raises
                    self._end(f"{part.name}: {_said(problem)}")
                    return None
            return used_j

    def close(self) -> None:
        if os.getpid() == self._process:
            with self._lock:
                self._end("closed")

    def _end(self, why: str) -> None:
        self.failed = self.failed or why
        for part in self._open:
            part.close()
        self._open = ()


@dataclass
class _Found:
    parts: list[_Part] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, counter: _Counter) -> None:
        try:
            self.parts.append(_Part(name, counter))
        except Exception as problem:  # one part that fails leaves the others
            counter.close()
            self.left_out.append(f"{name}: {_said(problem)}")


def _import_problem() -> str:
    """Why zeus cannot be used, in a sentence; empty where it can."""
    try:
        from zeus.device.cpu.rapl import RAPLFile
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] == "zeus":
            return f"no library: {INSTALL}"
        return f"the library zeus cannot be imported: {_said(problem)}"
    except Exception as problem:  # it loads drivers' libraries
        return f"the library zeus cannot be imported: {_said(problem)}"
    if not hasattr(RAPLFile, "wraparound_tracker"):  # up to 0.15 a process is started for each counter that is found
        return f"the library zeus is older than 0.16: {INSTALL}"
    return ""


def _look_for_packages(found: _Found) -> None:
    from zeus.device.cpu import get_cpus, rapl
    from zeus.device.cpu.common import ZeusCPUNoPermissionError

    if not rapl.rapl_is_available():
        found.left_out.append("RAPL does not answer")
        return
    try:
        cpus = get_cpus()
    except ZeusCPUNoPermissionError:
        found.left_out.append(
            "RAPL's files may be read by root only (run as root, or set ZEUSD_SOCK_PATH to the socket of zeus' daemon)"
        )
        return
    packages = [(cpu, name) for cpu in cpus.cpus if (name := _zone_name(cpus.rapl_dir, cpu)).startswith("package")]
    for cpu, name in packages:
        _add_package(found, cpu, name.replace("-", " "), by_daemon=isinstance(cpu, rapl.ZeusdRAPLCPU))
    if not packages:
        found.left_out.append("RAPL has no packages")


def _zone_name(folder: str, cpu: Any) -> str:
    """As "package-0" or "package-0-die-1"; "psys" is all of the machine, which holds the packages once more."""
    return Path(folder, f"intel-rapl:{cpu.cpu_index}", "name").read_text().strip()


def _add_package(found: _Found, cpu: Any, name: str, by_daemon: bool) -> None:
    if by_daemon:
        found.add(f"cpu {name}", _Call(lambda: cpu.get_total_energy_consumption().cpu_mj))
        if cpu.supports_get_dram_energy_consumption():
            found.add(f"dram of {name}", _Call(lambda: cpu.get_total_energy_consumption().dram_mj))
        return
    found.add(f"cpu {name}", _RaplFile(cpu.rapl_file))
    if cpu.dram is not None:
        found.add(f"dram of {name}", _RaplFile(cpu.dram))


def _look_for_gpus(found: _Found) -> None:
    from zeus.device import gpu as devices

    if not (devices.nvml_is_available() or devices.amdsmi_is_available()):
        found.left_out.append("neither NVML nor AMD SMI answers")
        return
    gpus = devices.get_gpus().gpus
    for gpu in gpus:
        name = f"gpu {gpu.gpu_index}"
        try:
            name += f" {gpu.get_name()}"
            supported = gpu.supports_get_total_energy_consumption()
        except Exception as problem:  # a GPU that is lost leaves the others
            found.left_out.append(f"{name}: {_said(problem)}")
            continue
        if supported:
            found.add(name, _Call(gpu.get_total_energy_consumption))
        else:
            found.left_out.append(f"{name} has no counter of energy")
    if not gpus:
        found.left_out.append("no GPU is there")


def _said(problem: Exception) -> str:
    """The first line of an error, without the full stop."""
    lines = str(problem).splitlines()
    return lines[0].strip().rstrip(".") if lines and lines[0].strip() else type(problem).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """zeus tells of what a machine lacks by warnings and in its log; here that is said in a sentence instead."""
    log = logging.getLogger("zeus")
    before = log.propagate
    log.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.propagate = before
