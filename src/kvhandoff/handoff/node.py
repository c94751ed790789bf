"""One engine's end of the protocol: every event goes in here, every effect comes out.

    now, event ──▶ HandoffNode.handle ──▶ effects
                     ├─ PeerBook     who the other engines are               (peers.py)
                     ├─ OfferLedger  what this engine keeps for others       (offers.py)
                     ├─ WriteLedger  what it writes to others                (writes.py)
                     ├─ ReadLedger   what it reads from others               (reads.py)
                     └─ GrantLedger  what others may write into its blocks   (grants.py)

Whoever drives it calls `handle(now, Tick())` at `next_deadline()` at the latest, carries out the effects in
their order, and reports what comes of them as further events. It is single-threaded and never blocks.
"""

from __future__ import annotations

from collections import deque

from kvhandoff.core.ids import Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.events import Effect, Event, Noted, Send
from kvhandoff.handoff.grants import GrantLedger
from kvhandoff.handoff.messages import (
    PROTOCOL_VERSION,
    Claim,
    ClaimDeclined,
    ClaimGranted,
    Commit,
    Envelope,
    Fenced,
    Grant,
    Hello,
    Progress,
    Refused,
    Release,
    Revoke,
    Welcome,
    WrongEpoch,
)
from kvhandoff.handoff.offers import OfferLedger
from kvhandoff.handoff.peers import Changes, PeerBook
from kvhandoff.handoff.reads import ReadLedger
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.handoff.writes import WriteLedger


class HandoffNode:
    """The protocol of one engine's one life."""

    def __init__(
        self,
        me: Identity,
        address: str,
        hello: Hello,
        settings: HandoffSettings | None = None,
        *,
        ranks: int = 1,
        log: int = 256,
    ) -> None:
        """`address`: where this engine's control plane listens. `ranks`: how many ranks of this engine write
        and report. `log`: stimuli kept for replay."""
        settings = settings or HandoffSettings()
        self.me = me
        self.address = address
        self.peers = PeerBook(hello, settings)
        self.offers = OfferLedger(settings)
        self.writes = WriteLedger(settings, self.offers, self.peers, ranks)
        self.reads = ReadLedger(settings, self.peers)
        self.grants = GrantLedger(settings, self.peers)
        self.stimuli: deque[tuple[float, Event]] = deque(maxlen=log)
        self._alarm_above = settings.quarantine_alarm * hello.num_blocks
        self._alarmed = False

    def handle(self, now: float, event: Event) -> list[Effect]:
        """What follows from `event` at `now`, a reading of this engine's own clock, made right before.

        Raises ValueError on an engine's own misuse (a key in use); never on what a peer sent.
        """
        self.stimuli.append((now, event))
        effects = self._handle(now, event)
        effects += self.writes.advance(now)
        return [*effects, *self._watch_quarantine()]

    def _handle(self, now: float, event: Event) -> list[Effect]:
        match event:
            case ev.OfferStarted():
                return self.offers.started(event.offer, event.chain)
            case ev.OfferGrown():
                return self.offers.grown(event.offer, event.blocks)
            case ev.Offered():
                return self.offers.offered(now, event)
            case ev.OfferAbandoned():
                return self.offers.abandoned(event.offer, event.reason)
            case ev.Retained():
                return self.offers.retain(now, event)
            case ev.MemoryShort():
                return self.offers.memory_short(now, event.blocks)
            case ev.Withdrawn():
                return self.offers.withdrawn(event.offer)
            case ev.ReadWanted():
                return self.reads.wanted(now, event)
            case ev.PushWanted():
                return self.grants.wanted(now, event)
            case ev.LoadAllocated():
                pushed = event.load in self.grants
                return (self.grants if pushed else self.reads).allocated(now, event)
            case ev.LoadDropped():
                pushed = event.load in self.grants
                return (self.grants if pushed else self.reads).dropped(now, event.load, done=event.done)
            case ev.ReadLanded():
                return self.reads.landed(now, event.load)
            case ev.ReadFailed():
                return [*self.reads.failed(now, event.load, event.error), *self._lost(now, event.peer)]
            case ev.WriteLanded():
                return self.writes.landed(now, event.write, event.rank)
            case ev.WriteFailed():
                failed = self.writes.failed(now, event.write, event.rank)
                return [*failed, *self._lost(now, event.write.grantee)]
            case ev.PeerWanted():
                return self.peers.wanted(now, event.address)
            case ev.PeerConnected():
                return self._peers_changed(now, self.peers.connected(event.peer, event.error))
            case ev.PeerGone():
                changed = self._peers_changed(now, self.peers.gone(event.address), Reason.PEER_LOST)
                return [*changed, *self.grants.peer_gone(now, event.address, Reason.PEER_LOST)]
            case ev.PeerDied():
                return self._over(now, event.peer)
            case ev.Received():
                return self._received(now, event.envelope)
            case ev.Tick():
                return [
                    *self._peers_changed(now, self.peers.tick(now)),
                    *self.offers.tick(now),
                    *self.reads.tick(now),
                    *self.grants.tick(now),
                ]

    def next_deadline(self) -> float | None:
        """When a `Tick` is due; None while nothing waits."""
        parts = (self.peers, self.offers, self.writes, self.reads, self.grants)
        return min((at for part in parts if (at := part.next_deadline()) is not None), default=None)

    def leases(self) -> dict[str, int]:
        """How many there are now: those on this engine's blocks (`OfferLedger.leases`), the claims of its
        reads, and the grants that it has given."""
        return {**self.offers.leases(), "read": len(self.reads), "grant": len(self.grants)}

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
            if isinstance(body, (Claim, Release, Grant, Revoke)):
                return [Send(envelope.reply_to, sender, WrongEpoch(wanted=envelope.target))]
            return []
        match body:
            case Hello():
                moved = self.grants.peer_moved(now, sender, envelope.reply_to)
                return [*self.peers.greeted(sender, envelope.reply_to, body), *moved]
            case Welcome():
                return self._peers_changed(now, self.peers.welcomed(now, sender, envelope.reply_to, body))
            case Refused():
                return self._peers_changed(now, self.peers.refused(envelope.reply_to, body))
            case WrongEpoch():
                # A life answers only when each of its processes holds the engine's name, and none gives it up
                # before its end (docs/protocol.md): this life answers, so that one has ended.
                proven = body.wanted.engine_id == sender.engine_id and body.wanted != sender
                if proven:
                    return self._over(now, body.wanted)
                changed = self._peers_changed(now, self.peers.over(body.wanted))
                return [*changed, *self.grants.peer_gone(now, envelope.reply_to, Reason.EPOCH_CHANGED)]
            case Claim():
                return self.offers.claimed(now, sender, envelope.reply_to, body)
            case Release():
                return [*self.writes.released(now, sender, body), *self.offers.released(now, sender, body)]
            case ClaimGranted():
                return self.reads.granted(now, sender, body)
            case ClaimDeclined():
                return self.reads.declined(now, sender, body)
            case Grant():
                return self.writes.granted(now, sender, envelope.reply_to, body)
            case Revoke():
                return self.writes.revoked(now, sender, envelope.reply_to, body)
            case Progress():
                return self.grants.progressed(now, sender, body)
            case Commit():
                return self.grants.committed(now, sender, body)
            case Fenced():
                return self.grants.fenced(now, sender, body)

    def _over(self, now: float, life: Identity) -> list[Effect]:
        """All processes of this life have ended, for certain."""
        return [*self.grants.peer_died(life), *self._peers_changed(now, self.peers.over(life))]

    def _lost(self, now: float, peer: Identity) -> list[Effect]:
        """A transfer failed: if none is in flight any more, the next request greets the peer anew."""
        if self.reads.reading_from(peer) or self.writes.writing_to(peer):
            return []
        return self._peers_changed(now, self.peers.over(peer), Reason.PEER_LOST)

    def _watch_quarantine(self) -> list[Effect]:
        """An alarm when much of the pool waits for fences."""
        held = len(self.reads.quarantined()) + len(self.grants.quarantined())
        grows, self._alarmed = held > self._alarm_above and not self._alarmed, held > self._alarm_above
        detail = f"{held} blocks wait for fences, the alarm is at {self._alarm_above:g}"
        return [Noted(None, Reason.QUARANTINE_GROWS, detail)] if grows else []

    def _peers_changed(
        self, now: float, changes: Changes, why_ended: Reason = Reason.EPOCH_CHANGED
    ) -> list[Effect]:
        effects = list(changes.effects)
        for life in changes.ended:
            effects += self.reads.peer_ended(now, life, why_ended)
            effects += self.writes.peer_ended(now, life, why_ended)
        for peer in changes.up:
            effects += self.reads.peer_up(now, peer)
            effects += self.writes.peer_up(now, peer)
            effects += self.grants.peer_up(now, peer)
        for gone in changes.unusable:
            effects += self.reads.peer_unusable(now, gone.address, gone.reason, gone.detail)
            effects += self.writes.peer_unusable(now, gone.address, gone.reason)
            effects += self.grants.peer_unusable(now, gone.address, gone.reason, gone.detail)
        return effects
