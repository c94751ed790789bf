"""The router's server on the wire: framing, pipelining, flow. Random bytes are read by another parser too."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import h11
import pytest
from hypothesis import given, settings

from kvhandoff.core.errors import RequestError
from kvhandoff.router.wire import Headers, Request, Response, Site, StreamResponse, get, post
from kvhandoff.router.wire.connection import Connection
from kvhandoff.router.wire.framing import MAX_HEAD_BYTES, MAX_PIPELINED
from kvhandoff.router.wire.server import Server, serve
from kvhandoff.web import ClientGone
from tests.router.wires import CUTS, LIMIT, MUTATIONS, Echo, Wire, cut, mutated, quiet

POST = b"POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;x=y\r\nabc\r\n00a\r\n0123456789\r\n0\r\nX-Trailer: t\r\n\r\n"
)
GET = b"GET /echo?a=b HTTP/1.1\r\nHost: h\r\n\r\n"
STREAM = b"POST /stream HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nab"
TRAFFIC = POST + GET + CHUNKED + STREAM + POST
SEEN = [("POST", "/echo", b"hello"), ("GET", "/echo", b""), ("POST", "/echo", b"abc0123456789")]


def undated(raw: bytes) -> bytes:
    return re.sub(rb"Date: [^\r]*\r\n", b"", raw)


async def exchange(pieces: list[bytes], echo: Echo | None = None) -> tuple[Echo, Wire]:
    echo = echo or Echo()
    wire = Wire(Connection(echo.server))
    await wire.feed(pieces)
    return echo, wire


def status_of(wire: Wire) -> int:
    """Of the last response."""
    return int(re.findall(rb"HTTP/1.1 (\d+) ", wire.written)[-1])


async def test_pipelined_requests_are_answered_in_order() -> None:
    echo, wire = await exchange([TRAFFIC])
    assert echo.seen == [*SEEN, SEEN[0]]
    ok = b"HTTP/1.1 200 OK\r\n"
    assert undated(wire.written) == (
        ok
        + b"Content-Length: 5\r\n\r\nhello"
        + ok
        + b"Content-Length: 0\r\n\r\n"
        + ok
        + b"Content-Length: 13\r\n\r\nabc0123456789"
        + ok
        + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
        + ok
        + b"Content-Length: 5\r\n\r\nhello"
    )
    assert wire.end == ""


async def test_a_pipelined_request_whose_body_comes_later() -> None:
    """It is read when its turn has come, and another one behind it is not read meanwhile."""
    echo = Echo()
    echo.gate = asyncio.Event()
    head, _, body = POST.partition(b"hello")
    assert not body
    wire = Wire(Connection(echo.server))
    await wire.feed([POST + head])
    assert not wire.reading
    echo.gate.set()
    await wire.feed([b"hello" + GET])
    assert echo.seen == [SEEN[0], SEEN[0], SEEN[1]]


async def test_nothing_is_written_into_a_stream_but_its_pieces() -> None:
    """Whatever a handler returns, a client can't take a second answer for a part of the first."""
    streams: list[StreamResponse] = []

    async def twice(request: Request) -> Response:
        streams.append(StreamResponse({}))
        streams[0].prepare(request)
        streams[0].write(b"a")
        return Response(status=400, body=b"an error")

    server = Server(Site([get("/echo", twice)], lambda request: None, max_body_bytes=LIMIT), 0.01)
    wire = Wire(Connection(server))
    await wire.feed([GET])
    assert wire.written.endswith(b"\r\n\r\n1\r\na\r\n")
    assert wire.end == "abort"


@settings(max_examples=200)
@given(cuts=CUTS)
def test_however_it_is_cut(cuts: list[int]) -> None:
    async def run(pieces: list[bytes]) -> tuple[Any, bytes]:
        echo, wire = await exchange(pieces)
        return echo.seen, undated(wire.written)

    assert asyncio.run(run(cut(TRAFFIC, cuts))) == asyncio.run(run([TRAFFIC]))


def read_by_h11(raw: bytes) -> tuple[list[tuple[str, str, bytes]], bool]:
    """(complete requests, whether h11 found fault with what follows)."""
    connection, found = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20), []
    connection.receive_data(raw)
    method = path = ""
    body = b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                method, path, body = event.method.decode(), event.target.decode(), b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                found.append((method, path, body))
                connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    return found, False
                connection.start_next_cycle()
            else:
                return found, False
    except h11.RemoteProtocolError:
        return found, True


@settings(max_examples=600)
@given(mutations=MUTATIONS, cuts=CUTS)
def test_what_is_taken_for_a_request_is_one(mutations: list[Any], cuts: list[int]) -> None:
    """Random damage: nothing crashes, and where another parser can read it too, both read the same."""
    raw = mutated(POST + CHUNKED + GET + POST, mutations)

    async def run() -> tuple[list[tuple[str, str, bytes]], bytes]:
        echo, wire = await exchange(cut(raw, cuts))
        return echo.seen, bytes(wire.written)

    seen, written = asyncio.run(run())
    assert b"HTTP/1.1 500" not in written
    theirs, fault = read_by_h11(raw)
    if not fault:
        asked = [(method, path.partition("?")[0].partition("#")[0], body) for method, path, body in theirs]
        wanted = [
            request for request in asked if request[1] == "/echo" and request[0] in ("GET", "POST", "HEAD")
        ]
        assert seen == wanted[: len(seen)]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Length: 5\r\nContent-Length: 5", 400),
        (b"Content-Length: 5\r\nContent-Length: 6", 400),
        (b"Content-Length: 5, 5", 400),
        (b"Content-Length: +5", 400),
        (b"Content-Length: 0x5", 400),
        (b"Content-Length:", 400),
        (b"Content-Length: 99999999999999999999", 400),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 5", 400),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
        (b"Transfer-Encoding: gzip, chunked", 501),
        (b"Transfer-Encoding: chunked, identity", 400),
        (b"Transfer-Encoding: xchunked", 501),
        (b"Transfer-Encoding : chunked", 400),
        (b"Content-Length : 5", 400),
        (b"Content-Length: 5\r\n X: folded", 400),
        (b"X: a\r\n folded\r\nContent-Length: 5", 400),
        (b"Content-Length: 5\nX: bare", 400),
        (b"X: a\0b\r\nContent-Length: 5", 400),
        (b"X y: b\r\nContent-Length: 5", 400),
        (b": b\r\nContent-Length: 5", 400),
        (b"Host: other\r\nContent-Length: 5", 400),
        (b"Expect: a-miracle\r\nContent-Length: 5", 417),
        (b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\nContent-Length: 5", 431),
        (b"X: a\r\n" * 200 + b"Content-Length: 5", 431),
    ],
)
async def test_bad_framing(head: bytes, status: int) -> None:
    """Field case 60's way around the router: what two parsers might read differently is refused."""
    raw = b"POST /echo HTTP/1.1\r\nHost: h\r\n" + head + b"\r\n\r\nhello" + POST
    echo, wire = await exchange([raw])
    assert echo.seen == []
    assert status_of(wire) == status
    assert len(re.findall(rb"HTTP/1.1 \d", wire.written)) == 1
    assert b"Connection: close\r\n" in wire.written
    assert wire.end == "eof"


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
        b"POST /echo HTTP/2.0\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
        b"POST /echo\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
        b"POST /ec ho HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
        b"post /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0" * 50,
    ],
)
async def test_what_is_no_request(raw: bytes) -> None:
    echo, wire = await exchange([raw])
    assert echo.seen == []
    assert status_of(wire) in (400, 505)
    assert b'"message"' in wire.written


@pytest.mark.parametrize(
    "chunks",
    [
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"5\r\nhello0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"\r\n5\r\nhello\r\n0\r\n\r\n",
        b"ffffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    ],
)
async def test_bad_chunks(chunks: bytes) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    echo, wire = await exchange([head + chunks + POST])
    assert echo.seen == []
    assert status_of(wire) == 400
    assert b"Connection: close" in wire.written


async def test_a_bad_request_waits_for_the_answers_before_it() -> None:
    echo = Echo()
    echo.gate = asyncio.Event()
    _, wire = await exchange([POST + b"nonsense\r\n\r\n"], echo)
    assert not wire.written
    echo.gate.set()
    await quiet()
    assert re.findall(rb"HTTP/1.1 (\d+)", wire.written) == [b"200", b"400"]
    assert wire.end == "eof"


async def test_too_many_requests_at_once() -> None:
    echo = Echo()
    echo.gate = asyncio.Event()
    _, wire = await exchange([GET * (MAX_PIPELINED + 5)], echo)
    assert not wire.reading
    echo.gate.set()
    for _ in range(5):
        await quiet()
    assert len(echo.seen) == MAX_PIPELINED + 1
    assert status_of(wire) == 400


async def test_body_beyond_the_limit() -> None:
    raw = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (LIMIT + 1)
    echo, wire = await exchange([raw + b"x" * (LIMIT + 1)])
    assert echo.seen == []
    assert status_of(wire) == 413
    assert wire.end == "eof"


async def test_nothing_beyond_the_limit_is_kept() -> None:
    connection: Any = None
    request = Request(connection, "POST", "/", "1.1", Headers(), keep_alive=True, limit=10)
    for _ in range(3):
        request.feed(b"x" * 6)
    assert request._body == []
    with pytest.raises(RequestError, match="more than the allowed 10 bytes"):
        request.body()


async def test_continue() -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    echo, wire = await exchange([head])
    assert wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    await wire.feed([b"hello"])
    assert status_of(wire) == 200
    assert wire.end == ""
    assert echo.seen == [("POST", "/echo", b"hello")]


async def test_who_may_not_come_in_is_not_told_to_continue() -> None:
    echo = Echo()

    def refuse(_: object) -> None:
        raise RequestError("no", status=401)

    echo.refuse = refuse
    head = b"POST /echo HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    _, wire = await exchange([head], echo)
    assert status_of(wire) == 401
    assert b"100 Continue" not in wire.written
    assert wire.end == "eof"


async def test_head_has_no_body() -> None:
    _, wire = await exchange([GET.replace(b"GET", b"HEAD") + POST])
    assert undated(wire.written).startswith(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200")


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"GET /echo HTTP/1.0\r\n\r\n", False),
        (b"GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
        (b"GET /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", False),
        (b"GET /echo HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", False),
        (b"GET http://h/echo HTTP/1.1\r\nHost: h\r\n\r\n", True),
    ],
)
async def test_keep_alive(head: bytes, kept: bool) -> None:
    echo, wire = await exchange([head])
    assert status_of(wire) == 200
    assert (wire.end == "") is kept
    assert (b"Connection: close" in wire.written) is not kept
    assert [request[1] for request in echo.seen] == ["/echo"]


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize("step", [1, 30, 10_000])
@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 5\r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    ],
)
async def test_another_protocol_is_not_taken_up(body: bytes, step: int) -> None:
    """Java's own client asks for HTTP/2 with each request in the clear."""
    raw = b"POST /echo HTTP/1.1\r\nHost: h\r\n" + UPGRADE + body
    echo, wire = await exchange([raw[at : at + step] for at in range(0, len(raw), step)])
    assert status_of(wire) == 200
    assert echo.seen == [("POST", "/echo", b"hello")]
    assert wire.written.endswith(b"hello")
    assert b"Connection: close" in wire.written


async def test_what_follows_another_protocol_s_request_is_not_answered() -> None:
    raw = b"POST /echo HTTP/1.1\r\nHost: h\r\n" + UPGRADE + b"Content-Length: 5\r\n\r\nhello"
    echo, wire = await exchange([raw + GET])
    assert len(echo.seen) == 1
    assert wire.written.count(b"HTTP/1.1 200") == 1


async def test_connect() -> None:
    _, wire = await exchange([b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n"])
    assert status_of(wire) == 400
    assert b"URL: got 'a:80', allowed is /PATH or http://HOST/PATH" in wire.written
    assert wire.end == "eof"


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        (
            b"HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip",
            "Transfer-Encoding",
            "got 'gzip', allowed is chunked",
        ),
        (
            b"HTTP/1.0\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding",
            "got 'chunked' in HTTP/1.0, allowed is none there",
        ),
        (b"HTTP/1.1\r\nHost: h\r\nExpect: a-miracle", "Expect", "got 'a-miracle', allowed is 100-continue"),
        (b"HTTP/1.1", "Host", "got none, allowed is one"),
        (b"HTTP/1.1\r\nHost: a\r\nHost: b", "Host", "got 'a' and 'b', allowed is one"),
        (b"HTTP/1.1\r\nHost: x y", "Host", "got 'x y', allowed is a name or an address, and a port"),
        (
            b"HTTP/1.1\r\nHost: \xe9",
            "Host",
            r"got '\udce9', allowed is a name or an address, and a port",
        ),
        (b"HTTP/1.1\r\nHost: h\r\n" + b"X: a\r\n" * 200 + b"Y: b", "headers", "got 202, allowed is 128"),
    ],
)
async def test_a_refusal_names_what_it_got_and_what_is_allowed(raw: bytes, field: str, message: str) -> None:
    _, wire = await exchange([b"GET /echo " + raw + b"\r\n\r\n"])
    error = json.loads(wire.written.partition(b"\r\n\r\n")[2])["error"]
    assert (error["param"], error["message"]) == (field, f"{field}: {message}")


async def test_a_url_that_is_too_long() -> None:
    _, wire = await exchange([b"GET /echo?" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: h\r\n\r\n"])
    assert status_of(wire) == 414
    assert b"URL: more than the allowed 65536 bytes" in wire.written


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        (b"h", True),
        (b"", True),
        (b"h \t", True),
        (b"Kv-Router_1.example.:8000", True),
        (b"10.0.0.1:8000", True),
        (b"[fd00::1]", True),
        (b"[fe80::1%25eth0]:8000", True),
        *(
            (bad, False)
            for bad in (b"x y", b"h/p", b"u@h", b"a,b", b"h:x", b"h:1:2", b"[::1", b"h\x7f", b"h?q")
        ),
    ],
)
async def test_hosts(host: bytes, taken: bool) -> None:
    echo, wire = await exchange([b"GET /echo HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"])
    assert len(echo.seen) == taken
    assert status_of(wire) == (200 if taken else 400)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (b"/a/x", ("/a/{id}", "x")),
        (b"/a/x%20y", ("/a/{id}", "x y")),
        (b"/a/x%2Fy", ("/a/{id}", "x/y")),
        (b"/a/x%2fend", ("/a/{id}", "x/end")),
        (b"/a/%ff", ("/a/{id}", "\udcff")),
        (b"/b/x/y", ("/b/{id}", "x/y")),
        (b"/b/x%2Fy%252F", ("/b/{id}", "x/y%2F")),
        (b"/a/x/end", ("/a/{id}/end", "x")),
        (b"/a%2Fx", None),
        (b"/%61/x", None),
        (b"/ech%6F", None),
        (b"/a/x%2F", ("/a/{id}", "x/")),
        (b"/a/", None),
    ],
)
async def test_only_parts_of_a_path_are_decoded(path: bytes, wanted: tuple[str, str] | None) -> None:
    """Whoever compares paths as they are sees the page that answers."""
    echo, seen = Echo(), []

    async def page(request: Request) -> Response:
        seen.append((request.page, request.match_info["id"]))
        return Response()

    for shape in ("/a/{id}", "/b/{id:.+}", "/a/{id}/end"):
        echo.site.add(get(shape, page))
    _, wire = await exchange([b"GET " + path + b" HTTP/1.1\r\nHost: h\r\n\r\n"], echo)
    assert seen == ([] if wanted is None else [wanted])
    assert echo.seen == []
    assert status_of(wire) == (404 if wanted is None else 200)


async def test_a_path_that_is_no_text() -> None:
    _, wire = await exchange([b"GET /%ff HTTP/1.1\r\nHost: h\r\n\r\n" + GET])
    assert wire.written.startswith(b"HTTP/1.1 404")
    assert b"no such endpoint: GET /" in wire.written
    assert status_of(wire) == 200, "the next one is answered"


async def test_a_stream_for_an_old_client_ends_with_its_connection() -> None:
    raw = b"POST /stream HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nab"
    _, wire = await exchange([raw])
    assert undated(wire.written).endswith(b"Connection: close\r\n\r\nab")
    assert wire.end == "close"


async def test_a_client_that_leaves_ends_its_handler() -> None:
    echo = Echo()
    echo.gate = asyncio.Event()
    _, wire = await exchange([STREAM], echo)
    connection = wire.protocol
    task = connection.task
    wire.abort()
    await quiet()
    assert task.cancelled()
    assert echo.stream is not None
    with pytest.raises(ClientGone):
        echo.stream.write(b"x")


@pytest.mark.parametrize(("version", "sent"), [("1.1", b"02;x\r\nab\r\n0\r\n\r\n"), ("1.0", b"ab")])
async def test_a_chunk_goes_as_it_came(version: str, sent: bytes) -> None:
    """To a client that knows chunks."""
    echo = Echo()

    async def passing(request: Request) -> StreamResponse:
        stream = StreamResponse({})
        with pytest.raises(RuntimeError):
            stream.write_chunk(b"1\r\na\r\n", b"a")
        stream.prepare(request)
        stream.write_chunk(b"02;x\r\nab\r\n", b"ab")
        stream.write_eof()
        return stream

    echo.site.add(post("/passing", passing))
    raw = b"POST /passing HTTP/%b\r\nHost: h\r\nContent-Length: 0\r\n\r\n" % version.encode()
    _, wire = await exchange([raw], echo)
    assert bytes(wire.written).partition(b"\r\n\r\n")[2] == sent


@pytest.mark.parametrize(
    ("version", "sent", "end"),
    [("1.1", b"\r\n\r\n2\r\nab\r\n0\r\n\r\n", ""), ("1.0", b"\r\n\r\nab", "close")],
)
async def test_a_piece_and_the_end_in_one(version: str, sent: bytes, end: str) -> None:
    echo, writes = Echo(), []

    async def short(request: Request) -> StreamResponse:
        stream = StreamResponse({})
        stream.prepare(request)
        before = len(wire.written)
        stream.write(b"ab", last=True)
        writes.append(bytes(wire.written[before:]))
        return stream

    echo.site.add(post("/short", short))
    wire = Wire(Connection(echo.server))
    await wire.feed([f"POST /short HTTP/{version}\r\nHost: h\r\nContent-Length: 0\r\n\r\n".encode()])
    assert wire.written.endswith(sent)
    assert (writes, wire.end) == ([bytes(wire.written)], end)


async def test_flow() -> None:
    echo = Echo()
    echo.gate = asyncio.Event()
    _, wire = await exchange([STREAM], echo)
    assert echo.stream is not None
    told: list[bool] = []
    echo.stream.on_flow = told.append
    wire.protocol.pause_writing()
    waiting = asyncio.ensure_future(echo.stream.drained())
    await quiet()
    assert (told, waiting.done()) == ([False], False)
    wire.protocol.resume_writing()
    await quiet()
    assert (told, waiting.done()) == ([False, True], True)


async def test_closing() -> None:
    """Who is idle is closed at once, who is at work after its answer, which goes out whole."""
    echo = Echo()
    echo.server = Server(echo.site, 10.0)
    echo.gate = asyncio.Event()
    _, idle = await exchange([], echo)
    _, busy = await exchange([POST], echo)
    closing = asyncio.ensure_future(echo.server.close())
    await quiet()
    assert (idle.end, busy.end) == ("close", "")
    echo.gate.set()
    await closing
    assert undated(busy.written).endswith(b"Connection: close\r\n\r\nhello")
    assert busy.end == "close"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_cut_stream_looks_cut(version: str) -> None:
    """Also to a client that knows no chunks, for which a connection's end is an answer's."""
    echo, told = Echo(), asyncio.Event()

    async def cut_off(request: Request) -> StreamResponse:
        stream = StreamResponse({})
        stream.prepare(request)
        stream.write(b"half")
        await told.wait()
        stream.cut()
        return stream

    echo.site.add(get("/cut", cut_off))
    server = await serve(echo.site)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(f"GET /cut HTTP/{version}\r\nHost: h\r\n\r\n".encode())
        await reader.readuntil(b"half")
        told.set()
        if version == "1.0":
            with pytest.raises(ConnectionResetError):
                await reader.read()
        else:
            assert await reader.read() == b"\r\n", "and no last chunk"
    finally:
        writer.close()
        await server.close()


ENDLESS = [
    pytest.param([b"0\r\nX: ", *[b"a" * MAX_HEAD_BYTES] * 3], id="trailer"),
    pytest.param([b"0\r\n", *[b"a" * MAX_HEAD_BYTES] * 3], id="trailer's name"),
    pytest.param([b"0\r\n", *[b"X: a\r\n" * 12_000] * 3], id="trailers"),
    pytest.param([b"1;", *[b"a" * MAX_HEAD_BYTES] * 3], id="extension"),
]


@pytest.mark.parametrize("pieces", ENDLESS)
async def test_what_is_around_chunks_has_an_end(pieces: list[bytes]) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"
    echo, wire = await exchange([head, *pieces])
    assert status_of(wire) == 400
    assert b"trailers: more than the allowed 65536 bytes" in wire.written
    assert echo.seen == []
    assert wire.end == "eof"


async def test_a_long_body_in_small_chunks() -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"1;" + b"x" * 1000 + b"\r\na\r\n"
    echo, _ = await exchange([head, *[chunk] * 300, b"0\r\n\r\n"])
    assert echo.seen == [("POST", "/echo", b"a" * 300)]


async def test_a_header_can_not_be_smuggled_out() -> None:
    from kvhandoff.router.wire.framing import response_head

    with pytest.raises(ValueError, match="line end"):
        response_head(200, {"X": "a\r\nSet-Cookie: b"})
