"""What the bytes of a KV block mean. Two engines move KV only between equal layouts."""

from __future__ import annotations

from hashlib import blake2b

import msgspec


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of one block; peers compare it field by field at the handshake."""

    order: str
    """Order of axes in memory, e.g. `block,layer,token,kv,head,dim`."""
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block."""
    block_bytes: int
    """Bytes of one block, all layers."""

    def fingerprint(self) -> str:
        """Short hash of every field."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    def differences(self, other: KVLayout) -> list[str]:
        """`field: this one's value, the other's value` for each field that differs."""
        return [
            f"{name}: {getattr(self, name)!r} here, {getattr(other, name)!r} there"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]
