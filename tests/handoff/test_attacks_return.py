"""Attacks on return, on several readers and on leases, by their numbers in docs/protocol.md's list."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffId, HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import to_spans
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import ClaimDeclined, ClaimGranted, HistoryRef, Release
from tests.handoff.sides import (
    CHAIN,
    D2,
    OFFER,
    READ,
    REF,
    SETTINGS,
    D,
    P,
    Side,
    acquaint,
    descriptor,
    offered,
    side,
)
from tests.handoff.toy import ROOTS

TURN, NEXT = HandoffKey(HandoffId("turn-1"), 0), HandoffKey(HandoffId("turn-2"), 0)
PAST = TokenChain.of(ROOTS[0], 4, range(16))
HISTORY = HistoryRef(key=TURN, source=D, control_address="addr-d", n_tokens=16)


def turn(*tokens: int, salt: int = 0) -> TokenChain:
    """The next turn's prompt."""
    return TokenChain.of(ROOTS[salt], 4, tokens)


def retained(
    d: Side,
    retention: ev.Retention = "renewable",
    *,
    key: HandoffKey = TURN,
    blocks: tuple[int, ...] = (4, 5, 6, 7),
) -> None:
    assert d.do(ev.Retained(key, PAST, blocks, retention)) == []


def reasons(effects: list[ev.Effect]) -> list[Reason]:
    return [effect.reason for effect in effects if isinstance(effect, ev.Missed)]


@pytest.fixture
def p(p: Side, d: Side) -> Side:
    """A reader that has shaken hands with `d`, which keeps a turn."""
    acquaint(d, p)
    return p


def claimed(
    p: Side, d: Side, chain: TokenChain, blocks: tuple[int, ...], cached: int = 0, min_tokens: int = 1
) -> list[ev.Effect]:
    assert p.do(ev.ReadWanted(NEXT, HISTORY, chain, min_tokens)) == []
    assert p.do(ev.LoadAllocated(NEXT, blocks, cached)) == []  # nothing is read before the answer
    p.hand_over(d)
    return d.hand_over(p)


@pytest.mark.parametrize(
    ("tokens", "copies", "matched"),
    [
        ((*range(16), 90, 91), ((4, 10, 4),), 16),
        ((*range(6), *range(60, 70)), ((4, 10, 1),), 4),
        ((*range(8), *range(12, 16), 90, 91), ((4, 10, 2),), 8),
        ((*range(9), 90, 91, 92), ((4, 10, 2),), 8),
    ],
    ids=[
        "16: it goes on",
        "16: edited inside a block",
        "17: thinking stripped",
        "17: the answer was another",
    ],
)
def test_only_the_common_beginning_is_read(
    p: Side, d: Side, tokens: tuple[int, ...], copies: tuple[tuple[int, int, int], ...], matched: int
) -> None:
    retained(d)
    chain = turn(*tokens)
    blocks = tuple(range(10, 10 + chain.n_blocks))
    assert claimed(p, d, chain, blocks) == [ev.PostRead(NEXT, D, copies)]
    assert p.do(ev.ReadLanded(NEXT)) == [ev.Loaded(NEXT, matched)]
    assert p.hand_over(d) == []  # attack 44: it has been read, and stays
    assert d.node.offers.retained() == [4, 5, 6, 7]


def test_attack_17_too_little_to_gain(p: Side, d: Side) -> None:
    retained(d)
    effects = claimed(p, d, turn(*range(12), 90), (10, 11, 12, 13), cached=2, min_tokens=8)
    assert reasons(effects) == [Reason.RETURN_TOO_SHORT]
    assert ev.FreeBlocks((12, 13)) in effects


@pytest.mark.parametrize(
    "chain",
    [turn(*range(16), salt=1), turn(99, *range(1, 16))],
    ids=["72: another salt", "70: another beginning"],
)
def test_attack_70_another_conversation_gets_nothing(p: Side, d: Side, chain: TokenChain) -> None:
    retained(d)
    effects = claimed(p, d, chain, (10, 11, 12, 13))
    assert reasons(effects) == [Reason.CHAIN_MISMATCH]
    assert not [effect for effect in effects if isinstance(effect, ev.PostRead)]


def test_attack_44_several_read_it_at_once(p: Side, d: Side, d2: Side) -> None:
    acquaint(d, d2)
    retained(d)
    claimed(p, d, PAST, (10, 11, 12, 13))
    other = HandoffKey(HandoffId("turn-2b"), 0)
    d2.do(ev.ReadWanted(other, HISTORY, PAST))
    d2.do(ev.LoadAllocated(other, (1, 2, 3, 8), 0))
    d2.hand_over(d)
    assert d.hand_over(d2) == [ev.PostRead(other, D, ((4, 1, 3), (7, 8, 1)))]
    assert p.do(ev.ReadLanded(NEXT)) == [ev.Loaded(NEXT, 16)]
    p.hand_over(d)
    d.do(ev.MemoryShort(1))
    assert d.node.offers.blocks() == [4, 5, 6, 7]  # the other one still reads
    assert d2.do(ev.ReadLanded(other)) == [ev.Loaded(other, 16)]
    assert d2.hand_over(d) == [ev.FreeBlocks((4, 5, 6, 7))]


def test_attack_42_the_least_recently_used_goes_first(p: Side, d: Side) -> None:
    keys = [HandoffKey(HandoffId(f"turn-{i}"), 0) for i in range(3)]
    for i, key in enumerate(keys):
        d.now += 1.0
        retained(d, key=key, blocks=tuple(range(4 * i, 4 * i + 4)))
    d.now += 1.0
    reference = HistoryRef(key=keys[0], source=D, control_address="addr-d", n_tokens=16)
    p.do(ev.ReadWanted(NEXT, reference, PAST))  # the oldest one is used, and is being read
    p.hand_over(d)
    given_up = "4 blocks, memory is short"
    assert d.do(ev.MemoryShort(3)) == [
        ev.Noted(keys[1], Reason.OFFER_GIVEN_UP, given_up),
        ev.FreeBlocks((4, 5, 6, 7)),
    ]
    assert d.do(ev.MemoryShort(8)) == [
        ev.Noted(keys[2], Reason.OFFER_GIVEN_UP, given_up),
        ev.FreeBlocks((8, 9, 10, 11)),
        ev.Noted(keys[0], Reason.OFFER_GIVEN_UP, given_up),
    ]
    assert d.node.offers.blocks() == [0, 1, 2, 3]


def test_attack_43_what_is_given_up_under_a_reader_ends_within_one_lease(p: Side, d: Side) -> None:
    retained(d)
    [posted] = claimed(p, d, PAST, (10, 11, 12, 13))
    assert isinstance(posted, ev.PostRead)
    d.do(ev.MemoryShort(4))
    assert d.node.offers.blocks() == [4, 5, 6, 7]
    for now in (2.0, 4.0):  # no renewal helps
        p.now, d.now = 100.0 + now, 7.0 + now
        assert p.do(ev.Tick()) == []
        assert p.hand_over(d) == []
    assert {type(body) for body in d.bodies()} == {ClaimDeclined}
    d.now = 12.9
    assert d.do(ev.Tick()) == []
    d.now = 13.0
    assert d.do(ev.Tick())[-1] == ev.FreeBlocks((4, 5, 6, 7))
    assert reasons(d.hand_over(p)) == [Reason.OFFER_GIVEN_UP]


@pytest.mark.parametrize(("retention", "ends"), [("renewable", 40.0 + 600.0), ("fixed", 480.0)])
def test_attacks_57_58_59_nobody_renews_it_but_who_reads_it(
    p: Side, d: Side, retention: ev.Retention, ends: float
) -> None:
    retained(d, retention)
    start = d.now
    d.now, p.now = d.now + 40.0, p.now + 40.0
    p.do(ev.ReadWanted(NEXT, HISTORY, PAST))
    p.hand_over(d)
    p.outbox.clear()
    p.do(ev.LoadDropped(NEXT, done=True))
    p.outbox.clear()  # the release is lost
    d.now = start + 50.0
    d.do(ev.Tick())
    d.now = start + ends - 0.1
    assert d.do(ev.Tick()) == []
    d.now = start + ends
    expired = ev.Noted(TURN, Reason.OFFER_EXPIRED, "4 blocks, no claim within the lease")
    assert d.do(ev.Tick()) == [expired, ev.FreeBlocks((4, 5, 6, 7))]
    assert d.node.next_deadline() is None


def test_attack_59_a_fixed_time_is_over_while_it_is_read(p: Side, d: Side) -> None:
    retained(d, "fixed")
    d.now += 479.0
    claimed(p, d, PAST, (10, 11, 12, 13))
    d.now += 1.0
    assert [e for e in d.do(ev.Tick()) if isinstance(e, ev.FreeBlocks)] == []
    p.now += 2.0
    p.do(ev.Tick())  # a renewal
    p.hand_over(d)
    assert reasons(d.hand_over(p)) == [Reason.OFFER_EXPIRED]
    assert p.node.reads.quarantined() == [10, 11, 12, 13]
    d.now += 5.0
    assert ev.FreeBlocks((4, 5, 6, 7)) in d.do(ev.Tick())


def test_attack_53_a_claim_is_not_answered(p: Side, d: Side) -> None:
    p.do(ev.ReadWanted(NEXT, HISTORY, PAST))
    p.do(ev.LoadAllocated(NEXT, (10, 11, 12, 13), 0))
    p.now += 2.0
    effects = p.do(ev.Tick())
    assert reasons(effects) == [Reason.CLAIM_TIMEOUT]
    assert ev.FreeBlocks((10, 11, 12, 13)) in effects  # it computes at once


def test_attack_54_two_engines_whose_queues_hold_each_others_blocks(p: Side, d: Side) -> None:
    acquaint(p, d)
    retained(d)
    retained(p, key=OFFER)
    p.do(ev.ReadWanted(NEXT, HISTORY, PAST))
    d.do(ev.ReadWanted(READ, HistoryRef(key=OFFER, source=P, control_address="addr-p", n_tokens=16), PAST))
    missed: list[Reason] = []
    start = p.now
    while len(missed) < 2:
        assert p.now < start + SETTINGS.queue_s + 1.0
        p.now, d.now = p.now + 1.0, d.now + 1.0
        for one, other in ((p, d), (d, p)):
            missed += reasons(one.do(ev.Tick()))
            one.hand_over(other)
    assert missed == [Reason.QUEUE_TIMEOUT] * 2


def test_attack_22_both_directions_under_one_key(p: Side, d: Side) -> None:
    """P reads the history from D and is to write the whole prompt to D, both for the handoff `h`."""
    acquaint(p, d)
    retained(d)
    chain = turn(*range(16), 90, 91)
    p.do(ev.OfferStarted(OFFER, chain))
    p.do(ev.ReadWanted(OFFER, HISTORY, chain))
    d.do(ev.PushWanted(OFFER, REF, chain))
    for _ in range(2):
        p.hand_over(d)
        d.hand_over(p)
    d.do(ev.LoadAllocated(OFFER, (4, 5, 6, 7, 12), 4))  # it has the history
    d.hand_over(p)
    assert p.do(ev.LoadAllocated(OFFER, (10, 11, 12, 13, 14), 0)) == [ev.PostRead(OFFER, D, ((4, 10, 4),))]
    assert p.do(ev.ReadLanded(OFFER)) == [ev.Loaded(OFFER, 16)]
    assert p.do(ev.OfferGrown(OFFER, (10, 11, 12, 13))) == []  # nothing of it is new to D
    assert p.do(ev.Offered(OFFER, chain, (14,), 42)) == [
        ev.PostWrite(ev.WriteKey(D, 0, 0), D, ((14, 12, 1),)),
    ]
    p.hand_over(d)
    assert d.do(ev.ReadLanded(OFFER)) == []  # no read of D's: it fences no write
    assert d.node.grants.granted() == [12]
    p.do(ev.WriteLanded(ev.WriteKey(D, 0, 0)))
    [loaded] = p.hand_over(d)
    assert isinstance(loaded, ev.Loaded)
    assert loaded.tokens == 18
    assert d.hand_over(p) == [ev.FreeBlocks((10, 11, 12, 13, 14))]
    assert d.node.offers.retained() == [4, 5, 6, 7]


def test_a_late_release_of_a_former_claim_ends_no_later_one(p: Side, d: Side) -> None:
    """A reader's key that is used again: what was said about the former read is not about this one."""
    acquaint(p, d)
    offered(p)
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    d.hand_over(p)
    late_grant = p.take()
    d.do(ev.LoadDropped(READ, done=True))
    late_release = d.take()
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    d.hand_over(p)
    p.outbox.clear()
    assert [effect for event in late_release for effect in p.do(event)] == []
    assert p.node.offers.blocks() == [5, 6, 9]
    d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    d.do(ev.ReadLanded(READ))
    assert [effect for event in late_grant for effect in d.do(event)] == []


@settings(max_examples=200)
@given(
    delays=st.lists(st.tuples(st.floats(0.0, 6.0), st.floats(0.0, 6.0)), min_size=1, max_size=4),
    lands=st.floats(0.0, 16.0),
    rates=st.tuples(st.floats(0.955, 1.045), st.floats(0.955, 1.045)),
)
@example(delays=[(0.0, 5.0)], lands=7.0, rates=(1.0, 1.0))
def test_attack_21_what_is_loaded_landed_before_the_source_could_free_it(
    delays: list[tuple[float, float]], lands: float, rates: tuple[float, float]
) -> None:
    """Each claim takes its time to the source, and its answer to the reader; renewals beyond those are lost.
    The source frees the blocks as soon as it may: what lands later must never be loaded."""
    patient = msgspec.structs.replace(SETTINGS, claim_s=6.0)
    p, d = side(P, 100.0), side(D, 7.0, settings=patient)
    acquaint(p, d)
    offered(p)
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    pending, mail = list(delays), list[tuple[float, Side, ev.Event]]()
    landed, loaded, freed_at = False, False, math.inf
    for step in range(400):
        now = step * 0.05
        d.now, p.now = 7.0 + rates[0] * now, 100.0 + rates[1] * now
        due, mail = [m for m in mail if m[0] <= now], [m for m in mail if m[0] > now]
        happens = [(to, event) for _, to, event in due]
        if now >= lands and not landed:
            landed = True
            happens.append((d, ev.ReadLanded(READ)))
        for to, event in [*happens, (d, ev.Tick()), (p, ev.Tick())]:
            effects = to.do(event)
            if to is p and isinstance(event, ev.Received):
                effects += p.do(ev.Withdrawn(OFFER))  # it ends with its last claim
                answer_s = pending.pop(0)[1] if pending else math.inf
                mail += [(now + answer_s, d, answer) for answer in p.take()]
            loaded = loaded or any(isinstance(effect, ev.Loaded) for effect in effects)
            if to is p and any(isinstance(effect, ev.FreeBlocks) for effect in effects):
                freed_at = min(now, freed_at)
        mail += [(now + pending[0][0], p, claim) for claim in d.take() if pending]
    assert not loaded or lands <= freed_at + 0.05  # time goes in steps


def test_grants_of_claims_name_their_offer(p: Side, d: Side) -> None:
    acquaint(p, d)
    offered(p)
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    d.do(ev.ReadLanded(READ))
    other = ClaimGranted(
        offer=TURN, reader=READ, seq=1, matched_tokens=10, spans=to_spans((5, 6, 9)), lease_s=6.0
    )
    assert d.hears(p, other) == []
    assert d.hears(p, ClaimDeclined(offer=TURN, reader=READ, reason=Reason.OFFER_EXPIRED)) == []


def test_a_withdrawn_history_is_declined(p: Side, d: Side) -> None:
    retained(d)
    assert d.do(ev.Withdrawn(TURN)) == [ev.FreeBlocks((4, 5, 6, 7))]
    assert reasons(claimed(p, d, PAST, (10, 11, 12, 13))) == [Reason.OFFER_WITHDRAWN]


def test_releases_of_strangers_end_nothing(p: Side, d: Side, d2: Side) -> None:
    retained(d)
    claimed(p, d, PAST, (10, 11, 12, 13))
    assert d.hears(d2, Release(offer=TURN, reader=NEXT, seq=99, done=True)) == []
    assert d2.node.me == D2
    d.do(ev.MemoryShort(4))
    assert d.node.offers.blocks() == [4, 5, 6, 7]  # the reader's claim still pins it
