"""Scenes of `handoff/offers.py`: the source's offers."""

from __future__ import annotations

from collections.abc import Callable

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables.scene import (
    BLOCKS,
    CHAIN,
    GRANTED_SPANS,
    LOAD,
    NUMBER,
    OFFER,
    OTHER_LOAD,
    SETTINGS,
    D,
    Kind,
    P,
    Scene,
    grant,
)


class Offers(Scene):
    module = machine = "offers"
    me = P
    handles = (
        ev.OfferStarted,
        ev.OfferGrown,
        ev.Offered,
        ev.OfferAbandoned,
        ev.Retained,
        ev.MemoryShort,
        ev.Withdrawn,
        msg.Claim,
        msg.Release,
        ev.WriteLanded,
        ev.WriteFailed,
        ev.Tick,
    )

    def state(self) -> str:
        offer = self.node.offers.get(OFFER)
        if offer is None:
            return "ENDED" if self.node.offers.why_ended(OFFER) else "(none)"
        if offer.closing is not None:
            return "CLOSING"
        if not offer.complete:
            return "GROWING"
        if offer.pins:
            return "PINNED"
        return "RETAINED" if offer.retention else "OPEN"

    def record(self) -> object:
        return self.node.offers.get(OFFER)

    def about(self, effect: ev.Effect) -> bool:
        if isinstance(effect, ev.FreeBlocks):
            return not set(BLOCKS).isdisjoint(effect.blocks)
        return not isinstance(effect, ev.Noted) or effect.key == OFFER

    def arrivals(self) -> dict[str, Callable[[], object]]:
        return {
            "(none)": lambda: None,
            "GROWING": self.growing,
            "OPEN": self.open,
            "RETAINED": self.retained,
            "PINNED": self.pinned,
            "CLOSING": self.closing,
            "ENDED": self.ended,
        }

    def probes(self) -> dict[Kind, Callable[[], ev.Event]]:
        return {
            ev.OfferStarted: lambda: ev.OfferStarted(OFFER, CHAIN),
            ev.OfferGrown: lambda: ev.OfferGrown(OFFER, BLOCKS[:1]),
            ev.Offered: lambda: ev.Offered(OFFER, CHAIN, BLOCKS),
            ev.OfferAbandoned: lambda: ev.OfferAbandoned(OFFER, Reason.OFFER_ABANDONED),
            ev.Retained: lambda: ev.Retained(OFFER, CHAIN, BLOCKS, "renewable"),
            ev.MemoryShort: lambda: ev.MemoryShort(1),
            ev.Withdrawn: lambda: ev.Withdrawn(OFFER),
            msg.Claim: self.claim,
            msg.Release: lambda: self.release(OTHER_LOAD, done=True),
            ev.WriteLanded: lambda: ev.WriteLanded(ev.WriteKey(D, NUMBER, 0)),
            ev.WriteFailed: lambda: ev.WriteFailed(ev.WriteKey(D, NUMBER, 0), "broken"),
            ev.Tick: ev.Tick,
        }

    def growing(self, *, written: bool = False) -> None:
        """`written`: a write from its first block is in flight."""
        if written:
            self.acquaint(D)
        self.do(ev.OfferStarted(OFFER, CHAIN))
        self.do(ev.OfferGrown(OFFER, BLOCKS[:1]))
        if written:
            self.do(self.got(grant(spans=GRANTED_SPANS), D))

    def open(self) -> None:
        self.do(ev.Offered(OFFER, CHAIN, BLOCKS))

    def retained(self, retention: ev.Retention = "renewable") -> None:
        self.do(ev.Retained(OFFER, CHAIN, BLOCKS, retention))

    def pinned(self, retention: ev.Retention | None = None) -> None:
        if retention is None:
            self.open()
        else:
            self.retained(retention)
        self.do(self.claim())

    def closing(self) -> None:
        self.pinned()
        self.do(ev.Withdrawn(OFFER))

    def ended(self) -> None:
        self.do(ev.Withdrawn(OFFER))

    def claim(
        self,
        reader: HandoffKey = LOAD,
        chain: TokenChain = CHAIN,
        *,
        seq: int = 2,
        queued: bool = False,
    ) -> ev.Event:
        return self.got(msg.Claim(offer=OFFER, reader=reader, chain=chain, seq=seq, queued=queued), D)

    def short_for_long(self, blocks: int = 1) -> ev.Event:
        """Memory has been short all the while, and is when the event comes."""
        end = self.now + SETTINGS.short_s
        while self.now < end:
            self.do(ev.MemoryShort(blocks))
            self.wait(min(0.5, end - self.now))
        return ev.MemoryShort(blocks)

    def release(self, reader: HandoffKey = LOAD, *, done: bool, seq: int = 2) -> ev.Event:
        return self.got(msg.Release(offer=OFFER, reader=reader, seq=seq, done=done), D)
