"""What goes into the protocol and what comes out: events in, effects out, nothing else.

Events and effects name a read by its `HandoffKey` (the destination's ticket) and an offer by the key of the
ticket that made it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Copy
from kvhandoff.handoff.messages import Body, Envelope, OfferDescriptor

# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Offered:
    """Source's engine: the prompt is computed. The ledger owns one reference on each block from now on."""

    offer: HandoffKey
    chain: TokenChain
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Source's router: nobody will come for this offer (it may not be made yet)."""

    offer: HandoffKey


@dataclass(frozen=True, slots=True)
class ReadWanted:
    """Destination: a request with an offer has arrived. It may still queue for blocks."""

    read: HandoffKey
    descriptor: OfferDescriptor
    chain: TokenChain
    """The request's own chain: what the offer has to stand for."""


@dataclass(frozen=True, slots=True)
class ReadAllocated:
    """Destination's engine: the request's prompt blocks. The ledger owns `blocks[cached_blocks:]` until
    `Loaded` or `FreeBlocks`."""

    read: HandoffKey
    blocks: tuple[int, ...]
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class ReadDropped:
    """Destination: the request ended, or its own cache holds all (`done`: nobody else will come)."""

    read: HandoffKey
    done: bool


@dataclass(frozen=True, slots=True)
class TransferLanded:
    """The transfer reported done. A fence."""

    read: HandoffKey


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer reported an error, or could not be posted. A fence."""

    read: HandoffKey
    error: str


@dataclass(frozen=True, slots=True)
class PeerWanted:
    """Handshake with whoever listens there, ahead of the first request."""

    address: str


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """The data plane is ready to move blocks from and to the peer, or says why not."""

    peer: Identity
    error: str | None


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The control connection to whoever listened there broke: the process has most likely ended. Not a
    fence."""

    address: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived."""

    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; nothing else happened."""


Event = (
    Offered
    | Withdrawn
    | ReadWanted
    | ReadAllocated
    | ReadDropped
    | TransferLanded
    | TransferFailed
    | PeerWanted
    | PeerConnected
    | PeerGone
    | Received
    | Tick
)

# --------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; it may get lost."""

    address: str
    target: Identity | None
    body: Body


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Make the data plane ready for a peer; answered by `PeerConnected`."""

    peer: Identity
    metadata: bytes


@dataclass(frozen=True, slots=True)
class DisconnectPeer:
    """The data plane may forget a peer. Not a fence."""

    peer: Identity


@dataclass(frozen=True, slots=True)
class PostRead:
    """Start the transfer (remote first, local first, count); answered by `TransferLanded` or
    `TransferFailed`, however long that takes."""

    read: HandoffKey
    peer: Identity
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """The ledger's references on these blocks end; the engine may re-issue them."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first `tokens` tokens of the request are in its blocks, verified; the blocks are the engine's."""

    read: HandoffKey
    tokens: int


@dataclass(frozen=True, slots=True)
class Missed:
    """Nothing can be used; the request needs other blocks. Its targets are freed after this, at once or at
    their fence."""

    read: HandoffKey
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Something to count and to log that changes no request's course, e.g. an offer that expired."""

    offer: HandoffKey
    reason: Reason
    detail: str


Effect = Send | ConnectPeer | DisconnectPeer | PostRead | FreeBlocks | Loaded | Missed | Noted
