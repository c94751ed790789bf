"""Rows of `handoff/reads.py`: a read's claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables import table
from tests.handoff.tables.scene import (
    CHAIN,
    LOAD,
    OFFER,
    OTHER_LOAD,
    P2,
    SETTINGS,
    SPANS,
    Kind,
    P,
    nonce_in,
    welcome,
)
from tests.handoff.tables.scenes.reads import HISTORY, Claims, descriptor

row = partial(table.row, "reads.claim")


# ----------------------------------------------------------------------------------- claim: to the asking


@row("(none)", "wanted, peer is up")
def wanted(s: Claims) -> ev.Event:
    s.acquaint(P)
    return s.probe(ev.ReadWanted)


@row("(none)", "wanted, no peer yet")
def wanted_of_a_stranger(s: Claims) -> ev.Event:
    return s.probe(ev.ReadWanted)


@row("(none)", "wanted, source owes an overdue fence")
def wanted_from_a_debtor(s: Claims) -> ev.Event:
    s.debt(overdue=True)
    return s.probe(ev.ReadWanted)


@row("(none)", "wanted, blocks ≠ tokens")
@row("WAITING", "peer is up, blocks ≠ tokens", waits=True)
def blocks_do_not_fit(s: Claims, *, waits: bool = False) -> ev.Event:
    wanted = ev.ReadWanted(LOAD, descriptor(n_tokens=13), CHAIN)
    if not waits:
        s.acquaint(P)
        return wanted
    s.do(s.got(welcome(nonce_in(s.do(wanted))), P))
    return ev.PeerConnected(P, None)


@row("WAITING", "peer is up, life as described")
def peer_comes_up(s: Claims) -> ev.Event:
    s.do(s.got(welcome(s.waiting()), P))
    return ev.PeerConnected(P, None)


@row("WAITING", "another life is up")
def another_life(s: Claims) -> ev.Event:
    s.do(s.got(welcome(s.waiting()), P2))
    return ev.PeerConnected(P2, None)


@row("WAITING", "peer unusable", Reason.PEER_UNREACHABLE, how="silent")
@row("WAITING", "peer unusable", Reason.HANDSHAKE_REFUSED, how="refuses")
@row("WAITING", "peer unusable", Reason.HANDSHAKE_REFUSED, how="differs")
@row("WAITING", "peer unusable", Reason.HANDSHAKE_REFUSED, how="data plane")
def unusable(s: Claims, how: str) -> ev.Event:
    nonce = s.waiting()
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


@row("WAITING", "deadline")
def for_ever_greeting(s: Claims) -> ev.Event:
    """Another life welcomes and goes away, over and over."""
    nonce = nonce_in(s.do(ev.ReadWanted(LOAD, descriptor(P2), CHAIN)))
    for _ in range(4):
        s.do(s.got(welcome(nonce), P))
        s.wait(SETTINGS.handshake_s / 2)
        effects = s.do(ev.PeerGone("addr-p"))
        if s.now < 100.0 + 2 * SETTINGS.handshake_s:
            nonce = nonce_in(effects)
    return ev.Tick()


# ------------------------------------------------------------------------------- claim: ASKED and GRANTED


@row("ASKED", "retry due")
def asked_again(s: Claims) -> ev.Event:
    s.asked()
    s.until(s.node.reads.next_deadline() or 0.0)
    return ev.Tick()


@row("ASKED", "granted")
@row("ASKED", "granted", of=HISTORY)
def granted(s: Claims, of: msg.OfferRef | None = None) -> ev.Event:
    s.asked(of)
    return s.granted()


@row("ASKED", "granted, other blocks")
@row("GRANTED", "granted, other blocks", renewed=True)
def other_blocks(s: Claims, *, renewed: bool = False) -> ev.Event:
    if renewed:
        renewal(s)
        s.do(ev.Tick())
    else:
        s.asked()
    return s.granted(spans=((40, 3),))


@row("ASKED", "answer to another's claim, or of another sender", stranger=False)
@row("ASKED", "answer to another's claim, or of another sender", stranger=True)
def not_my_answer(s: Claims, *, stranger: bool) -> ev.Event:
    s.asked()
    body = msg.ClaimGranted(
        offer=OFFER if stranger else OTHER_LOAD,
        reader=LOAD,
        seq=1,
        matched_tokens=12,
        spans=SPANS,
        lease_s=5.0,
    )
    return s.got(body, P2 if stranger else P)


@row("ASKED", "deadline")
def never_answered(s: Claims) -> ev.Event:
    s.asked()
    s.wait(SETTINGS.claim_s)
    return ev.Tick()


@row("ASKED", "granted, bytes in while trusted")
def granted_after_landing(s: Claims) -> ev.Event:
    s.landed()
    return s.granted()


@row("ASKED", "granted, bytes in too late")
def granted_for_too_short(s: Claims) -> ev.Event:
    s.posted()
    s.now += 0.5
    s.do(ev.ReadLanded(LOAD))
    return s.granted(lease_s=0.5)


@row("GRANTED", "renewal due")
def renewal(s: Claims) -> ev.Event:
    s.trusting()
    s.until(s.node.reads.next_deadline() or 0.0)
    return ev.Tick()


@row("GRANTED", "granted")
def renewed(s: Claims) -> ev.Event:
    renewal(s)
    s.do(ev.Tick())
    return s.granted()


@row("GRANTED", "answer that was had before")
def repeated(s: Claims) -> ev.Event:
    s.trusting()
    return s.granted()


@row("GRANTED", "trust over, bytes not in", lease_s=SETTINGS.claim_lease_s)
@row("GRANTED", "trust over, bytes not in", lease_s=-1.0)
@row("GRANTED", "trust over, bytes not in", lease_s=math.nan)
def not_renewed(s: Claims, lease_s: float) -> ev.Event:
    s.asked()
    s.do(s.granted(lease_s=lease_s))
    if lease_s > 0:
        s.wait(lease_s * (1 - SETTINGS.margin))
    return ev.Tick()


# ---------------------------------------------------------------------- claim: in whatever state it stands


@row("WAITING", "declined", Reason.OFFER_EXPIRED)
@row("ASKED", "declined", Reason.OFFER_EXPIRED)
@row("GRANTED", "declined", Reason.OFFER_EXPIRED)
def declined(s: Claims, at: str) -> ev.Event:
    s.arrive(at)
    return s.declined()


@row("WAITING", "dropped")
@row("ASKED", "dropped")
@row("GRANTED", "dropped")
def dropped(s: Claims, at: str) -> ev.Event:
    s.arrive(at)
    return s.probe(ev.LoadDropped)


LOST: tuple[tuple[Kind, Reason], ...] = (
    (ev.PeerGone, Reason.PEER_LOST),
    (ev.PeerDied, Reason.EPOCH_CHANGED),
    (msg.WrongEpoch, Reason.EPOCH_CHANGED),
)


def each_loss(arrange: Callable[..., ev.Event]) -> Callable[..., ev.Event]:
    for at in ("WAITING", "ASKED", "GRANTED"):
        for event, why in LOST:
            row(at, "connection broke, or its life over", why, event=event)(arrange)
    return arrange


@each_loss
def source_gone(s: Claims, event: Kind, at: str) -> ev.Event:
    if at == "WAITING":
        s.do(s.got(welcome(s.waiting()), P))
    else:
        s.arrive(at)
    return s.probe(event)


@row("ASKED", "another transfer failed, none in flight")
@row("GRANTED", "another transfer failed, none in flight")
def anothers_failure(s: Claims, at: str) -> ev.Event:
    s.debt(overdue=False)
    s.do(ev.ReadWanted(LOAD, descriptor(), CHAIN))
    if at == "GRANTED":
        s.do(s.granted())
    return ev.ReadFailed(OTHER_LOAD, P, "broken")
