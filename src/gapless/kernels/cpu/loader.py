"""Compiled kernels: built once per instruction set, cached on disk, loaded without Numba.

Each kernel module is compiled by a process of its own (``build.py``) to object code and a list of symbols. What the
serving process needs is LLVM's in-memory linker alone, which is why it starts quickly and never imports a compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs
from llvmlite import binding as llvm

from gapless.errors import ExecutorError, ResourceError
from gapless.kernels.cpu import build
from gapless.kernels.cpu.isa import Isa

Progress = Callable[[str], None]
Object = tuple[bytes, dict[str, str]]  # code, and its symbols by kernel


SCRATCH = "build-"  # begins the names of folders that a build works in


class Kernels:
    """Kernels of one instruction set, in executable memory for the life of the process.

    Addresses go into tapes; ``function`` gives a Python callable that releases the GIL while it runs.
    """

    def __init__(self, target: Isa, objects: list[Object]) -> None:
        self.isa = target
        # The engine owns the code. Its host module is empty: all code comes from the objects.
        self._engine = _empty_engine()
        self._objects = objects
        self._addresses: dict[str, int] = {}
        for code, _ in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        for _, symbols in objects:
            for name, symbol in symbols.items():
                address = self._engine.get_function_address(symbol)
                assert address, f"the kernels lack {symbol}"
                self._addresses[name] = address

    def address(self, name: str) -> int:
        return self._addresses[name]

    def function(self, name: str, n_args: int) -> Callable[..., None]:
        """The kernel as a callable of ``n_args`` integers (Numba's native convention: result and error first)."""
        pointer, word = ctypes.c_void_p, ctypes.c_int64
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, pointer, *[word] * n_args)
        raw = prototype(self._addresses[name])
        result, error = (ctypes.c_void_p * 1)(), (ctypes.c_void_p * 1)()
        head = ctypes.addressof(result), ctypes.addressof(error)
        keep = (result, error)

        def call(*args: int, _keep: Any = keep) -> None:
            raw(*head, *args)

        return call

    def call(self, name: str, op: int, step: int, tid: int = 0, n_threads: int = 1) -> None:
        """Run one kernel of a tape by itself."""
        self.function(name, 4)(op, step, tid, n_threads)


_loaded: dict[tuple[Isa, tuple[str, ...]], Kernels] = {}


def load_kernels(target: Isa, progress: Progress | None = None, modules: tuple[str, ...] = build.MODULES) -> Kernels:
    """Kernels for ``target``; those that are not in the cache are compiled first.

    Args:
        progress: told in a line what is compiled, and that it is done.

    Raises:
        ExecutorError: the compiler failed.
        ResourceError: what it made cannot be written.
    """
    if (target, modules) in _loaded:
        return _loaded[target, modules]
    report = progress or (lambda line: None)
    stems = {name: f"{name}-{_digest(name, target)}" for name in modules}
    objects = _read(cache_folder(target), stems)
    if missing := stems.keys() - objects.keys():
        with _build_folder(cache_folder(target), report) as folder:
            objects |= _read(folder, {name: stems[name] for name in missing})
            if missing := stems.keys() - objects.keys():
                _build({name: stems[name] for name in modules if name in missing}, folder, target, report)
                objects |= _read(folder, {name: stems[name] for name in missing})
        if missing := stems.keys() - objects.keys():
            names = ", ".join(sorted(missing))
            raise ExecutorError(f"compiled kernels in {folder} do not read as written: {names}", "check that disk")
    try:
        return _loaded.setdefault((target, modules), Kernels(target, [objects[name] for name in modules]))
    except (RuntimeError, OSError) as problem:
        raise ExecutorError(f"compiled kernels cannot be loaded: {problem}", "see docs/troubleshooting.md") from None


def cache_folder(target: Isa) -> Path:
    """Where the kernels of an instruction set are kept."""
    root = os.environ.get("GAPLESS_CACHE") or platformdirs.user_cache_dir("gapless", appauthor=False)
    return Path(root) / "kernels" / target.name


def _digest(module: str, target: Isa) -> str:
    """Changes with the sources that the module is compiled from, with the compiler and with the target."""
    digest = hashlib.sha256()
    for path in sorted(_sources(Path(__file__).with_name(f"{module}.py"), set())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    versions = [metadata.version(name) for name in ("numba", "llvmlite", "numpy")]
    settings = sorted(build.target_settings(target).items())
    digest.update(repr((versions, sys.version_info[:2], settings, build.FORMAT)).encode())
    return digest.hexdigest()[:16]


def _sources(path: Path, known: set[Path]) -> set[Path]:
    """The file and the kernel sources that it imports, directly or not."""
    if path not in known and path.exists():
        known.add(path)
        for name in re.findall(r"^from gapless\.kernels\.([\w.]+) import", path.read_text(), re.MULTILINE):
            _sources(Path(__file__).parents[1].joinpath(*name.split(".")).with_suffix(".py"), known)
    return known


def _read(folder: Path, stems: dict[str, str]) -> dict[str, Object]:
    """Those of the modules' objects that are there and whole."""
    found = {name: build.read_whole(folder / f"{stem}.o") for name, stem in stems.items()}
    return {name: read for name, read in found.items() if read is not None}


@contextlib.contextmanager
def _build_folder(folder: Path, progress: Progress) -> Iterator[Path]:
    """The cache folder while no other process builds in it; one for now where the cache cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        progress(
            f"{folder} cannot be written ({problem.strerror}): kernels are not kept; set GAPLESS_CACHE to a folder"
        )
        with tempfile.TemporaryDirectory(prefix="gapless-kernels-") as temporary:
            yield Path(temporary)
        return
    with _locked(folder):
        yield folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep processes that start together from compiling the same kernels; the lock goes with the process.

    Where there are no locks they do, and the last one's files stay: each is moved to its place whole.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            file = held.enter_context((folder / ".lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            for left in folder.glob(f"{SCRATCH}*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        yield


def _build(stems: dict[str, str], folder: Path, target: Isa, progress: Progress) -> None:
    started = time.perf_counter()
    progress(f"compiling CPU kernels for {target.name} (once): {', '.join(stems)}")
    environment = build.target_environment(target)
    running: dict[str, subprocess.Popen[str]] = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as scratch:
        waiting = list(stems)
        try:
            while waiting or running:
                while waiting and len(running) < len(os.sched_getaffinity(0)):
                    name = waiting.pop(0)
                    command = [sys.executable, "-m", "gapless.kernels.cpu.build", name, f"{scratch}/{stems[name]}.o"]
                    running[name] = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
                name = _next_ended(running)
                _check_built(name, running.pop(name), folder)
                for suffix in (".o", ".json"):
                    os.replace(Path(scratch, stems[name] + suffix), folder / (stems[name] + suffix))
                progress(f"  {name}: done")
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    progress(f"compiled in {time.perf_counter() - started:.1f} s")


def _next_ended(running: dict[str, subprocess.Popen[str]]) -> str:
    while True:
        for name, process in running.items():
            if process.poll() is not None:
                return name
        time.sleep(0.01)


def _check_built(name: str, process: subprocess.Popen[str], folder: Path) -> None:
    """Raises ResourceError if the disk, ExecutorError if anything else kept a module from being compiled."""
    assert process.stderr is not None
    with process.stderr:
        errors = process.stderr.read().strip().splitlines()
    if process.returncode == 0:
        return
    last = errors[-1] if errors else f"exit code {process.returncode}"
    if process.returncode == build.NOT_WRITTEN:
        raise ResourceError(
            f"compiled kernels cannot be written: {last}",
            f"make room in {folder}, or set GAPLESS_CACHE to another folder",
        )
    raise ExecutorError(f"compiling the kernels of {name} failed: {last}", "see docs/troubleshooting.md")


def _empty_engine() -> Any:
    llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly("")
    module.triple = llvm.get_process_triple()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(module, machine)
