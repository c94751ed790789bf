"""Handshakes that fail (field case 18): only the requests bound to that engine feel it, as the policy says.

The decode engine goes on serving, from another prefill engine too, and while it still waits for an answer.
The message names what differs, with both sides' values.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.messages import (
    PROTOCOL_VERSION,
    Body,
    Envelope,
    Hello,
    OfferDescriptor,
    Refused,
    Welcome,
    decode,
    encode,
)
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.handoff.tickets import MissPolicy
from kvhandoff.transport.control import ControlPlane
from tests.cluster import CLUSTER_KEY, LiveEngine, cluster, engine, until
from tests.legs import Answered, Legs, counted, new_key, pass_time, random_prompt
from tests.tinymodels import cached_tiny_model
from tests.wire import Wire

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 16
LENGTH = 2 * BLOCK + 9
HANDSHAKE = HandoffSettings().handshake_s

either_policy = pytest.mark.parametrize("on_miss", ["recompute", "error"])


LEG_LOG = "kvhandoff.engine.leg_log"
"""Its line sums a leg up."""


@dataclass
class Reader:
    """A decode engine whose clock stands still, and a prefill engine that it reads from without trouble."""

    legs: Legs
    good: LiveEngine
    d: LiveEngine
    wire: Wire
    rng: random.Random

    def prompt(self) -> list[int]:
        """A prompt that no engine has seen."""
        return random_prompt(self.rng, LENGTH)

    async def serves_others(self) -> None:
        """A request to the good engine is answered right, with its KV."""
        prompt = self.prompt()
        expected = await self.legs.alone(self.d, prompt)
        offer = await self.legs.offer(self.good, prompt)
        answer = await self.legs.decode(self.d, offer, prompt)
        assert answer.token_ids == expected
        assert (await self.legs.record(self.d, answer.key)).transferred_tokens == LENGTH

    async def missed(
        self,
        offer: OfferDescriptor,
        prompt: list[int],
        on_miss: MissPolicy,
        reason: Reason,
        caplog: pytest.LogCaptureFixture,
        *,
        in_time: bool,
    ) -> str:
        """Use an offer of a peer that can't be met; the message that says why.

        `in_time`: the peer's answer ends the handshake; otherwise its deadline does.
        """
        caplog.set_level(logging.INFO, logger="kvhandoff")
        expected = await self.legs.alone(self.d, prompt)
        before = await self.legs.reasons(self.d)
        greeted = len(self.wire.sent_of(Hello))
        leg = asyncio.create_task(self.legs.decode(self.d, offer, prompt, on_miss=on_miss))
        await until(lambda: len(self.wire.sent_of(Hello)) > greeted)
        if not in_time:
            await self.serves_others()
            assert not leg.done()
            pass_time(self.d, HANDSHAKE)
        answer: Answered = await leg
        (message,) = (
            line
            for logged in caplog.records
            if (line := logged.getMessage()).startswith(f"{answer.key}: ") and logged.name != LEG_LOG
        )
        if on_miss == "recompute":
            assert answer.token_ids == expected
        else:
            assert (answer.status, answer.error["code"]) == (503, reason)
            message = answer.error["message"]
        record = await self.legs.record(self.d, answer.key)
        assert (record.transferred_tokens, record.reasons) == (0, [reason])
        assert await self.legs.reasons(self.d) - before == counted(reason)
        await self.legs.cluster.settled()
        await self.serves_others()
        return message


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(tiny: Path) -> AsyncIterator[Reader]:
    async with cluster(tiny, decode_options={"clock": ManualClock(5.0)}) as deployment:
        d = deployment.decode[0]
        yield Reader(Legs(deployment), deployment.prefill[0], d, Wire(d), random.Random(9))


# ---------------------------------------------------------------------------- engines that don't go together


def _other_weights(tiny: Path) -> dict[str, Any]:
    return {"model_dir": cached_tiny_model("llama", seed=1)}


MISFITS: dict[str, tuple[Callable[[Path], dict[str, Any]], list[str]]] = {
    "dtype": (
        lambda tiny: {"model_dir": tiny, "dtype": "bfloat16", "exact": False},
        ["layout dtype: 'float32' here, 'bfloat16' there"],
    ),
    "block size": (
        lambda tiny: {"model_dir": tiny, "block_size": 32},
        ["layout block_size: 16 here, 32 there", "layout block_bytes: "],
    ),
    "weights": (_other_weights, ["model_fingerprint: "]),
    "exact mode": (lambda tiny: {"model_dir": tiny, "exact": False}, ["model_fingerprint: "]),
    "data plane": (
        lambda tiny: {"model_dir": tiny, "transport": "nixl"},
        ["data_plane: 'shm' here, 'nixl' there"],
    ),
}


@either_policy
@pytest.mark.parametrize("name", MISFITS)
async def test_engine_that_does_not_fit(
    reader: Reader, tiny: Path, name: str, on_miss: MissPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine of another layout or model is refused, with both sides' values in the message."""
    make, expected = MISFITS[name]
    async with engine("prefill", name=f"other {name}", **make(tiny)) as other:
        prompt = reader.prompt()
        offer = await reader.legs.offer(other, prompt)
        why = await reader.missed(offer, prompt, on_miss, Reason.HANDSHAKE_REFUSED, caplog, in_time=True)
        mine, theirs = reader.d.runner.model_fingerprint, other.runner.model_fingerprint
        if mine != theirs:
            expected = [*expected, repr(mine), repr(theirs)]
        assert f"refused by the peer at {offer.control_address}: " in why
        for part in expected:
            assert part in why


# ------------------------------------------------------------------------------- peers that answer nonsense


class Imposter:
    """Somebody with the cluster key who answers a `Hello` as a test says."""

    def __init__(self, answer: Callable[[Hello], list[Body | bytes]]) -> None:
        self.identity = Identity(EngineId("imposter"), Epoch("1"))
        self.address = ""
        self._answer = answer
        self._control = ControlPlane(CLUSTER_KEY, self._received)

    async def __aenter__(self) -> Imposter:
        self.address = await self._control.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._control.close()

    def _received(self, raw: bytes) -> None:
        envelope = decode(raw)
        if not isinstance(envelope.body, Hello):
            return
        for answer in self._answer(envelope.body):
            packed = answer if isinstance(answer, bytes) else self.pack(answer, envelope.sender)
            self._control.send(envelope.reply_to, packed)

    def pack(self, body: Body, target: Identity) -> bytes:
        """On the wire."""
        return encode(
            Envelope(
                protocol_version=PROTOCOL_VERSION,
                sender=self.identity,
                reply_to=self.address,
                target=target,
                body=body,
            )
        )


def described(source: Identity, address: str) -> OfferDescriptor:
    """An offer that looks right."""
    return OfferDescriptor(
        key=new_key(),
        source=source,
        control_address=address,
        spans=((0, 3),),
        n_tokens=LENGTH,
        digest="0" * 32,
    )


def _welcome(hello: Hello, **changes: Any) -> Welcome:
    return Welcome(hello=msgspec.structs.replace(hello, **changes), nonce=hello.nonce)


REFUSED: dict[str, tuple[Callable[[Hello], list[Body | bytes]], str]] = {
    "another protocol": (
        lambda hello: [_welcome(hello, protocol_version=99)],
        "protocol_version: 3 here, 99 there",
    ),
    "another layout": (
        lambda hello: [_welcome(hello, layout=msgspec.structs.replace(hello.layout, kv_heads=8))],
        "layout kv_heads: 2 here, 8 there",
    ),
    "refusal": (lambda hello: [Refused(detail="I am 1, you are 2", nonce=hello.nonce)], "I am 1, you are 2"),
    "no metadata": (lambda hello: [_welcome(hello, data_plane_metadata=b"")], "malformed shm metadata"),
    "truncated metadata": (
        lambda hello: [_welcome(hello, data_plane_metadata=hello.data_plane_metadata[:-3])],
        "malformed shm metadata",
    ),
    "another file's metadata": (
        lambda hello: [_welcome(hello, data_plane_metadata=_renamed(hello.data_plane_metadata))],
        "is not the region of that name",
    ),
}


def _renamed(metadata: bytes) -> bytes:
    facts = msgspec.msgpack.decode(metadata)
    return msgspec.msgpack.encode({**facts, "name": "something else"})


@either_policy
@pytest.mark.parametrize("name", REFUSED)
async def test_answer_that_ends_the_handshake(
    reader: Reader, name: str, on_miss: MissPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that can be read, from a peer that no KV can be had from."""
    answer, expected = REFUSED[name]
    async with Imposter(answer) as peer:
        offer = described(peer.identity, peer.address)
        prompt = reader.prompt()
        why = await reader.missed(offer, prompt, on_miss, Reason.HANDSHAKE_REFUSED, caplog, in_time=True)
        assert expected in why


UNREADABLE: dict[str, Callable[[Hello], list[Body | bytes]]] = {
    "nothing": lambda hello: [],
    "empty": lambda hello: [b""],
    "no msgpack": lambda hello: [b"\xc1\xff\x00"],
    "a deep nest": lambda hello: [b"\x91" * 100_000],
    "somebody else's nonce": lambda hello: [Welcome(hello=hello, nonce=hello.nonce + 1)],
}


@either_policy
@pytest.mark.parametrize("name", UNREADABLE)
async def test_answer_that_is_none(
    reader: Reader, name: str, on_miss: MissPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing, or nothing that can be read: the deadline ends the handshake, and nobody else waits for it."""
    async with Imposter(UNREADABLE[name]) as peer:
        offer = described(peer.identity, peer.address)
        prompt = reader.prompt()
        why = await reader.missed(offer, prompt, on_miss, Reason.PEER_UNREACHABLE, caplog, in_time=False)
        assert f"{peer.address} did not answer within {HANDSHAKE} s" in why


async def test_answer_cut_off_anywhere(reader: Reader, caplog: pytest.LogCaptureFixture) -> None:
    """A truncated answer is malformed at every length, and counted as that."""
    counters = reader.d.agent._control.counters
    before = counters.malformed
    lengths: list[int] = []

    def cut(hello: Hello) -> list[Body | bytes]:
        whole = peer.pack(_welcome(hello), reader.d.agent.me)
        lengths[:] = range(0, len(whole), 7)
        return [whole[:length] for length in lengths]

    async with Imposter(cut) as peer:
        offer = described(peer.identity, peer.address)
        prompt = reader.prompt()
        await reader.missed(offer, prompt, "recompute", Reason.PEER_UNREACHABLE, caplog, in_time=False)
        await until(lambda: counters.malformed - before == len(lengths))


# ------------------------------------------------------------------------------------- nobody who speaks it


@asynccontextmanager
async def _refusing() -> AsyncIterator[str]:
    """An address at which connections are refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listened on
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


@asynccontextmanager
async def _web_server() -> AsyncIterator[str]:
    """An address where something else listens."""

    async def answer(incoming: asyncio.StreamReader, outgoing: asyncio.StreamWriter) -> None:
        outgoing.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 10)
        outgoing.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def _no_address() -> AsyncIterator[str]:
    """What no engine listens on, and a metadata service does."""
    yield "http://169.254.169.254/latest/meta-data"


@either_policy
@pytest.mark.parametrize("place", [_refusing, _web_server, _no_address])
async def test_nobody_there(
    reader: Reader, place: Callable[[], Any], on_miss: MissPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused TCP, another protocol, no address: all are a peer that does not answer in time."""
    async with place() as address:
        offer = described(Identity(EngineId("nobody"), Epoch("1")), address)
        prompt = reader.prompt()
        why = await reader.missed(offer, prompt, on_miss, Reason.PEER_UNREACHABLE, caplog, in_time=False)
        assert f"{address} did not answer within {HANDSHAKE} s" in why
