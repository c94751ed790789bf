"""Scenes of `handoff/writes.py`: the grants that a source was given."""

from __future__ import annotations

from collections.abc import Callable

from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Span
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables.scene import (
    BLOCKS,
    CHAIN,
    D2,
    GRANTED_SPANS,
    LOAD,
    NUMBER,
    OFFER,
    OTHER_LOAD,
    D,
    Kind,
    P,
    Scene,
    grant,
    welcome,
)

KEY = ev.WriteKey(D, NUMBER, 0)


class Writes(Scene):
    module = machine = "writes"
    me = P
    ranks = 2
    handles = (
        msg.Grant,
        msg.Revoke,
        msg.Release,
        msg.Welcome,
        msg.Refused,
        msg.WrongEpoch,
        ev.OfferStarted,
        ev.OfferGrown,
        ev.Offered,
        ev.OfferAbandoned,
        ev.Withdrawn,
        ev.WriteLanded,
        ev.WriteFailed,
        ev.PeerConnected,
        ev.PeerGone,
        ev.PeerDied,
        ev.Tick,
    )
    also = (msg.Hello,)

    def state(self) -> str:
        known = self.node.writes._grants.get((D, NUMBER))
        if known is None:
            return "(none)"
        if known.ending is not None:
            return "ENDING"
        if known.commits:
            return "COMMITTED"
        return "WRITING" if known.pinned else "EARLY"

    def record(self) -> object:
        return self.node.writes._grants.get((D, NUMBER))

    def about(self, effect: ev.Effect) -> bool:
        if isinstance(effect, ev.Send) and isinstance(effect.body, (msg.Progress, msg.Commit, msg.Fenced)):
            return (effect.target, effect.body.number) == (D, NUMBER)
        return not isinstance(effect, ev.PostWrite) or (effect.peer, effect.write.number) == (D, NUMBER)

    def say(self, effects: list[ev.Effect], before: str) -> list[str]:
        """One commit of each rank is one phrase. A grant under which is written "ends": it is fenced at once,
        or ENDING."""
        said = " | ".join(super().say(effects, before))
        said = said.replace("commit of rank 0 | commit of rank 1", "commit of each rank")
        if before == "WRITING" and self.state() == "(none)":
            said = said.replace("fenced: ", "end: ")
        if before == "WRITING" and self.state() == "ENDING":
            said = " | ".join(filter(None, [said, f"end: {self.node.writes._grants[D, NUMBER].ending}"]))
        return said.split(" | ") if said else []

    def arrivals(self) -> dict[str, Callable[[], object]]:
        return {
            "(none)": lambda: None,
            "EARLY": self.early,
            "WRITING": self.writing,
            "COMMITTED": self.committed,
            "ENDING": self.ending,
        }

    def probes(self) -> dict[Kind, Callable[[], ev.Event]]:
        return {
            msg.Revoke: self.revoke,
            msg.Release: lambda: self.release(seq=7),
            msg.Welcome: lambda: self.got(welcome(99), D),
            msg.Refused: lambda: self.got(msg.Refused(detail="no", nonce=99), D),
            msg.WrongEpoch: lambda: self.got(msg.WrongEpoch(wanted=D), D2),
            ev.OfferStarted: lambda: ev.OfferStarted(self.unfinished(), CHAIN),
            ev.OfferGrown: lambda: ev.OfferGrown(self.unfinished(), BLOCKS[1:2]),
            ev.Offered: lambda: ev.Offered(self.unfinished(), CHAIN, BLOCKS),
            ev.OfferAbandoned: lambda: ev.OfferAbandoned(OFFER, Reason.OFFER_ABANDONED),
            ev.Withdrawn: lambda: ev.Withdrawn(OFFER),
            ev.WriteLanded: lambda: ev.WriteLanded(KEY, rank=0),
            ev.WriteFailed: lambda: ev.WriteFailed(KEY, "broken", rank=0),
            ev.PeerConnected: lambda: ev.PeerConnected(D, None),
            ev.PeerGone: lambda: ev.PeerGone("addr-d"),
            ev.PeerDied: lambda: ev.PeerDied(D),
            ev.Tick: ev.Tick,
        }

    def unfinished(self) -> HandoffKey:
        """The grant's offer unless it has begun, else another one."""
        return OFFER if self.node.offers.get(OFFER) is None else OTHER_LOAD

    def revoke(self) -> ev.Event:
        return self.got(msg.Revoke(offer=OFFER, reader=LOAD, number=NUMBER, floor=0), D)

    def release(self, *, seq: int = NUMBER) -> ev.Event:
        return self.got(msg.Release(offer=OFFER, reader=LOAD, seq=seq, done=True), D)

    def early(self, spans: tuple[Span, ...] | None = None) -> None:
        self.do(self.got(grant(spans=spans), D))

    def writing(self, *, in_flight: bool = False) -> None:
        """The prompt's first block is computed; if it is in flight, it is on both ranks."""
        self.acquaint(D)
        self.do(ev.OfferStarted(OFFER, CHAIN))
        self.do(ev.OfferGrown(OFFER, BLOCKS[:1]))
        self.early(GRANTED_SPANS if in_flight else None)

    def written(self) -> None:
        """All is computed, and in flight."""
        self.acquaint(D)
        self.do(ev.Offered(OFFER, CHAIN, BLOCKS))
        self.early(GRANTED_SPANS)

    def landed(self, chunk: int = 0) -> None:
        for rank in range(self.ranks):
            self.do(ev.WriteLanded(ev.WriteKey(D, NUMBER, chunk), rank))

    def committed(self) -> None:
        self.written()
        self.landed()

    def ending(self) -> None:
        self.writing(in_flight=True)
        self.do(self.revoke())
