"""Small servers on this machine: a package index that breaks off, and a model hub."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field


def wheel_bytes(member: str, content: bytes) -> bytes:
    """A wheel that pip accepts, with one file of content."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(member, content)
        info = "fake_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{member},,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return stream.getvalue()


@dataclass
class Index:
    """What the server has, how it behaves, and what it was asked.

    Attributes:
        breaks: after how many bytes the next responses for the wheel end, one after another.
        ranges: whether it can start in the middle.
        json: whether it gives its page as JSON (PEP 691) or HTML (PEP 503).
        password: that is asked for, as "user:password".
        raw_page: a whole response for the page instead, status line and all, after which the connection closes.
        raw_wheel: the same for the wheel.
        endless: what is sent after a raw response, over and over for as long as anyone listens.
        asked: (path, Range header) of each request.
    """

    wheel: bytes
    filename: str
    url: str = ""
    breaks: list[int] = field(default_factory=list)
    ranges: bool = True
    json: bool = False
    password: str | None = None
    missing: bool = False
    raw_page: bytes | None = None
    raw_wheel: bytes | None = None
    endless: bytes = b""
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    @property
    def wheel_requests(self) -> list[str | None]:
        return [start for path, start in self.asked if path.endswith(self.filename)]


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def package_index(wheel: bytes, filename: str) -> Iterator[Index]:
    index = Index(wheel, filename)

    class Handler(_Handler):
        def do_GET(self) -> None:
            index.asked.append((self.path, self.headers.get("Range")))
            if index.password is not None and self.headers.get("Authorization") is None:
                self.answer(401, b"", {"WWW-Authenticate": "Basic"})
            elif self.path.endswith("/fake-model/"):
                self.page() if index.raw_page is None else self.raw(index.raw_page, index.endless)
            elif self.path.endswith(filename) and index.raw_wheel is not None:
                self.raw(index.raw_wheel, index.endless)
            elif self.path.endswith(filename) and not index.missing:
                self.ranged(index.wheel, index.breaks.pop(0) if index.breaks else None, index.ranges)
            else:
                self.answer(404, b"")

        def page(self) -> None:
            link = f"../../files/{filename}#sha256={hashlib.sha256(index.wheel).hexdigest()}"
            if index.json:
                body = json.dumps({"meta": {"api-version": "1.0"}, "name": "fake-model",
                                   "files": [{"filename": filename, "url": link, "hashes": {}}]})  # fmt: skip
                self.answer(200, body.encode(), {"Content-Type": "application/vnd.pypi.simple.v1+json"})
            else:
                body = f'<html><body><a href="other-1.0.zip">no</a><a href="{link}">{filename}</a></body></html>'
                self.answer(200, body.encode(), {"Content-Type": "text/html"})

    with serving(Handler) as url:
        index.url = f"{url}/simple"
        yield index


@contextlib.contextmanager
def model_hub(repo: str, files: dict[str, bytes], private: tuple[str, ...] = ()) -> Iterator[str]:
    """A hub with one repository that all may read and others that are gated."""
    commit = "0" * 40

    class Handler(_Handler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if any(f"/{name}/" in f"{path}/" for name in private):
                self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
            elif f"/{repo}/" not in f"{path}/":
                self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
            elif path.startswith("/api/models/"):
                self.info(path.rpartition("/revision/")[2])
            else:
                self.file(path.partition("/resolve/")[2])

        def info(self, revision: str) -> None:
            if revision not in ("main", commit):
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
                return
            siblings = [{"rfilename": name} for name in files]
            body = {"id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings}
            self.answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def file(self, place: str) -> None:
            content = files.get(place.partition("/")[2])
            if content is None:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
                return
            etag = hashlib.sha256(content).hexdigest()
            self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    with serving(Handler) as url:
        yield url


class _Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[:sent])

    def raw(self, response: bytes, endless: bytes) -> None:
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            self.wfile.write(response)
            while endless:
                self.wfile.write(endless)

    def ranged(self, body: bytes, sent: int | None, ranges: bool) -> None:
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and ranges else 0
        if start >= len(body):
            self.answer(416, b"")
        elif start:
            span = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
            self.answer(206, body[start:], span, sent)
        else:
            self.answer(200, body, sent=sent)
