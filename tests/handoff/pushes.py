"""Steps of a push between sides: the prompt grows, blocks are granted, writes land."""

from __future__ import annotations

from kvhandoff.core.ids import HandoffId, HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import Commit, Grant
from tests.handoff.sides import CHAIN, OFFER, REF, D, Side

LOAD, LATER = HandoffKey(HandoffId("h"), 0), HandoffKey(HandoffId("h"), 1)
GRANTED = ((17, 1), (3, 1), (8, 1))
"""Of the blocks 17, 3, 8, for the positions 0, 1, 2."""


def started(p: Side) -> None:
    assert p.do(ev.OfferStarted(OFFER, CHAIN)) == []


def grown(p: Side, *blocks: int) -> list[ev.Effect]:
    return p.do(ev.OfferGrown(OFFER, blocks))


def completed(p: Side, *blocks: int) -> list[ev.Effect]:
    return p.do(ev.Offered(OFFER, CHAIN, blocks, 42))


def granted(
    p: Side, d: Side, load: HandoffKey = LOAD, blocks: tuple[int, ...] = (17, 3, 8)
) -> list[ev.Effect]:
    """`d` wants, allocates, and has granted; the effects at `p`. Answers of `p` are in its outbox."""
    assert d.do(ev.PushWanted(load, REF, CHAIN)) == []
    d.hand_over(p)
    p.hand_over(d)
    assert d.do(ev.LoadAllocated(load, blocks, 0)) == []
    assert isinstance(d.bodies()[-1], Grant)
    return d.hand_over(p)


def write(chunk: int, *copies: tuple[int, int, int], to: Identity = D, number: int = 0) -> ev.PostWrite:
    return ev.PostWrite(ev.WriteKey(to, number, chunk), to, copies)


def land(p: Side, chunk: int, rank: int = 0, *, to: Identity = D, number: int = 0) -> list[ev.Effect]:
    return p.do(ev.WriteLanded(ev.WriteKey(to, number, chunk), rank))


def answers(side: Side, kind: type) -> list[object]:
    return [body for body in side.bodies() if isinstance(body, kind)]


def commit(**other: object) -> Commit:
    facts = {
        "number": 0,
        "rank": 0,
        "ranks": 1,
        "blocks": 3,
        "digest": CHAIN.digest(),
        "first_token": 42,
        "cached_tokens": 0,
        "chunks": 1,
        "early_blocks": 0,
        "tail_s": 0.0,
    }
    return Commit(**{**facts, **other})  # type: ignore[arg-type]


def reasons(effects: list[ev.Effect]) -> list[Reason]:
    return [effect.reason for effect in effects if isinstance(effect, ev.Missed)]


def writing(p: Side, d: Side) -> None:
    """One block has been written to `d`, another is on its way."""
    started(p)
    granted(p, d)
    assert grown(p, 5) == [write(0, (5, 17, 1))]
    land(p, 0)
    assert grown(p, 6) == [write(1, (6, 3, 1))]
    p.outbox.clear()
    d.outbox.clear()
