"""Sending spans to an OpenTelemetry collector, or to whatever else receives OTLP over HTTP."""

from __future__ import annotations

import base64
import re
import urllib.parse
from typing import NamedTuple

from gapless.checks import shown
from gapless.errors import GaplessError
from gapless.ledger.file import Recorded
from gapless.ledger.otlp import messages
from gapless.models.fetch import Unreachable, post

PATH = "/v1/traces"
LIMIT_S = 10.0  # for each message

_RECEIVER = "give the address of an OTLP receiver for HTTP, such as http://localhost:4318, or a path"
_PASSWORD = "give user and password in the address, as https://USER:PASSWORD@HOST"
_AGAIN = "see what the receiver logs, and run it again: spans keep their ids"


class Sent(NamedTuple):
    """
    Attributes:
        url: that was posted to, without what may be secret.
    """

    url: str
    n_spans: int
    n_bytes: int


def is_url(output: str) -> bool:
    return re.match("[a-z][a-z0-9+.-]*://", output, re.IGNORECASE) is not None


def send(recorded: Recorded, url: str) -> Sent:
    """Post a recorded run as protobuf; ``export.check`` has found its library. Raises GaplessError."""
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    address, told = endpoint(url)
    n_spans, n_bytes = 0, 0
    for message in messages(recorded, lambda raw: base64.b64encode(raw).decode()):
        body = ParseDict(message, ExportTraceServiceRequest()).SerializeToString()
        try:
            answer = post(address, body, "application/x-protobuf", LIMIT_S)
        except Unreachable as problem:
            before = f"; {n_spans} spans before were taken" if n_spans else ""
            raise GaplessError(f"output = {told!r}: {problem}{before}", _remedy(problem.status)) from None
        _check_answer(answer, told)
        n_spans += len(message["resourceSpans"][0]["scopeSpans"][0]["spans"])
        n_bytes += len(body)
    return Sent(told, n_spans, n_bytes)


def endpoint(url: str) -> tuple[str, str]:
    """Where to post to, and how to tell of it: without user, password and query. Raises GaplessError."""
    try:
        parts = urllib.parse.urlsplit(url)
        proper = parts.scheme in ("http", "https") and parts.port != 0 and bool(parts.hostname)
    except ValueError:
        proper = False
    if not proper or ("@" in url and "@" not in parts.netloc):  # a password may hold what makes it none
        open_part = re.split("[?#]", url.rpartition("@")[2])[0]
        raise GaplessError(f"output = {open_part!r} is no proper address of http or https", _RECEIVER)
    path = parts.path.rstrip("/")
    parts = parts._replace(path=path if path.endswith(PATH) else path + PATH, fragment="")
    told = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="")
    return urllib.parse.urlunsplit(parts), urllib.parse.urlunsplit(told)


def _remedy(status: int | None) -> str:
    if status in (401, 403):
        return _PASSWORD
    return _AGAIN if status == 429 or (status or 0) >= 500 else _RECEIVER


def _check_answer(answer: bytes, told: str) -> None:
    """A receiver may take a message and say that it keeps not all of it."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        left_out = ExportTraceServiceResponse.FromString(answer).partial_success
    except DecodeError:  # not all of them answer as they should
        return
    if left_out.rejected_spans:
        why = f" ({shown(left_out.error_message)})" if left_out.error_message else ""
        raise GaplessError(f"output = {told!r}: {left_out.rejected_spans} spans were rejected{why}", _AGAIN)
