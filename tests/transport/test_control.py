"""The control plane: who may talk, what is kept for whom, and what happens when either side goes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from kvhandoff.core.errors import ConfigError
from kvhandoff.transport import control
from kvhandoff.transport.control import ControlPlane
from kvhandoff.web import free_port

KEY = b"cluster key"
DEADLINE = 20.0
_spawn = multiprocessing.get_context("spawn")


class Inbox:
    """Messages that have come, to be waited for."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, message: bytes) -> None:
        if message.startswith(b"malformed"):
            raise ValueError("malformed")
        if message.startswith(b"bug"):
            raise ZeroDivisionError
        self.queue.put_nowait(message)

    async def next(self) -> bytes:
        return await asyncio.wait_for(self.queue.get(), DEADLINE)

    async def next_lost(self) -> str:
        return await asyncio.wait_for(self.lost.get(), DEADLINE)


@asynccontextmanager
async def listening(
    key: bytes = KEY, bind: str = "tcp://127.0.0.1:0", **options: Any
) -> AsyncIterator[tuple[ControlPlane, str, Inbox]]:
    inbox = Inbox()
    plane = ControlPlane(key, inbox, bind, on_disconnect=inbox.lost.put_nowait, **options)
    address = await plane.start()
    try:
        yield plane, address, inbox
    finally:
        await plane.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110  counters have no events
            await asyncio.sleep(0.005)


def unused_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def test_messages_arrive_whole_and_in_order_both_ways() -> None:
    async with listening() as (a, at_a, from_b), listening() as (b, at_b, from_a):
        assert at_a.startswith("tcp://127.0.0.1:")
        messages = [os.urandom(size) for size in (0, 1, 1000, 100_000, 5)]
        for message in messages:
            assert a.send(at_b, message)
        for message in messages:
            assert await from_a.next() == message
        assert b.send(at_a, b"back")
        assert await from_b.next() == b"back"
        assert (a.counters.sent, a.counters.received, a.counters.dropped) == (5, 1, 0)
        assert (b.counters.sent, b.counters.received, b.counters.malformed) == (1, 5, 0)


def test_it_works_on_uvloop() -> None:
    uvloop.run(test_messages_arrive_whole_and_in_order_both_ways())
    uvloop.run(test_without_the_cluster_key_nothing_is_delivered_either_way())
    uvloop.run(test_the_other_side_survives_a_restart_of_this_one())


async def test_a_message_to_oneself_arrives() -> None:
    async with listening() as (plane, address, inbox):
        assert plane.send(address, b"me")
        assert await inbox.next() == b"me"


async def test_without_the_cluster_key_nothing_is_delivered_either_way() -> None:
    async with (
        listening() as (ours, at_ours, inbox),
        listening(b"another key") as (theirs, at_theirs, stolen),
    ):
        assert theirs.send(at_ours, b"obey")
        assert ours.send(at_theirs, b"secret")
        await until(lambda: ours.counters.rejected > 0 and theirs.counters.rejected > 0)
        async with listening() as (friend, _, _):
            assert friend.send(at_ours, b"hello")
            assert await inbox.next() == b"hello"  # the port still serves those who may
        assert inbox.queue.empty()
        assert stolen.queue.empty()
        assert (ours.counters.received, theirs.counters.received) == (1, 0)


@pytest.mark.parametrize("mechanism", ["none", "curve, own key pair"])
async def test_foreign_zeromq_sockets_are_not_heard(mechanism: str) -> None:
    async with listening() as (plane, address, inbox):
        context = zmq.asyncio.Context()
        foreign = context.socket(zmq.PUSH)
        if mechanism != "none":
            # It even knows the cluster's public key: what it lacks is the secret.
            public, secret = zmq.curve_keypair()
            foreign.curve_publickey, foreign.curve_secretkey = public, secret
            foreign.curve_serverkey = plane._public
        foreign.connect(address)
        foreign.send(b"obey")
        await until(lambda: plane.counters.rejected > 0)
        assert inbox.queue.empty()
        assert plane.counters.received == 0
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "garbage",
    [b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + b"\0" * 200],
    ids=["zero", "http", "long", "greeting"],
)
async def test_garbage_on_the_port_harms_nobody(garbage: bytes) -> None:
    async with listening() as (plane, address, inbox), listening() as (friend, _, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
        writer.write(garbage)
        assert friend.send(address, b"hello")
        assert await inbox.next() == b"hello"
        writer.close()
        assert plane.counters.received == 1


async def test_malformed_messages_are_counted_and_bugs_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (a, _, _), listening() as (b, at_b, inbox):
        for message in (b"malformed 1", b"bug", b"malformed 2", b"good"):
            assert a.send(at_b, message)
        assert await inbox.next() == b"good"
        assert (b.counters.received, b.counters.malformed) == (4, 2)
        assert [record.message for record in caplog.records] == ["a message's handler has failed"]


async def test_a_flood_lets_other_coroutines_run() -> None:
    async with listening() as (a, _, _), listening() as (b, at_b, inbox):
        for index in range(900):
            assert a.send(at_b, b"%d" % index)
        await inbox.next()
        turns = 0
        while b.counters.received < 900:
            turns += 1
            await asyncio.sleep(0)
        assert [inbox.queue.get_nowait() for _ in range(899)] == [b"%d" % index for index in range(1, 900)]
        assert turns > 1


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:5000",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://:5000",
        "tcp://a b:5000",
        "ipc:///tmp/x",
        "inproc://zeromq.zap.01",
        "tcp://127.0.0.1:5000;127.0.0.1:6000",
        "tcp://127.0.0.1:5000\n",
        "tcp://[zz:5000",
    ],
)
async def test_malformed_addresses_are_refused(address: str) -> None:
    async with listening() as (plane, _, _):
        assert plane.send(address, b"x") is False
        assert (plane.counters.sent, plane.counters.dropped) == (0, 1)
        assert plane._peers == {}


async def test_the_queue_to_a_peer_is_bounded() -> None:
    async with listening(queue_bound=10) as (plane, _, _):
        nobody = unused_address()
        assert [plane.send(nobody, b"%d" % index) for index in range(15)] == [True] * 10 + [False] * 5
        assert (plane.counters.sent, plane.counters.dropped) == (10, 5)
        # A peer that starts in time gets what was queued, in order.
        async with listening(bind=nobody) as (_, _, inbox):
            assert [await inbox.next() for _ in range(10)] == [b"%d" % index for index in range(10)]


async def test_messages_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_MESSAGE_BYTES", 1000)
    async with listening() as (a, _, _), listening() as (_, at_b, inbox):
        assert a.send(at_b, b"x" * 1001) is False
        assert a.send(at_b, b"x" * 900)
        assert await inbox.next() == b"x" * 900


async def test_a_receiver_does_not_take_larger_messages_than_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "MAX_MESSAGE_BYTES", 1000)
    async with listening() as (b, at_b, inbox):
        monkeypatch.setattr(control, "MAX_MESSAGE_BYTES", 10_000)
        async with listening() as (a, _, lost):
            assert a.send(at_b, b"x" * 5000)
            assert await lost.next_lost() == at_b
            assert a.send(at_b, b"small")
            assert await inbox.next() == b"small"
            assert b.counters.received == 1


async def test_nobody_there_is_reported_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_CONNECT_PATIENCE_S", 0.1)
    async with listening() as (plane, _, inbox):
        nobody = unused_address()
        assert plane.send(nobody, b"old")
        assert await inbox.next_lost() == nobody
        assert plane._peers == {}
        monkeypatch.undo()
        async with listening(bind=nobody) as (_, _, late):
            assert plane.send(nobody, b"new")
            assert await late.next() == b"new"  # and not the old one


async def test_unused_peers_are_closed_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_IDLE_S", 0.5)
    async with listening() as (a, _, lost), listening() as (_, at_b, inbox):
        assert a.send(at_b, b"1")
        assert await inbox.next() == b"1"
        await until(lambda: a._peers == {})
        assert a.send(at_b, b"2")
        assert await inbox.next() == b"2"
        assert lost.lost.empty()


async def test_forget_drops_the_queue() -> None:
    async with listening() as (plane, _, _):
        nobody = unused_address()
        assert plane.send(nobody, b"old")
        plane.forget(nobody)
        plane.forget(nobody)
        async with listening(bind=nobody) as (_, _, inbox):
            assert plane.send(nobody, b"new")
            assert await inbox.next() == b"new"


@pytest.mark.parametrize(
    ("bind", "words"),
    [
        ("127.0.0.1:5000", "got '127.0.0.1:5000', allowed is tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "allowed is tcp://HOST:PORT"),
        ("tcp://192.0.2.1:0", r"which can't be listened at \(Cannot assign requested address\)"),
    ],
)
async def test_addresses_that_cannot_be_bound(bind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await ControlPlane(KEY, Inbox(), bind).start()


async def test_a_used_port_is_named() -> None:
    async with listening() as (_, address, _):
        with pytest.raises(
            ConfigError, match=f"got '{address}', which can't be listened at .Address already in use"
        ):
            await ControlPlane(KEY, Inbox(), address).start()


async def test_a_closed_plane_takes_nothing() -> None:
    async with listening() as (plane, address, _):
        pass
    assert plane.send(address, b"x") is False
    await plane.close()


# Two processes, one of which dies.


class Echo:
    """A process that answers every message `reply_to|text` with `its name:text`."""

    def __init__(self, name: str, bind: str = "tcp://127.0.0.1:0") -> None:
        self._pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_echo, args=(theirs, name, bind), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(DEADLINE)
        self.address: str = self._pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(DEADLINE)
        self._pipe.close()


def _echo(pipe: Connection, name: str, bind: str) -> None:
    async def run() -> None:
        def answer(message: bytes) -> None:
            reply_to, _, text = message.partition(b"|")
            plane.send(reply_to.decode(), name.encode() + b":" + text)

        plane = ControlPlane(KEY, answer, bind)
        pipe.send(await plane.start())
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def echoing(*args: str) -> Iterator[Echo]:
    echo = Echo(*args)
    try:
        yield echo
    finally:
        echo.kill()


async def ask(plane: ControlPlane, at: str, me: str, inbox: Inbox, text: bytes) -> bytes:
    assert plane.send(at, me.encode() + b"|" + text)
    return await inbox.next()


async def test_a_killed_peer_is_reported_and_its_successor_at_the_same_port_is_reached() -> None:
    async with listening() as (plane, me, inbox):
        with echoing("first") as first:
            assert await ask(plane, first.address, me, inbox, b"1") == b"first:1"
        assert await inbox.next_lost() == first.address
        with echoing("second", first.address) as second:
            assert second.address == first.address
            assert await ask(plane, first.address, me, inbox, b"2") == b"second:2"
        with echoing("third") as third:
            assert third.address != first.address
            assert await ask(plane, third.address, me, inbox, b"3") == b"third:3"
        assert inbox.queue.empty()


async def test_the_other_side_survives_a_restart_of_this_one() -> None:
    with echoing("echo") as echo:
        async with listening() as (plane, me, inbox):
            assert await ask(plane, echo.address, me, inbox, b"1") == b"echo:1"
        for text in (b"2", b"3"):
            async with listening(bind=me) as (plane, again, inbox):
                assert again == me
                assert await ask(plane, echo.address, me, inbox, text) == b"echo:" + text


async def test_a_peer_that_does_not_read_fills_its_queue_and_blocks_nobody() -> None:
    with echoing("stuck") as stuck, echoing("fine") as fine:
        async with listening(queue_bound=10) as (plane, me, inbox):
            assert await ask(plane, stuck.address, me, inbox, b"1") == b"stuck:1"
            assert stuck.process.pid is not None
            os.kill(stuck.process.pid, signal.SIGSTOP)
            message = me.encode() + b"|" + b"x" * 1_000_000
            taken = sum(plane.send(stuck.address, message) for _ in range(200))
            assert 0 < taken < 200
            assert plane.counters.dropped == 200 - taken
            assert await ask(plane, fine.address, me, inbox, b"2") == b"fine:2"
