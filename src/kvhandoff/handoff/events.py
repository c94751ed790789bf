"""What goes into the protocol and what comes out: events in, effects out, nothing else.

Events and effects name a load, pulled or pushed, by its `HandoffKey` (that of the destination's ticket), and
an offer by the key of the ticket that made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Copy
from kvhandoff.handoff.messages import Body, Commit, Envelope, OfferRef

Retention = Literal["renewable", "fixed"]
"""How an offer is retained: under a lease that each use renews, or for a fixed time."""


@dataclass(frozen=True, slots=True)
class WriteKey:
    """One transfer under a grant."""

    grantee: Identity
    number: int
    """The grant's, in the grantee's life."""
    chunk: int
    """Counts the transfers of the grant."""


# ---------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class OfferStarted:
    """Source's engine: a prompt that is to be written while it is computed has arrived."""

    offer: HandoffKey
    chain: TokenChain


@dataclass(frozen=True, slots=True)
class OfferGrown:
    """Source's engine: the next full blocks of a started offer are computed. The ledger owns one reference on
    each of them from now on."""

    offer: HandoffKey
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offered:
    """Source's engine: the prompt is computed. The ledger owns one reference on each block from now on."""

    offer: HandoffKey
    chain: TokenChain
    blocks: tuple[int, ...]
    """The prompt's blocks; of a started offer, those that it has not grown by yet."""
    first_token: int | None = None
    """The token sampled after the prompt."""
    cached_tokens: int = 0
    """How many of the prompt's tokens did not have to be computed."""


@dataclass(frozen=True, slots=True)
class OfferAbandoned:
    """Source's engine: the request of a started offer ended, or lost its blocks, before it was computed."""

    offer: HandoffKey
    reason: Reason


@dataclass(frozen=True, slots=True)
class Retained:
    """Destination's engine: a turn has ended, and what it computed is kept for the next one. The ledger owns
    one reference on each block from now on."""

    offer: HandoffKey
    chain: TokenChain
    """Full blocks only."""
    blocks: tuple[int, ...]
    retention: Retention


@dataclass(frozen=True, slots=True)
class MemoryShort:
    """The engine lacks blocks for a request that waits: retained offers are given up, least recently used
    first, until at least so many blocks are free or none is left; after `short_s` also offers whose
    destinations queue. Told anew at each step, twice a second at least, as long as it lasts."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Source's router: nobody will come for this offer (it may not be made yet)."""

    offer: HandoffKey


@dataclass(frozen=True, slots=True)
class ReadWanted:
    """Destination: a request that is to read an offer has arrived. It may still queue for blocks."""

    load: HandoffKey
    offer: OfferRef
    """An `OfferDescriptor` lets the read start before the claim is answered."""
    chain: TokenChain
    """The request's own chain: what the offer has to stand for, or to share a beginning with."""
    min_tokens: int = 1
    """With less to gain than this many tokens, nothing is read."""


@dataclass(frozen=True, slots=True)
class PushWanted:
    """Destination: a request whose prompt an offer's source is to write here has arrived. It may still queue
    for blocks."""

    load: HandoffKey
    offer: OfferRef
    chain: TokenChain
    """The request's own chain, which must be the source's."""


@dataclass(frozen=True, slots=True)
class LoadAllocated:
    """Destination's engine: the request's prompt blocks. The ledger owns `blocks[cached_blocks:]` until
    `Loaded` or `FreeBlocks`."""

    load: HandoffKey
    blocks: tuple[int, ...]
    """As many as the chain has. Of a read they may be fewer, but one more than are cached at least: what
    matches beyond them is not read."""
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class LoadDropped:
    """Destination: the request ended, or its own cache holds all (`done`: nobody else will come)."""

    load: HandoffKey
    done: bool


@dataclass(frozen=True, slots=True)
class ReadLanded:
    """The transfer of a `PostRead` reported done. A fence."""

    load: HandoffKey


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The transfer of a `PostRead` reported an error, or could not be posted. A fence."""

    load: HandoffKey
    peer: Identity
    error: str


@dataclass(frozen=True, slots=True)
class WriteLanded:
    """The transfer of a `PostWrite` reported done on one writing rank. A fence."""

    write: WriteKey
    rank: int = 0


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The transfer of a `PostWrite` reported an error on one writing rank, or could not be posted. A
    fence."""

    write: WriteKey
    error: str
    rank: int = 0


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
class PeerDied:
    """Every process of this life has ended, for certain: the operating system says so. A fence."""

    peer: Identity


@dataclass(frozen=True, slots=True)
class Received:
    """A message arrived."""

    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; nothing else happened."""


Event = (
    OfferStarted
    | OfferGrown
    | Offered
    | OfferAbandoned
    | Retained
    | MemoryShort
    | Withdrawn
    | ReadWanted
    | PushWanted
    | LoadAllocated
    | LoadDropped
    | ReadLanded
    | ReadFailed
    | WriteLanded
    | WriteFailed
    | PeerWanted
    | PeerConnected
    | PeerGone
    | PeerDied
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
class WatchPeer:
    """Have the operating system tell when the last of this life's processes has ended (`PeerDied`), if it
    can; again is a no-op."""

    peer: Identity
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PostRead:
    """Start the transfer (remote first, local first, count); answered by `ReadLanded` or `ReadFailed`,
    however long that takes."""

    load: HandoffKey
    peer: Identity
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Start the transfer (local first, remote first, count) on every writing rank; answered by `WriteLanded`
    or `WriteFailed` from each of them, however long that takes."""

    write: WriteKey
    peer: Identity
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """The ledger's references on these blocks end; the engine may re-issue them."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The first `tokens` tokens of the request are in its blocks, verified; the blocks are the engine's."""

    load: HandoffKey
    tokens: int
    push: Commit | None = None
    """The last rank's commit, of a load that was pushed."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Nothing can be used; the request needs other blocks. Its targets are freed after this, at once or at
    their fence."""

    load: HandoffKey
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Something to count and to log that changes no request's course, e.g. an offer that expired."""

    key: HandoffKey | None
    """Of the offer or the load that it is about; None: of the whole engine."""
    reason: Reason
    detail: str


Effect = (
    Send
    | ConnectPeer
    | DisconnectPeer
    | WatchPeer
    | PostRead
    | PostWrite
    | FreeBlocks
    | Loaded
    | Missed
    | Noted
)
