"""The router's client on the wire: an answer is whole when its framing says so, or it is an error."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhandoff.router.wire import BrokenOff, Client, NotConnected
from kvhandoff.router.wire.client import _split
from kvhandoff.router.wire.framing import MAX_HEAD_BYTES
from kvhandoff.router.wire.leg import MAX_HELD_BYTES, LegAnswer, LegConnection
from kvhandoff.web import free_port
from tests.router.wires import CUTS, MUTATIONS, Wire, cut, mutated, quiet

SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\na;x\r\n0123456789\r\n0\r\nX-Trailer: t\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SIZED
HEAD = b"POST /p HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\n"


async def ask(pieces: list[bytes], *, eof: bool = False) -> tuple[tuple[int, bytes], Wire]:
    """((status, body), wire). Raises BrokenOff."""
    connection = LegConnection()
    wire = Wire(connection)

    async def read() -> tuple[int, bytes]:
        connection.ask(HEAD, b"x")
        answer = await connection.answered()
        return answer.status, await answer.read()

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    assert wire.written == HEAD + b"x"
    await wire.feed(pieces)
    if eof and not wire.is_closing():
        connection.connection_lost(None)
    await quiet()
    if not reading.done():
        reading.cancel()
        raise TimeoutError
    return reading.result(), wire


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(SIZED, (200, b"hello")), (CHUNKED, (200, b"abc0123456789")), (CONTINUED, (200, b"hello"))],
)
@given(cuts=CUTS)
def test_however_it_is_cut(raw: bytes, expected: tuple[int, bytes], cuts: list[int]) -> None:
    result, wire = asyncio.run(ask(cut(raw, cuts)))
    assert result == expected
    assert wire.end == ""
    assert wire.protocol.usable


@pytest.mark.parametrize("raw", [SIZED, CHUNKED, CONTINUED])
def test_no_part_of_an_answer_is_an_answer(raw: bytes) -> None:
    """Field case 35: wherever the connection ends."""
    for end in range(len(raw)):
        with pytest.raises(BrokenOff):
            asyncio.run(ask([raw[:end]], eof=True))


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        SIZED.replace(b"Content-Length", b"Content-Length: 5\r\nContent-Length"),
        SIZED.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length"),
        CHUNKED.replace(b"chunked", b"gzip, chunked"),
        CHUNKED.replace(b"chunked", b"chunked, gzip"),
        CHUNKED.replace(b"3\r\n", b"0x3\r\n"),
        CHUNKED.replace(b"3\r\n", b"3\n"),
        CHUNKED.replace(b"abc\r\n", b"abcd\r\n"),
        SIZED.replace(b"Content-Type: ", b"Content-Type: a\r\n b"),
        SIZED.replace(b"Content-Type: ", b"Content-Type: a\n"),
        SIZED.replace(b"HTTP/1.1 200", b"HTTP/1.1 2x0"),
        SIZED.replace(b"Content-Type: ", b"X: " + b"a" * 3 * MAX_HEAD_BYTES),
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
        b"\x15\x03\x01",
        SIZED + b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbye",  # another's answer
        SIZED + b"x",
    ],
)
async def test_bad_answers(raw: bytes) -> None:
    with pytest.raises(BrokenOff):
        await ask([raw], eof=True)


async def test_an_answer_that_only_its_connection_would_end() -> None:
    """Cut short it would look whole. It is not waited for."""
    with pytest.raises(BrokenOff, match="its end can't be told"):
        await ask([b"HTTP/1.1 200 OK\r\n\r\nhello"])


def read_by_h11(raw: bytes) -> tuple[int, bytes] | None:
    """The answer as another parser reads it; None: it can't, or it isn't whole."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**20)
    connection.send(h11.Request(method="POST", target="/p", headers=[("Host", "h"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(raw)
    connection.receive_data(b"")
    status, body = 0, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, body
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None


@pytest.mark.parametrize("raw", [SIZED, CHUNKED, CONTINUED])
@settings(max_examples=300)
@given(mutations=MUTATIONS, cuts=CUTS)
def test_random_damage(raw: bytes, mutations: Any, cuts: list[int]) -> None:
    """Nothing but BrokenOff comes of it, or what another parser reads too."""
    damaged = mutated(raw, mutations)
    try:
        result, _ = asyncio.run(ask(cut(damaged, cuts), eof=True))
    except BrokenOff:
        return
    theirs = read_by_h11(damaged)
    assert theirs in (None, result)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"0\r\nX: ", *[b"a" * MAX_HEAD_BYTES] * 3],
        [b"0\r\n", *[b"X: a\r\n" * 12_000] * 3],
        [b"1;", *[b"a" * MAX_HEAD_BYTES] * 3],
    ],
    ids=["trailer", "trailers", "extension"],
)
async def test_what_is_around_an_engine_s_chunks_has_an_end(pieces: list[bytes]) -> None:
    with pytest.raises(BrokenOff, match="the trailer of its answer is too long"):
        await ask([CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n1\r\na\r\n", *pieces])


async def test_an_answer_that_nobody_takes_is_not_read_on() -> None:
    connection = LegConnection()
    wire = Wire(connection)
    connection.ask(HEAD, b"x")
    size = MAX_HELD_BYTES + 1
    await wire.feed([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (size + 3), b"x" * size])
    answer = await connection.answered()
    assert not wire.reading
    assert await answer.readany() == b"x" * size
    assert wire.reading
    await wire.feed([b"end"])
    assert await answer.readany() == b"end"
    assert await answer.readany() == b""


class Bucket:
    def __init__(self, *, wants: bool = True) -> None:
        self.wants = wants
        self.answers: list[LegAnswer] = []
        self.pieces: list[bytes] = []
        self.lasts: list[bool] = []
        self.chunks: list[bytes] = []
        self.ends: list[BrokenOff | None] = []

    def begin(self, answer: LegAnswer) -> bool:
        self.answers.append(answer)
        return self.wants

    def take(self, piece: bytes, *, last: bool) -> None:
        self.pieces.append(piece)
        self.lasts.append(last)

    def take_chunk(self, chunk: bytes, piece: bytes) -> None:
        self.chunks.append(chunk)
        self.take(piece, last=False)

    def finish(self, error: BrokenOff | None) -> None:
        self.ends.append(error)


async def asked(bucket: Bucket) -> tuple[LegConnection, Wire, asyncio.Future[LegAnswer]]:
    connection = LegConnection()
    wire = Wire(connection)
    connection.ask(HEAD, b"x")
    asking = asyncio.ensure_future(connection.answered(bucket))
    await asyncio.sleep(0)
    return connection, wire, asking


async def test_pouring() -> None:
    """Each piece as it comes, no task being woken for the first either; chunks of one read together."""
    bucket = Bucket()
    connection, wire, asking = await asked(bucket)
    head = CHUNKED.partition(b"\r\n\r\n")[0]
    connection.data_received(head + b"\r\n\r\n2\r\nHe\r\n")
    assert not asking.done()
    assert bucket.pieces == [b"He"]
    answer = await asking
    assert bucket.answers == [answer]
    connection.data_received(b"1\r\nl\r\n1\r\nl\r\n")
    connection.data_received(b"1\r\no\r\n")
    assert bucket.pieces == [b"He", b"ll", b"o"]
    answer.flow(False)
    assert not wire.reading
    answer.flow(True)
    assert wire.reading
    connection.data_received(b"0\r\n\r\n")
    assert bucket.ends == [None]
    assert not any(bucket.lasts)


async def test_which_chunks_go_on_as_they_came() -> None:
    """Those that come whole and alone, after another's end; what the parser has seen a part of, it sees the
    rest of."""
    bucket = Bucket()
    connection, _, _ = await asked(bucket)
    head = CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    for data, chunks, body in [
        (head, [], b""),
        (b"1\r\na\r\n", [], b"a"),
        (b"1\r\nb\r\n", [b"1\r\nb\r\n"], b"ab"),
        (b"1\r\nc\r\n6\r\n", [], b"abc"),
        (b"1\r\nd\r\n", [], b"abc1\r\nd\r\n"),  # it looks like a chunk, and is in one
        (b"\r\n", [], b"abc1\r\nd\r\n"),
        (b"2\r\ne\r", [], b"abc1\r\nd\r\ne\r"),
        (b"\r\n", [], b"abc1\r\nd\r\ne\r"),
        (b"1\r\nf\r\n", [b"1\r\nf\r\n"], b"abc1\r\nd\r\ne\rf"),
        (b"A\r\n0123456789\r\n", [], b"abc1\r\nd\r\ne\rf0123456789"),
        (b"1\r\ng\r\n", [b"1\r\ng\r\n"], b"abc1\r\nd\r\ne\rf0123456789g"),
        (b"1", [], b"abc1\r\nd\r\ne\rf0123456789g"),
        (b"1\r\nh\r\n", [], b"abc1\r\nd\r\ne\rf0123456789gh\r\n"),  # the size is 0x11
        (b"34567890123456\r\n", [], b"abc1\r\nd\r\ne\rf0123456789gh\r\n34567890123456"),
    ]:
        bucket.chunks.clear()
        connection.data_received(data)
        assert (data, bucket.chunks, b"".join(bucket.pieces)) == (data, chunks, body)
    connection.data_received(b"1\r\ni\r\n0\r\n\r\n")
    assert bucket.ends == [None]
    assert connection.usable


async def test_an_answer_of_known_length_has_no_chunks() -> None:
    bucket = Bucket()
    connection, wire, _ = await asked(bucket)
    await wire.feed([CHUNKED])
    connection.rest()
    connection.ask(HEAD, b"x")
    asking = asyncio.ensure_future(connection.answered(second := Bucket()))
    await asyncio.sleep(0)
    await wire.feed([b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n", b"1\r\na\r\n", b"1\r\nb\r\n"])
    assert (second.pieces, second.chunks) == ([b"1\r\na\r\n", b"1\r\nb\r\n"], [])
    assert asking.done()


async def test_nothing_goes_on_after_the_connection_is_given_up() -> None:
    bucket = Bucket()
    connection, wire, _ = await asked(bucket)
    connection.data_received(CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n1\r\na\r\n")
    connection.data_received(b"1\r\nb\r\nx\r\n")
    assert wire.end == "abort"
    connection.data_received(b"1\r\nc\r\n")
    assert bucket.pieces == [b"a", b"b"]
    assert len(bucket.ends) == 1


CHUNKS = st.lists(
    st.one_of(
        st.builds(lambda text: b"%x\r\n%b\r\n" % (len(text), text), st.binary(min_size=1, max_size=40)),
        st.sampled_from(
            [
                b"5\r\na\r\nbc\r\n",
                b"A\r\n1\r\nx\r\n2\r\n\r\n",
                b"01\r\na\r\n",
                b"1;a=1\r\nb\r\n",
                b"2\r\nab\n",
            ]
        ),
    ),
    max_size=8,
)


@given(chunks=CHUNKS, cuts=CUTS, mutations=st.one_of(st.just([]), MUTATIONS))
def test_what_is_poured_is_what_a_parser_reads(chunks: list[bytes], cuts: list[int], mutations: Any) -> None:
    """Whole chunks are passed by the parser; however it goes on, nobody can tell."""
    raw = mutated(b"".join(chunks) + b"0\r\n\r\n", mutations)
    pieces, at = [CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"], 0
    for chunk in chunks:  # most reads begin and end where chunks do
        pieces.append(raw[at : at + len(chunk)])
        at += len(chunk)
    pieces += cut(raw[at:], cuts)
    if cuts and cuts[0] % 2:
        pieces[1:] = cut(raw, cuts)

    async def poured() -> tuple[bytes, list[bool]]:
        bucket = Bucket()
        connection, _, _ = await asked(bucket)
        for piece in filter(None, pieces):
            connection.data_received(piece)
        return b"".join(bucket.pieces), [error is None for error in bucket.ends]

    async def parsed() -> tuple[bytes, list[bool]]:
        bucket = Bucket()
        connection, _, _ = await asked(bucket)
        connection.data_received(pieces[0])
        for byte in b"".join(pieces[1:]):  # no byte is a chunk
            connection.data_received(bytes([byte]))
        return b"".join(bucket.pieces), [error is None for error in bucket.ends]

    (some, ends), (all_, right_ends) = asyncio.run(poured()), asyncio.run(parsed())
    assert ends == right_ends
    assert some == all_ or (ends == [False] and all_.startswith(some))


@pytest.mark.parametrize(("after", "last"), [(b"", True), (b"HTTP/1.1 200 OK\r\n", False)])
async def test_a_last_piece_is_known_by_what_comes_with_it(after: bytes, last: bool) -> None:
    """Its end came in one read, and nothing that makes the answer doubtful."""
    bucket = Bucket()
    connection, wire, _ = await asked(bucket)
    await wire.feed([CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\n\r\n1\r\na\r\n"])
    connection.data_received(b"1\r\nb\r\n0\r\n\r\n" + after)
    assert (bucket.pieces, bucket.lasts) == ([b"a", b"b"], [False, last])
    assert [error is None for error in bucket.ends] == [last]


async def test_an_answer_that_is_not_for_the_sink_is_read() -> None:
    bucket = Bucket(wants=False)
    _, wire, asking = await asked(bucket)
    await wire.feed([SIZED])
    assert await (await asking).read() == b"hello"
    assert (len(bucket.answers), bucket.pieces, bucket.ends) == (1, [], [])


async def test_an_answer_that_nobody_waits_for_goes_nowhere() -> None:
    bucket = Bucket()
    connection, _, asking = await asked(bucket)
    asking.cancel()
    connection.data_received(SIZED)
    assert (bucket.answers, bucket.pieces) == ([], [])


async def test_a_sink_is_for_one_answer() -> None:
    bucket = Bucket()
    connection, wire, asking = await asked(bucket)
    await wire.feed([SIZED])
    await asking
    connection.rest()
    connection.ask(HEAD, b"x")
    await wire.feed([SIZED])
    assert await (await connection.answered()).read() == b"hello"
    assert bucket.pieces == [b"hello"]


async def test_a_large_body_goes_as_the_engine_takes_it() -> None:
    connection = LegConnection()
    wire = Wire(connection)
    connection.pause_writing()
    body = b"x" * (3 << 20)
    connection.ask(HEAD, body)
    asking = asyncio.ensure_future(connection.answered())
    await quiet()
    assert len(wire.written) == len(HEAD) + (1 << 20)
    connection.resume_writing()
    await quiet()
    assert wire.written == HEAD + body
    await wire.feed([SIZED])
    assert (await asking).status == 200


async def test_an_engine_that_answers_before_it_has_all() -> None:
    """It waits for the rest of the body: the next request would be taken for that."""
    connection = LegConnection()
    wire = Wire(connection)
    connection.pause_writing()
    connection.ask(HEAD, b"x" * (3 << 20))
    asking = asyncio.ensure_future(connection.answered())
    await quiet()
    await wire.feed([SIZED])
    answer = await asking
    assert await answer.read() == b"hello"
    assert not connection.usable


async def test_connections_are_kept_and_nothing_is_left() -> None:
    ports: list[int] = []

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ports.append(writer.get_extra_info("peername")[1])
        try:
            while True:
                await reader.readuntil(b"\r\n\r\nx")
                writer.write(SIZED)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(engine, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/p"
    client = Client(1.0)
    async with server:
        for _ in range(3):
            async with client.post(url, data=b"x", headers=b"") as leg:
                assert await (await leg.answer()).read() == b"hello"
        assert len(ports) == 1
        async with client.post(url, data=b"x", headers=b""), client.post(url, data=b"x", headers=b""):
            pass  # answers that nobody has read to their end may not be mixed up with the next
        async with client.post(url, data=b"x", headers=b"") as leg:
            assert await (await leg.answer()).read() == b"hello"
        await client.close()


async def test_a_kept_connection_is_used_at_once() -> None:
    """The engine works while the leg's bounds are set up."""
    client, connection = Client(1.0), LegConnection()
    wire = Wire(connection)
    place, _ = _split("http://h:1/p")
    client.give_back(place, connection)
    leg = client.post("http://h:1/p", data=b"x", headers=b"A: b\r\n")
    assert wire.written == b"POST /p HTTP/1.1\r\nHost: h:1\r\nContent-Length: 1\r\nA: b\r\n\r\nx"
    async with leg:
        answer = asyncio.ensure_future(leg.answer())
        await wire.feed([SIZED])
        assert await (await answer).read() == b"hello"
    assert client.kept(place) is connection
    await client.close()


async def test_nothing_listens() -> None:
    client = Client(1.0)
    with pytest.raises(NotConnected) as caught:
        async with client.post(f"http://127.0.0.1:{free_port()}/p", data=b"", headers=b""):
            pass
    assert caught.value.refused
