"""One engine's end of the protocol: every event goes in here, every effect comes out.

    now, event ──▶ HandoffNode.handle ──▶ effects
                     ├─ PeerBook     who the other engines are          (peers.py)
                     ├─ OfferLedger  what this engine keeps for others  (offers.py)
                     └─ ReadLedger   what it reads from others          (reads.py)

Whoever drives it calls `handle(now, Tick())` at `next_deadline()` at the latest, carries out the effects in
their order, and reports what comes of them as further events. It is single-threaded and never blocks.
"""

from __future__ import annotations

from collections import deque

from kvhandoff.core.ids import Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff.events import (
    Effect,
    Event,
    Offered,
    PeerConnected,
    PeerGone,
    PeerWanted,
    ReadAllocated,
    ReadDropped,
    ReadWanted,
    Received,
    Send,
    Tick,
    TransferFailed,
    TransferLanded,
    Withdrawn,
)
from kvhandoff.handoff.messages import (
    PROTOCOL_VERSION,
    Claim,
    ClaimDeclined,
    ClaimGranted,
    Envelope,
    Hello,
    Refused,
    Release,
    Welcome,
    WrongEpoch,
)
from kvhandoff.handoff.offers import OfferLedger
from kvhandoff.handoff.peers import Changes, PeerBook
from kvhandoff.handoff.reads import ReadLedger
from kvhandoff.handoff.settings import HandoffSettings


class HandoffNode:
    """The protocol of one engine's one life."""

    def __init__(
        self,
        me: Identity,
        address: str,
        hello: Hello,
        settings: HandoffSettings | None = None,
        *,
        log: int = 256,
    ) -> None:
        """`address`: where this engine's control plane listens. `log`: stimuli kept for replay."""
        settings = settings or HandoffSettings()
        self.me = me
        self.address = address
        self.peers = PeerBook(hello, settings)
        self.offers = OfferLedger(settings)
        self.reads = ReadLedger(settings, self.peers)
        self.stimuli: deque[tuple[float, Event]] = deque(maxlen=log)

    def handle(self, now: float, event: Event) -> list[Effect]:
        """What follows from `event` at `now`, a reading of this engine's own clock.

        Raises ValueError on an engine's own misuse (a key in use); never on what a peer sent.
        """
        self.stimuli.append((now, event))
        match event:
            case Offered():
                return self.offers.offered(now, event.offer, event.chain, event.blocks)
            case Withdrawn():
                return self.offers.withdrawn(event.offer)
            case ReadWanted():
                return self.reads.wanted(now, event)
            case ReadAllocated():
                return self.reads.allocated(now, event)
            case ReadDropped():
                return self.reads.dropped(event.read, done=event.done)
            case TransferLanded():
                return self.reads.landed(now, event.read)
            case TransferFailed():
                return self.reads.failed(now, event.read, event.error)
            case PeerWanted():
                return self.peers.wanted(now, event.address)
            case PeerConnected():
                return self._peers_changed(now, self.peers.connected(event.peer, event.error))
            case PeerGone():
                return self._peers_changed(now, self.peers.gone(event.address), Reason.PEER_LOST)
            case Received():
                return self._received(now, event.envelope)
            case Tick():
                return [
                    *self._peers_changed(now, self.peers.tick(now)),
                    *self.offers.tick(now),
                    *self.reads.tick(now),
                ]

    def next_deadline(self) -> float | None:
        """When a `Tick` is due; None while nothing waits."""
        parts = (self.peers, self.offers, self.reads)
        return min((at for part in parts if (at := part.next_deadline()) is not None), default=None)

    def envelope(self, send: Send) -> Envelope:
        """The message of a `Send` effect, with what every message carries."""
        return Envelope(
            protocol_version=PROTOCOL_VERSION,
            sender=self.me,
            reply_to=self.address,
            target=send.target,
            body=send.body,
        )

    def _received(self, now: float, envelope: Envelope) -> list[Effect]:
        sender, body = envelope.sender, envelope.body
        if envelope.target not in (None, self.me):
            # Meant for a former life of this engine, or for another engine. Say so, but never in answer to an
            # answer: two confused engines must not talk for ever.
            if isinstance(body, (Claim, Release)):
                return [Send(envelope.reply_to, sender, WrongEpoch(wanted=envelope.target))]
            return []
        match body:
            case Hello():
                return self.peers.greeted(sender, envelope.reply_to, body)
            case Welcome():
                return self._peers_changed(now, self.peers.welcomed(now, sender, envelope.reply_to, body))
            case Refused():
                return self._peers_changed(now, self.peers.refused(envelope.reply_to, body))
            case WrongEpoch():
                return self._peers_changed(now, self.peers.wrong_epoch(body.wanted))
            case Claim():
                return self.offers.claimed(now, sender, envelope.reply_to, body)
            case Release():
                return self.offers.released(now, sender, body)
            case ClaimGranted():
                return self.reads.granted(now, sender, body)
            case ClaimDeclined():
                return self.reads.declined(sender, body)

    def _peers_changed(
        self, now: float, changes: Changes, why_ended: Reason = Reason.EPOCH_CHANGED
    ) -> list[Effect]:
        effects = list(changes.effects)
        for life in changes.ended:
            effects += self.reads.peer_ended(now, life, why_ended)
        for peer in changes.up:
            effects += self.reads.peer_up(now, peer)
        for gone in changes.unusable:
            effects += self.reads.peer_unusable(gone.address, gone.reason, gone.detail)
        return effects
