"""Registrations: an engine tells a router that it is there, signed with the cluster key, again and again.

A registration holds for a duration, counted by the router from its arrival, so that no clocks are compared.
Each has a number, and of one life of an engine a router takes only rising ones: a copy of an old message
neither brings an engine back nor keeps it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvhandoff.core.errors import RequestError
from kvhandoff.core.ids import Identity
from kvhandoff.handoff.signing import BadSignature, Signer

MAX_LEASE_S = 3600.0


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself."""

    engine: Identity
    number: int
    """Rises with each registration of this life."""
    role: Literal["prefill", "decode"]
    """What it is to be used for."""
    url: str
    """Where the router reaches its server."""
    internal: str | None = None
    """Where its pages for the router are, if not at `url` or at the usual port of that host."""
    lease_s: float
    """How long this holds, 3600 s at most; 0: the engine leaves."""


class BadRegistration(RequestError):
    """An unsigned, foreign, repeated, outdated or unreadable registration: refused with 403, nothing taken
    from it."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"registration: {why}",
            status=403,
            param="registration",
            code="bad_registration",
            kind="permission_error",
        )


_decoder = msgspec.msgpack.Decoder(Registration)


class RegistrationKey:
    """Signs and checks registrations."""

    def __init__(self, cluster_key: bytes) -> None:
        self._signer = Signer(cluster_key, b"kvh-register")

    def sign(self, registration: Registration) -> str:
        """As the body of `/internal/engines` has it in `registration`."""
        return self._signer.sign(msgspec.msgpack.encode(registration))

    def open(self, signed: object) -> Registration:
        """The registration, its signature checked (the number is the router's to check).

        Raises BadRegistration.
        """
        try:
            return _decoder.decode(self._signer.open(signed))
        except BadSignature as error:
            why = f"it {error}; a router takes only those signed with its cluster's key"
            raise BadRegistration(why) from error
        except msgspec.DecodeError as error:
            raise BadRegistration(f"it can't be read ({error})") from error
