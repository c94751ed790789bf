"""Field case 51: engines shake hands before the first request; nobody waits for one that can't be reached."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from kvhandoff.handoff.peers import PeerState
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.router.app import serve as serve_router
from kvhandoff.router.config import RouterConfig
from tests.cluster import CLUSTER_KEY, Cluster, LiveEngine, client, engine, until
from tests.e2e.stage import greedy, leave, prompt

FOREVER = HandoffSettings(handshake_s=600.0)
"""Whoever waits for an unreachable peer, waits longer than any test."""


@contextmanager
def black_hole() -> Iterator[int]:
    """A port of this host where a connection neither comes up nor is refused: its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = int(listener.getsockname()[1])
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        try:
            yield port
        finally:
            for filler in fillers:
                filler.close()


@asynccontextmanager
async def fleet(model_dir: Path, transport: Literal["shm", "nixl"]) -> AsyncIterator[Cluster]:
    """Two prefill and two decode engines that no router has met yet."""
    async with AsyncExitStack() as stack:
        options = {"transport": transport, "settings": FOREVER}

        async def start(role: Literal["prefill", "decode"], name: str) -> LiveEngine:
            return await stack.enter_async_context(engine(role, model_dir, name=name, **options))  # type: ignore[arg-type]

        prefill = [await start("prefill", name) for name in ("p0", "p1")]
        decode = [await start("decode", name) for name in ("d0", "d1")]
        session = await stack.enter_async_context(client())
        yield Cluster(prefill, decode, "", session)


@asynccontextmanager
async def routed(
    prefill: Sequence[LiveEngine], decode: Sequence[LiveEngine], *more: str
) -> AsyncIterator[str]:
    """The URL of a router in front of these engines; `more`: URLs of other prefill engines, listed first."""
    config = RouterConfig(
        prefill=(*more, *(engine.url for engine in prefill)),
        decode=tuple(engine.url for engine in decode),
        cluster_key=CLUSTER_KEY,
        port=0,
        path="pull",
        pair_tests="off",
    )
    router = await serve_router(config)
    try:
        yield f"http://127.0.0.1:{router.port}"
    finally:
        await router.close()


def introduced(reader: LiveEngine, source: LiveEngine) -> bool:
    """Whether blocks can move to the one from the other."""
    return reader.agent._running_node.peers.up(source.agent.control_address, source.agent.me) is not None


@pytest.mark.parametrize("transport", ["shm", "nixl"])
async def test_first_requests_on_all_pairs_transfer(tiny: Path, transport: Literal["shm", "nixl"]) -> None:
    """All pairs have shaken hands before there is a request, though one more prefill engine, the router's
    first choice, can't even be connected to; each pair's first request has its KV transferred."""
    async with fleet(tiny, transport) as c:
        with black_hole() as port:
            async with routed(c.prefill, c.decode, f"http://127.0.0.1:{port}") as c.url:
                await until(lambda: all(introduced(d, p) for d in c.decode for p in c.prefill))
                tokens = prompt(1, 50)
                expected = await c.tokens(tokens, url=c.prefill[0].url, body={"cache_salt": "alone"})
                pairs: set[tuple[str, str]] = set()
                for number in range(30):
                    # In turns with a request that has no prefill leg, or the pairs would never mix.
                    path = ("pull", "pull", "local")[number % 3]
                    status, answer = await c.post(greedy(tokens, cache_salt=str(number)), path=path)
                    assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
                    record = await c.record(answer["id"])
                    assert record["attempts"] == 1
                    if path == "pull":
                        assert record["kv_source"] == "transferred"
                        pairs.add((record["prefill"]["engine_id"], record["decode"]["engine_id"]))
                    if len(pairs) == 4:
                        break
                assert len(pairs) == 4
                await c.settled()


async def test_nobody_waits_for_a_peer_that_does_not_answer(tiny: Path) -> None:
    """A prefill engine answers over HTTP, but its control plane can't be reached. A request through it waits
    for the handshake; all others go on, on the same decode engines."""
    async with fleet(tiny, "shm") as c:
        with black_hole() as port:
            silent, sound = c.prefill
            silent.agent.control_address = f"tcp://127.0.0.1:{port}"
            async with routed([silent], c.decode) as by_silent, routed([sound], c.decode) as by_sound:
                await until(lambda: all(introduced(d, sound) for d in c.decode))
                for reader in c.decode:
                    peer = reader.agent._running_node.peers._peers[silent.agent.control_address]
                    assert peer.state is PeerState.GREETING
                tokens = prompt(2, 50)
                expected = await c.tokens(tokens, url=sound.url, body={"cache_salt": "alone"})
                waits = [asyncio.create_task(c.tokens(tokens, url=by_silent)) for _ in range(2)]
                await until(lambda: all(d.core.load()["loading"] == 1 for d in c.decode))
                for number in range(4):
                    got = await c.tokens(tokens, url=by_sound, body={"cache_salt": str(number)})
                    assert got == expected
                assert [d.core.load()["loading"] for d in c.decode] == [1, 1]
                await leave(*waits)
                await c.settled()
