"""Where messages begin and end: what is refused, and how heads are written.

httptools (llhttp in its strict mode) refuses by itself: a bare LF, a folded header, a bad name or value, a
Content-Length that is no number, either length header twice or both of them, a chunk size that is no hex
number. Here is what it lets pass and another parser on the way might read differently, or not at all.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import cache, lru_cache
from http import HTTPStatus
from typing import NamedTuple

from kvhandoff.core.errors import excerpt

MAX_HEAD_BYTES = 65_536
"""Of a message's first line and headers together."""
MAX_HEADERS = 128
MAX_PIPELINED = 64
"""Requests of one connection that wait for the answers to those before them."""

LAST_CHUNK = b"0\r\n\r\n"
"""The end of a body in chunks."""

Pairs = list[tuple[bytes, bytes]]
"""A head's names, in lower case, and values."""


class BadFraming(Exception):
    """A message whose end can't be told for certain, or that is out of bounds. `status`: to answer with;
    `field`: the header, or the part of a head, that is to blame."""

    def __init__(self, why: str, status: int = 400, *, field: str | None = None) -> None:
        super().__init__(why if field is None else f"{field}: {why}")
        self.status = status
        self.field = field


def bad_field(field: str, value: bytes, allowed: str, status: int = 400) -> BadFraming:
    """One that names what stands there, and what may."""
    return BadFraming(f"got {shown(value)}, allowed is {allowed}", status, field=field)


def shown(value: bytes) -> str:
    """As a message shows it."""
    return excerpt(value.decode("utf-8", "surrogateescape"))


class _Seen(NamedTuple):
    """What a head says of its message's framing."""

    length: bytes | None
    encoding: bytes | None
    hosts: list[bytes]


def check_request(version: str, pairs: Pairs) -> None:
    """Raises BadFraming for a head that httptools lets pass."""
    if version not in ("1.1", "1.0"):
        raise BadFraming(f"got HTTP/{version}, allowed is HTTP/1.1 or HTTP/1.0", 505, field="version")
    seen = _look(pairs)
    if seen.encoding is not None and version != "1.1":
        why = f"got {shown(seen.encoding)} in HTTP/1.0, allowed is none there"
        raise BadFraming(why, field="Transfer-Encoding")
    if len(seen.hosts) > 1 or (not seen.hosts and version == "1.1"):
        got = " and ".join(map(shown, seen.hosts[:4])) or "none"
        raise BadFraming(f"got {got}, allowed is one", field="Host")
    if seen.hosts and not _is_host(seen.hosts[0]):
        raise bad_field("Host", seen.hosts[0], "a name or an address, and a port")


_HOST = re.compile(rb"(\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z.%_~-]*)(:[0-9]*)?[ \t]*")
"""Narrower than RFC 3986, 3.2.2, by the punctuation that no name has; empty, where the client knows none; and
with the spaces behind it that RFC 9110, 5.5 allows, which httptools leaves there."""


@lru_cache(maxsize=256)
def _is_host(value: bytes) -> bool:
    return _HOST.fullmatch(value) is not None


def check_response(version: str, status: int, pairs: Pairs) -> None:
    """The same for an engine's answer. One that goes on until its connection is closed is refused too: cut
    short it would look whole."""
    seen = _look(pairs)
    if seen.encoding is not None and version != "1.1":
        raise BadFraming("it has Transfer-Encoding in HTTP/1.0")
    if seen.length is None and seen.encoding is None and status not in (204, 304):
        raise BadFraming("it has neither Content-Length nor chunks, so that its end can't be told")


def _look(pairs: Pairs) -> _Seen:
    """Raises BadFraming for a head that is too large, or has another coding than chunks."""
    if len(pairs) > MAX_HEADERS:
        raise BadFraming(f"got {len(pairs)}, allowed is {MAX_HEADERS}", 431, field="headers")
    length = encoding = None
    size, hosts = 0, []
    for name, value in pairs:
        size += len(name) + len(value) + 4
        if name == b"content-length":
            length = value
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise bad_field("Transfer-Encoding", value, "chunked", 501)
            encoding = value
        elif name == b"host":
            hosts.append(value)
    if size > MAX_HEAD_BYTES:
        raise too_large("headers", 431)
    return _Seen(length, encoding, hosts)


def too_large(field: str, status: int) -> BadFraming:
    """Of a first line, or headers."""
    return BadFraming(f"more than the allowed {MAX_HEAD_BYTES} bytes", status, field=field)


def response_head(status: int, headers: Mapping[str, str], *more: bytes) -> bytes:
    """A response's first line and headers; `more`: whole lines. Raises ValueError for a header that would
    end before its end."""
    return b"".join((_status_line(status), _date(), header_lines(headers), *more, b"\r\n"))


def request_head(path: bytes, host: bytes, lines: bytes, length: int) -> bytes:
    """Of a POST with a body of `length` bytes; `lines`: its other headers."""
    first = b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Length: %d\r\n" % (path, host, length)
    return b"".join((first, lines, b"\r\n"))


def header_lines(headers: Mapping[str, str]) -> bytes:
    """As they are sent. Raises ValueError for a header that would end before its end."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers) or "\0" in text:
        raise ValueError(f"one of the headers {', '.join(headers)} has a line end in it")
    return text.encode("utf-8", "surrogateescape")


def whole_chunk(data: bytes) -> bytes | None:
    """What is in `data` if that is one chunk, written as nearly everybody does: a size below 4,096 in lower
    case without leading zeros, and no extension. None: a parser must see it. The last chunk, which is empty,
    is none."""
    size, _, rest = data.partition(b"\r\n")
    if _SIZES.get(size) == len(rest) - 2 and rest.endswith(b"\r\n"):
        return rest[:-2]
    return None


_SIZES = {b"%x" % size: size for size in range(1, 4096)}


@cache
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_last_date = (0, b"")


def _date() -> bytes:
    """The Date header, made once a second."""
    global _last_date
    now = int(time.time())
    if _last_date[0] != now:
        _last_date = (now, f"Date: {formatdate(now, usegmt=True)}\r\n".encode())
    return _last_date[1]
