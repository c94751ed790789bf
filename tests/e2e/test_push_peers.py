"""Pushes between engines that don't go together, meet late, or are not who they were (field cases 5 ii, 9,
18). Nothing is written to an engine that P does not know, nor late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvhandoff.core.clock import ManualClock
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import (
    Hello,
    Progress,
    WrongEpoch,
)
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.handoff.tickets import MissPolicy
from tests.cluster import LiveEngine, Transport, engine, until
from tests.e2e.pushes import Push, Pushing, named_grants, policies, pushing, transports
from tests.e2e.stage import CHUNK, PATIENT
from tests.legs import counted, new_key, pass_time
from tests.tinymodels import cached_tiny_model
from tests.wire import Wire

BLOCKS = 10
"""Of a prompt."""
HANDSHAKE = HandoffSettings().handshake_s

# ---------------------------------------------------------------------------- engines that don't go together

MISFITS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dtype": lambda tiny: {"model_dir": tiny, "dtype": "bfloat16", "exact": False},
    "block size": lambda tiny: {"model_dir": tiny, "block_size": 32},
    "weights": lambda tiny: {"model_dir": cached_tiny_model("llama", seed=1)},
    "data plane": lambda tiny: {"model_dir": tiny, "transport": "nixl"},
}


@pytest.mark.parametrize("name", MISFITS)
async def test_engine_that_does_not_fit(tiny: Path, name: str) -> None:
    """Field case 18: only that request feels it. Not a byte is written, and D's blocks are free at once."""
    options = MISFITS[name](tiny)
    async with pushing(tiny) as c, engine("decode", name="other", settings=PATIENT, **options) as other:
        prompt, key = c.prompt(), new_key()
        expected = await c.legs.alone(other, prompt)
        decode = c.legs.decode_push(c.p, other, prompt, key=key)
        prefill, answer = await asyncio.gather(c.legs.prefill_push(c.p, other, prompt, key=key), decode)
        await is_missed(c, other, key, answer, expected, Reason.HANDSHAKE_REFUSED)
        assert prefill.status == 200
        await c.s.cluster.settled(other)
        assert c.writes.posted == 0
        await c.legs.withdraw(c.p, key)
        await serves_others(c)


async def is_missed(
    c: Pushing, at: LiveEngine, key: Any, answer: Any, expected: list[int] | None, reason: Reason
) -> None:
    """The right answer (`expected`), or the reason."""
    if expected is not None:
        assert answer.token_ids == expected
    else:
        assert (answer.status, answer.error["code"]) == (503, reason)
    record = await c.legs.record(at, key)
    assert (record.transferred_tokens, record.reasons) == (0, [reason])
    assert await c.legs.reasons(at) == counted(reason)


async def serves_others(c: Pushing) -> None:
    """P and D go on with each other."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    _, answer = await c.legs.push(c.p, c.d, prompt)
    assert answer.token_ids == expected
    assert (await c.legs.record(c.d, answer.key)).kv_source == "transferred"
    await c.idle()


@policies
async def test_destination_that_says_it_has_another_layout(tiny: Path, on_miss: MissPolicy) -> None:
    """Field case 18: the chains are the same, but its welcome differs; both sides' values are in the log."""
    async with pushing(tiny) as c:
        await parted(c)
        peers = c.d.agent._running_node.peers
        true = peers._hello
        peers._hello = msgspec.structs.replace(true, layout=msgspec.structs.replace(true.layout, kv_heads=8))
        prompt = c.prompt()
        expected = await c.alone(prompt)
        push = c.start(prompt, on_miss=on_miss)
        answer = await push.decode
        wanted = expected if on_miss == "recompute" else None
        await is_missed(c, c.d, push.key, answer, wanted, Reason.HANDSHAKE_REFUSED)
        await c.s.cluster.settled(c.d)
        assert c.writes.posted == 0
        await push.prefill
        await c.legs.withdraw(c.p, push.key)
        await c.idle()
        peers._hello = true
        await serves_others(c)


# ----------------------------------------------------------------------------------- a handshake that is late


async def parted(c: Pushing) -> None:
    """P has to meet D anew."""
    c.p.agent.feed(ev.PeerWanted(address(c.d)))
    await up(c)
    c.p.agent.feed(ev.PeerGone(address(c.d)))


async def granted(c: Pushing) -> tuple[Push, list[int]]:
    """A push whose grant and prompt are both at P."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    push = c.start(prompt)
    await push.prefill
    await c.named()
    await until(lambda: c.p.blocks().offered == BLOCKS)
    return push, expected


@transports
async def test_hello_that_is_late(tiny: Path, transport: Transport) -> None:
    """Field case 5 ii: P gives up the handshake, says so, and D computes in blocks that are its own. When the
    two have met at last, nothing is written."""
    async with pushing(tiny, transport, prefill_options={"clock": ManualClock(100.0)}) as c:
        await parted(c)
        c.from_p.lose = lambda body: isinstance(body, Hello)
        push, expected = await granted(c)
        pass_time(c.p, HANDSHAKE)
        assert (await push.decode).token_ids == expected
        assert (await c.record(push)).reasons == [Reason.PEER_UNREACHABLE]
        await c.s.cluster.settled(c.d)

        c.open()
        c.p.agent.feed(ev.PeerWanted(address(c.d)))
        await up(c)
        assert c.writes.posted == 0
        await c.legs.withdraw(c.p, push.key)
        await serves_others(c)


@transports
async def test_data_plane_that_connects_late(tiny: Path, transport: Transport) -> None:
    """Field case 5 ii: the handshake's second half, which is the data plane's, comes after all deadlines."""
    async with pushing(tiny, transport, prefill_options={"clock": ManualClock(100.0)}) as c:
        await parted(c)
        held: list[tuple[Any, ...]] = []
        mover = c.p.agent.mover
        connect = mover.connect
        mover.connect = lambda *asked: held.append(asked)  # type: ignore[method-assign]
        push, expected = await granted(c)
        await until(lambda: len(held) == 1)
        pass_time(c.p, HANDSHAKE)
        assert (await push.decode).token_ids == expected
        assert (await c.record(push)).reasons == [Reason.PEER_UNREACHABLE]
        await c.s.cluster.settled(c.d)

        mover.connect = connect  # type: ignore[method-assign]
        fed = watch(c.p, ev.PeerConnected)
        connect(*held[0])
        await until(lambda: len(fed) == 1)
        assert fed[0].error is None
        assert c.writes.posted == 0
        await c.legs.withdraw(c.p, push.key)
        await serves_others(c)


async def test_handshake_later_than_the_destination_waits(tiny: Path) -> None:
    """Field case 5 ii: D has given up before P could write; its revocation reaches P before D's welcome."""
    decode = {"clock": ManualClock(7.0)}
    async with pushing(tiny, prefill_options={"clock": ManualClock(100.0)}, decode_options=decode) as c:
        await parted(c)
        c.from_p.lose = lambda body: isinstance(body, Hello)
        push, expected = await granted(c)
        c.from_p.lose = lambda body: isinstance(body, (Hello, Progress))
        pass_time(c.d, PATIENT.rendezvous_s)
        assert (await push.decode).token_ids == expected
        assert (await c.record(push)).reasons == [Reason.PUSH_TIMEOUT]
        await c.s.cluster.settled(c.d)

        c.open()
        pass_time(c.p, PATIENT.retry_s)  # the hello is sent again
        await up(c)
        assert c.writes.posted == 0
        await c.legs.withdraw(c.p, push.key)
        await serves_others(c)


async def up(c: Pushing) -> None:
    peers = c.p.agent._running_node.peers
    await until(lambda: peers.up(address(c.d), c.d.agent.me) is not None)


def watch(engine: LiveEngine, kind: type[Any]) -> list[Any]:
    """The events of one kind that the protocol has been given."""
    node = engine.agent._running_node
    handle, seen = node.handle, []

    def handled(now: float, event: ev.Event) -> list[ev.Effect]:
        effects = handle(now, event)
        if isinstance(event, kind):
            seen.append(event)
        return effects

    node.handle = handled  # type: ignore[method-assign]
    return seen


# --------------------------------------------------------------------------------------------- another life


@transports
async def test_source_restarts_between_grant_and_write(tiny: Path, transport: Transport) -> None:
    """Field case 9: P's name and address are another life's now. D computes at once, and its blocks are free
    as soon as that life says that the former one is over."""
    options: dict[str, Any] = {"transport": transport, "settings": PATIENT, "max_step_tokens": CHUNK}
    async with pushing(tiny, transport) as c:
        async with engine("prefill", tiny, name="p", **options) as former:
            prompt, key = c.prompt(), new_key()
            expected = await c.alone(prompt)
            Wire(former).lose = lambda body: isinstance(body, Hello)
            await c.legs.prefill_push(former, c.d, prompt, key=key)
            decode = asyncio.create_task(c.legs.decode_push(former, c.d, prompt, key=key))
            await until(lambda: len(named_grants(former)) == 1)
        assert (await decode).token_ids == expected
        assert (await c.legs.record(c.d, key)).reasons == [Reason.PEER_LOST]
        assert c.d.blocks().quarantined == BLOCKS, "a broken connection is no fence"
        where = former.agent.control_address
        async with engine("prefill", tiny, name="p", control=where, num_blocks=64, **options) as present:
            await until(lambda: c.d.blocks().quarantined == 0, describe=c.s.where)
            assert c.from_d.received_of(WrongEpoch)[-1].wanted == former.agent.me
            await c.idle()
            prompt = c.prompt()
            expected = await c.alone(prompt)
            _, answer = await c.legs.push(present, c.d, prompt)
            assert answer.token_ids == expected
            assert (await c.legs.record(c.d, answer.key)).kv_source == "transferred"
            await c.idle()


def address(engine: LiveEngine) -> str:
    return engine.agent.control_address
