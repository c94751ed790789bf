"""Attacks on what a push brings, and on its fences, by their numbers in docs/protocol.md."""

from __future__ import annotations

import pytest

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import Commit, Fenced, Grant, Revoke, WrongEpoch
from tests.handoff.pushes import (
    LATER,
    LOAD,
    answers,
    commit,
    completed,
    granted,
    grown,
    land,
    reasons,
    started,
    write,
    writing,
)
from tests.handoff.sides import CHAIN, D2, OFFER, REBORN, REF, D, P, Side, acquaint, side
from tests.handoff.toy import ROOTS

pytestmark = pytest.mark.usefixtures("all_acquainted")


# ------------------------------------------------------------------------------------ right KV or none


def test_attack_1_the_grant_comes_after_the_prompt(p: Side, d: Side) -> None:
    started(p)
    assert grown(p, 5) == grown(p, 6) == completed(p, 9) == []  # nothing is written before the grant
    assert granted(p, d) == [write(0, (5, 17, 1), (6, 3, 1), (9, 8, 1))]
    p.outbox.clear()
    assert land(p, 0) == []
    assert p.bodies() == [commit()]
    assert p.hand_over(d) == [ev.Loaded(LOAD, 10, commit())]
    assert d.hand_over(p) == [ev.FreeBlocks((5, 6, 9))]
    assert (p.node.next_deadline(), d.node.next_deadline()) == (None, None)


def test_attack_2_the_grant_comes_before_the_prompt(p: Side, d: Side) -> None:
    assert granted(p, d) == []  # the source knows of no such prompt yet, and says nothing
    assert d.node.grants.granted() == [17, 3, 8]
    started(p)
    p.hand_over(d)  # it lives: now the blocks are named
    assert d.hand_over(p) == []
    assert grown(p, 5) == [write(0, (5, 17, 1))]
    assert land(p, 0) == []
    assert grown(p, 6) == [write(1, (6, 3, 1))]
    assert completed(p, 9) == [write(2, (9, 8, 1))]
    p.outbox.clear()
    assert land(p, 2) == []
    assert p.bodies() == []  # attack 3: chunk 1 is slow; only its own report counts
    assert land(p, 1) == []
    assert p.bodies() == [commit(chunks=3, early_blocks=1)]
    assert p.hand_over(d) == [ev.Loaded(LOAD, 10, commit(chunks=3, early_blocks=1))]


def test_attack_4_one_ranks_commit_twice_is_not_two_ranks(p: Side, d: Side) -> None:
    started(p)
    granted(p, d)
    first, second = commit(ranks=2), commit(ranks=2, rank=1)
    assert d.hears(p, first) == d.hears(p, first) == []
    assert d.hears(p, commit(ranks=2, rank=2)) == []  # there is no such rank
    assert d.hears(p, second) == [ev.Loaded(LOAD, 10, second)]


def test_attack_15_a_lost_commit_is_said_again() -> None:
    p, d = side(P, 100.0, ranks=2), side(D, 7.0)
    acquaint(p, d)
    acquaint(d, p)
    started(p)
    completed(p, 5, 6, 9)
    granted(p, d)
    land(p, 0)
    assert answers(p, Commit) == []  # attack 38: rank 1 has not reported
    land(p, 0, rank=1)
    _, lost = p.take()[-2:]
    d.outbox.clear()
    d.now += 1.0
    d.do(ev.Tick())  # the grant is renewed, and the commits come again
    d.hand_over(p)
    assert p.hand_over(d) == [ev.Loaded(LOAD, 10, commit(ranks=2, rank=1))]
    assert d.do(lost) == []


@pytest.mark.parametrize("stranger", [D2, REBORN, Identity(EngineId("x"), Epoch("1"))])
def test_attack_6_only_the_grantees_word_counts(p: Side, d: Side, stranger: Identity) -> None:
    started(p)
    granted(p, d)
    other = side(stranger, 0.0)
    assert d.hears(other, commit()) == []
    assert d.hears(other, Fenced(number=0, reason=Reason.REVOKED)) == []
    assert d.node.grants.granted() == [17, 3, 8]
    d.do(ev.LoadDropped(LOAD, done=False))
    assert d.hears(other, Fenced(number=0, reason=Reason.REVOKED)) == []
    assert d.node.grants.quarantined() == [17, 3, 8]


@pytest.mark.parametrize("wrong", [{"blocks": 2}, {"digest": "other"}])
def test_attack_7_a_commit_of_something_else_is_no_load(p: Side, d: Side, wrong: dict[str, object]) -> None:
    started(p)
    granted(p, d)
    p.outbox.clear()
    assert reasons(d.hears(p, commit(**wrong))) == [Reason.COMMIT_MISMATCH]
    assert d.node.grants.quarantined() == [17, 3, 8]  # until the fence
    d.hand_over(p)
    assert p.bodies() == [Fenced(number=0, reason=Reason.REVOKED)]
    assert p.hand_over(d) == [ev.FreeBlocks((17, 3, 8))]


@pytest.mark.parametrize(
    "other",
    [TokenChain.of(ROOTS[1], 4, range(10)), TokenChain.of(ROOTS[0], 4, [*range(9), 99])],
    ids=["attacks 69, 72: equal tokens, another salt", "attack 8: another last token"],
)
def test_nothing_is_written_for_another_chain(p: Side, d: Side, other: TokenChain) -> None:
    started(p)
    completed(p, 5, 6, 9)
    d.do(ev.PushWanted(LOAD, REF, other))
    assert d.hand_over(p) == []
    fenced = Fenced(number=0, reason=Reason.CHAIN_MISMATCH)
    assert answers(p, Fenced) == [fenced]
    assert reasons(p.hand_over(d)) == [Reason.CHAIN_MISMATCH]


def test_attack_11_positions_say_what_goes_where(p: Side, d: Side) -> None:
    started(p)
    grown(p, 6)  # neighbours in memory that are none in the prompt
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    d.hand_over(p)
    p.hand_over(d)
    d.do(ev.LoadAllocated(LOAD, (2, 8, 7), 1))  # the first block is here already, in block 2
    assert d.hand_over(p) == []
    assert completed(p, 4, 5) == [write(0, (4, 8, 1), (5, 7, 1))]
    land(p, 0)
    assert p.hand_over(d) == [ev.Loaded(LOAD, 10, commit(blocks=2))]


@pytest.mark.parametrize(
    "spans",
    [((3, 2),), ((3, 2), (4, 1)), ((18, 3),), ((-1, 3),), ((3, 0), (5, 3))],
    ids=["too few", "one twice", "beyond the pool", "before the pool", "empty"],
)
def test_attack_47_blocks_that_are_none_are_never_written(
    p: Side, d: Side, spans: tuple[tuple[int, int], ...]
) -> None:
    started(p)
    completed(p, 5, 6, 9)
    grant = Grant(offer=OFFER, reader=LOAD, number=0, floor=0, chain=CHAIN, first_block=0, spans=spans)
    assert p.hears(d, grant) == []
    assert answers(p, Fenced) == [Fenced(number=0, reason=Reason.BAD_REFERENCE)]


# ----------------------------------------------------------------------------------- no use after free


def test_attack_25_a_fence_waits_for_what_is_in_flight(p: Side, d: Side) -> None:
    writing(p, d)
    assert d.do(ev.LoadDropped(LOAD, done=False)) == []
    assert d.node.grants.quarantined() == [17, 3, 8]
    d.hand_over(p)
    assert p.bodies() == []
    assert completed(p, 9) == []  # nothing more is posted
    assert land(p, 1) == []
    assert p.bodies() == [Fenced(number=0, reason=Reason.REVOKED)]
    assert p.hand_over(d) == [ev.FreeBlocks((17, 3, 8))]


def test_attack_26_the_commit_crosses_the_revoke(p: Side, d: Side) -> None:
    writing(p, d)
    completed(p, 9)
    land(p, 1)
    land(p, 2)
    d.do(ev.LoadDropped(LOAD, done=False))
    revoke = d.take()
    assert p.hand_over(d) == [ev.FreeBlocks((17, 3, 8))]  # it is a fence, and no load
    for event in revoke:
        p.do(event)
    assert p.hand_over(d) == []


def test_attack_27_a_fence_is_asked_for_and_said_again(p: Side, d: Side) -> None:
    writing(p, d)
    d.do(ev.LoadDropped(LOAD, done=False))
    land(p, 1)
    d.outbox.clear()
    revokes = 0
    for _ in range(5):  # each is lost
        d.now += 10.0
        d.do(ev.Tick())
        revokes += len(answers(d, Revoke))
        d.outbox.clear()
    assert revokes == 5
    for _ in range(2):  # the answer is lost once; it is known again although the grant is forgotten
        d.now += 10.0
        d.do(ev.Tick())
        p.outbox.clear()
        d.hand_over(p)
        assert p.bodies() == [Fenced(number=0, reason=Reason.REVOKED)]
    assert p.hand_over(d) == [ev.FreeBlocks((17, 3, 8))]


def test_attack_28_a_revoke_overtakes_its_grant(p: Side, d: Side) -> None:
    started(p)
    completed(p, 5, 6, 9)
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    d.hand_over(p)
    p.hand_over(d)
    d.do(ev.LoadAllocated(LOAD, (17, 3, 8), 0))
    late = d.take()
    d.do(ev.LoadDropped(LOAD, done=False))
    d.hand_over(p)
    assert p.hand_over(d) == [ev.FreeBlocks((17, 3, 8))]
    for event in late * 2:  # the destination's blocks are another request's by now
        assert p.do(event) == []
    assert answers(p, Fenced) == [Fenced(number=0, reason=Reason.REVOKED)] * 2


def test_attack_29_a_grant_that_comes_again_after_the_commit(p: Side, d: Side) -> None:
    started(p)
    completed(p, 5, 6, 9)
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    d.hand_over(p)
    p.hand_over(d)
    d.do(ev.LoadAllocated(LOAD, (17, 3, 8), 0))
    [grant] = d.take()
    p.do(grant)
    land(p, 0)
    assert p.do(grant) == []
    assert answers(p, Commit) == [commit(), commit()]  # as long as it may have been lost
    p.hand_over(d)
    assert d.hand_over(p) == [ev.FreeBlocks((5, 6, 9))]
    assert p.do(grant) == []
    assert isinstance(p.bodies()[-1], Fenced)


def test_attacks_30_31_50_a_silent_source_keeps_its_blocks_but_gets_no_more(p: Side, d: Side) -> None:
    writing(p, d)
    d.now += 5.0
    assert reasons(d.do(ev.Tick())) == [Reason.PUSH_TIMEOUT]  # the request goes on in other blocks
    assert d.node.grants.quarantined() == [17, 3, 8]
    d.now += 10.0
    assert d.do(ev.Tick()) == [ev.Noted(LOAD, Reason.FENCE_OVERDUE, f"3 blocks, from {P}")]
    d.now += 1000.0
    assert d.do(ev.Tick()) == []
    assert d.node.grants.quarantined() == [17, 3, 8]
    assert reasons(d.do(ev.PushWanted(LATER, REF, CHAIN))) == [Reason.PEER_UNREACHABLE]  # attack 61
    d.outbox = d.outbox[-3:]
    land(p, 1)
    d.do(ev.Tick())
    d.hand_over(p)
    assert ev.FreeBlocks((17, 3, 8)) in p.hand_over(d)


def test_attacks_32_35_a_broken_connection_is_no_fence(p: Side, d: Side) -> None:
    writing(p, d)
    effects = d.do(ev.PeerGone("addr-p"))
    assert reasons(effects) == [Reason.PEER_LOST]
    assert not [effect for effect in effects if isinstance(effect, ev.FreeBlocks)]
    assert d.node.grants.quarantined() == [17, 3, 8]
    assert land(p, 1) == []  # it was alive all the time
    d.hand_over(p)
    assert ev.FreeBlocks((17, 3, 8)) in p.hand_over(d)


@pytest.mark.parametrize("proof", ["the system says so", "its engine id lives again"])
def test_attack_33_the_end_of_the_process_is_a_fence(p: Side, d: Side, proof: str) -> None:
    writing(p, d)
    d.do(ev.LoadDropped(LOAD, done=False))
    assert d.hears(side(D2, 0.0), WrongEpoch(wanted=P)) == [
        ev.DisconnectPeer(P)
    ]  # another engine at its address
    assert d.node.grants.quarantined() == [17, 3, 8]
    if proof == "the system says so":
        effects = d.do(ev.PeerDied(P))
    else:
        reborn = Side(side(REBORN, 0.0, address="addr-p").node)
        d.hand_over(reborn)
        assert WrongEpoch(wanted=P) in reborn.bodies()
        effects = reborn.hand_over(d)
    assert ev.FreeBlocks((17, 3, 8)) in effects
    assert d.node.grants.quarantined() == []


def test_attack_37_sources_wait_for_what_takes_from_them(p: Side, d: Side) -> None:
    writing(p, d)
    assert p.do(ev.OfferAbandoned(OFFER, Reason.CLIENT_ABORTED)) == []
    p.now += 1000.0
    assert p.do(ev.Tick()) == [
        ev.Noted(OFFER, Reason.LEASE_LAPSED, f"claim of {D} for {LOAD} was neither renewed nor released")
    ]
    assert p.node.offers.blocks() == [5, 6]
    assert land(p, 1) == [ev.FreeBlocks((5, 6))]
    assert reasons(p.hand_over(d)) == [Reason.CLIENT_ABORTED]


def test_attacks_13_38_an_error_of_one_rank_fences_that_rank_only() -> None:
    p, d = side(P, 100.0, ranks=2), side(D, 7.0)
    acquaint(p, d)
    acquaint(d, p)
    started(p)
    completed(p, 5, 6, 9)
    granted(p, d)
    p.outbox.clear()
    p.do(ev.WriteFailed(ev.WriteKey(D, 0, 0), "connection reset", 0))
    assert p.bodies() == []
    land(p, 0, rank=1)
    assert answers(p, Fenced) == [Fenced(number=0, reason=Reason.TRANSFER_FAILED)]
    assert reasons(p.hand_over(d)) == [Reason.TRANSFER_FAILED]
