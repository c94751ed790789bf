"""What engines say of pushes that are another's, or wrong (field cases 9 and 27): a word counts if it is the
right engine's, about that very grant, and true as far as can be seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import PROTOCOL_VERSION, Body, Commit, Envelope, Fenced, Grant, Revoke
from kvhandoff.handoff.tickets import MissPolicy
from tests.cluster import LiveEngine
from tests.e2e.pushes import Pushing, named_grants, policies, pushing
from tests.legs import counted, new_key

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 10
"""Of a prompt."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tiny: Path) -> AsyncIterator[Pushing]:
    async with pushing(tiny) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def c(engines: Pushing) -> AsyncIterator[Pushing]:
    engines.reset()
    yield engines
    engines.open()


@pytest.mark.parametrize("change", [{"epoch": Epoch("former")}, {"engine_id": EngineId("somebody")}])
async def test_source_that_is_another_life(c: Pushing, change: dict[str, Any]) -> None:
    """Field case 9: the ticket names a life that was over before the leg came."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    life = msgspec.structs.replace(c.p.agent.me, **change)
    other: Any = SimpleNamespace(agent=SimpleNamespace(me=life, control_address=c.p.agent.control_address))
    answer = await c.legs.decode_push(other, c.d, prompt, key=new_key())
    assert answer.token_ids == expected
    record = await c.legs.record(c.d, answer.key)
    assert (record.transferred_tokens, record.reasons) == (0, [Reason.EPOCH_CHANGED])
    await c.idle()


# -------------------------------------------------------------------------------- words that are another's


def say(c: Pushing, sender: Identity, body: Body, *, at: LiveEngine | None = None) -> None:
    """A message reaches D (or `at`)."""
    engine = at or c.d
    envelope = Envelope(
        protocol_version=PROTOCOL_VERSION,
        sender=sender,
        reply_to=c.p.agent.control_address,
        target=engine.agent.me,
        body=body,
    )
    engine.agent.feed(ev.Received(envelope))


async def test_word_for_another_grant(c: Pushing) -> None:
    """Field case 27: a commit or a fence counts if it is the granted engine's, and names that very grant."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    push = await c.half_written(prompt)
    (grant,) = named_grants(c.p)
    me, chain = c.p.agent.me, grant.chain
    right = Commit(
        number=grant.number,
        rank=0,
        ranks=1,
        blocks=BLOCKS,
        digest=chain.digest(),
        first_token=7,
        cached_tokens=0,
        chunks=1,
        early_blocks=0,
        tail_s=0.0,
    )
    others = [
        msgspec.structs.replace(me, engine_id=EngineId("other")),
        msgspec.structs.replace(me, epoch=Epoch("former")),
    ]
    for sender in others:
        say(c, sender, right)
        say(c, sender, Fenced(number=grant.number, reason=Reason.REVOKED))
    for number in (grant.number + 1, grant.number - 1, -1, 2**40):
        say(c, me, msgspec.structs.replace(right, number=number))
        say(c, me, Fenced(number=number, reason=Reason.REVOKED))
    assert c.d.blocks().granted == BLOCKS
    assert not push.decode.done()
    # Nor does P take another engine's word for D's.
    for sender in others:
        say(c, sender, Revoke(offer=push.key, reader=push.key, number=grant.number, floor=2**40), at=c.p)
    assert named_grants(c.p) == [grant]
    assert grant.ending is None
    c.open()
    assert (await push.decode).token_ids == expected
    assert (await c.record(push)).kv_source == "transferred"
    await c.idle()


@policies
@pytest.mark.parametrize("change", [{"blocks": BLOCKS - 1}, {"blocks": BLOCKS + 1}, {"digest": "0" * 32}])
async def test_commit_of_other_content(c: Pushing, change: dict[str, Any], on_miss: MissPolicy) -> None:
    """Rule 1: count and digest have to be right. What was granted waits for its fence."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    before = await c.legs.reasons(c.d)
    push = await c.half_written(prompt, on_miss=on_miss)
    (grant,) = named_grants(c.p)
    wrong = Commit(
        number=grant.number,
        rank=0,
        ranks=1,
        **{"blocks": BLOCKS, "digest": grant.chain.digest(), **change},
        first_token=7,
        cached_tokens=0,
        chunks=1,
        early_blocks=0,
        tail_s=0.0,
    )
    say(c, c.p.agent.me, wrong)
    answer = await push.decode
    if on_miss == "recompute":
        assert answer.token_ids == expected
    else:
        assert (answer.status, answer.error["code"]) == (503, Reason.COMMIT_MISMATCH)
    record = await c.record(push)
    assert (record.transferred_tokens, record.reasons) == (0, [Reason.COMMIT_MISMATCH])
    assert await c.legs.reasons(c.d) - before == counted(Reason.COMMIT_MISMATCH)
    assert c.d.blocks().quarantined == BLOCKS
    c.open()
    await c.s.cluster.settled(c.d)
    await push.prefill
    await c.legs.withdraw(c.p, push.key)
    await c.idle()


WRONG_BLOCKS: dict[str, Any] = {
    "beyond the pool": ((250, BLOCKS),),
    "negative": ((-1, BLOCKS),),
    "too few": ((0, BLOCKS - 1),),
    "too many": ((0, BLOCKS + 1),),
    "one of them twice": ((0, BLOCKS - 1), (3, 1)),
    "negative count": ((0, -BLOCKS), (0, 2 * BLOCKS)),
    "more than memory can list": ((0, 2**50),),
}


@pytest.mark.parametrize("spans", WRONG_BLOCKS.values(), ids=WRONG_BLOCKS)
async def test_grant_of_blocks_that_are_none(c: Pushing, spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 2: P writes to nothing that D does not have, or that is not one block for one position."""
    prompt = c.prompt()
    expected = await c.alone(prompt)
    change_grants(c.d, spans, monkeypatch)
    push = c.start(prompt)
    answer = await push.decode
    assert answer.token_ids == expected
    assert (await c.record(push)).reasons == [Reason.BAD_REFERENCE]
    await push.prefill
    assert c.writes.posted == 0
    await c.legs.withdraw(c.p, push.key)
    await c.idle()


def change_grants(engine: LiveEngine, spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever blocks the engine grants, it says that they are these."""
    node = engine.agent._running_node
    envelope = node.envelope

    def changed(send: ev.Send) -> Envelope:
        body = send.body
        if isinstance(body, Grant) and body.spans is not None:
            body = msgspec.structs.replace(body, spans=spans)
        return envelope(ev.Send(send.address, send.target, body))

    monkeypatch.setattr(node, "envelope", changed)
