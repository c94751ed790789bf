"""The source's side of a push: the grants it was given, and the writes under them.

    state      event                                  effect                            next
    ---------  -------------------------------------  --------------------------------  ----------------
    (none)     grant, over already                    fenced: why                       (none)
    (none)     grant of an earlier attempt            fenced: rebound                   (none)
    (none)     grant, offer has ended                 fenced: why                       (none)
    (none)     grant of no chain or position          fenced: bad_reference             (none)
    (none)     grant, offer unknown                   -                                 EARLY
    (none)     grant, offer lives                     progress                          WRITING
    (none)     grant, chains differ                   progress, fenced: chain_mismatch  (none)
    (none)     revoke                                 fenced: revoked                   (none)
    EARLY      started, or offered                    progress                          WRITING
    EARLY      started, chains differ                 progress, fenced: chain_mismatch  (none)
    EARLY      grant again                            -                                 EARLY
    EARLY      the offer does not come in time        fenced: offer_unknown             (none)
    EARLY      release                                -                                 (none)
    EARLY      revoke                                 fenced: revoked                   (none)
    EARLY      grant of a later attempt               fenced: rebound                   (none)
    EARLY      the offer ends                         fenced: why                       (none)
    EARLY      the destination is gone                fenced: why                       (none)
    WRITING    grant again                            progress                          WRITING
    WRITING    grant again, a write hangs             -                                 WRITING
    WRITING    grant names the blocks                 progress, write                   WRITING
    WRITING    the same, destination is no peer yet   progress, send hello              WRITING
    WRITING    destination is up                      write                             WRITING
    WRITING    destination is up, but not with these  end: bad_reference                (none)
               blocks
    WRITING    grant that says otherwise              end: bad_reference                (none) or ENDING
    WRITING    grown, or offered                      write                             WRITING
    WRITING    landed, more is to come                -                                 WRITING
    WRITING    all landed, and the prompt computed    commit of each rank               COMMITTED
    WRITING    a write failed                         end: why                          ENDING or (none)
    WRITING    revoke                                 end: revoked                      ENDING or (none)
    WRITING    grant of a later attempt               end: rebound                      ENDING or (none)
    WRITING    the offer ends                         end: why                          ENDING or (none)
    WRITING    the destination is gone                end: why                          ENDING or (none)
    WRITING    destination unusable, no blocks named  -                                 WRITING
    WRITING    destination unusable                   end: why                          (none)
    WRITING    release                                -                                 (none)
    WRITING    release, a write in flight, or of      -                                 WRITING
               another load
    COMMITTED  revoke                                 fenced: revoked                   (none)
    COMMITTED  grant of a later attempt               fenced: rebound                   (none)
    COMMITTED  the offer ends                         fenced: why                       (none)
    COMMITTED  the destination is gone                fenced: why                       (none)
    COMMITTED  grant again                            commit of each rank               COMMITTED
    COMMITTED  release, or a floor above it           -                                 (none)
    ENDING     grant again                            -                                 ENDING
    ENDING     reported, others are in flight         -                                 ENDING
    ENDING     the last write reported                fenced: why                       (none)

To `end` is to be fenced at once, or when the writes in flight have reported: ENDING till then. A grant may
come before the prompt, and the prompt before the grant; `advance` looks at what is there.

Rules of docs/protocol.md upheld here: *right KV or none*: nothing is written for another chain than the
offer's own, and `Commit` follows the report of every write; *no use after free* of the destination's blocks:
`Fenced` is said only when nothing is in flight, and a grant that is over is never taken up again: a late copy
has a number below the destination's floor, or one that is remembered until the floor has passed it; of the
source's blocks: `OfferLedger.write_began` holds them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Span, coalesce, to_blocks
from kvhandoff.handoff.events import Effect, PostWrite, Send, WriteKey
from kvhandoff.handoff.messages import Commit, Fenced, Grant, Progress, Release, Revoke
from kvhandoff.handoff.offers import Offer, OfferLedger
from kvhandoff.handoff.peers import Peer, PeerBook
from kvhandoff.handoff.settings import HandoffSettings

GrantId = tuple[Identity, int]
"""The destination's life, and the grant's number in it."""


@dataclass(slots=True)
class _Grant:
    grantee: Identity
    number: int
    address: str
    """Where the destination's control plane listens."""
    offer: HandoffKey
    reader: HandoffKey
    chain: TokenChain
    first_block: int
    came_at: float
    spans: tuple[Span, ...] | None = None
    """The destination's blocks; None until it has allocated them."""
    targets: tuple[int, ...] | None = None
    """The same, checked; None until then."""
    pinned: bool = False
    """False: EARLY."""
    next_block: int = 0
    """The position up to which writes have been posted."""
    chunks: int = 0
    in_flight: dict[int, set[int]] = field(default_factory=dict)
    """Chunk → ranks that have not reported."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Chunk → its blocks, while it is in flight."""
    oldest_post: float = 0.0
    """When the oldest write in flight was posted, or an older one."""
    landed: int = 0
    early_blocks: int = 0
    commits: tuple[Commit, ...] = ()
    """COMMITTED: what was said."""
    ending: Reason | None = None
    """ENDING: why."""


@dataclass(slots=True)
class _Over:
    """Which grants of one destination's life are over."""

    floor: int = 0
    numbers: dict[int, Reason] = field(default_factory=dict)
    """Those from the floor on, and why: what was said may have been lost."""

    def raise_floor(self, floor: int) -> None:
        if floor > self.floor:
            self.floor = floor
            self.numbers = {number: why for number, why in self.numbers.items() if number >= floor}

    def why(self, number: int) -> Reason | None:
        """Why a grant is over; None for one that isn't."""
        return self.numbers.get(number, Reason.REVOKED if number < self.floor else None)


class WriteLedger:
    """All grants that one engine was given. Time comes in with each call, on the engine's own clock."""

    def __init__(self, settings: HandoffSettings, offers: OfferLedger, peers: PeerBook, ranks: int) -> None:
        """`ranks`: how many ranks of this engine write; each reports each write."""
        self._settings = settings
        self._offers = offers
        self._peers = peers
        self._ranks = ranks
        self._grants: dict[GrantId, _Grant] = {}
        self._over: dict[Identity, _Over] = {}
        self._attempts: dict[HandoffKey, int] = {}
        """Offer → the latest attempt that has granted blocks for it; as long as one has a grant."""

    def __len__(self) -> int:
        return len(self._grants)

    def writing_to(self, peer: Identity) -> bool:
        """Whether a write to this life is in flight."""
        return any(grant.in_flight for grant in self._grants.values() if grant.grantee == peer)

    def next_deadline(self) -> float | None:
        """When an early grant is given up."""
        early = [grant.came_at for grant in self._grants.values() if not grant.pinned and not grant.ending]
        return min(early) + self._settings.rendezvous_s if early else None

    # --------------------------------------------------------------------------------- the peers' events

    def granted(self, now: float, sender: Identity, reply_to: str, grant: Grant) -> list[Effect]:
        """A grant, again and again until it is answered by a commit or a fence."""
        over = self._raise_floor(sender, grant.floor)
        return [
            *self._forget_committed(now, sender, over),
            *self._granted(now, sender, reply_to, grant, over),
        ]

    def _raise_floor(self, sender: Identity, floor: int) -> _Over:
        over = self._over.setdefault(sender, _Over())
        over.raise_floor(floor)
        return over

    def _granted(
        self, now: float, sender: Identity, reply_to: str, grant: Grant, over: _Over
    ) -> list[Effect]:
        why = over.why(grant.number)
        if why is not None:
            return [Send(reply_to, sender, Fenced(number=grant.number, reason=why))]
        known = self._grants.get((sender, grant.number))
        if known is None:
            return self._first(now, sender, reply_to, grant)
        if known.ending is not None:
            return []  # answered when it has ended
        if known.commits:
            return [Send(reply_to, sender, commit) for commit in known.commits]
        if grant.spans is not None and known.spans is None:
            known.spans, known.first_block = grant.spans, grant.first_block
        if (grant.offer, grant.chain) != (known.offer, known.chain) or grant.spans not in (None, known.spans):
            return self._end(now, known, Reason.BAD_REFERENCE)
        return self._pin(now, known)

    def revoked(self, now: float, sender: Identity, reply_to: str, revoke: Revoke) -> list[Effect]:
        """The destination takes a grant back."""
        over = self._raise_floor(sender, revoke.floor)
        known = self._grants.get((sender, revoke.number))
        if known is None:
            over.numbers.setdefault(revoke.number, Reason.REVOKED)
            return [Send(reply_to, sender, Fenced(number=revoke.number, reason=Reason.REVOKED))]
        return self._end(now, known, Reason.REVOKED)

    def released(self, now: float, sender: Identity, release: Release) -> list[Effect]:
        """A destination has what it wanted, or wants no more and has granted nothing."""
        known = self._grants.get((sender, release.seq))
        if known is None or known.reader != release.reader or known.in_flight:
            return []
        return self._forget(now, known)

    def peer_unusable(self, now: float, address: str, reason: Reason) -> list[Effect]:
        """No handshake with whoever is at `address`."""
        waiting = [g for g in self._grants.values() if g.address == address and g.spans is not None]
        return self._end_all(now, waiting, reason)

    def peer_ended(self, now: float, life: Identity, reason: Reason) -> list[Effect]:
        """Nobody is left to write to, it seems."""
        return self._end_all(now, [g for g in self._grants.values() if g.grantee == life], reason)

    def peer_up(self, now: float, peer: Peer) -> list[Effect]:
        """The handshake is complete; `advance` writes. Grants of another life at that address are over."""
        others = [
            g for g in self._grants.values() if g.address == peer.address and g.grantee != peer.identity
        ]
        return self._end_all(now, [g for g in others if g.spans is not None], Reason.EPOCH_CHANGED)

    # --------------------------------------------------------------------------------- the engine's events

    def landed(self, now: float, write: WriteKey, rank: int) -> list[Effect]:
        """The fence of one rank's part of a write."""
        grant = self._grants.get((write.grantee, write.number))
        if grant is None or rank not in grant.in_flight.get(write.chunk, ()):
            return []
        grant.in_flight[write.chunk].discard(rank)
        if grant.in_flight[write.chunk]:
            return []
        del grant.in_flight[write.chunk]
        blocks = grant.sizes.pop(write.chunk)
        grant.landed += blocks
        offer = self._offers.get(grant.offer)
        if offer is not None and not offer.complete:
            grant.early_blocks += blocks
        grant.oldest_post = now if not grant.in_flight else grant.oldest_post
        return self._offers.write_ended(now, grant.offer)

    def failed(self, now: float, write: WriteKey, rank: int) -> list[Effect]:
        """The fence of one rank's part of a write that came to nothing."""
        grant = self._grants.get((write.grantee, write.number))
        if grant is None or rank not in grant.in_flight.get(write.chunk, ()):
            return []
        return [*self._end(now, grant, Reason.TRANSFER_FAILED), *self.landed(now, write, rank)]

    # ----------------------------------------------------------------------------------------- the steps

    def advance(self, now: float) -> list[Effect]:
        """Whatever has become possible: after every event, since each may bring blocks, peers, offers or
        time."""
        effects = [effect for grant in list(self._grants.values()) for effect in self._advance(now, grant)]
        if len(self._attempts) > len(self._grants):
            self._attempts = {grant.offer: self._attempts[grant.offer] for grant in self._grants.values()}
        return effects

    def _first(self, now: float, sender: Identity, reply_to: str, message: Grant) -> list[Effect]:
        latest = self._attempts.get(message.offer, message.reader.attempt)
        if message.reader.attempt < latest:
            return self._refuse(sender, reply_to, message.number, Reason.REBOUND)
        ended = self._offers.why_ended(message.offer)
        if ended is not None:
            return self._refuse(sender, reply_to, message.number, ended)
        if not message.chain.is_well_formed() or not 0 <= message.first_block < message.chain.n_blocks:
            return self._refuse(sender, reply_to, message.number, Reason.BAD_REFERENCE)
        self._attempts[message.offer] = message.reader.attempt
        grant = _Grant(
            grantee=sender,
            number=message.number,
            address=reply_to,
            offer=message.offer,
            reader=message.reader,
            chain=message.chain,
            first_block=message.first_block,
            came_at=now,
            spans=message.spans,
        )
        earlier = [g for g in self._grants.values() if g.offer == grant.offer]
        self._grants[sender, message.number] = grant
        return self._end_all(now, earlier, Reason.REBOUND)  # `advance` does the rest

    def _pin(self, now: float, grant: _Grant) -> list[Effect]:
        """Keep the offer for the grant, and tell the destination that things go on, if they do."""
        offer = self._offers.get(grant.offer)
        if offer is None or offer.closing is not None:
            return []  # `advance` ends it
        grant.pinned = True
        queued = grant.spans is None
        self._offers.pin(now, offer, (grant.grantee, grant.reader), grant.number, queued=queued)
        if grant.in_flight and now > grant.oldest_post + self._settings.write_s:
            return []  # no sign of life: the destination gives it up in its time
        progress = Progress(
            number=grant.number,
            lease_s=self._settings.claim_lease_s,
            computed_blocks=len(offer.blocks),
            written_blocks=grant.landed,
        )
        return [Send(grant.address, grant.grantee, progress)]

    def _advance(self, now: float, grant: _Grant) -> list[Effect]:
        if grant.ending is not None:
            return self._fence(now, grant)
        offer = self._offers.get(grant.offer)
        if offer is None or offer.closing is not None:
            why = self._offers.why_ended(grant.offer) if offer is None else offer.closing
            if why is None and now < grant.came_at + self._settings.rendezvous_s:
                return []
            return self._end(now, grant, why or Reason.OFFER_UNKNOWN)
        if grant.commits:
            return []
        effects = [] if grant.pinned else self._pin(now, grant)
        if offer.chain != grant.chain:
            return [*effects, *self._end(now, grant, Reason.CHAIN_MISMATCH)]
        if grant.spans is None:
            return effects
        return [*effects, *self._write(now, grant, offer)]

    def _write(self, now: float, grant: _Grant, offer: Offer) -> list[Effect]:
        """Post what is computed and granted; commit when all of it has landed."""
        peer = self._peers.up(grant.address, grant.grantee)
        if peer is None:
            return self._peers.wanted(now, grant.address, grant.grantee)
        if grant.targets is None:
            grant.targets = _targets(grant, peer.num_blocks)
            if grant.targets is None:
                return self._end(now, grant, Reason.BAD_REFERENCE)
            grant.next_block = grant.first_block
        effects: list[Effect] = []
        if len(offer.blocks) > grant.next_block:
            start, end = grant.next_block, len(offer.blocks)
            targets = grant.targets[start - grant.first_block : end - grant.first_block]
            copies = coalesce(offer.blocks[start:end], targets)
            write = WriteKey(grant.grantee, grant.number, grant.chunks)
            if not grant.in_flight:
                grant.oldest_post = now
            grant.in_flight[grant.chunks] = set(range(self._ranks))
            grant.sizes[grant.chunks] = end - start
            grant.chunks, grant.next_block = grant.chunks + 1, end
            self._offers.write_began(grant.offer)
            effects.append(PostWrite(write, grant.grantee, tuple(copies)))
        if offer.completed_at is not None and not grant.in_flight:
            effects += self._commit(now, grant, offer, offer.completed_at)
        return effects

    def _commit(self, now: float, grant: _Grant, offer: Offer, completed_at: float) -> list[Effect]:
        grant.commits = tuple(
            Commit(
                number=grant.number,
                rank=rank,
                ranks=self._ranks,
                blocks=grant.landed,
                digest=offer.chain.digest(),
                first_token=offer.first_token,
                cached_tokens=offer.cached_tokens,
                chunks=grant.chunks,
                early_blocks=grant.early_blocks,
                tail_s=now - completed_at,
            )
            for rank in range(self._ranks)
        )
        return [Send(grant.address, grant.grantee, commit) for commit in grant.commits]

    def _end_all(self, now: float, grants: list[_Grant], reason: Reason) -> list[Effect]:
        return [effect for grant in grants for effect in self._end(now, grant, reason)]

    def _end(self, now: float, grant: _Grant, reason: Reason) -> list[Effect]:
        """Post nothing more under it. The first reason counts."""
        grant.ending = grant.ending or reason
        return self._fence(now, grant)

    def _fence(self, now: float, grant: _Grant) -> list[Effect]:
        if grant.in_flight:
            return []
        reason = grant.ending or Reason.REVOKED
        fenced = Send(grant.address, grant.grantee, Fenced(number=grant.number, reason=reason))
        return [fenced, *self._forget(now, grant)]

    def _forget(self, now: float, grant: _Grant) -> list[Effect]:
        """It is over, and stays so."""
        del self._grants[grant.grantee, grant.number]
        over = self._over.setdefault(grant.grantee, _Over())
        over.numbers.setdefault(grant.number, grant.ending or Reason.REVOKED)
        return self._offers.unpin(now, grant.offer, (grant.grantee, grant.reader))

    def _refuse(self, sender: Identity, reply_to: str, number: int, reason: Reason) -> list[Effect]:
        self._over[sender].numbers[number] = reason
        return [Send(reply_to, sender, Fenced(number=number, reason=reason))]

    def _forget_committed(self, now: float, sender: Identity, over: _Over) -> list[Effect]:
        """Below the floor the destination waits for nothing any more."""
        below = [
            g for g in self._grants.values() if g.grantee == sender and g.number < over.floor and g.commits
        ]
        return [effect for grant in below for effect in self._forget(now, grant)]


def _targets(grant: _Grant, num_blocks: int) -> tuple[int, ...] | None:
    """The granted blocks, one per position; None unless each is one of the destination's, and there but
    once."""
    spans = grant.spans or ()
    if any(first < 0 or count < 1 or first + count > num_blocks for first, count in spans):
        return None
    targets = to_blocks(spans)
    fits = len(targets) == grant.chain.n_blocks - grant.first_block and len(set(targets)) == len(targets)
    return targets if fits else None
