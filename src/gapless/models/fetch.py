"""Fetching large files: resumed where they broke off, checked, and stored whole or not at all."""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import queue
import re
import shutil
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from gapless.errors import DownloadError

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60
PAGE_S = 300
MAX_PAGE_BYTES = 1 << 24
MAX_ANSWER_BYTES = 1 << 16  # of the answer to a POST
SLOW_BYTES = 1 << 16  # what a connection, or TIMEOUT_S of it, must bring at least to count as getting on
MAX_BREAKS = 5  # one after another without getting on
PAUSE_S = 1.0  # after the first break; twice as long after each further one
GOES_ON = "run it again: the download goes on where it broke off"

LOCK_PAUSE_S = 0.05
LOCK_QUIET_S = 1.0  # how long a lock may be waited for without a word

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@runtime_checkable
class WaitingProgress(Protocol):
    """A ``Progress`` that is also told, once, that another process is fetching the same and is waited for."""

    def waiting(self) -> None: ...


class Unreachable(Exception):
    """An address that gives nothing; there may be others.

    Attributes:
        status: what the server has answered, if it has.
    """

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class _Broken(Exception):
    """The connection ended early."""


# --- what a file system refuses


@contextlib.contextmanager
def storing(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Make a folder and write to it, or say in one line why not.

    Raises:
        DownloadError: the disk is full (with the bytes needed and free), or it cannot be written otherwise.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as problem:
        if problem.errno == errno.EFBIG:
            raise DownloadError(
                f"a file in {folder} would be larger than this process may write", f"raise ulimit -f; then {GOES_ON}"
            ) from None
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"{folder} cannot be written ({problem.strerror or problem})",
                "set GAPLESS_CACHE to a folder of your own",
            ) from None
        free = shutil.disk_usage(_existing(folder)).free
        raise DownloadError(
            f"the disk of {folder} is full: {_megabytes(needed_bytes)} are needed, {_megabytes(free)} are free",
            f"free some space, or set GAPLESS_CACHE to a folder on another disk; then {GOES_ON}",
        ) from None


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB ({n_bytes} bytes)"


def check_plain(path: Path) -> None:
    """Refuse to use what is there but no file: to open a pipe is to wait for ever. Raises DownloadError."""
    if path.exists() and not path.is_file():
        raise DownloadError(f"{path} is in the way: it is no plain file", "remove it")


@contextlib.contextmanager
def locked(path: Path, progress: Progress | None = None) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however it ends.

    Raises:
        DownloadError: there is something else in the place of the lock.
        OSError: of the file system.
    """
    check_plain(path)
    with path.open("a") as file:
        if not _lock_soon(file):
            if isinstance(progress, WaitingProgress):
                progress.waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_soon(file: IO[str]) -> bool:
    until_s = time.monotonic() + LOCK_QUIET_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(LOCK_PAUSE_S)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- what a network refuses


def open_url(url: str, *, accept: str = "*/*", start: int = 0, cafile: str | None = None) -> Any:
    """The response to a GET, from byte ``start`` on where the server can. Raises Unreachable."""
    request = _request(url, accept, start)
    with _told(request):
        try:
            context = _tls(cafile) if request.type == "https" else None
            return urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)
        except urllib.error.HTTPError as problem:
            if start and problem.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
                return problem  # a response like another
            raise


def post(url: str, body: bytes, content_type: str, limit_s: float) -> bytes:
    """The response to a POST, its first bytes if it is long. Raises Unreachable, behind ``limit_s`` at the latest."""
    request = _request(url, "*/*", 0)
    request.data = body
    request.add_header("Content-Type", content_type)
    answer: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
    # In a thread that may be left behind: no timeout of a socket ends the search for a name or an answer that drips.
    threading.Thread(target=lambda: answer.put(_posted(request, limit_s)), daemon=True).start()
    try:
        found = answer.get(timeout=limit_s)
    except queue.Empty:
        raise Unreachable(f"it does not answer within {limit_s:g} s" + _by_proxy(request)) from None
    if isinstance(found, Exception):
        raise found
    return found


def _posted(request: urllib.request.Request, limit_s: float) -> bytes | Exception:
    try:
        with _told(request):
            context = _tls(None) if request.type == "https" else None
            opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=context))
            with opener.open(request, timeout=limit_s + 1) as response:  # who waits gives up before
                start: bytes = response.read(MAX_ANSWER_BYTES)
                return start
    except Exception as problem:
        return problem


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """What is posted would be asked for instead at the other address, without its content."""

    def redirect_request(self, *_: Any) -> None:
        return None


@contextlib.contextmanager
def _told(request: urllib.request.Request) -> Iterator[None]:
    """What goes wrong on the way of a request, as Unreachable."""
    try:
        yield
    except urllib.error.HTTPError as problem:
        problem.close()
        # Not the server's own words, which may be anything.
        reason = f"{problem.code} {http.client.responses.get(problem.code, '')}".strip()
        raise Unreachable(reason + _by_proxy(request), problem.code) from None
    except (OSError, http.client.HTTPException) as problem:
        raise Unreachable(_reason(problem) + _by_proxy(request)) from None
    except ValueError:  # from taking the address apart, or that of a proxy
        raise Unreachable("it is no proper address") from None


def _request(url: str, accept: str, start: int) -> urllib.request.Request:
    """Raises Unreachable for what is no address, and for what would not answer as a server or a file does."""
    try:
        address, authorization = _split_credentials(url)
        request = urllib.request.Request(address, headers={"Accept": accept, "Accept-Encoding": "identity"})
    except ValueError:
        raise Unreachable("it is no proper address") from None
    if authorization is not None:
        request.add_unredirected_header("Authorization", authorization)
    if start:
        request.add_header("Range", f"bytes={start}-")
    if request.type not in ("http", "https", "file"):
        raise Unreachable("it is no address of http, https or file")
    if request.type == "file" and not os.path.isfile(local_path(url)):  # to open a pipe is to wait for ever
        raise Unreachable("there is no such file")
    return request


def local_path(url: str) -> Path:
    """The path of a ``file:`` address."""
    return Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))


def _by_proxy(request: urllib.request.Request) -> str:
    """Names the proxy in between, if there is one: it may be what is wrong."""
    # Once it has been on its way, the request has the proxy for its host.
    through = request.has_proxy() or getattr(request, "_tunnel_host", None) is not None
    return f" (through the proxy {request.host})" if through else ""


def read_page(response: Any) -> bytes:
    """All of a response that is not to be large or slow. Raises Unreachable if it is, or breaks off."""
    begun_s, length = time.monotonic(), content_length(response)
    page = bytearray()
    try:
        while chunk := _read(response, MAX_PAGE_BYTES + 1 - len(page)):
            page += chunk
            if len(page) > MAX_PAGE_BYTES:
                raise Unreachable(f"its page does not end within {MAX_PAGE_BYTES} bytes")
            if time.monotonic() - begun_s > PAGE_S:
                raise Unreachable(f"its page does not end within {PAGE_S} s")
    except _Broken as problem:
        raise Unreachable(f"its page breaks off ({problem})") from None
    if length is not None and len(page) < length:
        raise Unreachable(f"its page breaks off (at byte {len(page)} of {length})")
    return bytes(page)


def _split_credentials(url: str) -> tuple[str, str | None]:
    """An address without user and password, and these as a header."""
    parts = urllib.parse.urlsplit(url)
    if "@" not in parts.netloc:
        return url, None
    user, _, host = parts.netloc.rpartition("@")
    pair = ":".join(urllib.parse.unquote(part) for part in user.split(":", 1))
    token = base64.b64encode(pair.encode()).decode()
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), f"Basic {token}"


def _tls(cafile: str | None) -> ssl.SSLContext:
    try:
        folder = cafile if cafile is not None and os.path.isdir(cafile) else None
        if cafile is not None and folder is None and not os.path.isfile(cafile):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        context = ssl.create_default_context(cafile=None if folder else cafile, capath=folder)
    except OSError as problem:
        raise Unreachable(f"the certificates in {cafile} cannot be read: {_reason(problem)}") from None
    if cafile is None:
        with contextlib.suppress(ImportError):
            import certifi

            context.load_verify_locations(certifi.where())  # a slim system may have no certificates of its own
    return context


def _reason(problem: BaseException) -> str:
    """One line without addresses, which may hold passwords."""
    reason = getattr(problem, "reason", problem)
    if isinstance(reason, http.client.InvalidURL):
        return "it is no proper address"
    if isinstance(reason, http.client.HTTPException) and not isinstance(reason, OSError):
        return f"it gives no proper HTTP ({type(reason).__name__})"
    text = getattr(reason, "strerror", None) or (str(reason) if isinstance(reason, OSError | str) else "")
    return text if text and "://" not in text else type(reason).__name__


def content_length(response: Any) -> int | None:
    """How many bytes a response announces, if it does. Raises Unreachable for what is no number."""
    text = response.headers.get("Content-Length")
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,18}", text.strip(), re.ASCII) is None:
        raise Unreachable("the server gives no proper Content-Length")
    return int(text)


def download(
    url: str,
    target: Path,
    sha256: str,
    size_bytes: int,
    progress: Progress | None = None,
    cafile: str | None = None,
) -> None:
    """Write the ``size_bytes`` at ``url`` to ``target``, from where an earlier attempt ended, and check them.

    No more than that is read, whatever comes; ``progress`` hears of the last byte when the file is known to be right.

    Raises:
        Unreachable: the address gives nothing, or a file of another size.
        DownloadError: the connection keeps breaking, or what came is not what ``sha256`` says.
        OSError: of the file system.
    """
    resumed, whole = _size(target) > 0, _size(target) == size_bytes
    _fetch(url, target, size_bytes, progress, cafile)
    if sha256_of(target) != sha256 and resumed:  # what was there may have been another file's
        target.unlink()
        whole = False
        _fetch(url, target, size_bytes, progress, cafile)
    if sha256_of(target) != sha256:
        target.unlink()
        raise DownloadError("what came is damaged (its SHA-256 is wrong)", "try again; check the network or the index")
    if progress is not None and not whole:
        progress(size_bytes, size_bytes)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _fetch(url: str, target: Path, size_bytes: int, progress: Progress | None, cafile: str | None) -> None:
    breaks, furthest = 0, _size(target)
    while True:
        try:
            return _continue(url, target, size_bytes, progress, cafile)
        except _Broken as problem:
            have = _size(target)
            # A byte a connection would go on for ever, and so would one that starts anew each time.
            got_on = have >= furthest + SLOW_BYTES
            breaks, furthest = (0, have) if got_on else (breaks + 1, furthest)
            if breaks == MAX_BREAKS:
                raise DownloadError(
                    f"the connection broke off after {_megabytes(have)} ({problem})", f"check the network; {GOES_ON}"
                ) from None
            time.sleep(PAUSE_S * 2**breaks)


def _continue(url: str, target: Path, size_bytes: int, progress: Progress | None, cafile: str | None) -> None:
    """One connection. What is in ``target`` in the end, the hash says."""
    have = _size(target)
    if have == size_bytes:
        return
    if have > size_bytes:  # the beginning of something else
        target.unlink()
        have = 0
    try:
        response = open_url(url, start=have, cafile=cafile)
    except Unreachable as problem:
        if have == 0:
            raise
        raise _Broken(str(problem)) from None
    with response:
        if response.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # that file ends before, so this is not its beginning
        goes_on = response.status == http.client.PARTIAL_CONTENT
        have = have if goes_on else 0
        _check_size(content_length(response), size_bytes - have, goes_on)
        with target.open("ab" if goes_on else "wb") as file:
            done = _copy(response, file, have, size_bytes, progress)
    if done < size_bytes:
        raise _Broken(f"at byte {done} of {size_bytes}")


def _check_size(length: int | None, missing: int, goes_on: bool) -> None:
    """A server may give less of a range than it was asked for, but no file of another size."""
    if length is not None and (length > missing or (length < missing and not goes_on)):
        raise Unreachable(f"it gives {length} bytes instead of {missing}")


def _copy(source: Any, file: IO[bytes], done: int, size_bytes: int, progress: Progress | None) -> int:
    since_s, since_done = time.monotonic(), done
    while done < size_bytes and (chunk := _read(source, size_bytes - done)):
        file.write(chunk)
        done += len(chunk)
        if progress is not None and done < size_bytes:
            progress(done, size_bytes)
        if time.monotonic() - since_s >= TIMEOUT_S:
            if done - since_done < SLOW_BYTES:
                raise _Broken(f"only {done - since_done} bytes came in {TIMEOUT_S} s")
            since_s, since_done = time.monotonic(), done
    return done


def _read(source: Any, limit_bytes: int) -> bytes:
    try:
        return bytes(source.read1(min(limit_bytes, CHUNK_BYTES)))
    except (OSError, http.client.HTTPException) as problem:
        raise _Broken(_reason(problem)) from None
