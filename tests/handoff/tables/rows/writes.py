"""Rows of `handoff/writes.py`: the grants that a source was given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import EngineId, Epoch, HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Span
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables import table
from tests.handoff.tables.scene import (
    BLOCKS,
    CHAIN,
    D2,
    FOREIGN,
    GRANTED_SPANS,
    LATER,
    LOAD,
    NUMBER,
    OFFER,
    OTHER_LOAD,
    SETTINGS,
    D,
    Kind,
    grant,
    nonce_in,
    welcome,
)
from tests.handoff.tables.scenes.writes import KEY, Writes

row = partial(table.row, "writes")

E = Identity(EngineId("e"), Epoch("1"))
"""Another destination."""
BUSY = {"in_flight": True}
IDLE = {"in_flight": False}


# ------------------------------------------------------------------------------------------------ (none)


@row("(none)", "grant, over already", Reason.REVOKED, how="revoked")
@row("(none)", "grant, over already", Reason.REVOKED, how="revoked, and a floor that isn't above it")
@row("(none)", "grant, over already", Reason.REVOKED, how="below the floor")
@row("(none)", "grant, over already", Reason.OFFER_WITHDRAWN, how="fenced, and that was lost")
@row("(none)", "grant, over already", Reason.BAD_REFERENCE, how="refused, and that was lost")
def over_already(s: Writes, how: str) -> ev.Event:
    s.do(ev.Offered(OFFER, CHAIN, BLOCKS))
    if how.startswith("revoked"):
        s.do(s.revoke())
    if how in ("below the floor", "revoked, and a floor that isn't above it"):
        floor = NUMBER + 1 if how == "below the floor" else NUMBER
        s.do(s.got(grant(NUMBER + 1, floor=floor, offer=OTHER_LOAD), D))
    if how.startswith("fenced"):
        s.do(s.got(grant(), D))
        s.do(ev.Withdrawn(OFFER))
    if how.startswith("refused"):
        s.do(s.got(grant(first_block=99), D))
    return s.got(grant(), D)


@row("(none)", "grant of an earlier attempt")
def earlier_attempt(s: Writes) -> ev.Event:
    s.do(ev.Offered(OFFER, CHAIN, BLOCKS))
    s.do(s.got(grant(1, reader=LATER), E))
    return s.got(grant(), D)


@row("(none)", "grant, offer has ended", Reason.OFFER_WITHDRAWN)
def offer_has_ended(s: Writes) -> ev.Event:
    s.do(ev.Withdrawn(OFFER))
    return s.got(grant(), D)


@row("(none)", "grant of no chain or position", chain=TokenChain(4, 12, (b"short",), b""))
@row("(none)", "grant of no chain or position", first_block=3)
@row("(none)", "grant of no chain or position", first_block=-1)
def ill_formed(s: Writes, chain: TokenChain = CHAIN, first_block: int = 0) -> ev.Event:
    s.do(ev.Offered(OFFER, CHAIN, BLOCKS))
    return s.got(grant(chain=chain, first_block=first_block), D)


@row("(none)", "grant, offer unknown")
def too_early(s: Writes) -> ev.Event:
    return s.got(grant(), D)


@row("(none)", "grant, offer lives", complete=False)
@row("(none)", "grant, offer lives", complete=True)
def in_time(s: Writes, *, complete: bool) -> ev.Event:
    s.do(ev.Offered(OFFER, CHAIN, BLOCKS) if complete else ev.OfferStarted(OFFER, CHAIN))
    return s.got(grant(), D)


@row("(none)", "grant, chains differ")
def other_chain(s: Writes) -> ev.Event:
    s.do(ev.OfferStarted(OFFER, CHAIN))
    return s.got(grant(chain=FOREIGN, spans=GRANTED_SPANS), D)


@row("(none)", "revoke")
def revoked_before(s: Writes) -> ev.Event:
    return s.revoke()


# ------------------------------------------------------------------------------------------------- EARLY


@row("EARLY", "started, or offered", event=ev.OfferStarted)
@row("EARLY", "started, or offered", event=ev.Offered)
def prompt_comes(s: Writes, event: Kind) -> ev.Event:
    s.early()
    return s.probe(event)


@row("EARLY", "started, chains differ")
def other_prompt_comes(s: Writes) -> ev.Event:
    s.early()
    return ev.OfferStarted(OFFER, FOREIGN)


@row("EARLY", "grant again")
def still_early(s: Writes) -> ev.Event:
    s.early()
    return s.got(grant(spans=GRANTED_SPANS), D)


@row("EARLY", "the offer does not come in time")
def never_started(s: Writes) -> ev.Event:
    s.early()
    s.wait(SETTINGS.rendezvous_s)
    return ev.Tick()


@row("EARLY", "release")
def released_early(s: Writes) -> ev.Event:
    s.early()
    return s.release()


# ----------------------------------------------------------------------------------------------- WRITING


@row("WRITING", "grant again")
def asked_again(s: Writes) -> ev.Event:
    s.writing()
    return s.got(grant(), D)


@row("WRITING", "grant again, a write hangs")
def hanging(s: Writes) -> ev.Event:
    s.writing(in_flight=True)
    for _ in range(31):
        s.wait(SETTINGS.write_s / 30)
        s.do(s.got(grant(spans=GRANTED_SPANS), D))
    return s.got(grant(spans=GRANTED_SPANS), D)


@row("WRITING", "grant names the blocks")
def named(s: Writes) -> ev.Event:
    s.writing()
    return s.got(grant(spans=GRANTED_SPANS), D)


@row("WRITING", "the same, destination is no peer yet")
def named_by_a_stranger(s: Writes) -> ev.Event:
    s.do(ev.Offered(OFFER, CHAIN, BLOCKS))
    s.early()
    return s.got(grant(spans=GRANTED_SPANS), D)


def awaited(s: Writes, spans: tuple[Span, ...] = GRANTED_SPANS) -> int:
    """All is computed and granted, and the destination has been greeted; gives back the hello's nonce."""
    s.do(ev.Offered(OFFER, CHAIN, BLOCKS))
    return nonce_in(s.do(s.got(grant(spans=spans), D)))


@row("WRITING", "destination is up")
def peer_comes_up(s: Writes) -> ev.Event:
    s.do(s.got(welcome(awaited(s)), D))
    return ev.PeerConnected(D, None)


@row("WRITING", "destination is up, but not with these blocks", spans=((20, 2),))
@row("WRITING", "destination is up, but not with these blocks", spans=((98, 3),))
@row("WRITING", "destination is up, but not with these blocks", spans=((20, 2), (21, 1)))
@row("WRITING", "destination is up, but not with these blocks", spans=((-1, 3),))
def blocks_that_are_none(s: Writes, spans: tuple[Span, ...]) -> ev.Event:
    s.do(s.got(welcome(awaited(s, spans)), D))
    return ev.PeerConnected(D, None)


@row("WRITING", "grant that says otherwise", **BUSY, chain=FOREIGN)
@row("WRITING", "grant that says otherwise", **BUSY, spans=((30, 3),))
@row("WRITING", "grant that says otherwise", **IDLE, spans=((30, 3),))
def contradicted(
    s: Writes, *, in_flight: bool, chain: TokenChain = CHAIN, spans: tuple[Span, ...] = GRANTED_SPANS
) -> ev.Event:
    s.writing(in_flight=True)
    if not in_flight:
        s.landed()
    return s.got(grant(chain=chain, spans=spans), D)


@row("WRITING", "grown, or offered", event=ev.OfferGrown(OFFER, BLOCKS[1:2]))
@row("WRITING", "grown, or offered", event=ev.Offered(OFFER, CHAIN, BLOCKS[1:]))
def more_is_computed(s: Writes, event: ev.Event) -> ev.Event:
    s.writing(in_flight=True)
    return event


@row("WRITING", "landed, more is to come", how="on another rank")
@row("WRITING", "landed, more is to come", how="in another chunk")
@row("WRITING", "landed, more is to come", how="to be computed")
def landed(s: Writes, how: str) -> ev.Event:
    s.writing(in_flight=True)
    if how == "on another rank":
        s.do(ev.Offered(OFFER, CHAIN, BLOCKS[1:]))
        s.landed(1)
        return ev.WriteLanded(KEY, rank=1)
    if how == "in another chunk":
        s.do(ev.Offered(OFFER, CHAIN, BLOCKS[1:]))
    s.do(ev.WriteLanded(KEY, rank=0))
    return ev.WriteLanded(KEY, rank=1)


@row("WRITING", "all landed, and the prompt computed")
def all_landed(s: Writes) -> ev.Event:
    s.written()
    s.do(ev.WriteLanded(KEY, rank=1))
    return ev.WriteLanded(KEY, rank=0)


@row("WRITING", "a write failed", Reason.TRANSFER_FAILED, last=True)
@row("WRITING", "a write failed", Reason.TRANSFER_FAILED, last=False)
def failed(s: Writes, *, last: bool) -> ev.Event:
    s.writing(in_flight=True)
    if last:
        s.do(ev.WriteLanded(KEY, rank=1))
    return ev.WriteFailed(KEY, "broken", rank=0)


# ----------------------------------------------------------------- what ends a grant, in whatever state


@row("EARLY", "revoke", **IDLE)
@row("WRITING", "revoke", **IDLE)
@row("WRITING", "revoke", **BUSY)
@row("COMMITTED", "revoke", **IDLE)
def revoked(s: Writes, *, in_flight: bool, at: str) -> ev.Event:
    arrive(s, at, in_flight=in_flight)
    return s.revoke()


@row("EARLY", "grant of a later attempt", **IDLE)
@row("WRITING", "grant of a later attempt", **IDLE)
@row("WRITING", "grant of a later attempt", **BUSY)
@row("COMMITTED", "grant of a later attempt", **IDLE)
def rebound(s: Writes, *, in_flight: bool, at: str) -> ev.Event:
    arrive(s, at, in_flight=in_flight)
    return s.got(grant(1, reader=LATER), E, "addr-e")


@row("EARLY", "the offer ends", Reason.OFFER_WITHDRAWN, **IDLE, event=ev.Withdrawn)
@row("WRITING", "the offer ends", Reason.OFFER_WITHDRAWN, **IDLE, event=ev.Withdrawn)
@row("WRITING", "the offer ends", Reason.OFFER_ABANDONED, **BUSY, event=ev.OfferAbandoned)
@row("COMMITTED", "the offer ends", Reason.OFFER_WITHDRAWN, **IDLE, event=ev.Withdrawn)
def offer_ends(s: Writes, event: Kind, *, in_flight: bool, at: str) -> ev.Event:
    arrive(s, at, in_flight=in_flight)
    return s.probe(event)


@row("COMMITTED", "the offer ends", Reason.OFFER_EXPIRED)
def offer_expires(s: Writes) -> ev.Event:
    s.committed()
    s.wait(SETTINGS.offer_lease_s)
    return ev.Tick()


LOST: tuple[tuple[Kind, Reason], ...] = (
    (ev.PeerGone, Reason.PEER_LOST),
    (ev.PeerDied, Reason.EPOCH_CHANGED),
    (msg.WrongEpoch, Reason.EPOCH_CHANGED),
)


def each_loss(arrange: Callable[..., ev.Event]) -> Callable[..., ev.Event]:
    for event, why in LOST:
        row("WRITING", "the destination is gone", why, event=event, **BUSY)(arrange)
    for event, why in (*LOST, (ev.WriteFailed, Reason.PEER_LOST)):  # another grant's, the last in flight
        for at in ("EARLY", "WRITING", "COMMITTED"):
            row(at, "the destination is gone", why, event=event, **IDLE)(arrange)
    return arrange


@each_loss
def destination_gone(s: Writes, event: Kind, *, in_flight: bool, at: str) -> ev.Event:
    if at == "EARLY":
        s.acquaint(D)
    arrive(s, at, in_flight=in_flight)
    return s.probe(event)


@row("WRITING", "destination unusable, no blocks named")
def destination_unusable_so_far(s: Writes) -> ev.Event:
    nonce = s.greet(D)
    s.do(ev.Offered(OFFER, CHAIN, BLOCKS))
    s.early()
    return s.got(msg.Refused(detail="no", nonce=nonce), D)


@row("WRITING", "destination unusable", Reason.PEER_UNREACHABLE, how="silent")
@row("WRITING", "destination unusable", Reason.HANDSHAKE_REFUSED, how="refuses")
@row("WRITING", "destination unusable", Reason.HANDSHAKE_REFUSED, how="differs")
@row("WRITING", "destination unusable", Reason.HANDSHAKE_REFUSED, how="data plane")
@row("WRITING", "destination unusable", Reason.EPOCH_CHANGED, how="another life")
def destination_unusable(s: Writes, how: str) -> ev.Event:
    nonce = awaited(s)
    match how:
        case "silent":
            s.wait(SETTINGS.handshake_s)
            return ev.Tick()
        case "refuses":
            return s.got(msg.Refused(detail="no", nonce=nonce), D)
        case "differs":
            return s.got(welcome(nonce, model_fingerprint="another"), D)
        case "data plane":
            s.do(s.got(welcome(nonce), D))
            return ev.PeerConnected(D, "no route")
    s.do(s.got(welcome(nonce), D2))
    return ev.PeerConnected(D2, None)


def arrive(s: Writes, at: str, *, in_flight: bool) -> None:
    if at == "WRITING":
        s.writing(in_flight=in_flight)
    else:
        s.arrive(at)


# ---------------------------------------------------------------------------------- COMMITTED and ENDING


@row("COMMITTED", "grant again")
def asked_after_the_commit(s: Writes) -> ev.Event:
    s.committed()
    return s.got(grant(spans=GRANTED_SPANS), D)


@row("COMMITTED", "release, or a floor above it", how="release")
@row("COMMITTED", "release, or a floor above it", how="floor")
def finished(s: Writes, how: str) -> ev.Event:
    s.committed()
    if how == "release":
        return s.release()
    return s.got(grant(NUMBER + 1, reader=LATER, floor=NUMBER + 1, offer=OTHER_LOAD), D)


@row("WRITING", "release")
def released(s: Writes) -> ev.Event:
    s.writing()
    return s.release()


@row("WRITING", "release, a write in flight, or of another load", reader=LOAD, **BUSY)
@row("WRITING", "release, a write in flight, or of another load", reader=OTHER_LOAD, **IDLE)
def released_in_error(s: Writes, reader: HandoffKey, *, in_flight: bool) -> ev.Event:
    s.writing(in_flight=in_flight)
    return s.got(msg.Release(offer=OFFER, reader=reader, seq=NUMBER, done=False), D)


@row("ENDING", "grant again")
def asked_while_ending(s: Writes) -> ev.Event:
    s.ending()
    return s.got(grant(spans=GRANTED_SPANS), D)


@row("ENDING", "reported, others are in flight", event=ev.WriteLanded)
@row("ENDING", "reported, others are in flight", event=ev.WriteFailed)
def one_reported(s: Writes, event: Kind) -> ev.Event:
    s.ending()
    return s.probe(event)


@row("ENDING", "the last write reported", Reason.REVOKED, event=ev.WriteLanded)
@row("ENDING", "the last write reported", Reason.REVOKED, event=ev.WriteFailed)
def last_reported(s: Writes, event: Kind) -> ev.Event:
    s.ending()
    s.do(ev.WriteLanded(KEY, rank=1))
    return s.probe(event)
