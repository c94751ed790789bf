"""What strangers and confused peers can say between engines (field case 60): nothing that stops one."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.handoff.messages import PROTOCOL_VERSION, Claim, Envelope, Release, encode
from kvhandoff.transport.control import ControlPlane
from tests.cluster import CLUSTER_KEY, LiveEngine, cluster, until
from tests.legs import Legs, new_key, random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
LENGTH = 2 * BLOCK + 9

on_either = pytest.mark.parametrize("role", ["prefill", "decode"])


@dataclass
class Pair:
    """A prefill and a decode engine."""

    legs: Legs
    p: LiveEngine
    d: LiveEngine
    rng: random.Random

    def engine(self, role: str) -> LiveEngine:
        return self.p if role == "prefill" else self.d


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny: Path) -> AsyncIterator[Pair]:
    async with cluster(tiny) as deployment:
        yield Pair(Legs(deployment), deployment.prefill[0], deployment.decode[0], random.Random(12))


def _envelope(engine: LiveEngine, body: Any, **changes: Any) -> bytes:
    envelope = Envelope(
        protocol_version=PROTOCOL_VERSION,
        sender=Identity(EngineId("somebody"), Epoch("1")),
        reply_to="tcp://127.0.0.1:9",
        target=engine.agent.me,
        body=body,
    )
    return encode(msgspec.structs.replace(envelope, **changes))


def _odd_messages(engine: LiveEngine, offer: HandoffKey, rng: random.Random) -> list[bytes]:
    """Malformed ones, and well-formed ones that make no sense."""
    reader = new_key()
    misfit = TokenChain(block_size=0, n_tokens=-5, blocks=(b"", b"x" * 99), tail=b"y")
    huge = TokenChain(block_size=BLOCK, n_tokens=2**62, blocks=(b"z" * 16,) * 1000, tail=b"")
    claim = _envelope(engine, Claim(offer=offer, reader=reader, chain=misfit, seq=1, queued=False))
    nowhere = HandoffKey(HandoffId("?"), -1)
    release = _envelope(engine, Release(offer=nowhere, reader=reader, seq=1, done=True))
    return [
        b"",
        b"\xc1",
        b"\x91" * 200_000,
        *(claim[:length] for length in range(1, len(claim), 5)),
        *(rng.randbytes(rng.randrange(1, 300)) for _ in range(200)),
        claim,
        _envelope(engine, Claim(offer=offer, reader=reader, chain=huge, seq=2**62, queued=False)),
        _envelope(
            engine,
            Claim(offer=offer, reader=reader, chain=misfit, seq=-1, queued=False),
            reply_to="file:///etc/passwd",
        ),
        release,
        _envelope(engine, Release(offer=offer, reader=reader, seq=1, done=False), protocol_version=99),
    ]


@on_either
async def test_odd_messages_between_engines(pair: Pair, role: str) -> None:
    """Whoever has the key can talk nonsense, and stops nobody; the offer it names stays."""
    engine = pair.engine(role)
    offer = await pair.legs.offer(pair.p, prompt := random_prompt(pair.rng, LENGTH))
    messages = _odd_messages(engine, offer.key, pair.rng)
    counters = engine.agent._control.counters
    received, malformed = counters.received, counters.malformed
    control = ControlPlane(CLUSTER_KEY, lambda raw: None)
    await control.start()
    try:
        for message in messages:
            assert control.send(engine.agent.control_address, message)
        await until(lambda: counters.received >= received + len(messages))
    finally:
        await control.close()
    assert counters.malformed > malformed
    answer = await pair.legs.decode(pair.d, offer, prompt)
    assert answer.token_ids == await pair.legs.alone(pair.p, prompt)
    assert (await pair.legs.record(pair.d, answer.key)).transferred_tokens == LENGTH
    await pair.legs.cluster.settled()


@on_either
async def test_messages_without_the_cluster_key(pair: Pair, role: str) -> None:
    """Nothing that a stranger says is received."""
    engine = pair.engine(role)
    counters = engine.agent._control.counters
    received, rejected = counters.received, counters.rejected
    control = ControlPlane(b"another cluster's key", lambda raw: None)
    await control.start()
    try:
        control.send(engine.agent.control_address, b"let me in")
        await until(lambda: counters.rejected > rejected)
    finally:
        await control.close()
    assert counters.received == received
