"""Models of the Hugging Face hub, through huggingface_hub: its cache, its tokens, its offline mode."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless.errors import DownloadError, GaplessError, ModelError

PREFIX = "hf:"
FORMS = "hf:ORG/REPO, hf:ORG/REPO@REVISION, hf:ORG/REPO/FILE.gguf or hf:ORG/REPO:QUANT"
# What a model folder needs, at its top: some repositories hold the weights a second time, in other folders or formats.
_FOLDER = ["*.safetensors", "*.json", "*.jinja"]
_NOT_NEEDED = ["*/*", "consolidated*.safetensors"]


@dataclass(frozen=True)
class HubName:
    """A repository, and of it a revision, one GGUF file, or the GGUF file of one quantisation."""

    repo: str
    revision: str | None
    file: str | None = None
    quant: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubName:
        """Raises ModelError."""
        match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:/([^@:]+\.gguf)|:([\w.-]+))?(?:@([^@:\s]+))?", name)
        if match is None:
            raise ModelError(f"model {name!r} is no name on the Hugging Face hub", f"write {FORMS}")
        repo, file, quant, revision = match.groups()
        return cls(repo, revision, file, quant)


def fetch(name: str, download: bool = True) -> Path:
    """The folder or file of ``hf:...``; only from the local cache if not ``download``.

    Raises:
        ModelError: the name is malformed, or the repository holds nothing that can be used.
        DownloadError: it cannot be fetched.
    """
    parsed = HubName.parse(name)
    try:
        return _fetch(parsed, name, local=not download)
    except GaplessError:
        raise
    except Exception as problem:
        raise _explained(name, parsed, problem, download) from None


def _library() -> Any:
    """huggingface_hub, which reads the environment when it is imported. Raises ModelError where that makes it fail."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it says so on standard output
            import huggingface_hub as hub
            import huggingface_hub.errors

            for name in ("hf_hub_download", "snapshot_download", "scan_cache_dir", "CacheNotFound"):
                getattr(hub, name)  # each is imported when it is asked for
    except ValueError:
        names = ", ".join(sorted(name for name in os.environ if name.startswith("HF_")))
        raise ModelError(f"huggingface_hub cannot read a variable among {names}", "correct or unset it") from None
    return hub


def _fetch(parsed: HubName, name: str, local: bool) -> Path:
    hub = _library()
    if parsed.file is not None:
        return Path(hub.hf_hub_download(parsed.repo, parsed.file, revision=parsed.revision, local_files_only=local))
    wanted = _FOLDER if parsed.quant is None else _quant_patterns(parsed.quant)
    not_wanted = _NOT_NEEDED if parsed.quant is None else None
    folder = Path(
        hub.snapshot_download(
            parsed.repo,
            revision=parsed.revision,
            allow_patterns=wanted,
            ignore_patterns=not_wanted,
            local_files_only=local,
        )
    )
    if parsed.quant is not None:
        return _quant_file(folder, parsed.quant, name)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{name} holds no safetensors", f"if it holds GGUF files, name one: {PREFIX}{parsed.repo}/FILE.gguf"
        )
    return folder


def _quant_patterns(quant: str) -> list[str]:
    spellings = dict.fromkeys((quant, quant.upper(), quant.lower()))
    return [
        pattern
        for q in spellings
        for pattern in (f"*[-._]{q}.gguf", f"{q}.gguf", f"*[-._]{q}-?????-of-?????.gguf", f"{q}/*.gguf")
    ]


def _quant_file(folder: Path, quant: str, name: str) -> Path:
    files = sorted(
        path
        for path in folder.rglob("*.gguf")
        if any(path.relative_to(folder).match(p) for p in _quant_patterns(quant))
    )
    if not files:
        raise ModelError(
            f"{name}: the repository has no GGUF file of {quant!r}",
            "look on its page, and name one: hf:ORG/REPO/FILE.gguf",
        )
    return files[0]  # of a split model the first part


def _explained(name: str, parsed: HubName, problem: Exception, download: bool) -> GaplessError:
    """What huggingface_hub raised, as one line. Its own texts are not passed on: they may hold addresses and tokens."""
    errors = _library().errors
    if isinstance(problem, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        if not download:
            return ModelError(f"model {name!r} has not been fetched", f"run: gapless pull {name}")
        offline = isinstance(problem, errors.OfflineModeIsEnabled) or os.environ.get("HF_HUB_OFFLINE", "0") != "0"
        return DownloadError(
            f"{name} is not in the local cache, and the hub cannot be reached",
            "unset HF_HUB_OFFLINE" if offline else "check the network",
        )
    if isinstance(problem, errors.GatedRepoError):
        return DownloadError(
            f"{name} is gated",
            f"accept its terms on huggingface.co/{parsed.repo}, then set HF_TOKEN to a token of yours",
        )
    if isinstance(problem, errors.RepositoryNotFoundError):
        return DownloadError(
            f"{name} does not exist, or is private", "check the name; set HF_TOKEN if the repository is yours"
        )
    if isinstance(problem, errors.RevisionNotFoundError):
        return DownloadError(f"{name} has no revision {parsed.revision!r}", "name a branch, tag or commit of it")
    if isinstance(problem, errors.EntryNotFoundError):
        return DownloadError(f"{name}: the repository has no file {parsed.file!r}", "look on its page for the name")
    if isinstance(problem, errors.HFValidationError):
        return ModelError(f"model {name!r} is no name on the Hugging Face hub", f"write {FORMS}")
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return DownloadError(
            f"the disk is full while fetching {name}", "free some space, or set HF_HOME to another disk"
        )
    status = getattr(getattr(problem, "response", None), "status_code", None)
    reason = f"status {status}" if status is not None else type(problem).__name__
    return DownloadError(f"{name} could not be fetched ({reason})", "check the network; run it again to go on")


@dataclass(frozen=True)
class Cached:
    """A model in the hub's cache on this machine."""

    name: str
    path: Path
    size_bytes: int
    revision: str


def cached_models() -> list[Cached]:
    """Folders and GGUF files that could be run, of the newest revision of each repository here."""
    hub = _library()
    try:
        cache = hub.scan_cache_dir()
    except (hub.CacheNotFound, OSError, ValueError):  # there is none, or none that can be read
        return []
    found: list[Cached] = []
    for repo in sorted(cache.repos, key=lambda repo: str(repo.repo_id)):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: float(revision.last_modified))
        name, commit, folder = f"{PREFIX}{repo.repo_id}", str(newest.commit_hash), Path(newest.snapshot_path)
        if os.path.isfile(folder / "config.json") and any(folder.glob("*.safetensors")):
            found.append(Cached(name, folder, int(newest.size_on_disk), commit))
        for file in sorted(filter(os.path.isfile, folder.rglob("*.gguf"))):  # a link may have lost its file
            found.append(Cached(f"{name}/{file.relative_to(folder)}", file, file.stat().st_size, commit))
    return found
