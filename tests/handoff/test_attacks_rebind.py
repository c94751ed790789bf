"""Attacks on re-bound pushes, and on their waits, by their numbers in docs/protocol.md."""

from __future__ import annotations

import pytest

from kvhandoff.core.ids import HandoffId, HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import Fenced, Grant, Progress, Release, Revoke
from tests.handoff.pushes import (
    GRANTED,
    LATER,
    LOAD,
    answers,
    commit,
    completed,
    granted,
    land,
    reasons,
    started,
    write,
    writing,
)
from tests.handoff.sides import CHAIN, D2, OFFER, REF, D, P, Side, hello, side

pytestmark = pytest.mark.usefixtures("all_acquainted")


# ------------------------------------------------------------------------------------------ re-binding


def test_attack_40_another_destination_while_a_write_is_in_flight(p: Side, d: Side, d2: Side) -> None:
    writing(p, d)
    assert granted(p, d2, LATER, (1, 4, 2)) == [
        write(0, (5, 1, 1), (6, 4, 1), to=D2)
    ]  # nothing is computed again
    assert answers(p, Fenced) == []
    late = Grant(offer=OFFER, reader=LOAD, number=0, floor=0, chain=CHAIN, first_block=0, spans=GRANTED)
    assert p.hears(d, late) == []  # attack 41
    assert completed(p, 9) == [write(1, (9, 2, 1), to=D2)]
    p.outbox.clear()
    assert land(p, 1) == []
    assert p.bodies() == [Fenced(number=0, reason=Reason.REBOUND)]
    assert reasons(p.hand_over(d)) == [Reason.REBOUND]
    assert d.node.grants.quarantined() == []
    land(p, 0, to=D2)
    land(p, 1, to=D2)
    [loaded] = p.hand_over(d2)
    assert isinstance(loaded, ev.Loaded)
    assert ev.FreeBlocks((5, 6, 9)) in d2.hand_over(p)


def test_attacks_41_64_an_earlier_attempt_comes_too_late(p: Side, d: Side, d2: Side) -> None:
    started(p)
    granted(p, d2, LATER, (1, 4, 2))
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    p.outbox.clear()
    d.hand_over(p)
    assert p.bodies() == [Fenced(number=0, reason=Reason.REBOUND)]
    assert reasons(p.hand_over(d)) == [Reason.REBOUND]


def test_attacks_5_65_two_attempts_at_one_destination(p: Side, d: Side) -> None:
    writing(p, d)
    d.do(ev.LoadDropped(LOAD, done=False))
    d.outbox.clear()  # the revoke is lost
    assert granted(p, d, LATER, (1, 4, 2)) == [write(0, (5, 1, 1), (6, 4, 1), number=1)]
    assert (d.node.grants.granted(), d.node.grants.quarantined()) == ([1, 4, 2], [17, 3, 8])
    assert d.hears(p, commit()) == [ev.FreeBlocks((17, 3, 8))]  # of the former: it never loads the latter
    assert d.node.grants.granted() == [1, 4, 2]


def test_attack_24_numbers_are_of_one_life(p: Side, d: Side, d2: Side) -> None:
    """Both destinations' grants have the number 0."""
    writing(p, d)
    granted(p, d2, LATER, (1, 4, 2))
    completed(p, 9)
    p.hears(d2, Revoke(offer=OFFER, reader=LATER, number=0, floor=0))
    p.outbox.clear()
    land(p, 1)
    assert [(send.target, send.body) for send in p.outbox] == [(D, Fenced(number=0, reason=Reason.REBOUND))]


def test_attack_60_each_attempt_ends_the_one_before(p: Side, d: Side, d2: Side) -> None:
    started(p)
    for attempt in range(6):
        granted(p, (d, d2)[attempt % 2], HandoffKey(HandoffId("h"), attempt))
        assert len(p.node.writes) == 1
        p.outbox.clear()
    assert len(p.node.offers.get(OFFER).pins) == 1  # type: ignore[union-attr]


# ---------------------------------------------------------------------------- no wait without a deadline


def test_attack_49_a_long_queue_at_a_live_source_is_waited_for(p: Side, d: Side) -> None:
    started(p)
    granted(p, d)
    for _ in range(100):
        p.hand_over(d)
        due = d.node.next_deadline()
        assert due is not None
        p.now += due - d.now
        d.now = due
        assert d.do(ev.Tick()) == p.do(ev.Tick()) == []
        d.hand_over(p)
    assert d.now > 100.0
    d.outbox.clear()
    p.outbox.clear()
    d.now += 5.0  # and now it is silent
    assert reasons(d.do(ev.Tick())) == [Reason.PUSH_TIMEOUT]


def test_attack_48_no_grant_comes(p: Side) -> None:
    started(p)
    p.now += 1000.0
    assert p.do(ev.Tick()) == []  # the engine still computes it
    completed(p, 5, 6, 9)
    p.now += 10.0
    expired = ev.Noted(OFFER, Reason.OFFER_EXPIRED, "3 blocks, no claim within the lease")
    assert p.do(ev.Tick()) == [expired, ev.FreeBlocks((5, 6, 9))]


def test_attack_49_no_prompt_comes(p: Side, d: Side) -> None:
    granted(p, d)
    p.now += 5.0
    p.do(ev.Tick())
    assert answers(p, Fenced) == [Fenced(number=0, reason=Reason.OFFER_UNKNOWN)]
    assert len(p.node.writes) == 0
    d.now += 5.0
    assert reasons(d.do(ev.Tick())) == [Reason.PUSH_TIMEOUT]
    assert d.node.grants.quarantined() == []  # the blocks were never named


def test_attack_39_an_abort_before_the_blocks_are_named_owes_nothing(p: Side, d: Side) -> None:
    started(p)
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    d.do(ev.LoadAllocated(LOAD, (17, 3, 8), 0))
    assert d.do(ev.LoadDropped(LOAD, done=False)) == [ev.FreeBlocks((17, 3, 8))]
    assert isinstance(d.bodies()[-1], Release)
    d.hand_over(p)
    assert len(p.node.writes) == 0
    assert d.node.next_deadline() is None


@pytest.mark.parametrize("known", [True, False])
def test_a_grant_to_a_life_that_never_answers_names_nothing(d: Side, known: bool) -> None:
    """Nobody would ever fence it."""
    d = d if known else side(D, 7.0)
    d.do(ev.PeerDied(P))
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    d.do(ev.LoadAllocated(LOAD, (17, 3, 8), 0))
    assert [grant.spans for grant in answers(d, Grant)] == [None, None]  # type: ignore[attr-defined]
    d.now += 5.0
    effects = d.do(ev.Tick())
    assert reasons(effects) == [Reason.PEER_UNREACHABLE]
    assert ev.FreeBlocks((17, 3, 8)) in effects


def test_another_layout_is_never_written_to() -> None:
    d = side(D, 7.0)
    stranger = Side(side(P, 100.0).node)
    stranger.node.peers._hello = hello(model_fingerprint="other")
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    d.do(ev.LoadAllocated(LOAD, (17, 3, 8), 0))
    d.hand_over(stranger)
    assert reasons(stranger.hand_over(d)) == [Reason.HANDSHAKE_REFUSED]
    assert not [body for body in d.bodies() if isinstance(body, Grant) and body.spans is not None]


def test_progress_is_of_the_grant_it_names(p: Side, d: Side) -> None:
    started(p)
    granted(p, d)
    p.outbox.clear()
    d.hears(p, Progress(number=7, lease_s=6.0, computed_blocks=3, written_blocks=3))
    d.now += 5.0
    assert reasons(d.do(ev.Tick())) == [Reason.PUSH_TIMEOUT]
