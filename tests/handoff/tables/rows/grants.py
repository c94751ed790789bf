"""Rows of `handoff/grants.py`: the grants that a destination has given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvhandoff.core.ids import EngineId, Epoch, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables import table
from tests.handoff.tables.scene import (
    CHAIN,
    FOREIGN,
    LOAD,
    OFFER,
    OTHER_LOAD,
    P2,
    SETTINGS,
    TARGETS,
    Kind,
    P,
    hello,
    nonce_in,
    welcome,
)
from tests.handoff.tables.scenes.grants import Grants

row = partial(table.row, "grants")

E = Identity(EngineId("e"), Epoch("1"))
"""Another engine."""


# ------------------------------------------------------------------------------------------------ (none)


@row("(none)", "wanted, source is up")
@row("(none)", "wanted, source is up", owes=P)
@row("(none)", "wanted, source is up", owes=P2, overdue=True)
def wanted(s: Grants, owes: Identity | None = None, *, overdue: bool = False) -> ev.Event:
    """Also when it owes a fence that isn't overdue, or another life owes one that is."""
    if owes is None:
        s.acquaint(P)
    else:
        debt(s, owes, overdue=overdue)
        s.number = 1
        if owes is not P:
            s.do(ev.PeerGone("addr-p"))
            s.acquaint(P)
    return s.probe(ev.PushWanted)


def debt(s: Grants, source: Identity, *, overdue: bool) -> None:
    """Blocks have been granted to `source`, and the fence is owed."""
    s.acquaint(source)
    ref = msg.OfferRef(key=OFFER, source=source, control_address="addr-p")
    s.do(ev.PushWanted(OTHER_LOAD, ref, CHAIN))
    s.do(s.progress(source))
    s.do(ev.LoadAllocated(OTHER_LOAD, (30, 31, 32), 0))
    s.do(ev.LoadDropped(OTHER_LOAD, done=False))
    if overdue:
        s.wait(SETTINGS.fence_s)
        s.do(ev.Tick())


@row("(none)", "wanted, no peer yet")
def wanted_of_a_stranger(s: Grants) -> ev.Event:
    return s.probe(ev.PushWanted)


@row("(none)", "wanted, source owes an overdue fence")
def wanted_from_a_debtor(s: Grants) -> ev.Event:
    debt(s, P, overdue=True)
    s.number = 1
    return s.probe(ev.PushWanted)


@row("(none)", "allocated")
def allocated_too_late(s: Grants) -> ev.Event:
    s.queued()
    s.do(s.probe(ev.LoadDropped))
    return s.probe(ev.LoadAllocated)


# --------------------------------------------------------- until blocks, peer and an answer are all there


@row("QUEUED", "allocated")
def allocated(s: Grants) -> ev.Event:
    s.queued()
    return s.probe(ev.LoadAllocated)


@row("QUEUED", "allocated, source up and heard")
def allocated_last(s: Grants) -> ev.Event:
    s.queued()
    s.do(s.progress())
    return s.probe(ev.LoadAllocated)


@row("QUEUED", "progress")
@row("GRANTED", "progress")
def progress(s: Grants, at: str) -> ev.Event:
    s.arrive(at)
    return s.progress()


@row("ALLOCATED", "progress, source is up")
def heard_last(s: Grants) -> ev.Event:
    s.allocated()
    return s.progress()


@row("ALLOCATED", "progress, no peer yet")
def heard_of_a_stranger(s: Grants) -> ev.Event:
    s.do(s.probe(ev.PushWanted))
    s.do(s.probe(ev.LoadAllocated))
    return s.progress()


@row("QUEUED", "source is up")
@row("ALLOCATED", "source is up, not heard")
@row("ALLOCATED", "source is up, and heard", heard=True)
def peer_comes_up(s: Grants, at: str, *, heard: bool = False) -> ev.Event:
    awaited(s, at)
    if heard:
        s.do(s.progress())
    return ev.PeerConnected(P, None)


def awaited(s: Grants, at: str, *, life: Identity = P) -> None:
    """In this state, with a handshake under way in which `life` has said welcome."""
    nonce = nonce_in(s.do(s.probe(ev.PushWanted)))
    if at == "ALLOCATED":
        s.do(s.probe(ev.LoadAllocated))
    s.do(s.got(welcome(nonce), life))


@row("QUEUED", "another life is up there")
@row("ALLOCATED", "another life is up there")
def another_life(s: Grants, at: str) -> ev.Event:
    awaited(s, at, life=P2)
    return ev.PeerConnected(P2, None)


@row("QUEUED", "source unusable", Reason.HANDSHAKE_REFUSED, how="data plane")
@row("QUEUED", "source unusable", Reason.HANDSHAKE_REFUSED, how="refuses")
@row("QUEUED", "source unusable", Reason.HANDSHAKE_REFUSED, how="differs")
@row("QUEUED", "source unusable", Reason.PEER_UNREACHABLE, how="silent")
@row("ALLOCATED", "source unusable", Reason.HANDSHAKE_REFUSED, how="data plane")
@row("ALLOCATED", "source unusable", Reason.HANDSHAKE_REFUSED, how="refuses")
@row("ALLOCATED", "source unusable", Reason.HANDSHAKE_REFUSED, how="differs")
@row("ALLOCATED", "source unusable", Reason.PEER_UNREACHABLE, how="silent")
def unusable(s: Grants, at: str, how: str) -> ev.Event:
    nonce = nonce_in(s.do(s.probe(ev.PushWanted)))
    if at == "ALLOCATED":
        s.do(s.probe(ev.LoadAllocated))
    match how:
        case "silent":
            s.wait(SETTINGS.handshake_s)
            return ev.Tick()
        case "refuses":
            return s.got(msg.Refused(detail="no", nonce=nonce), P)
        case "differs":
            return s.got(welcome(nonce, model_fingerprint="another"), P)
    s.do(s.got(welcome(nonce), P))
    return ev.PeerConnected(P, "no route")


@row("QUEUED", "allocated, the wrong number", blocks=TARGETS[:2])
@row("QUEUED", "allocated, the wrong number", blocks=(*TARGETS, 23))
def allocated_wrongly(s: Grants, blocks: tuple[int, ...]) -> ev.Event:
    """A grant stands for the whole prompt, unlike a read."""
    s.arrive("QUEUED")
    return ev.LoadAllocated(LOAD, blocks, 0)


@row("QUEUED", "no blocks in time")
def queue_timeout(s: Grants) -> ev.Event:
    s.queued()
    end = s.now + SETTINGS.queue_s
    while s.now < end:  # the source lives all the while
        s.do(s.progress())
        s.wait(min(SETTINGS.progress_s - 1.0, end - s.now))
    return ev.Tick()


# ------------------------------------------------------------------------------------- in whatever state


@row("QUEUED", "renewal due")
@row("ALLOCATED", "renewal due")
@row("GRANTED", "renewal due")
def renewal(s: Grants, at: str) -> ev.Event:
    s.arrive(at)
    s.until(s.node.grants.next_deadline() or 0.0)
    return ev.Tick()


@row("QUEUED", "dropped")
@row("ALLOCATED", "dropped")
@row("GRANTED", "dropped")
def dropped(s: Grants, at: str) -> ev.Event:
    s.arrive(at)
    return s.probe(ev.LoadDropped)


@row("QUEUED", "fenced", Reason.OFFER_EXPIRED)
@row("ALLOCATED", "fenced", Reason.OFFER_EXPIRED)
@row("GRANTED", "fenced", Reason.OFFER_EXPIRED)
def fenced(s: Grants, at: str) -> ev.Event:
    s.arrive(at)
    return s.probe(msg.Fenced)


@row("QUEUED", "no sign of life in time")
@row("ALLOCATED", "no sign of life in time")
@row("QUEUED", "no sign of life in time", answered=True)
@row("GRANTED", "no sign of life in time", answered=True)
def push_timeout(s: Grants, at: str, *, answered: bool = False) -> ev.Event:
    s.arrive(at)
    if answered:
        s.do(s.progress())
    s.wait(SETTINGS.progress_s if answered else SETTINGS.rendezvous_s)
    return ev.Tick()


GONE: tuple[tuple[Kind, Reason], ...] = (
    (ev.PeerGone, Reason.PEER_LOST),
    (msg.WrongEpoch, Reason.EPOCH_CHANGED),
)


def each_loss(arrange: Callable[..., ev.Event]) -> Callable[..., ev.Event]:
    for at in ("QUEUED", "ALLOCATED", "GRANTED"):
        for event, why in GONE:
            row(at, "source gone, it seems", why, event=event)(arrange)
    return arrange


@each_loss
def source_gone(s: Grants, event: Kind, at: str) -> ev.Event:
    """Its connection broke, or an engine of another name answers at its address."""
    s.arrive(at)
    return s.probe(event) if event is ev.PeerGone else s.got(msg.WrongEpoch(wanted=P), E, "addr-p")


def each_end(arrange: Callable[..., ev.Event]) -> Callable[..., ev.Event]:
    for at in ("QUEUED", "ALLOCATED", "GRANTED", "QUARANTINED"):
        for event in (ev.PeerDied, msg.WrongEpoch):
            row(at, "source's processes have ended", event=event)(arrange)
    return arrange


@each_end
def source_died(s: Grants, event: Kind, at: str) -> ev.Event:
    s.arrive(at)
    return s.probe(event)


# ----------------------------------------------------------------------------------------------- commits


@row("GRANTED", "commit, ranks are missing", again=False)
@row("GRANTED", "commit, ranks are missing", again=True)
def first_commit(s: Grants, *, again: bool) -> ev.Event:
    s.granted()
    if again:
        s.do(s.commit(ranks=2))
    return s.commit(ranks=2)


@row("GRANTED", "commit of the last rank", ranks=1)
@row("GRANTED", "commit of the last rank", ranks=2)
def last_commit(s: Grants, ranks: int) -> ev.Event:
    s.granted()
    if ranks == 2:
        s.do(s.commit(ranks=2, rank=1))
    return s.commit(ranks=ranks)


@row("GRANTED", "commit of other content", blocks=2)
@row("GRANTED", "commit of other content", digest=FOREIGN.digest())
def mismatch(s: Grants, **other: Any) -> ev.Event:
    s.granted()
    return s.commit(**other)


@row("GRANTED", "commit of no rank, or of another sender", rank=1)
@row("GRANTED", "commit of no rank, or of another sender", rank=-1)
@row("GRANTED", "commit of no rank, or of another sender", sender=P2)
def nobodys_commit(s: Grants, rank: int = 0, sender: Identity = P) -> ev.Event:
    s.granted()
    event = s.commit(rank=rank)
    assert isinstance(event, ev.Received)
    return s.got(event.envelope.body, sender)


# ------------------------------------------------------------------------------------------- QUARANTINED


@row("QUARANTINED", "retry due")
def revoked_again(s: Grants) -> ev.Event:
    s.quarantined()
    s.until(s.node.grants.next_deadline() or 0.0)
    return ev.Tick()


@row("QUARANTINED", "fence overdue")
def overdue(s: Grants) -> ev.Event:
    s.quarantined()
    s.wait(SETTINGS.fence_s)
    return ev.Tick()


@row("QUARANTINED", "fenced")
def fenced_at_last(s: Grants) -> ev.Event:
    s.quarantined()
    return s.probe(msg.Fenced)


@row("QUARANTINED", "commit of the last rank")
def committed_after_all(s: Grants) -> ev.Event:
    s.quarantined()
    return s.commit()


@row("QUARANTINED", "commit, ranks are missing")
def committed_in_part(s: Grants) -> ev.Event:
    s.quarantined()
    return s.commit(ranks=2)


@row("QUARANTINED", "hello of the source's next life, elsewhere")
def source_moved(s: Grants) -> ev.Event:
    s.quarantined()
    return s.got(hello(nonce=1), P2, "addr-new")


@row("QUARANTINED", "hello of another, or from the known place", sender=P, address="addr-new")
@row("QUARANTINED", "hello of another, or from the known place", sender=E, address="addr-new")
@row("QUARANTINED", "hello of another, or from the known place", sender=P2, address="addr-p")
def somebody_else(s: Grants, sender: Identity, address: str) -> ev.Event:
    s.quarantined()
    return s.got(hello(nonce=1), sender, address)
