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

PROTOCOL_VERSION = 1


class OfferDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Where an offer is and what it stands for; travels source → router → destination.

    It is a hint with a digest: the destination uses what it reads only after the source has answered a claim.
    """

    key: HandoffKey
    source: Identity
    control_address: str
    """Where the source's control plane listens, e.g. `tcp://127.0.0.1:5701`."""
    spans: tuple[Span, ...]
    """The offered blocks, in the order of the tokens."""
    n_tokens: int
    digest: str
    """`TokenChain.digest()` of the offered tokens."""
    cached_tokens: int = 0
    """How many of them the source found in its own prefix cache; reported in the answer's usage."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message to a peer: what the sender is. Answered by `Welcome` or `Refused`."""

    protocol_version: int
    model_fingerprint: str
    layout: KVLayout
    num_blocks: int
    data_plane: str
    """`nixl` or `shm`."""
    data_plane_metadata: bytes
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
    """The reader reads no more. `done` ends the offer too: nobody else will come for it."""

    offer: HandoffKey
    reader: HandoffKey
    done: bool


class WrongEpoch(msgspec.Struct, frozen=True, kw_only=True, tag="wrong_epoch"):
    """The answer of a restarted engine to a message for its former life; what that life promised is gone."""

    wanted: Identity


Body = Hello | Welcome | Refused | Claim | ClaimGranted | ClaimDeclined | Release | WrongEpoch


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
