"""Scenes of `handoff/reads.py`: a destination's reads, each a claim and a transfer side by side."""

from __future__ import annotations

from collections.abc import Callable

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Span
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables.scene import (
    CHAIN,
    LOAD,
    OFFER,
    OTHER_LOAD,
    P2,
    SETTINGS,
    SPANS,
    TARGETS,
    D,
    Kind,
    P,
    Scene,
    nonce_in,
    welcome,
)

HISTORY = msg.HistoryRef(key=OFFER, source=P, control_address="addr-p", n_tokens=12)


def descriptor(
    source: Identity = P, spans: tuple[Span, ...] = SPANS, n_tokens: int = 12
) -> msg.OfferDescriptor:
    return msg.OfferDescriptor(
        key=OFFER,
        source=source,
        control_address="addr-p",
        spans=SPANS,
        n_tokens=n_tokens,
        digest=CHAIN.digest(),
    )


class Reads(Scene):
    module = "reads"
    me = D

    def about(self, effect: ev.Effect) -> bool:
        if isinstance(effect, ev.Send) and isinstance(effect.body, (msg.Claim, msg.Release)):
            return effect.body.reader == LOAD
        if isinstance(effect, ev.FreeBlocks):
            return not set(TARGETS).isdisjoint(effect.blocks)
        return LOAD in (getattr(effect, "load", LOAD), getattr(effect, "key", None))

    def probes(self) -> dict[Kind, Callable[[], ev.Event]]:
        return {
            ev.ReadWanted: lambda: ev.ReadWanted(LOAD, descriptor(), CHAIN),
            ev.LoadAllocated: lambda: ev.LoadAllocated(LOAD, TARGETS, 0),
            ev.LoadDropped: lambda: ev.LoadDropped(LOAD, done=False),
            ev.ReadLanded: lambda: ev.ReadLanded(LOAD),
            ev.ReadFailed: lambda: ev.ReadFailed(LOAD, P, "broken"),
            ev.PeerConnected: lambda: ev.PeerConnected(P, None),
            ev.PeerGone: lambda: ev.PeerGone("addr-p"),
            ev.PeerDied: lambda: ev.PeerDied(P),
            msg.ClaimGranted: self.granted,
            msg.ClaimDeclined: self.declined,
            msg.Welcome: lambda: self.got(welcome(99), P),
            msg.Refused: lambda: self.got(msg.Refused(detail="no", nonce=99), P),
            msg.WrongEpoch: lambda: self.got(msg.WrongEpoch(wanted=P), P2),
            ev.Tick: ev.Tick,
        }

    # the claim's states, the transfer being NO_BLOCKS

    def waiting(self) -> int:
        """Gives back the hello's nonce."""
        return nonce_in(self.do(ev.ReadWanted(LOAD, descriptor(), CHAIN)))

    def asked(
        self, offer: msg.OfferRef | None = None, chain: TokenChain = CHAIN, min_tokens: int = 1
    ) -> None:
        self.acquaint(P)
        self.do(ev.ReadWanted(LOAD, offer or descriptor(), CHAIN, min_tokens))

    def trusting(self) -> None:
        self.asked()
        self.do(self.granted())

    # the transfer's states, the claim being ASKED

    def ready(self, cached: int = 0, min_tokens: int = 1, blocks: int = 3) -> None:
        """With so many blocks, of an offer that gives no cause to begin before the grant."""
        self.asked(HISTORY, min_tokens=min_tokens)
        self.do(ev.LoadAllocated(LOAD, TARGETS[:blocks], cached))

    def posted(self, cached: int = 0, blocks: int = 3) -> None:
        self.asked()
        self.do(ev.LoadAllocated(LOAD, TARGETS[:blocks], cached))

    def landed(self, cached: int = 0, blocks: int = 3) -> None:
        self.posted(cached, blocks)
        self.do(ev.ReadLanded(LOAD))

    def quarantined(self) -> None:
        self.posted()
        self.do(ev.LoadDropped(LOAD, done=False))

    def ended(self) -> None:
        self.asked()
        self.do(ev.LoadDropped(LOAD, done=False))

    def granted(
        self, matched: int = 12, spans: tuple[Span, ...] = SPANS, lease_s: float = SETTINGS.claim_lease_s
    ) -> ev.Event:
        """The answer to the last claim."""
        read = self.node.reads._reads.get(LOAD)
        body = msg.ClaimGranted(
            offer=OFFER,
            reader=LOAD,
            seq=1 if read is None else read.seq,
            matched_tokens=matched,
            spans=spans,
            lease_s=lease_s,
        )
        return self.got(body, P)

    def declined(self) -> ev.Event:
        return self.got(msg.ClaimDeclined(offer=OFFER, reader=LOAD, reason=Reason.OFFER_EXPIRED), P)

    def debt(self, *, overdue: bool) -> None:
        """The source owes the fence of another read."""
        self.acquaint(P)
        self.do(ev.ReadWanted(OTHER_LOAD, descriptor(), CHAIN))
        self.do(ev.LoadAllocated(OTHER_LOAD, (30, 31, 32), 0))
        self.do(ev.LoadDropped(OTHER_LOAD, done=False))
        if overdue:
            self.wait(SETTINGS.fence_s)
            self.do(ev.Tick())


class Claims(Reads):
    machine = "reads.claim"
    handles = (
        ev.ReadWanted,
        ev.LoadDropped,
        ev.PeerConnected,
        ev.PeerGone,
        ev.PeerDied,
        msg.ClaimGranted,
        msg.ClaimDeclined,
        msg.Welcome,
        msg.Refused,
        msg.WrongEpoch,
        ev.Tick,
    )
    also = (msg.Hello,)

    def arrivals(self) -> dict[str, Callable[[], object]]:
        return {
            "(none)": lambda: None,
            "WAITING": self.waiting,
            "ASKED": self.asked,
            "GRANTED": self.trusting,
        }

    def record(self) -> object:
        return self.node.reads._reads.get(LOAD)

    def state(self) -> str:
        read = self.node.reads._reads.get(LOAD)
        if read is None:
            return "(none)"
        if read.matched_tokens is not None:
            return "GRANTED"
        return "ASKED" if read.seq else "WAITING"


class Transfers(Reads):
    machine = "reads.transfer"
    handles = (
        ev.LoadAllocated,
        ev.LoadDropped,
        ev.ReadLanded,
        ev.ReadFailed,
        ev.PeerConnected,
        ev.PeerGone,
        ev.PeerDied,
        msg.ClaimGranted,
        msg.ClaimDeclined,
        ev.Tick,
    )
    also = (ev.Noted,)

    def arrivals(self) -> dict[str, Callable[[], object]]:
        return {
            "(none)": self.ended,
            "NO_BLOCKS": self.asked,
            "READY": self.ready,
            "POSTED": self.posted,
            "LANDED": self.landed,
            "QUARANTINED": self.quarantined,
        }

    def record(self) -> object:
        """All that isn't the claim's."""
        read, quarantined = self.node.reads._reads.get(LOAD), self.node.reads._quarantine._entries.get(LOAD)
        return quarantined if read is None else (read.targets, read.read_deadline, read.landed_at)

    def state(self) -> str:
        if LOAD in self.node.reads._quarantine:
            return "QUARANTINED"
        read = self.node.reads._reads.get(LOAD)
        if read is None:
            return "(none)"
        if read.landed_at is not None:
            return "LANDED"
        if read.read_deadline is not None:
            return "POSTED"
        return "NO_BLOCKS" if read.blocks is None else "READY"
