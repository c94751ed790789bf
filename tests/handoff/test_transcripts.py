"""The protocol as transcripts: after each step, the exact effects and the states of both sides."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import (
    Claim,
    ClaimDeclined,
    ClaimGranted,
    Release,
    Welcome,
    WrongEpoch,
    decode,
    encode,
)
from kvhandoff.handoff.node import HandoffNode
from tests.handoff.sides import (
    CHAIN,
    OFFER,
    OTHER,
    READ,
    REBORN,
    SETTINGS,
    SPANS,
    D,
    P,
    Side,
    acquaint,
    descriptor,
    hello,
    offered,
)
from tests.handoff.toy import ROOTS

AGAIN = descriptor(key=HandoffKey(HandoffId("h2"), 0), spans=((11, 3),))


def reading(p: Side, d: Side) -> None:
    """Offered, wanted, posted; the claim is in the outbox."""
    acquaint(p, d)
    offered(p)
    assert d.do(ev.ReadWanted(READ, descriptor(), CHAIN)) == []
    posted = d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    assert posted == [ev.PostRead(READ, P, ((5, 1, 2), (9, 3, 1)))]
    assert d.node.reads.loading() == [1, 2, 3]


def test_pull(p: Side, d: Side) -> None:
    reading(p, d)
    assert d.bodies() == [
        Claim(offer=OFFER, reader=READ, chain=CHAIN, seq=1, queued=True),
        Claim(offer=OFFER, reader=READ, chain=CHAIN, seq=2, queued=False),
    ]
    assert d.hand_over(p) == []
    granted = ClaimGranted(offer=OFFER, reader=READ, seq=1, matched_tokens=10, spans=SPANS, lease_s=6.0)
    assert p.bodies() == [granted, replace(granted, seq=2)]
    assert p.hand_over(d) == []
    d.now += 1.0
    assert d.do(ev.ReadLanded(READ)) == [ev.Loaded(READ, 10)]
    assert d.node.reads.loading() == []
    assert d.bodies() == [Release(offer=OFFER, reader=READ, seq=2, done=True)]
    assert d.hand_over(p) == [ev.FreeBlocks((5, 6, 9))]
    assert p.node.offers.blocks() == []
    assert p.node.next_deadline() is None
    assert d.node.next_deadline() is None


def test_bytes_may_come_before_the_claims_answer(p: Side, d: Side) -> None:
    reading(p, d)
    assert d.do(ev.ReadLanded(READ)) == []
    d.hand_over(p)
    assert p.hand_over(d) == [ev.Loaded(READ, 10)]


def test_own_prefix_is_not_read(p: Side, d: Side) -> None:
    acquaint(p, d)
    offered(p)
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    assert d.do(ev.LoadAllocated(READ, (1, 2, 3), 1)) == [ev.PostRead(READ, P, ((6, 2, 1), (9, 3, 1)))]
    assert d.node.reads.loading() == [2, 3]


def test_first_request_to_a_peer_shakes_hands_first(p: Side, d: Side) -> None:
    offered(p)
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    assert d.bodies() == [hello(nonce=1)]
    d.hand_over(p)
    assert p.bodies() == [Welcome(hello=hello(), nonce=1)]
    assert p.hand_over(d) == [ev.ConnectPeer(P, b"memory")]
    assert d.do(ev.PeerConnected(P, None)) == [ev.PostRead(READ, P, ((5, 1, 2), (9, 3, 1)))]
    assert d.bodies() == [Claim(offer=OFFER, reader=READ, chain=CHAIN, seq=1, queued=False)]


def test_another_prompt_under_the_reference_gets_only_what_it_shares(p: Side, d: Side) -> None:
    acquaint(p, d)
    offered(p)
    d.do(ev.ReadWanted(READ, descriptor(), OTHER))
    # Digests differ, so nothing is read before the claim says how much matches.
    assert d.do(ev.LoadAllocated(READ, (1, 2), 0)) == []
    d.hand_over(p)
    assert p.hand_over(d) == [ev.PostRead(READ, P, ((5, 1, 1),))]
    assert d.do(ev.ReadLanded(READ)) == [ev.Loaded(READ, 4)]


def test_another_salt_shares_nothing(p: Side, d: Side) -> None:
    acquaint(p, d)
    offered(p)
    foreign = TokenChain.of(ROOTS[1], 4, list(range(10)))
    d.do(ev.ReadWanted(READ, descriptor(), foreign))
    d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    d.hand_over(p)
    assert p.bodies() == [ClaimDeclined(offer=OFFER, reader=READ, reason=Reason.CHAIN_MISMATCH)] * 2
    missed = ev.Missed(READ, Reason.CHAIN_MISMATCH, f"declined by {P}")
    assert p.hand_over(d) == [missed, ev.FreeBlocks((1, 2, 3))]


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("consumed", Reason.OFFER_CONSUMED),
        ("withdrawn", Reason.OFFER_WITHDRAWN),
        ("expired", Reason.OFFER_EXPIRED),
        ("unknown", Reason.OFFER_UNKNOWN),
    ],
)
def test_a_late_claim_is_told_why(p: Side, d: Side, ending: str, reason: Reason) -> None:
    acquaint(p, d)
    if ending != "unknown":
        offered(p)
    if ending == "consumed":
        p.hears(d, Release(offer=OFFER, reader=READ, seq=1, done=True))
    if ending == "withdrawn":
        assert p.do(ev.Withdrawn(OFFER)) == [ev.FreeBlocks((5, 6, 9))]
    if ending == "expired":
        p.now += 10.0
        noted = ev.Noted(OFFER, Reason.OFFER_EXPIRED, "3 blocks, no claim within the lease")
        assert p.do(ev.Tick()) == [noted, ev.FreeBlocks((5, 6, 9))]
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    d.hand_over(p)
    assert p.hand_over(d) == [ev.Missed(READ, reason, f"declined by {P}")]
    # Nobody else is told that it is done; the reader's own pin, if it had one, is over.
    assert d.bodies() == [Release(offer=OFFER, reader=READ, seq=1, done=False)]


def test_an_offer_made_after_its_withdrawal_is_freed_at_once(p: Side) -> None:
    assert p.do(ev.Withdrawn(OFFER)) == []
    assert p.do(ev.Offered(OFFER, CHAIN, (5, 6, 9))) == [ev.FreeBlocks((5, 6, 9))]


def test_a_claim_pins_beyond_the_offers_own_lease(p: Side, d: Side) -> None:
    reading(p, d)
    p.now += 9.0
    d.hand_over(p)
    p.now += 5.9  # 14.9 after the offer, 5.9 after the claim
    assert p.do(ev.Tick()) == []
    p.now += 0.1
    lapsed = f"claim of {D} for {READ} was neither renewed nor released"
    assert p.do(ev.Tick()) == [ev.Noted(OFFER, Reason.LEASE_LAPSED, lapsed)]
    p.now += 3.9  # its own lease counts from the last use
    assert p.do(ev.Tick()) == []
    p.now += 0.1
    expired = ev.Noted(OFFER, Reason.OFFER_EXPIRED, "3 blocks, no claim within the lease")
    assert p.do(ev.Tick()) == [expired, ev.FreeBlocks((5, 6, 9))]


def test_a_queueing_reader_renews(p: Side, d: Side) -> None:
    acquaint(p, d)
    offered(p)
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    for _ in range(20):  # 40 s, far beyond any lease
        d.hand_over(p)
        assert p.hand_over(d) == []
        due = d.node.next_deadline()
        assert due == pytest.approx(d.now + 2.0)
        p.now += 2.0
        d.now += 2.0
        assert d.do(ev.Tick()) == []
        assert p.do(ev.Tick()) == []
    d.hand_over(p)
    p.hand_over(d)
    assert d.do(ev.LoadAllocated(READ, (1, 2, 3), 0)) == [ev.PostRead(READ, P, ((5, 1, 2), (9, 3, 1)))]
    assert d.do(ev.ReadLanded(READ)) == [ev.Loaded(READ, 10)]


def test_bytes_that_come_after_the_lease_are_not_used(p: Side, d: Side) -> None:
    reading(p, d)
    d.hand_over(p)
    p.hand_over(d)
    d.now += 4.9
    assert d.do(ev.Tick()) == []  # renewals go out, none is answered
    d.outbox.clear()
    d.now += 0.5  # 5.4 s: the lease of 6 s less its margin
    assert d.do(ev.Tick()) == [ev.Missed(READ, Reason.LEASE_LAPSED, f"{P} did not renew the claim")]
    assert d.node.reads.quarantined() == [1, 2, 3]
    assert d.do(ev.ReadLanded(READ)) == [ev.FreeBlocks((1, 2, 3))]


def test_the_lease_counts_from_the_asking(p: Side, d: Side) -> None:
    reading(p, d)
    asked_at = d.now
    d.now += 1.9  # the answer is slow
    d.hand_over(p)
    p.hand_over(d)
    d.outbox.clear()
    d.now = asked_at + 5.41  # 6 s from the asking, less the margin; 7.3 s from the answer would be too long
    assert [e.reason for e in d.do(ev.Tick()) if isinstance(e, ev.Missed)] == [Reason.LEASE_LAPSED]


def test_a_dropped_read_in_flight_is_quarantined_until_its_fence(p: Side, d: Side) -> None:
    reading(p, d)
    assert d.do(ev.LoadDropped(READ, done=False)) == []
    assert (d.node.reads.loading(), d.node.reads.quarantined()) == ([], [1, 2, 3])
    d.now += 1000.0
    overdue = ev.Noted(READ, Reason.FENCE_OVERDUE, f"3 blocks, from {P}")
    assert d.do(ev.Tick()) == [overdue]  # a timeout is no fence
    assert d.do(ev.Tick()) == []
    assert d.node.reads.quarantined() == [1, 2, 3]
    assert d.do(ev.ReadFailed(READ, P, "peer is dead")) == [
        ev.FreeBlocks((1, 2, 3)),
        ev.DisconnectPeer(P),  # none of its transfers is in flight any more
    ]
    assert d.node.reads.quarantined() == []


def test_a_peer_that_owes_a_fence_gets_no_more_reads(p: Side, d: Side) -> None:
    reading(p, d)
    for _ in range(10):  # renewed all the time, but the bytes don't come
        d.hand_over(p)
        p.hand_over(d)
        d.do(ev.Tick())
        d.now += 2.0
    missed = [e for e in d.do(ev.Tick()) if isinstance(e, ev.Missed)]
    assert [m.reason for m in missed] == [Reason.READ_TIMEOUT]
    p.node.handle(p.now, ev.Offered(AGAIN.key, CHAIN, (11, 12, 13)))
    # At first nothing more is posted to it unasked ...
    d.outbox.clear()
    assert d.do(ev.ReadWanted(AGAIN.key, AGAIN, CHAIN)) == []
    assert d.do(ev.LoadAllocated(AGAIN.key, (5, 6, 7), 0)) == []
    assert d.do(ev.LoadDropped(AGAIN.key, done=False)) == [ev.FreeBlocks((5, 6, 7))]
    # ... and when the fence is overdue, nothing is asked of it.
    d.now += 10.0
    assert d.do(ev.Tick()) == [ev.Noted(READ, Reason.FENCE_OVERDUE, f"3 blocks, from {P}")]
    [refused] = d.do(ev.ReadWanted(HandoffKey(HandoffId("h"), 3), AGAIN, CHAIN))
    assert isinstance(refused, ev.Missed)
    assert refused.reason is Reason.PEER_UNREACHABLE
    assert d.do(ev.ReadLanded(READ)) == [ev.FreeBlocks((1, 2, 3))]
    assert d.do(ev.ReadWanted(HandoffKey(HandoffId("h"), 4), AGAIN, CHAIN)) == []


def test_an_unanswered_claim_is_sent_again_and_given_up(p: Side, d: Side) -> None:
    reading(p, d)
    for wait, seq in ((0.5, 3), (1.0, 4)):
        d.outbox.clear()
        d.now += wait
        assert d.do(ev.Tick()) == []
        assert d.bodies() == [Claim(offer=OFFER, reader=READ, chain=CHAIN, seq=seq, queued=False)]
    d.now += 0.5
    [missed] = d.do(ev.Tick())
    assert missed == ev.Missed(READ, Reason.CLAIM_TIMEOUT, f"no answer from {P} in time")


def test_a_restarted_source_says_so(p: Side, d: Side) -> None:
    reading(p, d)
    reborn = Side(HandoffNode(REBORN, "addr-p", hello(num_blocks=4), SETTINGS))
    d.hand_over(reborn)
    assert reborn.bodies() == [WrongEpoch(wanted=P)] * 2
    effects = reborn.hand_over(d)
    assert effects == [ev.DisconnectPeer(P), ev.Missed(READ, Reason.EPOCH_CHANGED, f"{P} is gone")]
    assert d.node.reads.quarantined() == [1, 2, 3]
    # A reference of the new life is read after a new handshake, within its own blocks.
    newer = HandoffKey(HandoffId("h"), 2)
    d.outbox.clear()
    d.do(ev.ReadWanted(newer, descriptor(source=REBORN), CHAIN))
    d.hand_over(reborn)
    assert reborn.hand_over(d) == [ev.ConnectPeer(REBORN, b"memory")]
    d.do(ev.PeerConnected(REBORN, None))
    effects = d.do(ev.LoadAllocated(newer, (11, 12, 13), 0))
    assert [e.reason for e in effects if isinstance(e, ev.Missed)] == [Reason.BAD_REFERENCE]


def test_a_broken_connection_ends_the_wait_at_once(p: Side, d: Side) -> None:
    reading(p, d)
    queued = HandoffKey(HandoffId("h"), 2)
    assert d.do(ev.ReadWanted(queued, descriptor(), CHAIN)) == []
    assert d.do(ev.PeerGone("addr-x")) == []
    assert d.do(ev.PeerGone("addr-p")) == [
        ev.DisconnectPeer(P),
        ev.Missed(READ, Reason.PEER_LOST, f"{P} is gone"),
        ev.Missed(queued, Reason.PEER_LOST, f"{P} is gone"),
    ]
    assert d.node.reads.quarantined() == [1, 2, 3]  # it is no fence
    assert d.do(ev.ReadFailed(READ, P, "peer is dead")) == [ev.FreeBlocks((1, 2, 3))]
    assert d.node.next_deadline() is None


def test_a_connection_that_breaks_in_the_handshake_is_tried_again(p: Side, d: Side) -> None:
    assert d.do(ev.ReadWanted(READ, descriptor(source=REBORN), CHAIN)) == []
    d.outbox.clear()
    assert d.do(ev.PeerGone("addr-p")) == []
    d.now += 0.5
    assert d.do(ev.Tick()) == []
    reborn = Side(HandoffNode(REBORN, "addr-p", hello(), SETTINGS))
    d.hand_over(reborn)
    assert reborn.hand_over(d) == [ev.ConnectPeer(REBORN, b"memory")]


def test_an_old_reference_at_a_known_new_life_is_refused(p: Side, d: Side) -> None:
    acquaint(p, d)
    old = Identity(EngineId("p"), Epoch("0"))
    assert d.do(ev.ReadWanted(READ, descriptor(source=old), CHAIN)) == []
    d.hand_over(p)
    p.hand_over(d)
    effects = d.do(ev.PeerConnected(P, None))
    detail = f"offered by {old}, {P} answers at addr-p"
    assert effects == [ev.Missed(READ, Reason.EPOCH_CHANGED, detail)]


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"model_fingerprint": "other"}, "model_fingerprint: 'other' here, 'model' there"),
        ({"data_plane": "shm"}, "data_plane: 'shm' here, 'toy' there"),
        ({"protocol_version": 4}, "protocol_version: 4 here, 3 there"),
    ],
)
def test_a_peer_that_differs_is_refused_with_both_values(
    p: Side, theirs: dict[str, object], named: str
) -> None:
    other = Side(HandoffNode(D, "addr-d", hello(**theirs), SETTINGS))
    other.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    other.hand_over(p)
    [missed] = p.hand_over(other)
    assert isinstance(missed, ev.Missed)
    assert missed.reason is Reason.HANDSHAKE_REFUSED
    assert named in missed.detail


def test_nobody_answers_the_handshake(d: Side) -> None:
    d.do(ev.ReadWanted(READ, descriptor(), CHAIN))
    d.now += 2.0
    [missed] = d.do(ev.Tick())
    assert isinstance(missed, ev.Missed)
    assert missed.reason is Reason.PEER_UNREACHABLE
    late = d.do(ev.LoadAllocated(READ, (1, 2, 3), 1))
    assert late == [ev.FreeBlocks((2, 3))]


@pytest.mark.parametrize("spans", [((5, 1),), ((5, 2), (20, 1)), ((-1, 3),), ((18, 3),), ((5, 3), (9, 0))])
def test_blocks_outside_the_pool_are_never_read(p: Side, d: Side, spans: tuple[tuple[int, int], ...]) -> None:
    acquaint(p, d)
    offered(p)
    effects = d.do(ev.ReadWanted(READ, descriptor(spans=spans), CHAIN))
    effects += d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    assert [e.reason for e in effects if isinstance(e, ev.Missed)] == [Reason.BAD_REFERENCE]
    assert not [e for e in effects if isinstance(e, ev.PostRead)]


def test_other_blocks_than_the_offers_are_not_used(p: Side, d: Side) -> None:
    acquaint(p, d)
    offered(p)
    d.do(ev.ReadWanted(READ, descriptor(spans=((0, 3),)), CHAIN))
    d.do(ev.LoadAllocated(READ, (1, 2, 3), 0))
    d.do(ev.ReadLanded(READ))
    d.hand_over(p)
    effects = p.hand_over(d)
    assert [e.reason for e in effects if isinstance(e, ev.Missed)] == [Reason.BAD_REFERENCE]
    assert ev.FreeBlocks((1, 2, 3)) in effects


def test_answers_of_a_stranger_are_ignored(p: Side, d: Side) -> None:
    reading(p, d)
    stranger = HandoffNode(REBORN, "addr-x", hello(), SETTINGS)
    forged = ClaimGranted(offer=OFFER, reader=READ, seq=1, matched_tokens=10, spans=SPANS, lease_s=6.0)
    d.do(ev.ReadLanded(READ))
    assert d.do(ev.Received(stranger.envelope(ev.Send("addr-d", D, forged)))) == []
    assert d.node.reads.loading() == [1, 2, 3]


def test_messages_survive_the_wire_and_garbage_does_not() -> None:
    node = HandoffNode(D, "addr-d", hello(), SETTINGS)
    for body in (
        hello(),
        Welcome(hello=hello(), nonce=3),
        Claim(offer=OFFER, reader=READ, chain=CHAIN, seq=4, queued=True),
        WrongEpoch(wanted=P),
    ):
        envelope = node.envelope(ev.Send("addr-p", P, body))
        assert decode(encode(envelope)) == envelope
    for garbage in (b"", b"\x80", b"hello", encode(node.envelope(ev.Send("a", P, hello())))[:-1]):
        with pytest.raises(ValueError):  # noqa: PT011  msgspec's message is not ours
            decode(garbage)
