"""The source's side of a pull: offers, and the claims that pin them.

Rules of docs/protocol.md upheld here: *no use after free* for blocks a peer may read: `_free` is the only
way out of the ledger, and it runs only when no claim's lease is running; *no leak*: every offer has a lease
that ends by itself; *salts never mix*: a claim is answered by comparing chains, whose roots hold the salt.

    state      event                          effect                      next
    ---------  -----------------------------  --------------------------  ---------
    (none)     offered                        -                           OPEN
    (none)     claim                          declined: offer_unknown     (none)
    (none)     withdrawn                      remember                    ENDED
    OPEN       claim, chains share tokens     granted, pinned             CLAIMED
    OPEN       claim, no token shared         declined: chain_mismatch    OPEN
    OPEN       release, done                  free                        ENDED
    OPEN       withdrawn                      free                        ENDED
    OPEN       own lease over                 free, noted: offer_expired  ENDED
    CLAIMED    claim                          granted, lease renewed      CLAIMED
    CLAIMED    release, done                  end when unclaimed          CLOSING or ENDED
    CLAIMED    release, not done              own lease starts anew       OPEN or CLAIMED
    CLAIMED    withdrawn                      end when unclaimed          CLOSING
    CLAIMED    last claim's lease over        noted: lease_lapsed         OPEN
    CLOSING    claim of a present reader      granted, lease renewed      CLOSING
    CLOSING    claim of another reader        declined: why it closes     CLOSING
    CLOSING    last claim released or over    free                        ENDED
    ENDED      claim                          declined: why it ended      ENDED
    ENDED      offered                        free                        ENDED

The state is what the data says: claims make it CLAIMED, `closing` makes it CLOSING, `_ended` ENDED.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import to_spans
from kvhandoff.handoff.events import Effect, FreeBlocks, Noted, Send
from kvhandoff.handoff.messages import Claim, ClaimDeclined, ClaimGranted, Release
from kvhandoff.handoff.settings import HandoffSettings

Reader = tuple[Identity, HandoffKey]


@dataclass(slots=True)
class _Offer:
    chain: TokenChain
    blocks: tuple[int, ...]
    expires: float
    """On the source's own clock: when the offer ends if nobody has a claim."""
    claims: dict[Reader, float] = field(default_factory=dict)
    """Reader → when its claim's lease ends, on the source's own clock."""
    closing: Reason | None = None
    """Set once no new reader is admitted: why."""


class OfferLedger:
    """All offers of one engine. Time comes in with each call, in seconds of the engine's own clock."""

    def __init__(self, settings: HandoffSettings) -> None:
        self._settings = settings
        self._offers: dict[HandoffKey, _Offer] = {}
        self._ended: dict[HandoffKey, Reason] = {}

    def blocks(self) -> list[int]:
        """Every block under an offer, once per offer that holds it."""
        return [block for offer in self._offers.values() for block in offer.blocks]

    def __len__(self) -> int:
        return len(self._offers)

    def next_deadline(self) -> float | None:
        """When a lease ends next."""
        return min((_next_end(offer) for offer in self._offers.values()), default=None)

    def offered(
        self, now: float, key: HandoffKey, chain: TokenChain, blocks: tuple[int, ...]
    ) -> list[Effect]:
        """Keep `blocks` for readers of `chain`. Raises ValueError on a key in use or an unfit block count."""
        if key in self._offers:
            raise ValueError(f"offer {key} is open already")
        if chain.n_blocks != len(blocks):
            raise ValueError(f"offer {key}: {chain.n_blocks} blocks in the chain, {len(blocks)} given")
        if key in self._ended:
            return [FreeBlocks(blocks)]
        self._offers[key] = _Offer(chain, blocks, now + self._settings.offer_lease_s)
        return []

    def withdrawn(self, key: HandoffKey) -> list[Effect]:
        """Nobody will come any more, says the router."""
        offer = self._offers.get(key)
        if offer is None:
            if key not in self._ended:
                self._remember(key, Reason.OFFER_WITHDRAWN)
            return []
        return self._close(key, offer, Reason.OFFER_WITHDRAWN)

    def claimed(self, now: float, sender: Identity, reply_to: str, claim: Claim) -> list[Effect]:
        """Answer a claim; a granted one pins the offer for a lease that starts now."""
        effects = self.tick(now)
        offer, reader = self._offers.get(claim.offer), (sender, claim.reader)

        def decline(reason: Reason) -> list[Effect]:
            answer = ClaimDeclined(offer=claim.offer, reader=claim.reader, reason=reason)
            return [*effects, Send(reply_to, sender, answer)]

        if offer is None:
            return decline(self._ended.get(claim.offer, Reason.OFFER_UNKNOWN))
        if offer.closing is not None and reader not in offer.claims:
            return decline(offer.closing)
        matched = offer.chain.common_tokens(claim.chain) if claim.chain.is_well_formed() else 0
        if matched == 0:
            return decline(Reason.CHAIN_MISMATCH)
        lease = self._settings.claim_lease_s
        offer.claims[reader] = now + lease
        answer = ClaimGranted(
            offer=claim.offer,
            reader=claim.reader,
            seq=claim.seq,
            matched_tokens=matched,
            spans=to_spans(offer.blocks),
            lease_s=lease,
        )
        return [*effects, Send(reply_to, sender, answer)]

    def released(self, now: float, sender: Identity, release: Release) -> list[Effect]:
        """A reader reads no more. Also right when its claim never arrived."""
        offer = self._offers.get(release.offer)
        if offer is None:
            return self.tick(now)
        had_claim = offer.claims.pop((sender, release.reader), None) is not None
        if release.done:
            return self._close(release.offer, offer, offer.closing or Reason.OFFER_CONSUMED)
        if had_claim:
            offer.expires = max(offer.expires, now + self._settings.offer_lease_s)
        return self.tick(now)

    def tick(self, now: float) -> list[Effect]:
        """End what has run out."""
        return [effect for key in list(self._offers) for effect in self._expire(now, key)]

    def _expire(self, now: float, key: HandoffKey) -> Iterator[Effect]:
        offer = self._offers[key]
        for reader, until in list(offer.claims.items()):
            if now >= until:
                del offer.claims[reader]
                detail = f"claim of {reader[0]} for {reader[1]} was neither renewed nor released"
                yield Noted(key, Reason.LEASE_LAPSED, detail)
        if offer.claims:
            return
        if offer.closing is not None:
            yield self._free(key, offer.closing)
        elif now >= offer.expires:
            yield Noted(key, Reason.OFFER_EXPIRED, f"{len(offer.blocks)} blocks, no claim within the lease")
            yield self._free(key, Reason.OFFER_EXPIRED)

    def _close(self, key: HandoffKey, offer: _Offer, why: Reason) -> list[Effect]:
        offer.closing = why
        return [] if offer.claims else [self._free(key, why)]

    def _free(self, key: HandoffKey, why: Reason) -> FreeBlocks:
        offer = self._offers.pop(key)
        self._remember(key, why)
        return FreeBlocks(offer.blocks)

    def _remember(self, key: HandoffKey, why: Reason) -> None:
        self._ended[key] = why
        while len(self._ended) > self._settings.remembered:
            del self._ended[next(iter(self._ended))]


def _next_end(offer: _Offer) -> float:
    return min(offer.claims.values()) if offer.claims else offer.expires
