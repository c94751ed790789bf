"""Scenes of `handoff/grants.py`: the grants that a destination has given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables.scene import (
    CHAIN,
    LOAD,
    OFFER,
    P2,
    TARGETS,
    D,
    Kind,
    P,
    Scene,
    hello,
    welcome,
)

REF = msg.OfferRef(key=OFFER, source=P, control_address="addr-p")


class Grants(Scene):
    module = machine = "grants"
    me = D
    handles = (
        ev.PushWanted,
        ev.LoadAllocated,
        ev.LoadDropped,
        msg.Progress,
        msg.Commit,
        msg.Fenced,
        msg.Hello,
        msg.Welcome,
        msg.Refused,
        msg.WrongEpoch,
        ev.PeerConnected,
        ev.PeerGone,
        ev.PeerDied,
        ev.Tick,
    )
    also = (msg.Hello,)

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        """Of the subject's grant."""

    def state(self) -> str:
        ledger = self.node.grants
        if self.number in ledger._quarantine:
            return "QUARANTINED"
        push = ledger._pushes.get(self.number)
        if push is None:
            return "(none)"
        if push.named:
            return "GRANTED"
        return "QUEUED" if push.blocks is None else "ALLOCATED"

    def record(self) -> object:
        return self.node.grants._quarantine.get(self.number) or self.node.grants._pushes.get(self.number)

    def about(self, effect: ev.Effect) -> bool:
        if isinstance(effect, ev.Send) and isinstance(effect.body, (msg.Grant, msg.Revoke)):
            return effect.body.number == self.number
        return not isinstance(effect, (ev.Missed, ev.Noted)) or LOAD in (
            getattr(effect, "load", None),
            getattr(effect, "key", None),
        )

    def arrivals(self) -> dict[str, Callable[[], object]]:
        return {
            "(none)": lambda: None,
            "QUEUED": self.queued,
            "ALLOCATED": self.allocated,
            "GRANTED": self.granted,
            "QUARANTINED": self.quarantined,
        }

    def probes(self) -> dict[Kind, Callable[[], ev.Event]]:
        return {
            ev.PushWanted: lambda: ev.PushWanted(LOAD, REF, CHAIN),
            ev.LoadAllocated: lambda: ev.LoadAllocated(LOAD, TARGETS, 0),
            ev.LoadDropped: lambda: ev.LoadDropped(LOAD, done=False),
            msg.Progress: self.progress,
            msg.Commit: self.commit,
            msg.Fenced: lambda: self.got(msg.Fenced(number=self.number, reason=Reason.OFFER_EXPIRED), P),
            msg.Hello: lambda: self.got(hello(nonce=1), P),
            msg.Welcome: lambda: self.got(welcome(99), P),
            msg.Refused: lambda: self.got(msg.Refused(detail="no", nonce=99), P),
            msg.WrongEpoch: lambda: self.got(msg.WrongEpoch(wanted=P), P2, "addr-new"),
            ev.PeerConnected: lambda: ev.PeerConnected(P, None),
            ev.PeerGone: lambda: ev.PeerGone("addr-p"),
            ev.PeerDied: lambda: ev.PeerDied(P),
            ev.Tick: ev.Tick,
        }

    def queued(self, key: HandoffKey = LOAD) -> None:
        """The source is up, and has not answered."""
        self.acquaint(P)
        self.do(ev.PushWanted(key, REF, CHAIN))

    def allocated(self) -> None:
        self.queued()
        self.do(self.probe(ev.LoadAllocated))

    def granted(self) -> None:
        self.allocated()
        self.do(self.progress())

    def quarantined(self) -> None:
        self.granted()
        self.do(ev.LoadDropped(LOAD, done=False))

    def progress(self, source: Identity = P) -> ev.Event:
        body = msg.Progress(number=self.number, lease_s=5.0, computed_blocks=1, written_blocks=0)
        return self.got(body, source)

    def commit(self, **other: Any) -> ev.Event:
        facts = {
            "number": self.number,
            "rank": 0,
            "ranks": 1,
            "blocks": 3,
            "digest": CHAIN.digest(),
            "first_token": 7,
            "cached_tokens": 0,
            "chunks": 1,
            "early_blocks": 0,
            "tail_s": 0.0,
        }
        return self.got(msg.Commit(**{**facts, **other}), P)
