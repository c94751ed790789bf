"""The shared index on a real server: what is found, and what a slow, lost or foreign server costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.router.index import Answer, Turn
from kvhandoff.router.valkey_index import PREFIX, ValkeyIndex, encode
from tests.router.engines import WAIT_S, key_of, soon
from tests.router.valkey_server import ValkeyServer, running_server

pytestmark = pytest.mark.valkey

D = Identity(EngineId("d"), Epoch("1"))
LOST = Answer((), Reason.INDEX_FAILED)
LATE = Answer((), Reason.INDEX_TIMEOUT)


def turn(handoff_id: str) -> Turn:
    return Turn(key_of(handoff_id), D)


class Opened(ValkeyIndex):
    """With short waits, unless a test says otherwise."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.lost = 0
        given = {"ttl_s": 600.0, "deadline_s": WAIT_S, "connect_s": WAIT_S, "retry_s": 0.01} | settings
        super().__init__(url, on_lost_turns=self._lose, **given)

    def _lose(self, turns: int) -> None:
        self.lost += turns

    async def written(self) -> None:
        """Until all that came before has been carried out: commands go in their order."""
        assert (await self.look_up([b"none"])).reason is None

    async def connected(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.look_up([b"none"])).reason is not None:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.001)


@asynccontextmanager
async def opened(url: str, **settings: Any) -> AsyncIterator[Opened]:
    index = Opened(url, **settings)
    await soon(index.start())
    try:
        yield index
    finally:
        await soon(index.close())


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    async with running_server(tmp_path) as running:
        yield running


async def test_two_replicas_share_turns(server: ValkeyServer) -> None:
    async with opened(server.url) as one, opened(server.url) as other:
        one.remember([b"a", b"b"], turn("1"))
        await one.written()
        assert await other.look_up([b"c", b"b", b"a"]) == Answer([None, turn("1"), turn("1")])
        other.remember([b"b"], turn("2"))
        await other.written()
        assert await one.look_up([b"a", b"b"]) == Answer([turn("1"), turn("2")])


async def test_the_later_turn_takes_the_name(server: ValkeyServer) -> None:
    async with opened(server.url) as index:
        for number in range(1000):
            index.remember([b"a"], turn(str(number)))
        assert await index.look_up([b"a"]) == Answer([turn("999")])


async def test_one_command_for_a_look_up(server: ValkeyServer) -> None:
    async with opened(server.url) as index:
        index.remember([b"7"], turn("1"))
        answer = await index.look_up([str(n).encode() for n in range(300)])
        assert [n for n, found in enumerate(answer.turns) if found] == [7]
        assert await server.calls("mget") == 1
        assert await server.calls("get") == 0


async def test_many_at_once_share_one_connection(server: ValkeyServer) -> None:
    async with opened(server.url) as index:
        index.remember([b"a"], turn("1"))
        answers = await soon(asyncio.gather(*(index.look_up([b"a"]) for _ in range(2000))))
        assert set(map(str, answers)) == {str(Answer([turn("1")]))}
        clients = await server.client.client_list()
        assert len(clients) == 2  # this test's own too


async def test_entries_live_as_long_as_the_lease(server: ValkeyServer) -> None:
    async with opened(server.url, ttl_s=600.0) as index:
        index.remember([b"a", b"b"], turn("1"))
        await index.written()
        for name in (b"a", b"b"):
            assert 500_000 < await server.client.pttl(PREFIX + name) <= 600_000
            await server.client.pexpire(PREFIX + name, 60_000)
        index.renew(b"a")
        await index.written()
        assert await server.client.pttl(PREFIX + b"a") > 500_000
        assert await server.client.pttl(PREFIX + b"b") <= 60_000
        index.renew(b"gone")  # leaves nothing behind
        await index.written()
        assert await server.client.dbsize() == 2


async def test_foreign_values_are_misses(server: ValkeyServer) -> None:
    async with opened(server.url) as index:
        index.remember([b"mine"], turn("1"))
        await index.written()
        await server.client.set(PREFIX + b"newer", b"\x02" + encode(turn("2"))[1:])
        await server.client.set(PREFIX + b"text", "hello")
        await server.client.rpush(PREFIX + b"list", "a")  # no value at all
        answer = await index.look_up([b"newer", b"text", b"list", b"mine"])
        assert answer == Answer([None, None, None, turn("1")], Reason.INDEX_FOREIGN)
        assert await index.look_up([b"list", b"mine"]) == Answer([None, turn("1")])


async def test_a_killed_server_is_lost_and_found_again(server: ValkeyServer) -> None:
    async with opened(server.url) as index:
        index.remember([b"a"], turn("1"))
        await index.written()
        await server.kill()
        assert await soon(index.look_up([b"a"])) == LOST
        index.remember([b"a", b"b"], turn("2"))
        assert index.lost == 1  # a turn, whatever its names
        assert await index.look_up([b"a"]) == LOST
        await server.start()
        await index.connected()
        assert await index.look_up([b"a", b"b"]) == Answer([None, None])  # it has kept nothing
        index.remember([b"a"], turn("3"))
        assert await index.look_up([b"a"]) == Answer([turn("3")])
        assert index.lost == 1


async def test_a_restart_between_two_requests_costs_no_look_up(server: ValkeyServer) -> None:
    async with opened(server.url) as index:
        await index.written()
        await server.kill()
        await server.start()
        await index.connected()
        index.remember([b"a"], turn("1"))
        assert await index.look_up([b"a"]) == Answer([turn("1")])


async def test_a_frozen_server_costs_the_deadline_and_then_nothing(server: ValkeyServer) -> None:
    async with opened(server.url, deadline_s=0.02, connect_s=0.2) as index:
        await index.connected()
        server.freeze()
        assert await soon(index.look_up([b"a"])) == LATE
        # When the batch's own time is over, the server counts as lost: nobody waits for it any more.
        async with asyncio.timeout(WAIT_S):
            while (answer := await index.look_up([b"a"])) == LATE:
                index.remember([b"a"], turn("1"))
        assert answer == LOST
        assert index.lost > 0
        server.thaw()
        await index.connected()


async def test_a_late_answer_harms_no_other(server: ValkeyServer) -> None:
    """The connection stays, and each answer goes to its own question."""
    async with opened(server.url, deadline_s=0.02) as index:
        await index.connected()
        await server.client.set(PREFIX + b"a", encode(turn("1")))
        server.freeze()
        assert await soon(index.look_up([b"b"])) == LATE
        waiting = asyncio.create_task(index.look_up([b"c"]))
        assert await soon(waiting) == LATE
        server.thaw()
        async with asyncio.timeout(WAIT_S):
            while (answer := await index.look_up([b"a"])) == LATE:
                pass
        assert answer == Answer([turn("1")])
        assert index.lost == 0


async def test_a_client_that_leaves_takes_its_look_up_along(server: ValkeyServer) -> None:
    async with opened(server.url) as index:
        index.remember([b"a"], turn("1"))
        leaving = asyncio.create_task(index.look_up([b"a"]))
        await asyncio.sleep(0)
        leaving.cancel()
        assert await index.look_up([b"a"]) == Answer([turn("1")])
        assert leaving.cancelled()


async def test_what_a_server_refuses_is_counted(server: ValkeyServer) -> None:
    """Its memory is full, say: turns are lost, look-ups go on."""
    async with opened(server.url) as index:
        index.remember([b"a"], turn("1"))
        await index.written()
        await server.client.config_set("maxmemory", 1)
        index.remember([b"b", b"c"], turn("2"))
        assert await index.look_up([b"a", b"b"]) == Answer([turn("1"), None])
        assert index.lost == 1
        await server.client.config_set("maxmemory", 0)
        index.remember([b"b"], turn("3"))
        assert await index.look_up([b"b"]) == Answer([turn("3")])


async def test_more_than_may_wait_is_dropped(server: ValkeyServer) -> None:
    async with opened(server.url) as index:
        await index.written()
        for _ in range(20_000):
            index.remember([b"a"], turn("1"))
        assert index.lost == 20_000 - 8192
        assert await index.look_up([b"a"]) == LATE  # no place for it either
        async with asyncio.timeout(WAIT_S):
            while (answer := await index.look_up([b"a"])) == LATE:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0)
        assert answer == Answer([turn("1")])


async def test_closing_writes_what_waits(server: ValkeyServer) -> None:
    async with opened(server.url) as index:
        for number in range(1000):
            index.remember([str(number).encode()], turn("1"))
    assert await server.client.dbsize() == 1000
    assert len(await server.client.client_list()) == 1


async def test_a_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(tmp_path, password="secret") as server:
        async with opened(server.url) as index:
            index.remember([b"a"], turn("1"))
            assert await index.look_up([b"a"]) == Answer([turn("1")])
        async with opened(server.url.replace(":secret@", ":terces@")) as index:
            assert await index.look_up([b"a"]) == LOST
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "terces" not in caplog.text


async def test_closing_does_not_wait_for_a_frozen_server(server: ValkeyServer) -> None:
    async with opened(server.url, deadline_s=0.02) as index:
        await index.connected()
        server.freeze()
        index.remember([b"a"], turn("1"))
    server.thaw()
