"""Durations of the protocol, in seconds. None is ever compared with another machine's clock."""

from __future__ import annotations

import msgspec


class HandoffSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Each engine's own; a lease travels in the answer that gives it."""

    offer_lease_s: float = 10.0
    """How long a source keeps an offer nobody claims. Long enough for the router to bind a destination, short
    enough that a dead destination strands a source's memory for seconds, not minutes."""
    claim_lease_s: float = 5.0
    """How long a claim pins an offer. Readers renew at a third of it."""
    margin: float = 0.1
    """Part of a lease that a reader doesn't trust: it covers clocks that run at unequal rates."""
    handshake_s: float = 2.0
    """A peer that hasn't answered `Hello` by then is unreachable: recompute."""
    claim_s: float = 2.0
    """A claim that wasn't answered by then is given up: recompute."""
    read_s: float = 30.0
    """A read that hasn't landed by then is given up, its targets quarantined until the fence: recompute."""
    retry_s: float = 0.1
    """First wait before an unanswered message is sent again; doubles each time."""
    remembered: int = 4096
    """Ended offers whose end is remembered, so that a late claim is told why."""
