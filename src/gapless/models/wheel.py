"""Files inside wheels of the Python package index, fetched as the user's pip is set up to fetch.

pip cannot resume a download in the versions that systems ship, so its configuration is read and the wheel fetched
directly (by the simple repository API, PEP 503 and 691). Where that fails, pip itself is asked.
"""

from __future__ import annotations

import ast
import errno
import html
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gapless.errors import DownloadError
from gapless.models.fetch import (
    CHUNK_BYTES,
    GOES_ON,
    MAX_PAGE_BYTES,
    Progress,
    Unreachable,
    download,
    local_path,
    open_url,
    read_page,
    sha256_of,
)

DEFAULT_INDEX = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
MAX_LINKS = 8  # of one page, all to the same file
MAX_SHOWN = 4  # of the places that gave nothing
MAX_LINE = 300  # of what pip says
PIP_MEMORY_BYTES = 1 << 30
PIP_CONFIG_S = 60
PIP_S = 3600
_CHECK_PIP = "check the network and pip's index"
_HREF = re.compile(r"""(?<![\w-])href\s*=\s*(?:"([^"]+)"|'([^']+)'|([^\s"'<>]+))""", re.IGNORECASE)


@dataclass(frozen=True)
class Wheel:
    package: str
    version: str
    filename: str
    sha256: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def fetch_wheel(wheel: Wheel, target: Path, progress: Progress | None = None) -> None:
    """Write a wheel to ``target``, which may hold the beginning of it.

    Raises:
        DownloadError: pip is missing, or neither this nor pip could fetch it.
        OSError: of the file system.
    """
    config = _pip_config()
    cafile = config.get("cert")
    problems: list[str] = []
    for url in _addresses(wheel, config, problems):
        try:
            return download(url, target, wheel.sha256, wheel.size_bytes, progress, cafile)
        except Unreachable as unreachable:
            problems.append(f"{_shown(url)}: {unreachable}")
        except DownloadError as failure:
            problem = f"{wheel.requirement} from {_shown(url)}: {failure.problem}"
            raise DownloadError(problem, failure.remedy) from None
    _download_by_pip(wheel, target, _joined(problems) or "it is in none of the indexes")


def part_of(target: Path) -> Path:
    """Where a file is written until it is whole."""
    return target.with_name(target.name + ".part")


def extract(wheel: Path, member: str, target: Path, sha256: str) -> None:
    """Take a file out of a wheel; it gets its name when it is whole and the one that is wanted.

    Raises:
        DownloadError: the wheel is damaged or holds something else.
        OSError: of the file system.
    """
    part = part_of(target)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, part.open("wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if sha256_of(part) != sha256:
            raise DownloadError(
                "the wheel holds another file than expected (its SHA-256 is wrong)", "check pip's index"
            )
        os.replace(part, target)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, zlib.error) as problem:
        raise DownloadError(f"the wheel is damaged ({type(problem).__name__})", "try again") from None
    finally:
        part.unlink(missing_ok=True)


# --- where a wheel is


def _pip_config() -> dict[str, str]:
    """pip's settings, by name; the environment goes before files, and a command's own before global ones."""
    settings: dict[str, tuple[int, str]] = {}
    for line in _pip("config", "list").splitlines():
        match = re.fullmatch(r"(global|download|install|:env:)\.([\w-]+)=(['\"].*)", line)
        if match is None:
            continue
        section, name, value = match.groups()
        rank = ("global", "install", "download", ":env:").index(section)
        if name not in settings or settings[name][0] < rank:
            settings[name] = (rank, str(ast.literal_eval(value)))
    return {name: value for name, (_, value) in settings.items()}


def _addresses(wheel: Wheel, config: dict[str, str], problems: list[str]) -> Iterator[str]:
    """Addresses of a wheel in each place that has it; what is wrong with other places goes to ``problems``."""
    places = [_as_url(link) for link in config.get("find-links", "").split()]
    if config.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        indexes = [config.get("index-url") or DEFAULT_INDEX, *config.get("extra-index-url", "").split()]
        places += [_as_url(f"{index.rstrip('/')}/{wheel.package}/") for index in indexes]
    for place in places:
        try:
            links = _links(place, wheel.filename, config.get("cert"))
        except Unreachable as problem:
            problems.append(f"{_shown(place)}: {problem}")
            continue
        if not links:
            problems.append(f"{_shown(place)}: it has no {wheel.filename}")
        yield from links[:MAX_LINKS]


def _as_url(place: str) -> str:
    return place if "://" in place else Path(place).absolute().as_uri()


def _shown(place: str) -> str:
    """An address as it may be told: without passwords, and of a server no more than its name."""
    try:
        parts = urllib.parse.urlsplit(place)
        if parts.scheme == "file":
            return str(local_path(place))
        port = "" if parts.port is None else f":{parts.port}"
        if parts.hostname and ("@" in parts.netloc or "@" not in place):
            return f"{parts.scheme}://{parts.hostname}{port}"
    except ValueError:
        pass
    return repr(place.rpartition("@")[2])  # a password may hold what makes it no address


def _joined(problems: list[str]) -> str:
    different = list(dict.fromkeys(problems))
    more = [f"and {len(different) - MAX_SHOWN} more"] if len(different) > MAX_SHOWN else []
    return ", ".join(different[:MAX_SHOWN] + more)


def _filename(url: str) -> str:
    return urllib.parse.unquote(urllib.parse.urlsplit(url).path).rpartition("/")[2]


def _links(place: str, filename: str, cafile: str | None) -> list[str]:
    """Links to a file of that name on an index page or in a local folder. Raises Unreachable."""
    try:
        parts = urllib.parse.urlsplit(place)
        if parts.scheme == "file" and (folder := local_path(place)).is_dir():
            if not (folder / "index.html").exists():
                return [path.as_uri() for path in [folder / filename] if path.is_file()]
            place = (folder / "index.html").as_uri()
    except OSError as problem:
        raise Unreachable(problem.strerror or type(problem).__name__) from None
    except ValueError:
        raise Unreachable("it is no proper address") from None
    with open_url(place, accept=_ACCEPT, cafile=cafile) as response:
        text = read_page(response).decode("utf-8", "replace")
        base = response.geturl()
        kind = response.headers.get("Content-Type") or ""
    links = _json_links(text) if "json" in kind else _html_links(text)
    found = (_absolute(link, base, place) for link in links if filename in urllib.parse.unquote(link))
    return list(dict.fromkeys(link for link in found if link is not None and _filename(link) == filename))


def _absolute(link: str, base: str, source: str) -> str | None:
    """A page's link as an address, with the page's credentials where they apply; None if it is none."""
    try:
        url = urllib.parse.urldefrag(urllib.parse.urljoin(_with_credentials(base, source), link)).url
        return _with_credentials(url, source)
    except ValueError:
        return None


def _with_credentials(url: str, source: str) -> str:
    """An address on the host of ``source`` is asked by the same user."""
    parts, known = urllib.parse.urlsplit(url), urllib.parse.urlsplit(source)
    same_host = (parts.scheme, parts.netloc) == (known.scheme, known.netloc.rpartition("@")[2])
    return urllib.parse.urlunsplit(parts._replace(netloc=known.netloc)) if same_host else url


def _json_links(text: str) -> list[str]:
    try:
        files = json.loads(text)["files"]
        links = [file.get("url") for file in files if isinstance(file, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Unreachable("the index gave no list of files") from None
    return [link for link in links if isinstance(link, str)]


def _html_links(text: str) -> list[str]:
    """Whatever a tag refers to.

    Not by ``html.parser``, which takes time quadratic in the length of some pages and has assertions for others.
    """
    return [unescaped for match in _HREF.finditer(text) if (unescaped := _unescape(next(filter(None, match.groups()))))]


def _unescape(link: str) -> str:
    try:
        return html.unescape(link)
    except ValueError:  # a number of thousands of digits
        return ""


# --- pip


def _download_by_pip(wheel: Wheel, target: Path, problem: str) -> None:
    options = ["--no-deps", "--no-cache-dir", "--quiet"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            _pip("download", *options, "--dest", folder, wheel.requirement, temp=folder, file_bytes=wheel.size_bytes)
        except DownloadError as failure:
            raise DownloadError(
                f"{wheel.requirement} could not be fetched ({problem}; {failure.problem})",
                f"check the network and pip's index; {GOES_ON}",
            ) from None
        found = Path(folder) / wheel.filename
        if not found.exists() or sha256_of(found) != wheel.sha256:
            raise DownloadError(f"pip brought another {wheel.requirement} than expected", "check pip's index")
        os.replace(found, target)


# pip reads whatever a server sends, to its end, so a limit of memory and one of the size of a file are put on it.
_LIMITED_PIP = """
import resource, runpy, sys
for kind, wanted in (resource.RLIMIT_AS, int(sys.argv[1])), (resource.RLIMIT_FSIZE, int(sys.argv[2])):
    soft, hard = resource.getrlimit(kind)
    wanted = min(limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY)
    try:
        resource.setrlimit(kind, (wanted, hard))
    except (OSError, ValueError):
        pass
del sys.argv[1:3]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def _pip(*args: str, temp: str | None = None, file_bytes: int = 0) -> str:
    # Without byte code, which would stay behind as 6 MB for what runs once.
    limits = [str(PIP_MEMORY_BYTES), str(file_bytes + MAX_PAGE_BYTES)]
    options = ["--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-B", "-c", _LIMITED_PIP, *limits, *options, *args]
    environment = os.environ | ({"TMPDIR": temp} if temp is not None else {})
    limit_s, remedy = (PIP_CONFIG_S, _check_configuration()) if args[0] == "config" else (PIP_S, _CHECK_PIP)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, env=environment, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise DownloadError(f"pip {args[0]} did not end within {limit_s} s", remedy) from None
    except OSError as problem:
        raise DownloadError(
            f"pip could not be run ({problem.strerror or problem})", "check this Python's installation"
        ) from None
    if done.returncode == 0:
        return done.stdout
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in done.stderr:
        raise DownloadError("pip is not installed beside gapless", f"run: {sys.executable} -m ensurepip")
    if re.search("^Configuration file (could not be loaded|contains invalid)", done.stderr, re.MULTILINE):
        raise _bad_configuration(done.stderr)
    raise DownloadError(f"pip failed: {_last_words(done.stderr)}", remedy)


def _check_configuration() -> str:
    named = os.environ.get("PIP_CONFIG_FILE")
    return f"check pip's configuration ({f'PIP_CONFIG_FILE is {named}' if named else 'see: pip config debug'})"


def _bad_configuration(stderr: str) -> DownloadError:
    """Names the file and the line; what is in it, as pip says, may be secret."""
    line = re.search(r"\bline:? +(\d+)", stderr)
    quoted = re.search(
        r"(?:file|from|errors): (?:<[^>]*>|(['\"])(.+?)\1)|from (['\"])(.+?)\3|characters in (.+?)\.?$", stderr
    )
    named = next(filter(None, quoted.group(2, 4, 5)), None) if quoted is not None else None
    name = named or os.environ.get("PIP_CONFIG_FILE") or "(see: pip config debug)"
    where = f"{name}, line {line[1]}," if line is not None else name
    return DownloadError(f"pip's configuration {where} is malformed", "mend it, or set PIP_CONFIG_FILE to another")


def _last_words(stderr: str) -> str:
    """The line of what pip says that tells most: of a traceback, which it calls an exception, the last."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and not line[0].isspace()]
    lines = [line for line in lines if line != "ERROR: Exception:"] or ["it gave no reason"]
    told = [line for line in lines if line.startswith("ERROR")]
    last = lines[-1] if "Traceback (most recent call last):" in lines or not told else told[-1]
    return _without_secrets(last)[:MAX_LINE]


def _without_secrets(line: str) -> str:
    return re.sub(r"(://[^\s?]*)\?\S*", r"\1", re.sub(r"//[^/\s]*@", "//", line))
