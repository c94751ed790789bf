"""Tickets: what an engine obeys. Made and signed by the router, short-lived, for one engine's one life.

`not_after` is a reading of the *audience's* clock. The router learns that clock from the engine's own state
reports: an engine's `now` is read before its report arrives, so that reading plus the time since the arrival
never runs ahead of the engine. So a ticket ends early rather than late, and no two clocks are compared.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvhandoff.core.errors import RequestError
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.handoff.events import Retention
from kvhandoff.handoff.messages import HistoryRef, OfferDescriptor, OfferRef
from kvhandoff.handoff.signing import BadSignature, Signer

MissPolicy = Literal["recompute", "error"]


class Ticket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One leg of one attempt of one request."""

    leg: Literal["prefill", "decode", "local", "withdraw", "yield", "peers"]
    """`prefill`: compute and offer; `decode`: read the offer and answer; `local`: answer alone; `withdraw`:
    end the offer; `yield`: end the decode leg, unless it has begun; `peers`: connect to these peers ahead of
    time."""
    audience: Identity
    not_after: float
    """On the audience's own monotonic clock, seconds."""
    key: HandoffKey
    cache_salt: str = ""
    """From the authenticated tenant and the client's own `cache_salt`; it overrides any in the body."""
    offer: OfferDescriptor | None = None
    """Decode leg, pulled: what to claim."""
    push_from: OfferRef | None = None
    """Decode leg, pushed: the offer whose source is to write."""
    push: bool = False
    """Prefill leg: a decode engine will grant blocks to be written while the prompt is computed. Its control
    address is in `peers`, to connect to ahead of that."""
    history: HistoryRef | None = None
    """Prefill or local leg: a retained offer that may hold the beginning of the prompt."""
    retain: Retention | None = None
    """Decode or local leg: keep what the turn computed, under this ticket's key, for the next one."""
    on_miss: MissPolicy = "recompute"
    """Decode leg: what to do when the offer can't be used."""
    peers: tuple[str, ...] = ()
    """Control addresses, for `peers`."""


class BadTicket(RequestError):
    """An unsigned, foreign, late or repeated ticket: refused with 403, nothing obeyed."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"kv_transfer_params: {why}; an engine obeys only tickets signed by its router",
            status=403,
            param="kv_transfer_params",
            code="bad_ticket",
            kind="permission_error",
        )


_decoder = msgspec.msgpack.Decoder(Ticket)


class TicketKey:
    """Signs and checks tickets with a key derived from the cluster key."""

    def __init__(self, cluster_key: bytes) -> None:
        self._signer = Signer(cluster_key, b"kvh-ticket")

    def sign(self, ticket: Ticket) -> str:
        """`payload.signature`, both base64url."""
        return self._signer.sign(msgspec.msgpack.encode(ticket))

    def open(self, signed: object) -> Ticket:
        """The ticket, its signature checked (audience and time are the engine's to check).

        Raises BadTicket.
        """
        try:
            return _decoder.decode(self._signer.open(signed))
        except BadSignature as error:
            raise BadTicket(f"ticket {error}") from error
        except msgspec.DecodeError as error:
            raise BadTicket(f"ticket can't be read ({error})") from error


class TicketGate:
    """One engine's check of tickets: for this life, in time, and once per leg and attempt.

    One thread at a time may ask: of two with one ticket, both might be admitted."""

    def __init__(self, key: TicketKey, me: Identity) -> None:
        self._key = key
        self._me = me
        self._seen: dict[tuple[str, HandoffKey], float] = {}

    def admit(self, signed: object, now: float) -> Ticket:
        """The ticket, if this engine may obey it now (`now`: its own clock). Raises BadTicket."""
        ticket = self._key.open(signed)
        if ticket.audience != self._me:
            raise BadTicket(f"ticket is for {ticket.audience}, this engine is {self._me}")
        if now > ticket.not_after:
            raise BadTicket(f"ticket ran out {now - ticket.not_after:.1f} s ago")
        use = (ticket.leg, ticket.key)
        self._seen = {seen: until for seen, until in self._seen.items() if until >= now}
        if use in self._seen:
            raise BadTicket(f"ticket for the {ticket.leg} leg of {ticket.key} was used before")
        self._seen[use] = ticket.not_after
        return ticket
