"""Rows of `handoff/offers.py`: the source's offers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables import table
from tests.handoff.tables.scene import (
    BLOCK_SIZE,
    BLOCKS,
    CHAIN,
    FOREIGN,
    GRANTED_SPANS,
    LOAD,
    OFFER,
    OTHER_LOAD,
    ROOTS,
    SETTINGS,
    D,
    Kind,
    grant,
)
from tests.handoff.tables.scenes.offers import Offers

row = partial(table.row, "offers")

TAILED = TokenChain.of(ROOTS[0], BLOCK_SIZE, list(range(10)))
"""Its third block is not full."""


# ------------------------------------------------------------------------------------------------ (none)


@row("(none)", "started")
def started(s: Offers) -> ev.Event:
    return s.probe(ev.OfferStarted)


@row("(none)", "offered")
def offered(s: Offers) -> ev.Event:
    return s.probe(ev.Offered)


@row("(none)", "retained")
def retained(s: Offers) -> ev.Event:
    return s.probe(ev.Retained)


@row("(none)", "offered, or retained, not as its chain", event=ev.Offered(OFFER, CHAIN, BLOCKS[1:]))
@row("(none)", "offered, or retained, not as its chain", event=ev.Retained(OFFER, CHAIN, (5,), "fixed"))
@row("(none)", "offered, or retained, not as its chain", event=ev.Retained(OFFER, TAILED, BLOCKS, "fixed"))
def offered_wrongly(s: Offers, event: ev.Event) -> ev.Event:
    return event


@row("(none)", "claim")
def claim_of_nothing(s: Offers) -> ev.Event:
    return s.claim()


@row("(none)", "withdrawn")
def withdrawn_before(s: Offers) -> ev.Event:
    return s.probe(ev.Withdrawn)


@row("(none)", "grown")
def grown_without_start(s: Offers) -> ev.Event:
    return s.probe(ev.OfferGrown)


# ----------------------------------------------------------------------------------------------- GROWING


@row("GROWING", "grown")
def grown(s: Offers) -> ev.Event:
    s.growing()
    return ev.OfferGrown(OFFER, BLOCKS[1:2])


@row("GROWING", "offered")
def completed(s: Offers) -> ev.Event:
    s.growing()
    return ev.Offered(OFFER, CHAIN, BLOCKS[1:])


@row("GROWING", "offered, a grant pins it")
def completed_under_a_grant(s: Offers) -> ev.Event:
    s.growing()
    s.do(s.got(grant(), D))
    return ev.Offered(OFFER, CHAIN, BLOCKS[1:])


@row("GROWING", "grown, or offered, not as its chain", event=ev.OfferGrown(OFFER, (*BLOCKS[1:], 30)))
@row("GROWING", "grown, or offered, not as its chain", event=ev.Offered(OFFER, CHAIN, BLOCKS))
@row("GROWING", "grown, or offered, not as its chain", event=ev.Offered(OFFER, FOREIGN, BLOCKS[1:]))
def grown_wrongly(s: Offers, event: ev.Event) -> ev.Event:
    s.growing()
    return event


@row("GROWING", "claim")
def claim_too_early(s: Offers) -> ev.Event:
    s.growing()
    return s.claim()


@row("GROWING", "abandoned, withdrawn, or release, done", event=ev.OfferAbandoned)
@row("GROWING", "abandoned, withdrawn, or release, done", event=ev.Withdrawn)
@row("GROWING", "abandoned, withdrawn, or release, done", event=msg.Release)
def ended_while_growing(s: Offers, event: Kind) -> ev.Event:
    s.growing()
    return s.probe(event)


@row("GROWING", "the same, a write in flight", event=ev.OfferAbandoned)
@row("GROWING", "the same, a write in flight", event=ev.Withdrawn)
@row("GROWING", "the same, a write in flight", event=msg.Release)
def ended_while_written(s: Offers, event: Kind) -> ev.Event:
    s.growing(written=True)
    return s.probe(event)


# -------------------------------------------------------------------------------------- OPEN and RETAINED


@row("OPEN", "claim, chains share tokens")
def claim(s: Offers) -> ev.Event:
    s.open()
    return s.claim()


@row("OPEN", "claim, no token shared")
def foreign_claim(s: Offers) -> ev.Event:
    s.open()
    return s.claim(chain=FOREIGN)


@row("OPEN", "release, done")
def released_unclaimed(s: Offers) -> ev.Event:
    s.open()
    return s.release(done=True)


@row("OPEN", "withdrawn")
def withdrawn(s: Offers) -> ev.Event:
    s.open()
    return s.probe(ev.Withdrawn)


@row("OPEN", "own lease over")
def expired(s: Offers) -> ev.Event:
    s.open()
    s.wait(SETTINGS.offer_lease_s)
    return ev.Tick()


@row("RETAINED", "claim, chains share tokens")
def claim_of_history(s: Offers) -> ev.Event:
    s.retained()
    return s.claim()


@row("RETAINED", "claim, no token shared")
def foreign_claim_of_history(s: Offers) -> ev.Event:
    s.retained()
    return s.claim(chain=FOREIGN)


@row("RETAINED", "withdrawn")
def history_withdrawn(s: Offers) -> ev.Event:
    s.retained()
    return s.probe(ev.Withdrawn)


@row("RETAINED", "memory short, used least recently")
def given_up(s: Offers) -> ev.Event:
    s.retained()
    s.now += 1.0
    s.do(ev.Retained(OTHER_LOAD, CHAIN, (30, 31, 32), "renewable"))
    return ev.MemoryShort(1)


@row("RETAINED", "memory short, enough others")
def spared(s: Offers) -> ev.Event:
    s.do(ev.Retained(OTHER_LOAD, CHAIN, (30, 31, 32), "renewable"))
    s.now += 1.0
    s.retained()
    # In its place `OTHER_LOAD`'s history is freed: of this one nothing is said.
    return ev.MemoryShort(3)


@row("RETAINED", "own lease or time over", retention="renewable", seconds=SETTINGS.retain_lease_s)
@row("RETAINED", "own lease or time over", retention="fixed", seconds=SETTINGS.retain_fixed_s)
def history_expired(s: Offers, retention: ev.Retention, seconds: float) -> ev.Event:
    s.retained(retention)
    s.wait(seconds)
    return ev.Tick()


# ------------------------------------------------------------------------------------------------ PINNED


@row("PINNED", "claim, chains share tokens", reader=LOAD)
@row("PINNED", "claim, chains share tokens", reader=OTHER_LOAD)
def claimed_again(s: Offers, reader: HandoffKey) -> ev.Event:
    s.pinned()
    return s.claim(reader)


@row("PINNED", "claim, no token shared")
def foreign_claim_beside(s: Offers) -> ev.Event:
    s.pinned()
    return s.claim(OTHER_LOAD, FOREIGN)


@row("PINNED", "release of the last reader, done")
def consumed(s: Offers) -> ev.Event:
    s.pinned()
    return s.release(done=True)


@row("PINNED", "release, done, others pin it")
def consumed_beside_another(s: Offers) -> ev.Event:
    s.pinned()
    s.do(s.claim(OTHER_LOAD))
    return s.release(done=True)


@row("PINNED", "release, not done or retained", retention=None, done=False)
@row("PINNED", "release, not done or retained", retention="renewable", done=True)
@row("PINNED", "release, not done or retained", retention=None, done=False, others=True)
def released(s: Offers, retention: ev.Retention | None, *, done: bool, others: bool = False) -> ev.Event:
    s.pinned(retention)
    if others:
        s.do(s.claim(OTHER_LOAD))
    return s.release(done=done)


@row("PINNED", "release from before the claim")
def released_late(s: Offers) -> ev.Event:
    s.pinned("renewable")
    return s.release(done=True, seq=1)


@row("PINNED", "withdrawn")
def withdrawn_while_read(s: Offers) -> ev.Event:
    s.pinned()
    return s.probe(ev.Withdrawn)


@row("PINNED", "memory short, retained")
def given_up_while_read(s: Offers) -> ev.Event:
    s.pinned("renewable")
    return ev.MemoryShort(1)


@row("PINNED", "memory short, not retained")
def never_given_up(s: Offers) -> ev.Event:
    s.open()
    s.do(s.claim(queued=True))
    return ev.MemoryShort(1)


@row("PINNED", "short for long, all queue", others=False)
@row("PINNED", "short for long, all queue", others=True)
def waits_for_each_other(s: Offers, *, others: bool) -> ev.Event:
    s.open()
    # Pins are renewed once, in time for the shortage to become a long one.
    s.do(s.claim(queued=True))
    s.wait(1.0)
    last = s.short_for_long()
    s.do(s.claim(seq=3, queued=True))
    if others:
        s.do(s.claim(OTHER_LOAD, seq=4, queued=True))
    return last


@row("PINNED", "short for long, all queue by grants")
def pushes_wait_for_each_other(s: Offers) -> ev.Event:
    s.open()
    s.do(s.got(grant(), D))
    last = s.short_for_long()
    s.do(s.got(grant(), D))
    return last


@row("PINNED", "short for long, one does not queue", how="reads")
@row("PINNED", "short for long, one does not queue", how="another reads")
@row("PINNED", "short for long, one does not queue", how="said so before")
@row("PINNED", "short for long, one does not queue", how="is written to")
def somebody_reads(s: Offers, how: str) -> ev.Event:
    s.open()
    last = s.short_for_long()
    if how == "is written to":
        s.acquaint(D)
        s.do(s.got(grant(spans=GRANTED_SPANS), D))
        return last
    s.do(s.claim(queued=how != "reads"))
    if how == "another reads":
        s.do(s.claim(OTHER_LOAD))
    if how == "said so before":
        s.do(s.claim(seq=4))
        s.do(s.claim(seq=3, queued=True))
    return last


@row("PINNED", "memory short, not retained", seconds=SETTINGS.short_s - 0.5)
@row("PINNED", "memory short, not retained", seconds=SETTINGS.short_s + 1.0)
def short_with_a_break(s: Offers, seconds: float) -> ev.Event:
    """Not for long enough, or twice, with nothing said of it for more than a second between."""
    s.open()
    s.do(ev.MemoryShort(1))
    end = s.now + seconds
    while s.now < end:
        s.wait(0.5)
        if seconds < SETTINGS.short_s or s.now < end - 1.0:
            s.do(ev.MemoryShort(1))
    s.do(s.claim(queued=True))
    s.wait(0.1)
    return ev.MemoryShort(1)


@row("PINNED", "fixed time over")
def fixed_time_over(s: Offers) -> ev.Event:
    s.retained("fixed")
    s.wait(SETTINGS.retain_fixed_s - 1.0)
    s.do(s.claim())
    s.wait(1.0)
    return ev.Tick()


@row("PINNED", "last pin's lease over", retention=None)
@row("PINNED", "last pin's lease over", retention="renewable")
def lapsed(s: Offers, retention: ev.Retention | None) -> ev.Event:
    s.pinned(retention)
    s.wait(SETTINGS.claim_lease_s)
    return ev.Tick()


@row("PINNED", "last pin's and own lease over")
def lapsed_and_expired(s: Offers) -> ev.Event:
    s.pinned()
    s.now += SETTINGS.offer_lease_s
    return ev.Tick()


# ----------------------------------------------------------------------------------------------- CLOSING


@row("CLOSING", "claim of a present reader")
def renewed_while_closing(s: Offers) -> ev.Event:
    s.closing()
    return s.claim()


@row("CLOSING", "the same, given up or expired", Reason.OFFER_GIVEN_UP, end=given_up_while_read)
@row(
    "CLOSING",
    "the same, given up or expired",
    Reason.SOURCE_SHORT,
    end=partial(waits_for_each_other, others=False),
)
@row("CLOSING", "the same, given up or expired", Reason.OFFER_EXPIRED, end=fixed_time_over)
def not_renewed(s: Offers, end: Callable[[Offers], ev.Event]) -> ev.Event:
    s.do(end(s))
    return s.claim(seq=9)


@row("CLOSING", "claim of another reader", Reason.OFFER_WITHDRAWN)
def not_admitted(s: Offers) -> ev.Event:
    s.closing()
    return s.claim(OTHER_LOAD)


@row("CLOSING", "last pin released")
def last_released(s: Offers) -> ev.Event:
    s.closing()
    return s.release(done=False)


@row("CLOSING", "last pin's lease over")
def last_lapsed(s: Offers) -> ev.Event:
    s.closing()
    s.wait(SETTINGS.claim_lease_s)
    return ev.Tick()


@row("CLOSING", "last write reported", event=ev.WriteLanded)
@row("CLOSING", "last write reported", event=ev.WriteFailed)
def last_written(s: Offers, event: Kind) -> ev.Event:
    s.growing(written=True)
    s.do(s.probe(ev.Withdrawn))
    return s.probe(event)


@row("CLOSING", "grown, or offered", event=ev.OfferGrown(OFFER, BLOCKS[1:2]))
@row("CLOSING", "grown, or offered", event=ev.Offered(OFFER, CHAIN, BLOCKS[1:]))
def grown_while_closing(s: Offers, event: ev.Event) -> ev.Event:
    s.growing(written=True)
    s.do(s.probe(ev.Withdrawn))
    return event


# ------------------------------------------------------------------------------------------------- ENDED


@row("ENDED", "claim", Reason.OFFER_WITHDRAWN, end=withdrawn_before)
@row("ENDED", "claim", Reason.OFFER_ABANDONED, end=partial(ended_while_growing, event=ev.OfferAbandoned))
@row("ENDED", "claim", Reason.OFFER_CONSUMED, end=consumed)
@row("ENDED", "claim", Reason.OFFER_EXPIRED, end=expired)
@row("ENDED", "claim", Reason.OFFER_GIVEN_UP, end=given_up)
@row("ENDED", "claim", Reason.SOURCE_SHORT, end=pushes_wait_for_each_other)
@row("ENDED", "claim", Reason.OFFER_WITHDRAWN, end=last_released)
def late_claim(s: Offers, end: Callable[[Offers], ev.Event]) -> ev.Event:
    s.do(end(s))
    return s.claim()


@row("ENDED", "grown, offered, or retained", event=ev.OfferGrown)
@row("ENDED", "grown, offered, or retained", event=ev.Offered)
@row("ENDED", "grown, offered, or retained", event=ev.Retained)
def late_blocks(s: Offers, event: Kind) -> ev.Event:
    s.ended()
    return s.probe(event)
