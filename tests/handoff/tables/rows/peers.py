"""Rows of `handoff/peers.py`: the handshake."""

from __future__ import annotations

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
    TARGETS,
    Kind,
    P,
    hello,
    nonce_in,
    welcome,
)
from tests.handoff.tables.scenes.peers import Peers, descriptor

row = partial(table.row, "peers")


@row("(none)", "wanted", event=ev.PeerWanted)
@row("(none)", "wanted", event=ev.ReadWanted)
def wanted(s: Peers, event: Kind) -> ev.Event:
    return s.probe(event)


@row("GREETING", "retry due")
def retry(s: Peers) -> ev.Event:
    s.greeting()
    s.until(s.node.peers.next_deadline() or 0.0)
    return ev.Tick()


@row("GREETING", "welcome, compatible")
def welcomed(s: Peers) -> ev.Event:
    s.greeting()
    return s.got(welcome(s.nonce), P)


@row("GREETING", "the same, of the next life", Reason.EPOCH_CHANGED)
def next_life(s: Peers) -> ev.Event:
    s.up()
    nonce = nonce_in(s.do(ev.ReadWanted(OTHER_LOAD, descriptor(P2, OTHER_LOAD), CHAIN)))
    return s.got(welcome(nonce), P2)


@row("GREETING", "welcome that differs")
def differing(s: Peers) -> ev.Event:
    s.greeting()
    return s.got(welcome(s.nonce, model_fingerprint="another"), P)


@row("GREETING", "refused")
def refused(s: Peers) -> ev.Event:
    s.greeting()
    return s.got(msg.Refused(detail="no", nonce=s.nonce), P)


@row("GREETING", "deadline")
def silent(s: Peers) -> ev.Event:
    s.greeting()
    s.wait(SETTINGS.handshake_s)
    return ev.Tick()


@row("CONNECTING", "data plane connected")
def connected(s: Peers) -> ev.Event:
    s.connecting()
    return ev.PeerConnected(P, None)


@row("CONNECTING", "data plane error")
def not_connected(s: Peers) -> ev.Event:
    s.connecting()
    return ev.PeerConnected(P, "no route")


@row("CONNECTING", "deadline")
def connecting_for_too_long(s: Peers) -> ev.Event:
    s.connecting()
    s.wait(SETTINGS.handshake_s)
    return ev.Tick()


@row("CONNECTING", "connection broke", Reason.PEER_LOST)
def broke_while_connecting(s: Peers) -> ev.Event:
    s.connecting()
    return s.probe(ev.PeerGone)


@row("CONNECTING", "its life is over", Reason.EPOCH_CHANGED, event=ev.PeerDied)
@row("CONNECTING", "its life is over", Reason.EPOCH_CHANGED, event=msg.WrongEpoch)
def over_while_connecting(s: Peers, event: Kind) -> ev.Event:
    s.connecting()
    return s.probe(event)


@row("UP", "another life is wanted there")
def another_life_wanted(s: Peers) -> ev.Event:
    s.up()
    return ev.ReadWanted(OTHER_LOAD, descriptor(P2, OTHER_LOAD), CHAIN)


@row("UP", "connection broke", Reason.PEER_LOST)
def broke(s: Peers) -> ev.Event:
    s.up()
    return s.probe(ev.PeerGone)


@row("UP", "its life is over", Reason.EPOCH_CHANGED, event=ev.PeerDied)
@row("UP", "its life is over", Reason.EPOCH_CHANGED, event=msg.WrongEpoch)
def over(s: Peers, event: Kind) -> ev.Event:
    s.up()
    return s.probe(event)


@row("CONNECTING", "transfer failed, none in flight", event=ev.ReadFailed)
@row("CONNECTING", "transfer failed, none in flight", event=ev.WriteFailed)
@row("UP", "transfer failed, none in flight", event=ev.ReadFailed)
@row("UP", "transfer failed, none in flight", event=ev.WriteFailed)
def failed(s: Peers, event: Kind, at: str) -> ev.Event:
    s.arrive(at)
    return s.probe(event)


@row("UP", "transfer failed, others in flight")
def one_failed(s: Peers) -> ev.Event:
    s.up()
    s.do(ev.LoadAllocated(LOAD, TARGETS, 0))
    s.do(ev.LoadDropped(LOAD, done=False))
    s.do(ev.ReadWanted(OTHER_LOAD, descriptor(), CHAIN))
    s.do(
        s.got(
            msg.ClaimGranted(
                offer=OFFER, reader=OTHER_LOAD, seq=3, matched_tokens=12, spans=SPANS, lease_s=5.0
            ),
            P,
        )
    )
    s.do(ev.LoadAllocated(OTHER_LOAD, (30, 31, 32), 0))
    return s.probe(ev.ReadFailed)


@row("any", "hello, compatible", processes=("process",))
@row("any", "hello, compatible", processes=("core", "rank 0", "rank 1"))
@row("any", "hello that leaves a process out", processes=())
@row("any", "hello that leaves a process out", processes=("",))
@row("any", "hello that leaves a process out", processes=("core", "", "rank 1"))
def greeted(s: Peers, processes: tuple[str, ...]) -> ev.Event:
    return s.got(hello(nonce=1, processes=processes), P)


@row("any", "hello that differs")
def greeted_in_another_tongue(s: Peers) -> ev.Event:
    return s.got(hello(nonce=1, data_plane="another"), P)
