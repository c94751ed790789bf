"""What a NIXL plane tells its peers of itself, on the wire: written here, and checked here field by field."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated

import msgspec

from kvhandoff.core.ids import Identity
from kvhandoff.transport.api import MemoryKind, Piece, Region, TransportError
from kvhandoff.transport.pieces import MAX_PIECES, check_pieces

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
_Device = Annotated[int, msgspec.Meta(ge=0, le=2**16)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class NixlMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="nixl"):
    """An agent, and the region it has registered."""

    agent_name: _Name
    backend: _Name
    agent_metadata: bytes
    """NIXL's own format: connection information and keys of registered memory."""
    checksum: bytes
    """Of all else here: NIXL takes damaged addresses and keys for good ones."""
    memory: MemoryKind
    device: _Device
    num_blocks: _Positive
    pieces: Annotated[
        tuple[tuple[_Positive, _Positive, _Positive], ...], msgspec.Meta(min_length=1, max_length=MAX_PIECES)
    ]
    """(address, stride, size) of each, in bytes."""

    @property
    def layout(self) -> tuple[Piece, ...]:
        return tuple(Piece(*piece) for piece in self.pieces)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(NixlMetadata)


def encode(agent_name: str, backend: str, agent_metadata: bytes, region: Region) -> bytes:
    """The metadata of an agent that has registered `region`."""
    facts = NixlMetadata(
        agent_name=agent_name,
        backend=backend,
        agent_metadata=agent_metadata,
        checksum=b"",
        memory=region.memory,
        device=region.device,
        num_blocks=region.num_blocks,
        pieces=tuple((piece.address, piece.stride, piece.size) for piece in region.pieces),
    )
    return _encoder.encode(msgspec.structs.replace(facts, checksum=_checksum(facts)))


def decode(peer: Identity, metadata: bytes) -> NixlMetadata:
    """Raises TransportError for what is no metadata, damaged, or tells of memory that can't be."""
    try:
        facts = _decoder.decode(metadata)
    except msgspec.DecodeError as error:
        raise TransportError(f"connect {peer}: malformed nixl metadata ({error})") from error
    if facts.checksum != _checksum(facts):
        raise TransportError(f"connect {peer}: damaged nixl metadata (checksum)")
    try:
        check_pieces(facts.layout, facts.num_blocks)
    except ValueError as error:
        raise TransportError(f"connect {peer}: malformed nixl metadata ({error})") from error
    return facts


def _checksum(facts: NixlMetadata) -> bytes:
    return blake2b(_encoder.encode(msgspec.structs.replace(facts, checksum=b"")), digest_size=16).digest()
