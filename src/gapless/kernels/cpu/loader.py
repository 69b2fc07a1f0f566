"""Compiled kernels: built once per instruction set, cached on disk, loaded without Numba.

Each kernel module is compiled by a process of its own (``build.py``) to object code and a list of symbols. What the
serving process needs is LLVM's in-memory linker alone, which is why it starts quickly and never imports a compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
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

from gapless.errors import ExecutorError
from gapless.kernels.cpu import build
from gapless.kernels.cpu.isa import Isa

Progress = Callable[[str], None]


class Kernels:
    """Kernels of one instruction set, in executable memory for the life of the process.

    Addresses go into tapes; ``function`` gives a Python callable that releases the GIL while it runs.
    """

    def __init__(self, target: Isa, objects: list[tuple[Path, dict[str, str]]]) -> None:
        self.isa = target
        # The engine owns the code. Its host module is empty: all code comes from the objects.
        self._engine = _empty_engine()
        self._addresses: dict[str, int] = {}
        for path, _ in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_path(str(path)))
        self._engine.finalize_object()
        for path, symbols in objects:
            for name, symbol in symbols.items():
                address = self._engine.get_function_address(symbol)
                assert address, f"{path.name} lacks {symbol}"
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
    """
    if (target, modules) in _loaded:
        return _loaded[target, modules]
    stems = {name: f"{name}-{_digest(name, target)}" for name in modules}
    folder = cache_folder(target)
    missing = {name: stem for name, stem in stems.items() if not _complete(folder, stem)}
    if missing:
        folder = _writable(folder)
        with _locked(folder):
            missing = {name: stem for name, stem in stems.items() if not _complete(folder, stem)}
            if missing:
                _build(missing, folder, target, progress or (lambda line: None))
    objects = [(folder / f"{stem}.o", json.loads((folder / f"{stem}.json").read_text())) for stem in stems.values()]
    try:
        return _loaded.setdefault((target, modules), Kernels(target, objects))
    except (RuntimeError, OSError) as problem:
        raise ExecutorError(f"compiled kernels in {folder} cannot be loaded: {problem}", "delete that folder") from None


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


def _complete(folder: Path, stem: str) -> bool:
    # The list of symbols is written last: where it stands, the object is whole.
    return (folder / f"{stem}.json").exists() and (folder / f"{stem}.o").exists()


def _writable(folder: Path) -> Path:
    """The cache folder, or a temporary one where the cache cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="gapless-kernels-"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep processes that start together from compiling the same kernels; the lock goes with the process."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(stems: dict[str, str], folder: Path, target: Isa, progress: Progress) -> None:
    started = time.perf_counter()
    progress(f"compiling CPU kernels for {target.name} (once): {', '.join(stems)}")
    environment = build.target_environment(target)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        running: list[tuple[str, Path, subprocess.Popen[str]]] = []
        waiting = list(stems)
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                name = waiting.pop(0)
                out = Path(scratch) / f"{stems[name]}.o"
                command = [sys.executable, "-m", "gapless.kernels.cpu.build", name, str(out)]
                process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
                running.append((name, out, process))
            _finish(running, folder, progress)
    progress(f"compiled in {time.perf_counter() - started:.1f} s")


def _finish(running: list[tuple[str, Path, subprocess.Popen[str]]], folder: Path, progress: Progress) -> None:
    """Wait for one of the processes and move its files into the cache."""
    while True:
        for entry in running:
            name, out, process = entry
            if process.poll() is None:
                continue
            running.remove(entry)
            assert process.stderr is not None
            errors = process.stderr.read().strip().splitlines()
            process.stderr.close()
            if process.returncode != 0:
                for _, _, other in running:
                    other.kill()
                last = errors[-1] if errors else f"exit code {process.returncode}"
                raise ExecutorError(f"compiling the kernels of {name} failed: {last}", "see docs/troubleshooting.md")
            for source in (out, out.with_suffix(".json")):
                os.replace(source, folder / source.name)
            progress(f"  {name}: done")
            return
        time.sleep(0.01)


def _empty_engine() -> Any:
    llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly("")
    module.triple = llvm.get_process_triple()
    machine = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(module, machine)
