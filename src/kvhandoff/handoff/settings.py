"""Durations of the protocol, in seconds. None is ever compared with another machine's clock."""

from __future__ import annotations

import msgspec

MIN_RETURN_TOKENS = 64
"""Return: with less to gain, computing is as cheap as asking (design)."""


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
    queue_s: float = 300.0
    """A load that has no blocks by then is given up, so that two engines whose queues hold each other's
    blocks don't wait for ever: recompute when there are blocks."""
    short_s: float = 5.0
    """An engine that has lacked blocks for so long, without a break, gives up offers whose destinations queue
    for blocks themselves: it may be that each waits for the other. Those requests recompute."""
    retry_s: float = 0.1
    """First wait before an unanswered message is sent again; doubles each time."""
    rendezvous_s: float = 5.0
    """Push: how long a grant whose prompt has not reached the source yet is kept there, and how long the
    destination waits for a first answer: recompute."""
    progress_s: float = 5.0
    """Push: a source that gave no sign of life for so long is given up: recompute. A long queue at a live
    source is none of that."""
    write_s: float = 30.0
    """Push: a source with a write in flight for longer gives no sign of life any more."""
    fence_s: float = 10.0
    """A peer that owes a fence for longer gets no new permission: recompute."""
    revoke_cap_s: float = 2.0
    """Longest wait before an unanswered `Revoke` is sent again: until the fence, however long that takes."""
    retain_lease_s: float = 600.0
    """Return, `renewable`: how long what a turn left is kept after its last use."""
    retain_fixed_s: float = 480.0
    """Return, `fixed`: how long it is kept, used or not. vLLM's time (design)."""
    quarantine_alarm: float = 0.1
    """Part of the pool in quarantine that raises an alarm."""
    remembered: int = 4096
    """Ended offers whose end is remembered, so that a late claim is told why."""
