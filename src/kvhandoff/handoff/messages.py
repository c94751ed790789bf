"""Every message of the protocol between engines. Typed, versioned, small, idempotent; msgpack on the wire.

An `Envelope` carries who sends and which life of which engine it is for, so that a message that was queued
for a dead process is recognised by the one that took its address.
"""

from __future__ import annotations

import msgspec

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.layout import KVLayout
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Span

PROTOCOL_VERSION = 3


class OfferRef(msgspec.Struct, frozen=True, kw_only=True):
    """Which offer, and where: all that the router need know. The source may not have made it yet."""

    key: HandoffKey
    source: Identity
    control_address: str
    """Where the source's control plane listens, e.g. `tcp://127.0.0.1:5701`."""


class HistoryRef(OfferRef, frozen=True, kw_only=True):
    """A retained offer: what a decode engine kept of a conversation's last turn."""

    n_tokens: int
    """How many tokens it has at most; a hint that saves claims which could gain nothing."""


class OfferDescriptor(OfferRef, frozen=True, kw_only=True):
    """Where an offer is and what it stands for; travels source → router → destination.

    It is a hint with a digest: the destination uses what it reads only after the source has answered a claim.
    """

    spans: tuple[Span, ...]
    """The offered blocks, in the order of the tokens."""
    n_tokens: int
    digest: str
    """`TokenChain.digest()` of the offered tokens."""
    cached_tokens: int = 0
    """How many of them the source did not have to compute; reported in the answer's usage."""
    first_token: int | None = None
    """The token that the source sampled after them."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message to a peer: what the sender is. Answered by `Welcome` or `Refused`."""

    protocol_version: int
    model_fingerprint: str
    layout: KVLayout
    num_blocks: int
    data_plane: str
    """`nixl` or `shm`."""
    data_plane_metadata: bytes
    processes: tuple[str, ...] = ()
    """All processes of the sender that may write or read a peer's memory, as the operating system of their
    host knows them: a peer on the same host learns for certain when the last of them has ended. Empty where
    that can't be."""
    nonce: int = 0
    """Counts the sender's handshakes; repeated in the answer, so that a former life's is known."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The answer to a compatible `Hello`: the same facts of the answering side, and the asker's nonce."""

    hello: Hello
    nonce: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The answer to an incompatible `Hello`: what differs, both sides' values, "here" being the asker's."""

    detail: str
    nonce: int


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """A reader names its own chain and asks to read an offer. Sent again, it renews the claim's lease."""

    offer: HandoffKey
    reader: HandoffKey
    """The read it is for: one engine may read an offer again under a later attempt."""
    chain: TokenChain
    seq: int
    """Counts this read's claims. The answer repeats it, so that the reader counts the lease from the sending
    of the very message that was answered."""
    queued: bool
    """The reader has no blocks yet, and so has posted nothing; as soon as that changes, another claim says
    so. Tells a source that is short of memory whom it harms least: no permission rests on it."""


class ClaimGranted(msgspec.Struct, frozen=True, kw_only=True, tag="claim_granted"):
    """The offer has lived since it was made; its first `matched_tokens` are pinned for `lease_s` from now."""

    offer: HandoffKey
    reader: HandoffKey
    seq: int
    matched_tokens: int
    spans: tuple[Span, ...]
    """The offer's blocks as the source knows them; a reader that read others uses nothing."""
    lease_s: float


class ClaimDeclined(msgspec.Struct, frozen=True, kw_only=True, tag="claim_declined"):
    """The offer is gone or stands for other tokens. Nothing read under it may be used."""

    offer: HandoffKey
    reader: HandoffKey
    reason: Reason


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """The reader reads no more. `done` ends the offer too, unless it is retained: nobody else will come."""

    offer: HandoffKey
    reader: HandoffKey
    seq: int
    """Of the reader's last claim, so that a late release doesn't end a claim that came after it."""
    done: bool


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """A destination lets the source write into its blocks, for one read. Sent again, it renews the grant's
    lease on the offer and asks how far things are; answered by `Progress`, `Commit` or `Fenced`.

    It may come before the source has begun with the prompt.
    """

    offer: HandoffKey
    reader: HandoffKey
    """The load it is for. Of two attempts at one offer, the later one's grant ends the earlier one's."""
    number: int
    """Counts the grants of the destination's life: a grant's name in all that follows."""
    floor: int
    """All grants of the destination's life with a smaller number are over. So a source knows a late one
    without remembering every grant that there ever was."""
    chain: TokenChain
    """What the blocks are to hold: the source writes nothing unless its own chain is the same."""
    first_block: int
    """The position of the first block that is granted; the destination has those before it."""
    spans: tuple[Span, ...] | None
    """The destination's blocks for the positions from `first_block` to the chain's end. None: not allocated
    yet; the source keeps its blocks and writes nothing."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """The source is alive and will write, or is writing, under this grant."""

    number: int
    lease_s: float
    """How long the offer is kept for this grant, from now: renew in time."""
    computed_blocks: int
    written_blocks: int


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag="commit"):
    """All granted blocks are written, and the transfers have reported done. A fence, if all ranks say so."""

    number: int
    rank: int
    ranks: int
    """How many ranks write; the destination counts one commit of each."""
    blocks: int
    """How many blocks were written under the grant."""
    digest: str
    """`TokenChain.digest()` of the source's chain."""
    first_token: int | None
    """The token that the source sampled after the prompt."""
    cached_tokens: int
    """How many of the prompt's tokens the source did not have to compute."""
    chunks: int
    """How many transfers it took."""
    early_blocks: int
    """How many blocks had landed before the prompt's last chunk was computed."""
    tail_s: float
    """From the last chunk computed to this commit, on the source's clock."""


class Revoke(msgspec.Struct, frozen=True, kw_only=True, tag="revoke"):
    """The destination takes a grant back. Sent again until it is answered by `Fenced`, or by `Commit`s."""

    offer: HandoffKey
    reader: HandoffKey
    number: int
    floor: int
    """As in `Grant`."""


class Fenced(msgspec.Struct, frozen=True, kw_only=True, tag="fenced"):
    """Nothing is in flight under this grant, and nothing will ever be written under it again."""

    number: int
    reason: Reason
    """Why it ended: `revoked`, or what keeps the source from writing."""


class WrongEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="wrong_epoch"):
    """The answer of a restarted engine to a message for its former life; what that life promised is gone."""

    wanted: Identity


Body = (
    Hello
    | Welcome
    | Refused
    | Claim
    | ClaimGranted
    | ClaimDeclined
    | Release
    | Grant
    | Progress
    | Commit
    | Revoke
    | Fenced
    | WrongEpoch
)


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """One message on the wire."""

    protocol_version: int
    sender: Identity
    reply_to: str
    """The sender's control address."""
    target: Identity | None
    """The life of the engine it is meant for; None for a `Hello` to whoever listens there."""
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """Bytes for the wire."""
    return _encoder.encode(envelope)


def decode(raw: bytes) -> Envelope:
    """The message in `raw`. Raises msgspec.DecodeError, a ValueError, on anything malformed."""
    return _decoder.decode(raw)
