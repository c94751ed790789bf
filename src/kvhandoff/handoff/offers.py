"""The source's side: offers, and the claims and grants that pin them.

An offer is a prompt's blocks, kept for a handoff. That of a push grows while the prompt is computed; one that
a turn left behind for the next one is *retained*, read any number of times, and given up when memory is
short.

Two engines may wait for each other: one's memory is full of offers whose destinations queue at the other,
and the other's of blocks for prompts, or of turns for loads, that queue at the first. So a source whose
memory has been short for `short_s` without a break gives up offers whose destinations all say that they queue
("short for long"). What they say only chooses whom to give up, and may be out of date; it frees nothing. As
with any offer that closes, the blocks are freed when every pin has ended, and each end is safe, whatever was
lost or comes late:

- a claim's lease, counted from the last answer: its reader counts from before it asked, and trusts no longer;
- a release: the reader has dropped the load before it sent this, and uses nothing that lands later. It is a
  declined reader's last word; so it takes until the next renewal, a third of a lease, if nothing is lost;
- a grant's end: it named no blocks, so that nothing was written under it.

Rules of docs/protocol.md upheld here: *no use after free* for blocks a peer may read or a write reads from:
`_free` is the only way out of the ledger, and it runs only when no pin's lease is running and no write is in
flight; *no wait without a deadline* between engines that are short: `memory_short`; *no leak*: every offer
has a lease that ends by itself, or an engine that computes it; *salts never mix*: a claim is answered by
comparing chains, whose roots hold the salt.

    state     event                                effect                       next
    --------  -----------------------------------  ---------------------------  --------------------------
    (none)    started                              -                            GROWING
    (none)    offered                              -                            OPEN
    (none)    retained                             -                            RETAINED
    (none)    offered, or retained, not as its     ValueError                   (none)
              chain
    (none)    claim                                declined: offer_unknown      (none)
    (none)    withdrawn                            -                            ENDED
    (none)    grown                                free                         (none)
    GROWING   grown                                -                            GROWING
    GROWING   offered                              -                            OPEN
    GROWING   offered, a grant pins it             -                            PINNED
    GROWING   grown, or offered, not as its chain  ValueError                   GROWING
    GROWING   claim                                declined: offer_unknown      GROWING
    GROWING   abandoned, withdrawn, or release,    free                         ENDED
              done
    GROWING   the same, a write in flight          -                            CLOSING
    OPEN      claim, chains share tokens           granted                      PINNED
    OPEN      claim, no token shared               declined: chain_mismatch     OPEN
    OPEN      release, done                        free                         ENDED
    OPEN      withdrawn                            free                         ENDED
    OPEN      own lease over                       noted: offer_expired, free   ENDED
    RETAINED  claim, chains share tokens           granted                      PINNED
    RETAINED  claim, no token shared               declined: chain_mismatch     RETAINED
    RETAINED  withdrawn                            free                         ENDED
    RETAINED  memory short, used least recently    noted: offer_given_up, free  ENDED
    RETAINED  memory short, enough others          -                            RETAINED
    RETAINED  own lease or time over               noted: offer_expired, free   ENDED
    PINNED    claim, chains share tokens           granted                      PINNED
    PINNED    claim, no token shared               declined: chain_mismatch     PINNED
    PINNED    release of the last reader, done     free                         ENDED
    PINNED    release, done, others pin it         -                            CLOSING
    PINNED    release, not done or retained        -                            OPEN or RETAINED or PINNED
    PINNED    release from before the claim        -                            PINNED
    PINNED    withdrawn                            -                            CLOSING
    PINNED    memory short, retained               noted: offer_given_up        CLOSING
    PINNED    memory short, not retained           -                            PINNED
    PINNED    short for long, all queue            noted: source_short          CLOSING
    PINNED    short for long, all queue by grants  noted: source_short, free    ENDED
    PINNED    short for long, one does not queue   -                            PINNED
    PINNED    fixed time over                      noted: offer_expired         CLOSING
    PINNED    last pin's lease over                noted: lease_lapsed          OPEN or RETAINED
    PINNED    last pin's and own lease over        noted: lease_lapsed, noted:  ENDED
                                                   offer_expired, free
    CLOSING   claim of a present reader            granted                      CLOSING
    CLOSING   the same, given up or expired        declined: why                CLOSING
    CLOSING   claim of another reader              declined: why                CLOSING
    CLOSING   last pin released                    free                         ENDED
    CLOSING   last pin's lease over                noted: lease_lapsed, free    ENDED
    CLOSING   last write reported                  free                         ENDED
    CLOSING   grown, or offered                    free                         CLOSING
    ENDED     claim                                declined: why                ENDED
    ENDED     grown, offered, or retained          free                         ENDED

Misuse, refused with ValueError: GROWING: started, retained; OPEN, RETAINED, PINNED: started, grown, offered,
retained; CLOSING: started, retained.

The state is what the data says, the first that holds: `_ended` makes it ENDED, `closing` CLOSING, no
completion GROWING, pins PINNED, a retention RETAINED. A grant pins an offer as a claim does, also while it
grows (`writes.py`). An own lease starts anew with each use; a `fixed` time does not. Whatever the state, a
write in flight holds the blocks until it has ended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import to_spans
from kvhandoff.handoff.events import Effect, FreeBlocks, Noted, Offered, Retained, Retention, Send
from kvhandoff.handoff.messages import Claim, ClaimDeclined, ClaimGranted, Release
from kvhandoff.handoff.settings import HandoffSettings

Reader = tuple[Identity, HandoffKey]


@dataclass(slots=True)
class Pin:
    """A claim's or a grant's hold on an offer."""

    until: float
    """When its lease ends, on the source's own clock."""
    last_seq: int
    """Its latest claim's, or the grant's number: a release that names a smaller one came late."""
    queued: bool
    """Whether the destination has no blocks to fill yet: that claim says so, or that grant names none."""


@dataclass(slots=True)
class Offer:
    """One prompt's blocks, as far as they are computed."""

    chain: TokenChain
    blocks: tuple[int, ...]
    expires: float
    """On the source's own clock: when the offer ends if nobody pins it."""
    retention: Retention | None = None
    first_token: int | None = None
    cached_tokens: int = 0
    completed_at: float | None = None
    """None: GROWING."""
    used_at: float = 0.0
    pins: dict[Reader, Pin] = field(default_factory=dict)
    writing: int = 0
    """Writes in flight that read from its blocks."""
    closing: Reason | None = None
    """Set once no new reader is admitted: why."""

    @property
    def complete(self) -> bool:
        return self.completed_at is not None

    @property
    def queued_for(self) -> bool:
        """Whether somebody wants it, and none of those who do has blocks to fill."""
        return bool(self.pins) and not self.writing and all(pin.queued for pin in self.pins.values())


@dataclass(slots=True)
class _Shortage:
    """How long the engine has lacked blocks."""

    began: float = -math.inf
    told: float = -math.inf

    def lasts(self, now: float) -> float:
        """The engine says it again: seconds since it began, without a break."""
        if now > self.told + _BREAK_S:
            self.began = now
        self.told = now
        return now - self.began


class OfferLedger:
    """All offers of one engine. Time comes in with each call, in seconds of the engine's own clock."""

    def __init__(self, settings: HandoffSettings) -> None:
        self._settings = settings
        self._offers: dict[HandoffKey, Offer] = {}
        self._ended: dict[HandoffKey, Reason] = {}
        self._shortage = _Shortage()

    def blocks(self) -> list[int]:
        """Every block under an offer, once per offer that holds it."""
        return [block for offer in self._offers.values() for block in offer.blocks]

    def retained(self) -> list[int]:
        """Every block under a retained offer, once per offer that holds it."""
        return [block for offer in self._offers.values() if offer.retention for block in offer.blocks]

    def __len__(self) -> int:
        return len(self._offers)

    def leases(self) -> dict[str, int]:
        """Leases on this engine's blocks: `offer` and `retained` wait for readers, `pin` is a reader's or a
        writer's hold on one."""
        retained = sum(offer.retention is not None for offer in self._offers.values())
        pins = sum(len(offer.pins) for offer in self._offers.values())
        return {"offer": len(self._offers) - retained, "retained": retained, "pin": pins}

    def get(self, key: HandoffKey) -> Offer | None:
        """An offer that has not ended; for the write ledger."""
        return self._offers.get(key)

    def why_ended(self, key: HandoffKey) -> Reason | None:
        """Why an offer ended; None for one that was never heard of, or that lives."""
        return self._ended.get(key)

    def next_deadline(self) -> float | None:
        """When a lease ends next."""
        ends = [end for offer in self._offers.values() if (end := _next_end(offer)) < math.inf]
        return min(ends, default=None)

    # ------------------------------------------------------------------------------ the engine's events

    def started(self, key: HandoffKey, chain: TokenChain) -> list[Effect]:
        """A prompt that grows has arrived. Raises ValueError on a key in use."""
        self._check_new(key)
        if key not in self._ended:
            self._offers[key] = Offer(chain, (), math.inf)
        return []

    def grown(self, key: HandoffKey, blocks: tuple[int, ...]) -> list[Effect]:
        """The next full blocks are computed."""
        offer = self._offers.get(key)
        if offer is None or offer.closing is not None:
            return [FreeBlocks(blocks)]
        if offer.complete or len(offer.blocks) + len(blocks) > offer.chain.n_blocks:
            raise ValueError(f"offer {key}: {len(blocks)} blocks more than its chain has")
        offer.blocks += blocks
        return []

    def offered(self, now: float, event: Offered) -> list[Effect]:
        """Keep `blocks` for readers of `chain`. Raises ValueError on a key in use or an unfit block count."""
        key, chain = event.offer, event.chain
        offer = self._offers.get(key)
        if offer is not None and (offer.complete or offer.chain != chain):
            raise ValueError(f"offer {key} is open already, or was started with another chain")
        before = () if offer is None else offer.blocks
        if offer is not None and offer.closing is not None:
            return [FreeBlocks(event.blocks)]
        if offer is None and key in self._ended:
            return [FreeBlocks(event.blocks)]
        if chain.n_blocks != len(before) + len(event.blocks):
            given = len(before) + len(event.blocks)
            raise ValueError(f"offer {key}: {chain.n_blocks} blocks in the chain, {given} given")
        if offer is None:
            offer = self._offers[key] = Offer(chain, (), math.inf)
        offer.blocks += event.blocks
        offer.first_token, offer.cached_tokens = event.first_token, event.cached_tokens
        offer.completed_at = now
        offer.expires = now + self._settings.offer_lease_s
        return []

    def abandoned(self, key: HandoffKey, reason: Reason) -> list[Effect]:
        """It will never be complete."""
        offer = self._offers.get(key)
        return [] if offer is None or offer.complete else self._close(key, offer, reason)

    def retain(self, now: float, event: Retained) -> list[Effect]:
        """Keep what a turn left. Raises ValueError on a key in use or an unfit block count."""
        key, chain = event.offer, event.chain
        self._check_new(key)
        if chain.n_blocks != len(event.blocks) or chain.tail:
            raise ValueError(f"offer {key}: {chain.n_tokens} tokens are not {len(event.blocks)} full blocks")
        if key in self._ended:
            return [FreeBlocks(event.blocks)]
        settings = self._settings
        fixed = event.retention == "fixed"
        expires = now + (settings.retain_fixed_s if fixed else settings.retain_lease_s)
        self._offers[key] = Offer(
            chain, event.blocks, expires, retention=event.retention, completed_at=now, used_at=now
        )
        return []

    def memory_short(self, now: float, blocks: int) -> list[Effect]:
        """Give up offers, at least `blocks` blocks' worth, as far as there are: retained ones, least recently
        used first, those that nobody reads before the others; and when memory has been short for `short_s`,
        those whose destinations all queue, oldest first. What closing offers still hold is on its way: as
        much less is taken from readers."""
        lasts = self._shortage.lasts(now)
        living = [(key, o) for key, o in self._offers.items() if o.complete and o.closing is None]
        retained = [(key, o) for key, o in living if o.retention]
        retained.sort(key=lambda item: (bool(item[1].pins), item[1].used_at))
        queued = [(key, o) for key, o in living if not o.retention and o.queued_for]
        queued.sort(key=lambda item: item[1].completed_at or 0.0)
        coming = sum(len(o.blocks) for o in self._offers.values() if o.closing is not None)
        effects: list[Effect] = []
        for key, offer in [*retained, *(queued if lasts >= self._settings.short_s else ())]:
            if blocks <= (coming if offer.pins else 0):
                break
            blocks -= len(offer.blocks)
            why = Reason.OFFER_GIVEN_UP if offer.retention else Reason.SOURCE_SHORT
            effects.append(Noted(key, why, f"{len(offer.blocks)} blocks, memory is short"))
            effects += self._close(key, offer, why)
        return effects

    def withdrawn(self, key: HandoffKey) -> list[Effect]:
        """Nobody will come any more, says the router."""
        offer = self._offers.get(key)
        if offer is None:
            if key not in self._ended:
                self._remember(key, Reason.OFFER_WITHDRAWN)
            return []
        return self._close(key, offer, Reason.OFFER_WITHDRAWN)

    # --------------------------------------------------------------------------------- the peers' events

    def claimed(self, now: float, sender: Identity, reply_to: str, claim: Claim) -> list[Effect]:
        """Answer a claim; a granted one pins the offer for a lease that starts now."""
        effects = self.tick(now)
        offer, reader = self._offers.get(claim.offer), (sender, claim.reader)

        def decline(reason: Reason) -> list[Effect]:
            answer = ClaimDeclined(offer=claim.offer, reader=claim.reader, reason=reason)
            return [*effects, Send(reply_to, sender, answer)]

        if offer is None or not offer.complete:
            return decline(self._ended.get(claim.offer, Reason.OFFER_UNKNOWN))
        if offer.closing is not None and (reader not in offer.pins or offer.closing in _NO_RENEWAL):
            return decline(offer.closing)
        matched = offer.chain.common_tokens(claim.chain) if claim.chain.is_well_formed() else 0
        if matched == 0:
            return decline(Reason.CHAIN_MISMATCH)
        self.pin(now, offer, reader, claim.seq, queued=claim.queued)
        answer = ClaimGranted(
            offer=claim.offer,
            reader=claim.reader,
            seq=claim.seq,
            matched_tokens=matched,
            spans=to_spans(offer.blocks),
            lease_s=self._settings.claim_lease_s,
        )
        return [*effects, Send(reply_to, sender, answer)]

    def released(self, now: float, sender: Identity, release: Release) -> list[Effect]:
        """A reader reads no more. Also right when its claim never arrived."""
        offer, reader = self._offers.get(release.offer), (sender, release.reader)
        if offer is None:
            return self.tick(now)
        pin = offer.pins.get(reader)
        if pin is not None and release.seq < pin.last_seq:
            return self.tick(now)
        had_pin = offer.pins.pop(reader, None) is not None
        if release.done and offer.retention is None:
            return self._close(release.offer, offer, offer.closing or Reason.OFFER_CONSUMED)
        if had_pin:
            self._use(now, offer)
        return self.tick(now)

    # ------------------------------------------------------------------------------- the write ledger's

    def pin(self, now: float, offer: Offer, reader: Reader, seq: int, *, queued: bool) -> None:
        """Keep an offer for one lease from now. `queued`: as of `seq`, which may come after a later one."""
        known = offer.pins.get(reader)
        if known is not None and seq < known.last_seq:
            seq, queued = known.last_seq, known.queued
        offer.pins[reader] = Pin(now + self._settings.claim_lease_s, seq, queued)
        self._use(now, offer)

    def unpin(self, now: float, key: HandoffKey, reader: Reader) -> list[Effect]:
        """A grant is over."""
        offer = self._offers.get(key)
        if offer is None or offer.pins.pop(reader, None) is None:
            return []
        self._use(now, offer)
        return list(self._expire(now, key))

    def write_began(self, key: HandoffKey) -> None:
        """One more write reads from an offer's blocks."""
        self._offers[key].writing += 1

    def write_ended(self, now: float, key: HandoffKey) -> list[Effect]:
        """One of them has reported."""
        self._offers[key].writing -= 1
        return list(self._expire(now, key))

    # ----------------------------------------------------------------------------------------- the steps

    def tick(self, now: float) -> list[Effect]:
        """End what has run out."""
        return [effect for key in list(self._offers) for effect in self._expire(now, key)]

    def _expire(self, now: float, key: HandoffKey) -> Iterator[Effect]:
        offer = self._offers[key]
        for reader, pin in list(offer.pins.items()):
            if now >= pin.until:
                del offer.pins[reader]
                detail = f"claim of {reader[0]} for {reader[1]} was neither renewed nor released"
                yield Noted(key, Reason.LEASE_LAPSED, detail)
        over = now >= offer.expires
        if over and offer.closing is None and (not offer.pins or offer.retention == "fixed"):
            yield Noted(key, Reason.OFFER_EXPIRED, f"{len(offer.blocks)} blocks, no claim within the lease")
            offer.closing = Reason.OFFER_EXPIRED
        if offer.closing is not None and not offer.pins and not offer.writing:
            yield self._free(key, offer.closing)

    def _close(self, key: HandoffKey, offer: Offer, why: Reason) -> list[Effect]:
        offer.closing = offer.closing or why
        return [] if offer.pins or offer.writing else [self._free(key, offer.closing)]

    def _free(self, key: HandoffKey, why: Reason) -> FreeBlocks:
        offer = self._offers.pop(key)
        self._remember(key, why)
        return FreeBlocks(offer.blocks)

    def _use(self, now: float, offer: Offer) -> None:
        """Its own lease starts anew, unless it grows or its time is fixed."""
        offer.used_at = now
        settings = self._settings
        if offer.complete and offer.retention != "fixed":
            lease = settings.offer_lease_s if offer.retention is None else settings.retain_lease_s
            offer.expires = max(offer.expires, now + lease)

    def _check_new(self, key: HandoffKey) -> None:
        if key in self._offers:
            raise ValueError(f"offer {key} is open already")

    def _remember(self, key: HandoffKey, why: Reason) -> None:
        self._ended[key] = why
        while len(self._ended) > self._settings.remembered:
            del self._ended[next(iter(self._ended))]


_BREAK_S = 1.0
"""Seconds without a word of the shortage after which another one begins: engines say it twice a second."""

_NO_RENEWAL = (Reason.OFFER_GIVEN_UP, Reason.SOURCE_SHORT, Reason.OFFER_EXPIRED)
"""Why an offer closes although its readers would go on: they are told at their next renewal."""


def _next_end(offer: Offer) -> float:
    ends = [pin.until for pin in offer.pins.values()]
    if offer.closing is None and (not offer.pins or offer.retention == "fixed"):
        ends.append(offer.expires)
    return min(ends, default=math.inf)
