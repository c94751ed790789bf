"""Rows of `handoff/reads.py`: a read's transfer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Span
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables import table
from tests.handoff.tables.scene import (
    CHAIN,
    LOAD,
    SETTINGS,
    TARGETS,
    Kind,
    P,
    welcome,
)
from tests.handoff.tables.scenes.reads import HISTORY, Transfers

row = partial(table.row, "reads.transfer")


# ------------------------------------------------------------------------------- transfer: to the posting


@row("NO_BLOCKS", "allocated, no peer yet")
def allocated_without_a_peer(s: Transfers) -> ev.Event:
    s.waiting()
    return s.probe(ev.LoadAllocated)


@row("NO_BLOCKS", "allocated, nothing to gain", Reason.ALREADY_CACHED, min_tokens=1)
@row("NO_BLOCKS", "allocated, nothing to gain", Reason.RETURN_TOO_SHORT, min_tokens=8)
def allocated_in_vain(s: Transfers, min_tokens: int) -> ev.Event:
    s.asked(HISTORY, min_tokens=min_tokens)
    s.do(s.granted(matched=4 if min_tokens == 1 else 8))
    return ev.LoadAllocated(LOAD, TARGETS, 1)


@row("NO_BLOCKS", "allocated, nothing to read yet", blocks=3, cached=0)
@row("NO_BLOCKS", "allocated, nothing to read yet", blocks=2, cached=1)
def allocated(s: Transfers, blocks: int, cached: int) -> ev.Event:
    s.asked(HISTORY)
    return ev.LoadAllocated(LOAD, TARGETS[:blocks], cached)


@row("NO_BLOCKS", "allocated, a read may begin", granted=False, blocks=3)
@row("NO_BLOCKS", "allocated, a read may begin", granted=True, blocks=3)
@row("NO_BLOCKS", "allocated, a read may begin", granted=False, blocks=1)
@row("NO_BLOCKS", "allocated, a read may begin", granted=True, blocks=1)
def allocated_and_posted(s: Transfers, *, granted: bool, blocks: int) -> ev.Event:
    s.asked(HISTORY if granted else None)
    if granted:
        s.do(s.granted())
    return ev.LoadAllocated(LOAD, TARGETS[:blocks], 0)


@row("NO_BLOCKS", "allocated, too many or none to fill", blocks=(20, 21, 22, 23), cached=0)
@row("NO_BLOCKS", "allocated, too many or none to fill", blocks=(), cached=0)
@row("NO_BLOCKS", "allocated, too many or none to fill", blocks=(20, 21), cached=2)
@row("NO_BLOCKS", "allocated, too many or none to fill", blocks=(20, 21, 22), cached=3)
@row("NO_BLOCKS", "allocated, too many or none to fill", blocks=(20, 21), cached=-1)
def allocated_wrongly(s: Transfers, blocks: tuple[int, ...], cached: int) -> ev.Event:
    s.arrive("NO_BLOCKS")
    return ev.LoadAllocated(LOAD, blocks, cached)


@row("NO_BLOCKS", "no blocks in time")
def queue_timeout(s: Transfers) -> ev.Event:
    s.asked()
    end = s.now + SETTINGS.queue_s
    while s.now < end:  # renewed all the while
        s.do(s.granted())
        s.wait(min(SETTINGS.claim_lease_s / 2, end - s.now))
    return ev.Tick()


@row("READY", "peer is up, and a read may begin")
def peer_comes_up_for_a_transfer(s: Transfers) -> ev.Event:
    nonce = s.waiting()
    s.do(s.probe(ev.LoadAllocated))
    s.do(s.got(welcome(nonce), P))
    return ev.PeerConnected(P, None)


@row("READY", "granted", debt=False)
@row("READY", "granted", debt=False, blocks=2)
@row("READY", "granted", debt=True)
def granted_for_a_transfer(s: Transfers, *, debt: bool, blocks: int = 3) -> ev.Event:
    """With a fence owed nothing is posted before the grant, whatever was described."""
    if debt:
        s.debt(overdue=False)
        s.do(s.probe(ev.ReadWanted))
        s.do(s.probe(ev.LoadAllocated))
    else:
        s.ready(blocks=blocks)
    return s.granted()


@row("READY", "granted, nothing gained", blocks=3)
@row("READY", "granted, nothing gained", blocks=2)
def nothing_gained(s: Transfers, blocks: int) -> ev.Event:
    s.ready(cached=1, blocks=blocks)
    return s.granted(matched=4)


@row("READY", "granted, little gained", matched=4, blocks=3)
@row("READY", "granted, little gained", matched=12, blocks=1)
def little_gained(s: Transfers, matched: int, blocks: int) -> ev.Event:
    """Little matches, or little of what matches has blocks."""
    s.ready(min_tokens=8, blocks=blocks)
    return s.granted(matched)


@row("READY", "granted, blocks that are none", spans=((98, 3),))
@row("READY", "granted, blocks that are none", spans=((-1, 3),))
@row("READY", "granted, blocks that are none", spans=((5, 2),))
def blocks_that_are_none(s: Transfers, spans: tuple[Span, ...]) -> ev.Event:
    s.ready()
    return s.granted(spans=spans)


@row("READY", "granted, source owes an overdue fence")
def granted_by_a_debtor(s: Transfers) -> ev.Event:
    s.debt(overdue=False)
    s.wait(SETTINGS.fence_s - 1.0)
    s.do(ev.ReadWanted(LOAD, HISTORY, CHAIN))
    s.do(s.probe(ev.LoadAllocated))
    s.wait(1.0)
    s.do(ev.Tick())
    return s.granted()


# ------------------------------------------------------------------------- transfer: POSTED and thereafter


@row("POSTED", "landed, claim not granted yet")
def landed(s: Transfers) -> ev.Event:
    s.posted()
    return s.probe(ev.ReadLanded)


@row("POSTED", "landed while trusted", matched=12)
@row("POSTED", "landed while trusted", matched=8)
@row("POSTED", "landed while trusted", matched=12, blocks=2)
def landed_in_time(s: Transfers, matched: int, blocks: int = 3) -> ev.Event:
    s.posted(blocks=blocks)
    s.do(s.granted(matched))
    return s.probe(ev.ReadLanded)


@row("POSTED", "landed too late")
def landed_late(s: Transfers) -> ev.Event:
    """The tick that ends the trust is later still."""
    s.posted()
    s.do(s.granted())
    s.now += SETTINGS.claim_lease_s
    return s.probe(ev.ReadLanded)


@row("POSTED", "granted")
def granted_while_reading(s: Transfers) -> ev.Event:
    s.posted()
    return s.granted()


@row("POSTED", "failed")
def failed(s: Transfers) -> ev.Event:
    s.posted()
    return s.probe(ev.ReadFailed)


@row("POSTED", "deadline")
def read_timeout(s: Transfers) -> ev.Event:
    s.posted()
    end = s.now + SETTINGS.read_s
    while s.now < end:
        s.do(s.granted())
        s.wait(min(SETTINGS.claim_lease_s / 2, end - s.now))
    return ev.Tick()


CLAIM_FAILS: tuple[tuple[Kind, Reason], ...] = (
    (msg.ClaimDeclined, Reason.OFFER_EXPIRED),
    (ev.PeerGone, Reason.PEER_LOST),
    (ev.PeerDied, Reason.EPOCH_CHANGED),
    (ev.ReadFailed, Reason.PEER_LOST),  # another transfer, the last in flight
)


def each_failure(arrange: Callable[..., ev.Event]) -> Callable[..., ev.Event]:
    for at in ("NO_BLOCKS", "READY", "POSTED", "LANDED"):
        for event, why in CLAIM_FAILS:
            said = "declined" if event is msg.ClaimDeclined else "the source is gone"
            if (at, event) != ("POSTED", ev.ReadFailed):
                row(at, said, why, event=event)(arrange)
    return arrange


@each_failure
def claim_fails(s: Transfers, event: Kind, at: str) -> ev.Event:
    s.arrive(at)
    return s.probe(event)


@row("NO_BLOCKS", "dropped")
@row("READY", "dropped")
@row("POSTED", "dropped")
@row("LANDED", "dropped")
def dropped_by_the_engine(s: Transfers, at: str) -> ev.Event:
    s.arrive(at)
    return s.probe(ev.LoadDropped)


@row("NO_BLOCKS", "claim's deadline, or trust over", Reason.CLAIM_TIMEOUT)
@row("NO_BLOCKS", "claim's deadline, or trust over", Reason.LEASE_LAPSED, granted=True)
@row("READY", "claim's deadline", Reason.CLAIM_TIMEOUT)
@row("POSTED", "claim's deadline, or trust over", Reason.CLAIM_TIMEOUT)
@row("POSTED", "claim's deadline, or trust over", Reason.LEASE_LAPSED, granted=True)
@row("LANDED", "claim's deadline", Reason.CLAIM_TIMEOUT)
def claim_runs_out(s: Transfers, at: str, *, granted: bool = False) -> ev.Event:
    s.arrive(at)
    if granted:
        s.do(s.granted())
    s.wait(SETTINGS.claim_lease_s * (1 - SETTINGS.margin) if granted else SETTINGS.claim_s)
    return ev.Tick()


@row("LANDED", "granted", blocks=3)
@row("LANDED", "granted", blocks=2)
def granted_at_last(s: Transfers, blocks: int) -> ev.Event:
    s.landed(blocks=blocks)
    return s.granted()


@row("LANDED", "granted, nothing gained")
def granted_what_is_cached(s: Transfers) -> ev.Event:
    s.landed(cached=1)
    return s.granted(matched=4)


@row("QUARANTINED", "landed, or failed", event=ev.ReadLanded)
@row("QUARANTINED", "landed, or failed", event=ev.ReadFailed)
def fenced(s: Transfers, event: Kind) -> ev.Event:
    s.quarantined()
    return s.probe(event)


@row("QUARANTINED", "fence overdue")
def overdue(s: Transfers) -> ev.Event:
    s.quarantined()
    s.wait(SETTINGS.fence_s)
    return ev.Tick()


@row("(none)", "allocated")
def allocated_too_late(s: Transfers) -> ev.Event:
    s.ended()
    return s.probe(ev.LoadAllocated)
