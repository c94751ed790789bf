"""Two or three engines that talk by hand: each step's exact effects, and both sides' states."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.handoff import events as ev
from kvhandoff.handoff.messages import (
    PROTOCOL_VERSION,
    Body,
    Hello,
    OfferDescriptor,
    OfferRef,
    decode,
    encode,
)
from kvhandoff.handoff.node import HandoffNode
from kvhandoff.handoff.settings import HandoffSettings
from tests.handoff.toy import LAYOUT, ROOTS

SETTINGS = HandoffSettings(
    offer_lease_s=10.0,
    claim_lease_s=6.0,
    margin=0.1,
    handshake_s=2.0,
    claim_s=2.0,
    read_s=20.0,
    retry_s=0.5,
    quarantine_alarm=0.5,
)
OFFER, READ = HandoffKey(HandoffId("h"), 0), HandoffKey(HandoffId("h"), 1)
CHAIN = TokenChain.of(ROOTS[0], 4, list(range(10)))
OTHER = TokenChain.of(ROOTS[0], 4, [*range(4), 99, 99])
P, D, D2 = (Identity(EngineId(name), Epoch("1")) for name in ("p", "d", "d2"))
REBORN = Identity(EngineId("p"), Epoch("2"))
SPANS = ((5, 2), (9, 1))
REF = OfferRef(key=OFFER, source=P, control_address="addr-p")


def hello(**other: object) -> Hello:
    facts = {
        "protocol_version": PROTOCOL_VERSION,
        "model_fingerprint": "model",
        "layout": LAYOUT,
        "num_blocks": 20,
        "data_plane": "toy",
        "data_plane_metadata": b"memory",
    }
    return Hello(**{**facts, **other})  # type: ignore[arg-type]


def descriptor(**other: object) -> OfferDescriptor:
    facts = {
        "key": OFFER,
        "source": P,
        "control_address": "addr-p",
        "spans": SPANS,
        "n_tokens": 10,
        "digest": CHAIN.digest(),
    }
    return OfferDescriptor(**{**facts, **other})  # type: ignore[arg-type]


@dataclass
class Side:
    """One engine: its node, its clock, and what it was told to do."""

    node: HandoffNode
    now: float = 100.0
    outbox: list[ev.Send] = field(default_factory=list)

    def do(self, event: ev.Event) -> list[ev.Effect]:
        """The effects but for messages, which go to the outbox."""
        effects = self.node.handle(self.now, event)
        self.outbox += [effect for effect in effects if isinstance(effect, ev.Send)]
        return [effect for effect in effects if not isinstance(effect, ev.Send)]

    def bodies(self) -> list[Body]:
        """What is in the outbox."""
        return [send.body for send in self.outbox]

    def take(self) -> list[ev.Event]:
        """What is in the outbox, as it will arrive: to be delivered late, twice, or never."""
        sent, self.outbox = self.outbox, []
        return [ev.Received(decode(encode(self.node.envelope(send)))) for send in sent]

    def hand_over(self, other: Side) -> list[ev.Effect]:
        """Deliver all that was sent, over the wire's encoding."""
        return [effect for event in self.take() for effect in other.do(event)]

    def hears(self, sender: Side, body: Body) -> list[ev.Effect]:
        """A message that `sender` may or may not have sent."""
        return self.do(ev.Received(sender.node.envelope(ev.Send("", self.node.me, body))))


def side(
    who: Identity,
    now: float,
    *,
    address: str | None = None,
    ranks: int = 1,
    settings: HandoffSettings = SETTINGS,
) -> Side:
    node = HandoffNode(who, address or f"addr-{who.engine_id}", hello(), settings, ranks=ranks)
    return Side(node, now)


def acquaint(p: Side, d: Side) -> None:
    """`d` has shaken hands with `p`."""
    d.do(ev.PeerWanted(p.node.address))
    d.hand_over(p)
    assert p.hand_over(d) == [ev.ConnectPeer(p.node.me, b"memory")]
    assert d.do(ev.PeerConnected(p.node.me, None)) == []


def offered(p: Side) -> None:
    assert p.do(ev.Offered(OFFER, CHAIN, (5, 6, 9))) == []
    assert p.node.offers.blocks() == [5, 6, 9]
