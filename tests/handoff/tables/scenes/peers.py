"""Scenes of `handoff/peers.py`: the handshake."""

from __future__ import annotations

from collections.abc import Callable

from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from tests.handoff.tables.scene import (
    CHAIN,
    LOAD,
    OFFER,
    OTHER_LOAD,
    P2,
    SPANS,
    D,
    Kind,
    P,
    Scene,
    hello,
    nonce_in,
    welcome,
)


def descriptor(source: Identity = P, key: HandoffKey = OFFER) -> msg.OfferDescriptor:
    return msg.OfferDescriptor(
        key=key,
        source=source,
        control_address="addr-p",
        spans=SPANS,
        n_tokens=12,
        digest=CHAIN.digest(),
    )


class Peers(Scene):
    """The subject is whoever listens at `addr-p`; a load waits there."""

    module = machine = "peers"
    me = D
    handles = (
        ev.PeerWanted,
        ev.ReadWanted,
        ev.PeerConnected,
        ev.PeerGone,
        ev.PeerDied,
        ev.ReadFailed,
        ev.WriteFailed,
        msg.Hello,
        msg.Welcome,
        msg.Refused,
        msg.WrongEpoch,
        ev.Tick,
    )
    also = (msg.Claim, ev.Missed)
    """What is told to a load that waits for the peer, or reads from it."""
    nonce = 99

    def state(self) -> str:
        peer = self.node.peers._peers.get("addr-p")
        return "(none)" if peer is None else peer.state.name

    def record(self) -> object:
        return self.node.peers._peers.get("addr-p")

    def say(self, effects: list[ev.Effect], before: str) -> list[str]:
        said = super().say(effects, before)
        return [text.replace("send claim", "tell: up").replace("miss: ", "tell: ") for text in said]

    def arrivals(self) -> dict[str, Callable[[], object]]:
        return {
            "(none)": lambda: None,
            "GREETING": self.greeting,
            "CONNECTING": self.connecting,
            "UP": self.up,
        }

    def probes(self) -> dict[Kind, Callable[[], ev.Event]]:
        return {
            ev.PeerWanted: lambda: ev.PeerWanted("addr-p"),
            ev.ReadWanted: lambda: ev.ReadWanted(OTHER_LOAD, descriptor(), CHAIN),
            ev.PeerConnected: lambda: ev.PeerConnected(P, None),
            ev.PeerGone: lambda: ev.PeerGone("addr-p"),
            ev.PeerDied: lambda: ev.PeerDied(P),
            ev.ReadFailed: lambda: ev.ReadFailed(LOAD, P, "broken"),
            ev.WriteFailed: lambda: ev.WriteFailed(ev.WriteKey(P, 0, 0), "broken"),
            msg.Hello: lambda: self.got(hello(nonce=1), P),
            msg.Welcome: lambda: self.got(welcome(99), P),
            msg.Refused: lambda: self.got(msg.Refused(detail="no", nonce=99), P),
            msg.WrongEpoch: lambda: self.got(msg.WrongEpoch(wanted=P), P2),
            ev.Tick: ev.Tick,
        }

    def greeting(self) -> None:
        self.nonce = nonce_in(self.do(ev.ReadWanted(LOAD, descriptor(), CHAIN)))

    def connecting(self) -> None:
        self.greeting()
        self.do(self.got(welcome(self.nonce), P))

    def up(self) -> None:
        self.connecting()
        self.do(ev.PeerConnected(P, None))
