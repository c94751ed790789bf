"""The stage of the table scenarios: one engine's real node. The test plays its engine, its transfers, its
peers and its clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, get_args

from kvhandoff.core.chain import TokenChain, chain_root
from kvhandoff.core.ids import EngineId, Epoch, HandoffId, HandoffKey, Identity
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.spans import Span
from kvhandoff.handoff import events as ev
from kvhandoff.handoff import messages as msg
from kvhandoff.handoff.node import HandoffNode
from kvhandoff.handoff.settings import HandoffSettings
from tests.handoff.tables.table import MODULES

BLOCK_SIZE = 4
LAYOUT = KVLayout(
    order="block", dtype="label", layers=1, kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, block_bytes=1
)
ROOTS = tuple(chain_root("model", LAYOUT.fingerprint(), salt) for salt in ("a", "b"))
SETTINGS = HandoffSettings()
P, D = Identity(EngineId("p"), Epoch("1")), Identity(EngineId("d"), Epoch("1"))
P2, D2 = Identity(EngineId("p"), Epoch("2")), Identity(EngineId("d"), Epoch("2"))
ADDRESS = {"p": "addr-p", "d": "addr-d", "e": "addr-e"}
OFFER = HandoffKey(HandoffId("h"), 0)
LOAD, LATER, OTHER_LOAD = (HandoffKey(HandoffId(name), n) for name, n in (("h", 1), ("h", 2), ("i", 0)))
CHAIN = TokenChain.of(ROOTS[0], BLOCK_SIZE, list(range(12)))
FOREIGN = TokenChain.of(ROOTS[1], BLOCK_SIZE, list(range(12)))
"""Of the same tokens under another salt."""
BLOCKS, SPANS = (5, 6, 9), ((5, 2), (9, 1))
"""The source's."""
TARGETS, GRANTED_SPANS = (20, 21, 22), ((20, 3),)
"""The destination's."""

NUMBER = 3
"""Of a grant in its destination's life: some are over, and some will come."""

Kind = type
"""An event's class; of a message, its body's."""


def hello(**other: Any) -> msg.Hello:
    facts = {
        "protocol_version": msg.PROTOCOL_VERSION,
        "model_fingerprint": "model",
        "layout": LAYOUT,
        "num_blocks": 100,
        "data_plane": "toy",
        "data_plane_metadata": b"memory",
        "processes": ("process",),
    }
    return msg.Hello(**{**facts, **other})


def kind(event: ev.Event) -> Kind:
    return type(event.envelope.body) if isinstance(event, ev.Received) else type(event)


def phrase(effect: ev.Effect) -> tuple[type, str]:
    """What an effect is (of a message, its body), and the tables' word for it."""
    match effect:
        case ev.Send(body=body):
            return type(body), _message(body)
        case ev.ConnectPeer():
            said = "connect"
        case ev.DisconnectPeer():
            said = "disconnect"
        case ev.WatchPeer():
            said = "watch"
        case ev.PostRead():
            said = "post the read"
        case ev.PostWrite():
            said = "write"
        case ev.FreeBlocks():
            said = "free"
        case ev.Loaded():
            said = "loaded"
        case ev.Missed(reason=reason):
            said = f"miss: {reason}"
        case ev.Noted(reason=reason):
            said = f"noted: {reason}"
    return type(effect), said


def _message(body: msg.Body) -> str:
    match body:
        case msg.Hello():
            return "send hello"
        case msg.Welcome():
            return "send welcome"
        case msg.Refused():
            return "send refused"
        case msg.Claim():
            return "send claim"
        case msg.ClaimGranted():
            return "granted"
        case msg.ClaimDeclined(reason=reason):
            return f"declined: {reason}"
        case msg.Release():
            return "release"
        case msg.Grant(spans=spans):
            return "send grant" if spans else "send grant without blocks"
        case msg.Progress():
            return "progress"
        case msg.Commit(rank=rank):
            return f"commit of rank {rank}"
        case msg.Revoke():
            return "send revoke"
        case msg.Fenced(reason=reason):
            return f"fenced: {reason}"
        case msg.WrongEpoch():
            return "send wrong_epoch"


class Scene:
    """A node in whatever state a scenario has led it to."""

    module: ClassVar[str]
    machine: ClassVar[str]
    me: ClassVar[Identity]
    ranks: ClassVar[int] = 1
    handles: ClassVar[tuple[Kind, ...]]
    """Events and messages that the machine is told of."""
    also: ClassVar[tuple[Kind, ...]] = ()
    """Effects that it causes through another part of the node."""

    def __init__(self) -> None:
        address = ADDRESS[self.me.engine_id]
        self.node = HandoffNode(self.me, address, hello(), SETTINGS, ranks=self.ranks)
        self.now = 100.0

    # ------------------------------------------------------------------------- what a scene of a machine is

    def state(self) -> str:
        """The subject's state, derived from the ledger's data."""
        raise NotImplementedError

    def record(self) -> object:
        """What the ledger holds of the subject."""
        raise NotImplementedError

    def arrivals(self) -> dict[str, Callable[[], object]]:
        """Each of the machine's states, and how to get there."""
        raise NotImplementedError

    def arrive(self, state: str) -> None:
        self.arrivals()[state]()

    def probe(self, event: Kind) -> ev.Event:
        """An event of this kind that is about the subject."""
        return self.probes()[event]()

    def probes(self) -> dict[Kind, Callable[[], ev.Event]]:
        """How to make one of each kind that the machine handles."""
        raise NotImplementedError

    def say(self, effects: list[ev.Effect], before: str) -> list[str]:
        """The effects that are the machine's, in the tables' words. `before`: the state that they came in."""
        about = [phrase(effect) for effect in effects if self.about(effect)]
        return [said for what, said in about if what in self.vocabulary()]

    def about(self, effect: ev.Effect) -> bool:
        """Whether an effect is about the subject, as far as several are in play."""
        return True

    @classmethod
    def vocabulary(cls) -> set[type]:
        """Every kind of effect and message that the machine's module knows."""
        every = {*get_args(ev.Effect), *get_args(msg.Body)} - {ev.Send}
        known = [value for value in vars(MODULES[cls.module]).values() if isinstance(value, type)]
        return every.intersection(known) | set(cls.also)

    # -------------------------------------------------------------------------------- what scenarios use

    def do(self, event: ev.Event) -> list[ev.Effect]:
        return self.node.handle(self.now, event)

    def got(self, body: msg.Body, sender: Identity, address: str | None = None) -> ev.Received:
        """A message for this life."""
        address = address or ADDRESS[sender.engine_id]
        return ev.Received(
            msg.Envelope(
                protocol_version=msg.PROTOCOL_VERSION,
                sender=sender,
                reply_to=address,
                target=self.me,
                body=body,
            )
        )

    def wait(self, seconds: float) -> None:
        """Let time pass, with a tick at each deadline before its end."""
        end = self.now + seconds
        while (due := self.node.next_deadline()) is not None and due < end:
            self.now = max(self.now, due)
            self.do(ev.Tick())
        self.now = end

    def until(self, due: float) -> None:
        """Let time pass up to a reading of the clock."""
        self.wait(due - self.now)

    def greet(self, peer: Identity) -> int:
        """Begin the handshake; gives back the hello's nonce."""
        return nonce_in(self.do(ev.PeerWanted(ADDRESS[peer.engine_id])))

    def connect(self, peer: Identity) -> None:
        """Shake hands, but for the data plane's part."""
        self.do(self.got(welcome(self.greet(peer)), peer))

    def acquaint(self, peer: Identity) -> None:
        """Shake hands."""
        self.connect(peer)
        self.do(ev.PeerConnected(peer, None))


def nonce_in(effects: list[ev.Effect]) -> int:
    """Of the hello among these effects."""
    [nonce] = [e.body.nonce for e in effects if isinstance(e, ev.Send) and isinstance(e.body, msg.Hello)]
    return nonce


def welcome(nonce: int, **other: Any) -> msg.Welcome:
    return msg.Welcome(hello=hello(**other), nonce=nonce)


def grant(
    number: int = NUMBER,
    *,
    reader: HandoffKey = LOAD,
    chain: TokenChain = CHAIN,
    spans: tuple[Span, ...] | None = None,
    floor: int = 0,
    first_block: int = 0,
    offer: HandoffKey = OFFER,
) -> msg.Grant:
    return msg.Grant(
        offer=offer,
        reader=reader,
        number=number,
        floor=floor,
        chain=chain,
        first_block=first_block,
        spans=spans,
    )
