"""What router and engines sign for each other with the cluster key: short texts that travel through HTTP."""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode
from binascii import b2a_base64
from hashlib import blake2b

from kvhandoff.core.errors import ConfigError

MIN_CLUSTER_KEY_BYTES = 16
"""Of the key that router and engines share: fewer could be guessed, and whoever knows it is one of them."""


def check_cluster_key(key: bytes, *, set_by: str) -> bytes:
    """The key. Raises ConfigError for none, and for one that is too short; `set_by`: how it is given."""
    if not key:
        raise ConfigError(f"cluster key: none given; set {set_by}")
    if len(key) < MIN_CLUSTER_KEY_BYTES:
        allowed = f"{MIN_CLUSTER_KEY_BYTES} or more, as of `openssl rand -hex 32`"
        raise ConfigError(f"cluster key: got {len(key)} bytes, allowed are {allowed}; set {set_by}")
    return key


class BadSignature(ValueError):
    """Not signed with this cluster's key for this purpose. Its text goes on a sentence about what it was."""


class Signer:
    """Signs and checks with a key derived from the cluster key, one for each purpose: what is signed for one
    is worth nothing for another."""

    def __init__(self, cluster_key: bytes, purpose: bytes) -> None:
        """`purpose`: 16 bytes at most."""
        key = blake2b(cluster_key, digest_size=32, person=purpose).digest()
        self._keyed = blake2b(digest_size=32, key=key)

    def sign(self, payload: bytes) -> str:
        """`payload.signature`, both base64url."""
        both = b2a_base64(payload, newline=False) + b"." + b2a_base64(self._mac(payload), newline=False)
        return both.translate(_URLSAFE).decode()

    def open(self, signed: object) -> bytes:
        """The payload, its signature checked. Raises BadSignature."""
        if not isinstance(signed, str) or signed.count(".") != 1:
            raise BadSignature("is not of the form payload.signature")
        try:
            payload, mac = (urlsafe_b64decode(part) for part in signed.split("."))
        except ValueError as error:
            raise BadSignature("is not base64url") from error
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise BadSignature("is not signed with this cluster's key")
        return payload

    def _mac(self, payload: bytes) -> bytes:
        """BLAKE2b with a key is a MAC by itself (RFC 7693), at a third of HMAC's time."""
        mac = self._keyed.copy()
        mac.update(payload)
        return mac.digest()


_URLSAFE = bytes.maketrans(b"+/", b"-_")
