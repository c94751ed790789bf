"""A read whose destination has blocks for a part of the prompt only: what matches beyond them is left out."""

from __future__ import annotations

import pytest

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import ClaimGranted, HistoryRef, OfferRef, Release
from tests.handoff.pushes import LOAD
from tests.handoff.sides import CHAIN, OFFER, READ, REF, SPANS, P, Side, acquaint, descriptor, offered

HISTORY = HistoryRef(key=OFFER, source=P, control_address="addr-p", n_tokens=8)
"""Of the chain's 10 tokens in 3 blocks, the last of which is partial."""


def wanted(p: Side, d: Side, offer: OfferRef) -> None:
    acquaint(p, d)
    offered(p)
    assert d.do(ev.ReadWanted(READ, offer, CHAIN)) == []


def granted(p: Side, d: Side, matched: int) -> list[ev.Effect]:
    """The claim's answer, as a source would give it whose offer shares so many tokens."""
    seq = d.node.reads._reads[READ].seq
    answer = ClaimGranted(offer=OFFER, reader=READ, seq=seq, matched_tokens=matched, spans=SPANS, lease_s=6.0)
    d.outbox.clear()
    return d.hears(p, answer)


@pytest.mark.parametrize(
    ("blocks", "cached", "copies", "tokens"),
    [
        ((1, 2), 0, ((5, 1, 2),), 8),
        ((1, 2), 1, ((6, 2, 1),), 8),
        ((1,), 0, ((5, 1, 1),), 4),
        ((1, 2, 3), 0, ((5, 1, 2), (9, 3, 1)), 10),
    ],
)
def test_as_much_is_read_as_there_are_blocks(
    p: Side,
    d: Side,
    blocks: tuple[int, ...],
    cached: int,
    copies: tuple[tuple[int, int, int], ...],
    tokens: int,
) -> None:
    wanted(p, d, HISTORY)
    assert d.do(ev.LoadAllocated(READ, blocks, cached)) == []
    assert d.node.reads.loading() == list(blocks[cached:])
    d.hand_over(p)
    assert p.hand_over(d) == [ev.PostRead(READ, P, copies)]
    assert d.do(ev.ReadLanded(READ)) == [ev.Loaded(READ, tokens)]
    assert d.node.reads.loading() == []
    assert d.bodies() == [Release(offer=OFFER, reader=READ, seq=2, done=True)]


def test_the_read_may_begin_before_the_grant(p: Side, d: Side) -> None:
    wanted(p, d, descriptor())
    assert d.do(ev.LoadAllocated(READ, (1, 2), 0)) == [ev.PostRead(READ, P, ((5, 1, 2),))]
    assert d.do(ev.ReadLanded(READ)) == []
    assert granted(p, d, 10) == [ev.Loaded(READ, 8)]


def test_less_may_match_than_there_are_blocks_for(p: Side, d: Side) -> None:
    wanted(p, d, HISTORY)
    assert d.do(ev.LoadAllocated(READ, (1, 2), 0)) == []
    assert granted(p, d, 4) == [ev.PostRead(READ, P, ((5, 1, 1),))]
    assert d.do(ev.ReadLanded(READ)) == [ev.Loaded(READ, 4)]


def test_less_may_match_than_was_read(p: Side, d: Side) -> None:
    wanted(p, d, descriptor())
    assert d.do(ev.LoadAllocated(READ, (1, 2), 0)) == [ev.PostRead(READ, P, ((5, 1, 2),))]
    assert granted(p, d, 4) == []
    assert d.do(ev.ReadLanded(READ)) == [ev.Loaded(READ, 4)]


def test_what_matches_without_blocks_is_no_gain(p: Side, d: Side) -> None:
    acquaint(p, d)
    assert d.do(ev.ReadWanted(READ, HISTORY, CHAIN, 5)) == []
    assert d.do(ev.LoadAllocated(READ, (1,), 0)) == []
    detail = "4 of 10 tokens to be had, 4 more than are cached here"
    missed = ev.Missed(READ, Reason.RETURN_TOO_SHORT, detail)
    assert granted(p, d, 10) == [missed, ev.FreeBlocks((1,))]


def test_a_read_given_up_waits_for_its_fence(p: Side, d: Side) -> None:
    wanted(p, d, descriptor())
    d.do(ev.LoadAllocated(READ, (1, 2), 1))
    assert d.do(ev.LoadDropped(READ, done=False)) == []
    assert d.node.reads.quarantined() == [2]
    assert d.do(ev.ReadLanded(READ)) == [ev.FreeBlocks((2,))]


@pytest.mark.parametrize(
    ("blocks", "cached", "got"),
    [((1, 2, 3, 4), 0, "4 blocks, 0"), ((1, 2), 2, "2 blocks, 2"), ((), 0, "0 blocks, 0")],
)
def test_too_many_or_none_to_fill_are_refused(
    p: Side, d: Side, blocks: tuple[int, ...], cached: int, got: str
) -> None:
    wanted(p, d, descriptor())
    allowed = "more than are cached, and at most the chain's 3"
    with pytest.raises(ValueError, match=f"^load h#1: got {got} of them cached, allowed are {allowed}$"):
        d.do(ev.LoadAllocated(READ, blocks, cached))
    assert d.node.reads.loading() == []
    assert d.do(ev.LoadAllocated(READ, (1,), 0)) == [ev.PostRead(READ, P, ((5, 1, 1),))]


@pytest.mark.parametrize("blocks", [(1, 2), (1, 2, 3, 4)])
def test_a_push_needs_all_of_them(d: Side, blocks: tuple[int, ...]) -> None:
    d.do(ev.PushWanted(LOAD, REF, CHAIN))
    allowed = "as many as the chain has, 3"
    with pytest.raises(ValueError, match=f"^load h#0: got {len(blocks)} blocks, allowed are {allowed}$"):
        d.do(ev.LoadAllocated(LOAD, blocks, 0))
    assert d.node.grants.granted() == []
