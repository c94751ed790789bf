"""A shared index whose server was never there, or is none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.router.index import Answer, Turn
from kvhandoff.router.valkey_index import ValkeyIndex
from kvhandoff.web import free_port
from tests.router.engines import WAIT_S, key_of, soon

LOST = Answer((), Reason.INDEX_FAILED)
TURN = Turn(key_of("1"), Identity(EngineId("d"), Epoch("1")))


@asynccontextmanager
async def talking(answer: bytes | None) -> AsyncIterator[int]:
    """Something that answers every line with this (None: with silence)."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(4096):
                if answer is not None:
                    writer.write(answer)
                    await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def lost_turns(port: int, connect_s: float = WAIT_S) -> int:
    """Start, ask, remember and close."""
    lost: list[int] = []
    index = ValkeyIndex(
        f"valkey://127.0.0.1:{port}/0",
        ttl_s=1.0,
        deadline_s=WAIT_S,
        connect_s=connect_s,
        on_lost_turns=lost.append,
    )
    await soon(index.start())
    assert await index.look_up([b"a"]) == LOST
    index.remember([b"a", b"b"], TURN)
    index.renew(b"a")
    await soon(index.close())
    return sum(lost)


async def test_nothing_listens() -> None:
    assert await lost_turns(free_port()) == 1


async def test_it_says_nothing() -> None:
    async with talking(None) as port:
        assert await lost_turns(port, connect_s=0.05) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
        b"-LOADING it is loading\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"$x\r\n",
        b"*-5\r\n$1\r\n",
        b"\r\n",
        b"\xff\xfe\r\n",
    ],
)
async def test_it_is_no_server(answer: bytes) -> None:
    async with talking(answer) as port:
        assert await lost_turns(port, connect_s=1.0) == 1


@pytest.mark.parametrize(
    "reply", [b"+OK", b":1", b"*1\r\n:5", b"*1\r\n*0", b"*1\r\n-ERR", b"*2\r\n$-1\r\n$-1", b"$-1"]
)
async def test_replies_that_make_no_sense(reply: bytes) -> None:
    """From a server that knows PING: no error but a miss."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                words = int((await reader.readline())[1:])
                command = [await read_word(reader) for _ in range(words)]
                writer.write((b"+PONG" if command[0] == b"PING" else reply) + b"\r\n")
        writer.close()

    async def read_word(reader: asyncio.StreamReader) -> bytes:
        size = int((await reader.readline())[1:])
        return (await reader.readexactly(size + 2))[:-2]

    lost: list[int] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        index = ValkeyIndex(
            f"valkey://127.0.0.1:{port}",
            ttl_s=1.0,
            deadline_s=WAIT_S,
            connect_s=WAIT_S,
            on_lost_turns=lost.append,
        )
        await soon(index.start())
        answer = await index.look_up([b"a"])
        index.remember([b"a"], TURN)
        await soon(index.close())
        assert answer.reason is Reason.INDEX_FOREIGN
        assert set(answer.turns) <= {None}
