"""An engine that comes back at the addresses of its former life (field case 9).

Its memory lies elsewhere, and has another size. Nothing of the former life is used: not its offers, not its
addresses; and from the next handshake on the new one is read from.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest

from kvhandoff.core.ids import Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Copy
from kvhandoff.transport.api import DataPlane, Handle, Operation
from tests.cluster import Cluster, LiveEngine, Transport, cluster, engine
from tests.legs import MAX_TOKENS, Legs, random_prompt

BLOCK = 16
LENGTH = 2 * BLOCK + 9
POOL = 64

either_transport = pytest.mark.parametrize("transport", ["shm", "nixl"])


@dataclass
class Posts:
    """Which peers a data plane was told to read from, in order: `engine(..., wrap_plane=posts.wrap)`."""

    peers: list[Identity] = field(default_factory=list)

    def wrap(self, plane: DataPlane) -> DataPlane:
        post = plane.post

        def noted(operation: Operation, peer: Identity, copies: Sequence[Copy]) -> Handle:
            self.peers.append(peer)
            return post(operation, peer, copies)

        plane.post = noted  # type: ignore[method-assign]
        return plane


class Lives:
    """A deployment whose prefill engine starts again."""

    def __init__(self, deployment: Cluster, posts: Posts) -> None:
        self.deployment = deployment
        self.posts = posts
        self.legs = Legs(deployment)
        self.p, self.d = deployment.prefill[0], deployment.decode[0]
        self.rng = random.Random(8)

    def prompt(self) -> list[int]:
        return random_prompt(self.rng, LENGTH)

    async def request(self) -> dict[str, Any]:
        """One request through the router, checked; its record."""
        prompt = self.prompt()
        expected = await self.legs.alone(self.d, prompt)
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        status, answer = await self.deployment.post({**body, "return_token_ids": True})
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected)
        return await self.deployment.record(answer["id"])

    @asynccontextmanager
    async def restarted(self, tiny: Path, transport: Transport, num_blocks: int) -> AsyncIterator[LiveEngine]:
        """The next life, at the same two addresses; at the former's place in memory there is rubbish now."""
        former = self.p
        await former.close()
        former.region.buffer[:] = b"\x3e" * len(former.region.buffer)
        async with engine(
            "prefill",
            tiny,
            name=former.agent.me.engine_id,
            transport=transport,
            num_blocks=num_blocks,
            port=urlsplit(former.url).port or 0,
            control=former.agent.control_address,
        ) as reborn:
            assert (reborn.url, reborn.agent.control_address) == (former.url, former.agent.control_address)
            assert reborn.agent.me.engine_id == former.agent.me.engine_id
            assert reborn.agent.me != former.agent.me
            assert reborn.region.address != former.region.address
            self.p = reborn
            yield reborn


@asynccontextmanager
async def lives(tiny: Path, transport: Transport, *, notices: bool) -> AsyncIterator[Lives]:
    """`notices`: whether the decode engine hears that its connection to the former life broke."""
    posts = Posts()
    async with cluster(
        tiny,
        transport=transport,
        prefill_options={"num_blocks": POOL},
        decode_options={"wrap_plane": posts.wrap},
        router_options={"poll_interval_s": 3600},  # the router learns of a restart the hard way
    ) as deployment:
        if not notices:
            deployment.decode[0].agent._control._on_disconnect = None
        yield Lives(deployment, posts)


@either_transport
@pytest.mark.parametrize(
    ("num_blocks", "notices"), [(24, True), (200, False)], ids=["smaller, noticed", "larger, unnoticed"]
)
async def test_requests_through_the_router(
    tiny: Path, transport: Transport, num_blocks: int, notices: bool
) -> None:
    """The next requests are right, and use the new life's KV."""
    async with lives(tiny, transport, notices=notices) as c:
        assert (await c.request())["kv_source"] == "transferred"
        async with c.restarted(tiny, transport, num_blocks) as reborn:
            c.posts.peers.clear()
            first = await c.request()
            assert Reason.EPOCH_CHANGED in first["reasons"]
            assert (first["kv_source"], first["prefill"]["epoch"]) == ("transferred", reborn.agent.me.epoch)
            for _ in range(3):
                assert (await c.request())["kv_source"] == "transferred"
            assert c.posts.peers == [reborn.agent.me] * 4
            await c.deployment.settled(c.d, reborn)


@either_transport
@pytest.mark.parametrize(
    ("notices", "known"),
    [(False, False), (True, False), (False, True)],
    ids=["thought alive", "thought gone", "succeeded"],
)
@pytest.mark.parametrize("on_miss", ["recompute", "error"])
async def test_reference_of_the_former_life(
    tiny: Path, transport: Transport, notices: bool, known: bool, on_miss: Literal["recompute", "error"]
) -> None:
    """A reference that outlived its engine is not used, whatever its reader knows of the engine by then.

    `known`: it has read from the new life.
    """
    async with lives(tiny, transport, notices=notices) as c:
        await c.request()
        prompt = c.prompt()
        expected = await c.legs.alone(c.d, prompt)
        offer = await c.legs.offer(c.p, prompt)
        async with c.restarted(tiny, transport, 24) as reborn:
            if known:
                assert (await c.request())["kv_source"] == "transferred"
            answer = await c.legs.decode(c.d, offer, prompt, on_miss=on_miss)
            record = await c.legs.record(c.d, answer.key)
            (reason,) = record.reasons
            assert record.transferred_tokens == 0
            if notices or known or transport == "shm":
                assert reason is Reason.EPOCH_CHANGED
            else:  # NIXL may hear of the end before a claim is answered
                assert reason in (Reason.EPOCH_CHANGED, Reason.TRANSFER_FAILED)
            if on_miss == "recompute":
                assert answer.token_ids == expected
            else:
                assert (answer.status, answer.error["code"]) == (503, reason)
                assert str(offer.source) in answer.error["message"]
            await c.deployment.settled(c.d)  # a read that was on its way has ended
            c.posts.peers.clear()
            assert (await c.request())["kv_source"] == "transferred"
            assert c.posts.peers == [reborn.agent.me]
            await c.deployment.settled(c.d, reborn)
