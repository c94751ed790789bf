"""Engines whose memory waits for each other: a source that is short for long gives up what is queued for.

The words of a claim choose whom to give up; leases, releases and fences alone free blocks.
"""

from __future__ import annotations

from kvhandoff.core.ids import HandoffId, HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import Claim, ClaimDeclined, Fenced, Grant, OfferDescriptor, Release
from tests.handoff.pushes import LOAD, answers, completed, grown, started
from tests.handoff.sides import (
    CHAIN,
    OFFER,
    READ,
    REF,
    SETTINGS,
    P,
    Side,
    acquaint,
    descriptor,
    offered,
)

GIVEN_UP = ev.Noted(OFFER, Reason.SOURCE_SHORT, "3 blocks, memory is short")
MISSED = ev.Missed(READ, Reason.SOURCE_SHORT, f"declined by {P}")
STEP_S = 0.5
"""Time between two steps of an engine that is short."""


def queued(p: Side, d: Side) -> None:
    """`d` has claimed `p`'s offer, and queues."""
    acquaint(p, d)
    offered(p)
    assert d.do(ev.ReadWanted(READ, descriptor(), CHAIN)) == []
    assert d.bodies() == [Claim(offer=OFFER, reader=READ, chain=CHAIN, seq=1, queued=True)]
    assert talk(p, d) == ([], [])


def talk(p: Side, d: Side) -> tuple[list[ev.Effect], list[ev.Effect]]:
    """Deliver until nothing is on its way: what follows at `p`, at `d`."""
    at_p: list[ev.Effect] = []
    at_d: list[ev.Effect] = []
    while p.outbox or d.outbox:
        at_p += d.hand_over(p)
        at_d += p.hand_over(d)
    return at_p, at_d


def short(p: Side, d: Side, seconds: float, blocks: int = 1) -> tuple[list[ev.Effect], list[ev.Effect]]:
    """`p` says at every step that it is short, while both keep time and talk: what follows at each."""
    at_p: list[ev.Effect] = []
    at_d: list[ev.Effect] = []
    end = p.now + seconds
    while p.now < end:
        p.now, d.now = p.now + STEP_S, d.now + STEP_S
        at_p += p.do(ev.Tick())
        at_p += p.do(ev.MemoryShort(blocks))
        at_d += d.do(ev.Tick())
        for effects, more in zip((at_p, at_d), talk(p, d), strict=True):
            effects += more
    return at_p, at_d


def given_up(p: Side, d: Side) -> None:
    """The offer is, and `d` does not know it yet."""
    queued(p, d)
    assert p.do(ev.MemoryShort(1)) == []
    assert short(p, d, SETTINGS.short_s - STEP_S) == ([], [])
    p.now, d.now = p.now + STEP_S, d.now + STEP_S
    assert d.do(ev.Tick()) == []
    assert talk(p, d) == ([], [])
    assert p.do(ev.MemoryShort(1)) == [GIVEN_UP]
    assert p.node.offers.blocks() == [5, 6, 9]


def test_blocks_come_back_with_the_next_renewal(p: Side, d: Side) -> None:
    given_up(p, d)
    at_p, at_d = short(p, d, SETTINGS.claim_lease_s / 3)
    assert at_d == [MISSED]
    assert at_p == [ev.FreeBlocks((5, 6, 9))]
    assert p.node.next_deadline() is d.node.next_deadline() is None


def test_a_declined_reader_says_that_it_uses_nothing_more(p: Side, d: Side) -> None:
    given_up(p, d)
    d.now += SETTINGS.claim_lease_s / 3
    d.do(ev.Tick())
    d.hand_over(p)
    assert p.bodies() == [ClaimDeclined(offer=OFFER, reader=READ, reason=Reason.SOURCE_SHORT)]
    assert p.node.offers.blocks() == [5, 6, 9]  # the decline alone frees nothing: it may not arrive
    assert p.hand_over(d) == [MISSED]
    [release] = d.bodies()
    assert isinstance(release, Release)
    assert not release.done
    assert d.hand_over(p) == [ev.FreeBlocks((5, 6, 9))]


def test_a_reader_that_hears_nothing_keeps_what_it_was_promised(p: Side, d: Side) -> None:
    """Nor is it heard: its blocks come, it reads, and may use what lands as long as it trusts its lease."""
    given_up(p, d)
    pinned_until = p.node.offers.next_deadline()
    assert pinned_until is not None
    [posted] = d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    assert isinstance(posted, ev.PostRead)
    d.outbox.clear()
    trusts_until = d.node.reads._reads[READ].trust_until
    assert trusts_until - d.now < pinned_until - p.now
    d.now, p.now = trusts_until - 0.001, p.now + trusts_until - 0.001 - d.now
    assert p.do(ev.Tick()) == []
    assert p.node.offers.blocks() == [5, 6, 9]
    assert d.do(ev.ReadLanded(READ)) == [ev.Loaded(READ, 10)]
    p.now = pinned_until
    lapsed, freed = p.do(ev.Tick())
    assert isinstance(lapsed, ev.Noted)
    assert lapsed.reason is Reason.LEASE_LAPSED
    assert freed == ev.FreeBlocks((5, 6, 9))


def test_a_read_that_began_meanwhile_is_not_used(p: Side, d: Side) -> None:
    """What the reader says of its blocks crosses the giving up: it computes, its targets await the fence."""
    given_up(p, d)
    d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    assert d.bodies()[-1] == Claim(
        offer=OFFER, reader=READ, chain=CHAIN, seq=d.node.reads._claims, queued=False
    )
    assert d.hand_over(p) == []
    assert p.hand_over(d) == [MISSED]
    assert d.node.reads.quarantined() == [1, 2, 3]
    assert d.hand_over(p) == [ev.FreeBlocks((5, 6, 9))]
    assert d.do(ev.ReadLanded(READ)) == [ev.FreeBlocks((1, 2, 3))]


def test_who_has_blocks_says_so_at_once_and_is_spared(p: Side, d: Side) -> None:
    queued(p, d)
    p.do(ev.MemoryShort(1))
    short(p, d, SETTINGS.short_s - STEP_S)
    d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    assert d.hand_over(p) == []
    assert short(p, d, 2 * SETTINGS.short_s) == ([], [])
    assert d.do(ev.ReadLanded(READ)) == [ev.Loaded(READ, 10)]
    assert d.hand_over(p) == [ev.FreeBlocks((5, 6, 9))]


def test_an_offer_that_nobody_has_claimed_is_spared(p: Side, d: Side) -> None:
    offered(p)
    p.do(ev.MemoryShort(1))
    assert short(p, d, SETTINGS.short_s + 1.0) == ([], [])


def test_a_shortage_with_a_break_begins_anew(p: Side, d: Side) -> None:
    queued(p, d)
    for _ in range(3):
        p.do(ev.MemoryShort(1))
        assert short(p, d, SETTINGS.short_s - STEP_S) == ([], [])
        for _ in range(3):  # of more than a second
            p.now, d.now = p.now + 0.4, d.now + 0.4
            d.do(ev.Tick())
            talk(p, d)
    p.do(ev.MemoryShort(1))
    assert GIVEN_UP in short(p, d, SETTINGS.short_s)[0]


def test_the_oldest_go_first_and_no_more_than_are_needed(p: Side, d: Side) -> None:
    acquaint(p, d)
    keys = [HandoffKey(HandoffId(f"h{i}"), 0) for i in range(4)]
    for i, key in enumerate(keys):
        blocks = (3 * i, 3 * i + 1, 3 * i + 2)
        p.do(ev.Offered(key, CHAIN, blocks))
        facts = descriptor(key=key, spans=((3 * i, 3),))
        assert isinstance(facts, OfferDescriptor)
        d.do(ev.ReadWanted(key, facts, CHAIN))
        p.now, d.now = p.now + 0.1, d.now + 0.1
    talk(p, d)
    p.do(ev.MemoryShort(5))
    # What has been given up is on its way, however often the engine says what it lacks until it comes.
    at_p, _ = short(p, d, SETTINGS.short_s + 0.5, blocks=5)
    assert [e.key for e in at_p if isinstance(e, ev.Noted)] == keys[:2]
    assert p.node.offers.get(keys[2]) is not None
    assert p.node.offers.get(keys[3]) is not None


def test_a_push_that_is_queued_for_is_fenced(p: Side, d: Side) -> None:
    """No block was named, so the fence is immediate. Blocks that the destination names too late come back."""
    acquaint(p, d)
    acquaint(d, p)
    started(p)
    grown(p, 5)
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    completed(p, 6, 9)
    talk(p, d)
    p.do(ev.MemoryShort(1))
    assert short(p, d, SETTINGS.short_s - STEP_S) == ([], [])
    p.now += STEP_S
    assert p.do(ev.MemoryShort(1)) == [GIVEN_UP, ev.FreeBlocks((5, 6, 9))]
    assert p.bodies() == [Fenced(number=0, reason=Reason.SOURCE_SHORT)]
    d.do(ev.LoadAllocated(LOAD, (17, 3, 8), 0))
    assert isinstance(d.bodies()[-1], Grant)
    assert d.hand_over(p) == []  # nothing is written
    p.outbox = p.outbox[-1:]  # the first word is lost
    missed, freed = p.hand_over(d)
    assert isinstance(missed, ev.Missed)
    assert missed.reason is Reason.SOURCE_SHORT
    assert freed == ev.FreeBlocks((17, 3, 8))


def test_a_push_that_has_blocks_is_spared(p: Side, d: Side) -> None:
    acquaint(p, d)
    acquaint(d, p)
    started(p)
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    completed(p, 5, 6, 9)
    talk(p, d)
    p.do(ev.MemoryShort(1))
    d.do(ev.LoadAllocated(LOAD, (17, 3, 8), 0))
    [written] = d.hand_over(p)
    assert isinstance(written, ev.PostWrite)
    at_p, at_d = short(p, d, 2 * SETTINGS.short_s)
    assert (at_p, at_d) == ([], [])
    assert p.node.offers.blocks() == [5, 6, 9]


def test_two_engines_that_wait_for_each_other_go_on(p: Side, d: Side) -> None:
    """P's memory is full of an offer that D queues for, D's of blocks for a push that P has no blocks for."""
    queued(p, d)
    acquaint(d, p)
    push = HandoffKey(HandoffId("pushed"), 0)
    d.do(ev.PushWanted(push, descriptor(key=push), CHAIN))
    p.do(ev.OfferStarted(push, CHAIN))  # it queues for the blocks that its neighbour's offer has
    talk(p, d)
    d.do(ev.LoadAllocated(push, (17, 3, 8), 0))
    p.do(ev.MemoryShort(3))
    at_p, at_d = short(p, d, SETTINGS.short_s + SETTINGS.claim_lease_s / 3, blocks=3)
    assert at_p == [GIVEN_UP, ev.FreeBlocks((5, 6, 9))]
    assert at_d == [MISSED]
    [written] = p.do(ev.Offered(push, CHAIN, (5, 6, 9), 42))
    assert isinstance(written, ev.PostWrite)
    assert p.do(ev.WriteLanded(written.write)) == []
    _, at_d = talk(p, d)
    assert [type(effect) for effect in at_d] == [ev.Loaded]
    assert answers(p, Fenced) == []
    assert p.node.offers.blocks() == []
