"""The destination's side of a pull: reads, verified by claims.

A read waits for two things that run side by side: the bytes (*transfer*) and the proof that they are the
right ones (*claim*). Each has its own states; the read ends when both are in, or as soon as one can't be.

    claim    event                                     effect                             next
    -------  ----------------------------------------  ---------------------------------  -------
    (none)   wanted, peer is up                        send claim                         ASKED
    (none)   wanted, no peer yet                       send hello                         WAITING
    (none)   wanted, source owes an overdue fence      miss: peer_unreachable, release    (none)
    (none)   wanted, blocks ≠ tokens                   miss: bad_reference, release       (none)
    WAITING  peer is up, blocks ≠ tokens               miss: bad_reference, release       (none)
    WAITING  peer is up, life as described             send claim                         ASKED
    WAITING  another life is up                        miss: epoch_changed, release       (none)
    WAITING  peer unusable                             miss: why, release                 (none)
    WAITING  deadline                                  miss: peer_unreachable, release    (none)
    WAITING  declined                                  miss: why, release                 (none)
    WAITING  dropped                                   release                            (none)
    WAITING  connection broke, or its life over        miss: why                          (none)
    ASKED    retry due                                 send claim                         ASKED
    ASKED    granted                                   -                                  GRANTED
    ASKED    granted, other blocks                     miss: bad_reference, release       (none)
    ASKED    answer to another's claim, or of another  -                                  ASKED
             sender
    ASKED    granted, bytes in while trusted           loaded, release                    (none)
    ASKED    granted, bytes in too late                miss: lease_lapsed, free, release  (none)
    ASKED    deadline                                  miss: claim_timeout, release       (none)
    ASKED    declined                                  miss: why, release                 (none)
    ASKED    dropped                                   release                            (none)
    ASKED    connection broke, or its life over        miss: why                          (none)
    ASKED    another transfer failed, none in flight   miss: peer_lost                    (none)
    GRANTED  renewal due                               send claim                         GRANTED
    GRANTED  granted                                   -                                  GRANTED
    GRANTED  granted, other blocks                     miss: bad_reference, release       (none)
    GRANTED  answer that was had before                -                                  GRANTED
    GRANTED  trust over, bytes not in                  miss: lease_lapsed, release        (none)
    GRANTED  declined                                  miss: why, release                 (none)
    GRANTED  dropped                                   release                            (none)
    GRANTED  connection broke, or its life over        miss: why                          (none)
    GRANTED  another transfer failed, none in flight   miss: peer_lost                    (none)

    transfer     event                                  effect                              next
    -----------  -------------------------------------  ----------------------------------  -----------
    (none)       allocated                              free                                (none)
    NO_BLOCKS    allocated, no peer yet                 -                                   READY
    NO_BLOCKS    allocated, nothing to read yet         send claim                          READY
    NO_BLOCKS    allocated, a read may begin            post the read, send claim           POSTED
    NO_BLOCKS    allocated, nothing to gain             miss: why, free, release            (none)
    NO_BLOCKS    allocated, too many or none to fill    ValueError                          NO_BLOCKS
    NO_BLOCKS    no blocks in time                      miss: queue_timeout, release        (none)
    NO_BLOCKS    declined                               miss: why, release                  (none)
    NO_BLOCKS    the source is gone                     miss: why                           (none)
    NO_BLOCKS    dropped                                release                             (none)
    NO_BLOCKS    claim's deadline, or trust over        miss: why, release                  (none)
    READY        peer is up, and a read may begin       send claim, post the read           POSTED
    READY        granted                                post the read                       POSTED
    READY        granted, nothing gained                miss: already_cached, free,         (none)
                                                        release
    READY        granted, little gained                 miss: return_too_short, free,       (none)
                                                        release
    READY        granted, blocks that are none          miss: bad_reference, free, release  (none)
    READY        granted, source owes an overdue fence  miss: peer_unreachable, free,       (none)
                                                        release
    READY        declined                               miss: why, free, release            (none)
    READY        the source is gone                     miss: why, free                     (none)
    READY        dropped                                free, release                       (none)
    READY        claim's deadline                       miss: why, free, release            (none)
    POSTED       landed, claim not granted yet          -                                   LANDED
    POSTED       landed while trusted                   loaded, release                     (none)
    POSTED       landed too late                        miss: lease_lapsed, free, release   (none)
    POSTED       failed                                 miss: transfer_failed, free,        (none)
                                                        release
    POSTED       granted                                -                                   POSTED
    POSTED       deadline                               miss: read_timeout, release         QUARANTINED
    POSTED       declined                               miss: why, release                  QUARANTINED
    POSTED       the source is gone                     miss: why                           QUARANTINED
    POSTED       dropped                                release                             QUARANTINED
    POSTED       claim's deadline, or trust over        miss: why, release                  QUARANTINED
    LANDED       declined                               miss: why, free, release            (none)
    LANDED       the source is gone                     miss: why, free                     (none)
    LANDED       dropped                                free, release                       (none)
    LANDED       claim's deadline                       miss: why, free, release            (none)
    LANDED       granted                                loaded, release                     (none)
    LANDED       granted, nothing gained                miss: already_cached, free,         (none)
                                                        release
    QUARANTINED  landed, or failed                      free                                (none)
    QUARANTINED  fence overdue                          noted: fence_overdue                QUARANTINED

Misuse, refused with ValueError: WAITING, ASKED, GRANTED: wanted; READY, POSTED, LANDED, QUARANTINED:
allocated.

"A read may begin" when its claim is granted; before that, when the offer is described as the request's own
chain and no fence of an earlier read is owed. What a read has landed counts while its claim is trusted: until
(its asking + lease − margin). Where there are fewer blocks than the chain has, what matches beyond them is
neither read nor loaded. A read without blocks is queued; each claim says whether it is.

Rules of docs/protocol.md upheld here: *right KV or none*: `_resolve` is the only place that says `Loaded`;
*no use after free* of one's own targets: `_let_go` frees only what no posted transfer can still reach, and
gives the rest to `read_quarantine.py`;
*no wait without a deadline*: `_expire`, which names the next step of each; *every fallback has a reason*.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import Span, coalesce, to_blocks
from kvhandoff.handoff.events import (
    Effect,
    FreeBlocks,
    LoadAllocated,
    Loaded,
    Missed,
    PostRead,
    ReadWanted,
    Send,
)
from kvhandoff.handoff.messages import Claim, ClaimDeclined, ClaimGranted, OfferDescriptor, OfferRef, Release
from kvhandoff.handoff.peers import Peer, PeerBook
from kvhandoff.handoff.read_quarantine import ReadQuarantine
from kvhandoff.handoff.settings import HandoffSettings


@dataclass(slots=True)
class _Read:
    key: HandoffKey
    offer: OfferRef
    chain: TokenChain
    min_tokens: int
    spans: tuple[Span, ...] | None
    """The offer's blocks: as described, or as granted; None while neither is known."""
    queue_deadline: float
    # claim
    claim_deadline: float
    """WAITING: for the handshake; ASKED: for the first answer."""
    seq: int = 0
    """Of its last claim. 0: WAITING."""
    asked_at: dict[int, float] = field(default_factory=dict)
    """Sequence number → when that claim was sent; the lease counts from there."""
    next_claim: float = 0.0
    retry_s: float = 0.0
    matched_tokens: int | None = None
    """None until GRANTED."""
    trust_until: float = 0.0
    # transfer
    blocks: tuple[int, ...] | None = None
    """None: NO_BLOCKS. The prompt's blocks, or its first ones; those from `cached_blocks` on belong to the
    ledger."""
    cached_blocks: int = 0
    read_deadline: float | None = None
    """None until POSTED."""
    landed_at: float | None = None

    @property
    def targets(self) -> tuple[int, ...]:
        return () if self.blocks is None else self.blocks[self.cached_blocks :]

    @property
    def tokens(self) -> int:
        """How many leading tokens it brings, those cached here included: those that match (all, while the
        claim has no answer), as far as there are blocks for them. Such a cut falls between blocks."""
        matched = self.chain.n_tokens if self.matched_tokens is None else self.matched_tokens
        return min(matched, len(self.blocks or ()) * self.chain.block_size)

    @property
    def in_flight(self) -> bool:
        return self.read_deadline is not None and self.landed_at is None


class ReadLedger:
    """All reads of one engine. Time comes in with each call, in seconds of the engine's own clock."""

    def __init__(self, settings: HandoffSettings, peers: PeerBook) -> None:
        self._settings = settings
        self._peers = peers
        self._reads: dict[HandoffKey, _Read] = {}
        self._quarantine = ReadQuarantine(settings.fence_s)
        self._claims = 0
        """Counts the claims of this engine's life: an answer to another read's never fits."""

    def __len__(self) -> int:
        """Reads whose requests wait for them."""
        return len(self._reads)

    def loading(self) -> list[int]:
        """Targets of reads under way."""
        return [block for read in self._reads.values() for block in read.targets]

    def quarantined(self) -> list[int]:
        """Targets of ended reads whose transfer has no fence yet."""
        return self._quarantine.blocks()

    def reading_from(self, peer: Identity) -> bool:
        """Whether a transfer from this life is in flight, wanted or not."""
        reading = any(read.in_flight and read.offer.source == peer for read in self._reads.values())
        return reading or self._quarantine.owed_by(peer)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        times = [time for read in self._reads.values() for time in _times(read)]
        overdue_at = self._quarantine.next_deadline()
        return min(times if overdue_at is None else [*times, overdue_at], default=None)

    # ------------------------------------------------------------------------------ the engine's events

    def wanted(self, now: float, event: ReadWanted) -> list[Effect]:
        """A request with an offer has arrived. Raises ValueError on a key in use."""
        if event.load in self._reads or event.load in self._quarantine:
            raise ValueError(f"read {event.load} is under way already")
        spans = event.offer.spans if isinstance(event.offer, OfferDescriptor) else None
        settings = self._settings
        read = _Read(
            event.load,
            event.offer,
            event.chain,
            event.min_tokens,
            spans,
            queue_deadline=now + settings.queue_s,
            claim_deadline=now + 2 * settings.handshake_s,  # the data plane's part of it counts anew
        )
        self._reads[read.key] = read
        source = read.offer.source
        if self._quarantine.owed_by(source, overdue=True):
            return self._miss(now, read, Reason.PEER_UNREACHABLE, f"{source} owes the fence of another read")
        if self._peers.up(read.offer.control_address, source) is None:
            return self._greet(now, read)
        return self._ask(now, read)

    def allocated(self, now: float, event: LoadAllocated) -> list[Effect]:
        """The engine has blocks for the prompt, or for as much of it as the read can bring; a read that has
        ended meanwhile needs none. Raises ValueError when it had some already, for more blocks than the chain
        has, and for none to read into."""
        if event.load in self._quarantine:
            raise ValueError(f"load {event.load} had blocks, which are in quarantine")
        read = self._reads.get(event.load)
        if read is None:
            targets = event.blocks[event.cached_blocks :]
            return [FreeBlocks(targets)] if targets else []
        if read.blocks is not None:
            raise ValueError(f"load {read.key} has blocks already: {read.blocks}")
        if not 0 <= event.cached_blocks < len(event.blocks) <= read.chain.n_blocks:
            got = f"{len(event.blocks)} blocks, {event.cached_blocks} of them cached"
            allowed = f"more than are cached, and at most the chain's {read.chain.n_blocks}"
            raise ValueError(f"load {read.key}: got {got}, allowed are {allowed}")
        read.blocks, read.cached_blocks = event.blocks, event.cached_blocks
        effects = self._post(now, read)
        if read.seq == 0 or read.key not in self._reads:
            return effects
        read.retry_s = self._settings.retry_s
        return [*effects, self._claim(now, read)]  # it is queued no more

    def dropped(self, now: float, key: HandoffKey, *, done: bool) -> list[Effect]:
        """The request ended, or needs no KV."""
        read = self._reads.pop(key, None)
        return [] if read is None else [*self._let_go(now, read), self._release(read, done=done)]

    def landed(self, now: float, key: HandoffKey) -> list[Effect]:
        """The fence of a transfer that went well."""
        read = self._reads.get(key)
        if read is None or not read.in_flight:
            return self._quarantine.fenced(key)
        read.landed_at = now
        return self._resolve(now, read)

    def failed(self, now: float, key: HandoffKey, error: str) -> list[Effect]:
        """The fence of a transfer that did not."""
        read = self._reads.get(key)
        if read is None or not read.in_flight:
            return self._quarantine.fenced(key)
        read.read_deadline = None
        return self._miss(now, read, Reason.TRANSFER_FAILED, f"from {read.offer.source}: {error}")

    # --------------------------------------------------------------------------------- the peer's events

    def peer_up(self, now: float, peer: Peer) -> list[Effect]:
        """The handshake is complete: claim and read what waited for it."""
        effects: list[Effect] = []
        for read in self._unposted(peer.address):
            if read.offer.source == peer.identity:
                effects += self._ask(now, read) if read.seq == 0 else self._post(now, read)
            else:
                detail = f"offered by {read.offer.source}, {peer.identity} answers at {peer.address}"
                effects += self._miss(now, read, Reason.EPOCH_CHANGED, detail)
        return effects

    def peer_unusable(self, now: float, address: str, reason: Reason, detail: str) -> list[Effect]:
        """No handshake with whoever is at `address`."""
        return [e for read in self._unposted(address) for e in self._miss(now, read, reason, detail)]

    def peer_ended(self, now: float, life: Identity, reason: Reason) -> list[Effect]:
        """Nothing more will come from the source of these reads."""
        reads = [read for read in self._reads.values() if read.offer.source == life]
        effects = [
            effect
            for read in reads
            for effect in self._miss(now, read, reason, f"{life} is gone", tell=False)
        ]
        # Its handshake may be the one that reads from the life after it wait for.
        for read in self._reads.values():
            if read.read_deadline is None:
                effects += self._greet(now, read)
        return effects

    def granted(self, now: float, sender: Identity, answer: ClaimGranted) -> list[Effect]:
        """The offer stands for `matched_tokens` of the request and is pinned."""
        read = self._reads.get(answer.reader)
        if read is None or sender != read.offer.source or answer.seq not in read.asked_at:
            return []
        if answer.offer != read.offer.key:
            return []
        if read.spans not in (None, answer.spans):
            detail = f"described as blocks {read.spans}, {sender} has {answer.spans}"
            return self._miss(now, read, Reason.BAD_REFERENCE, detail)
        read.spans = answer.spans
        asked_at = read.asked_at[answer.seq]
        read.asked_at = {seq: at for seq, at in read.asked_at.items() if seq > answer.seq}
        known = read.chain.n_tokens if read.matched_tokens is None else read.matched_tokens
        read.matched_tokens = min(answer.matched_tokens, known)
        read.trust_until = max(read.trust_until, asked_at + answer.lease_s * (1 - self._settings.margin))
        read.next_claim = asked_at + answer.lease_s / 3
        read.retry_s = self._settings.retry_s
        return [*self._post(now, read), *self._resolve(now, read)]

    def declined(self, now: float, sender: Identity, answer: ClaimDeclined) -> list[Effect]:
        """The offer is gone or given up, or never stood for this request. The release is the reader's word
        that it uses nothing more, whatever it was granted: what lands from here on is only a fence."""
        read = self._reads.get(answer.reader)
        if read is None or (sender, answer.offer) != (read.offer.source, read.offer.key):
            return []
        missed = self._miss(now, read, answer.reason, f"declined by {sender}", tell=False)
        return [*missed, self._release(read, done=False)]

    def tick(self, now: float) -> list[Effect]:
        """Send again, renew, give up: whatever is due."""
        effects = [effect for read in list(self._reads.values()) for effect in self._expire(now, read)]
        return [*effects, *self._quarantine.tick(now)]

    # ----------------------------------------------------------------------------------------- the steps

    def _ask(self, now: float, read: _Read) -> list[Effect]:
        """Claim and read from a peer that is up: its blocks are as large as this engine's."""
        if isinstance(read.offer, OfferDescriptor):
            described, n_tokens = sum(count for _, count in read.offer.spans), read.offer.n_tokens
            if described != -(-n_tokens // read.chain.block_size):
                return self._miss(
                    now, read, Reason.BAD_REFERENCE, f"{described} blocks for {n_tokens} tokens"
                )
        read.claim_deadline = now + self._settings.claim_s
        read.retry_s = self._settings.retry_s
        return [self._claim(now, read), *self._post(now, read)]

    def _claim(self, now: float, read: _Read) -> Send:
        self._claims += 1
        read.seq = self._claims
        read.asked_at[read.seq] = now
        read.next_claim = now + read.retry_s
        read.retry_s *= 2
        claim = Claim(
            offer=read.offer.key,
            reader=read.key,
            chain=read.chain,
            seq=read.seq,
            queued=read.blocks is None,
        )
        return Send(read.offer.control_address, read.offer.source, claim)

    def _post(self, now: float, read: _Read) -> list[Effect]:
        """Post once there are blocks and a peer; before the grant only if digests promise a full match."""
        offer, spans = read.offer, read.spans
        if read.blocks is None or read.read_deadline is not None:
            return []
        peer = self._peers.up(offer.control_address, offer.source)
        if peer is None:
            return self._greet(now, read)
        if self._quarantine.owed_by(offer.source, overdue=True):
            detail = f"{offer.source} owes the fence of another read"
            return self._miss(now, read, Reason.PEER_UNREACHABLE, detail)
        if read.matched_tokens is None and not self._may_begin(read):
            return []
        assert spans is not None, "described or granted"
        if any(first < 0 or count < 1 or first + count > peer.num_blocks for first, count in spans):
            detail = f"{spans} is not within the {peer.num_blocks} blocks of {offer.source}"
            return self._miss(now, read, Reason.BAD_REFERENCE, detail)
        tokens = read.tokens
        gained = tokens - read.cached_blocks * read.chain.block_size
        if gained < read.min_tokens:
            detail = f"{tokens} of {read.chain.n_tokens} tokens to be had, {gained} more than are cached here"
            reason = Reason.ALREADY_CACHED if gained < 1 else Reason.RETURN_TOO_SHORT
            return self._miss(now, read, reason, detail)
        end = -(-tokens // read.chain.block_size)
        remote = to_blocks(spans)[read.cached_blocks : end]
        if len(remote) < end - read.cached_blocks:
            return self._miss(now, read, Reason.BAD_REFERENCE, f"{spans} for {tokens} tokens")
        read.read_deadline = now + self._settings.read_s
        copies = coalesce(remote, read.blocks[read.cached_blocks : end])
        return [PostRead(read.key, offer.source, tuple(copies))]

    def _resolve(self, now: float, read: _Read) -> list[Effect]:
        """Right KV or none: the chain has matched, and the bytes came while the claim was trusted."""
        if read.matched_tokens is None or read.landed_at is None:
            return []
        if read.landed_at > read.trust_until:
            late = read.landed_at - read.trust_until
            return self._miss(
                now, read, Reason.LEASE_LAPSED, f"the bytes came {late:.3f} s after the claim's lease"
            )
        if read.tokens <= read.cached_blocks * read.chain.block_size:
            detail = f"{read.tokens} of {read.chain.n_tokens} tokens match, as many are cached here"
            return self._miss(now, read, Reason.ALREADY_CACHED, detail)
        del self._reads[read.key]
        return [Loaded(read.key, read.tokens), self._release(read, done=True)]

    def _expire(self, now: float, read: _Read) -> list[Effect]:
        if read.in_flight and now >= (read.read_deadline or 0.0):
            detail = f"not landed within {self._settings.read_s} s, from {read.offer.source}"
            return self._miss(now, read, Reason.READ_TIMEOUT, detail)
        if read.matched_tokens is None and now >= read.claim_deadline:
            reason = Reason.CLAIM_TIMEOUT if read.seq else Reason.PEER_UNREACHABLE
            return self._miss(now, read, reason, f"no answer from {read.offer.source} in time")
        if read.seq == 0:
            return []
        if read.blocks is None and now >= read.queue_deadline:
            detail = f"no blocks within {self._settings.queue_s} s"
            return self._miss(now, read, Reason.QUEUE_TIMEOUT, detail)
        if read.matched_tokens is not None and now >= read.trust_until:
            return self._miss(now, read, Reason.LEASE_LAPSED, f"{read.offer.source} did not renew the claim")
        return [self._claim(now, read)] if now >= read.next_claim else []

    def _miss(
        self, now: float, read: _Read, reason: Reason, detail: str, *, tell: bool = True
    ) -> list[Effect]:
        """Nothing can be used. The request hears of it before its target blocks are freed: until then they
        are its own. The source is told with `done`, unless it said so itself or is gone."""
        del self._reads[read.key]
        effects = [Missed(read.key, reason, detail), *self._let_go(now, read)]
        return [*effects, self._release(read, done=True)] if tell else effects

    def _let_go(self, now: float, read: _Read) -> list[Effect]:
        """No use after free: targets of a transfer in flight wait for its fence."""
        if not read.targets:
            return []
        if read.in_flight:
            self._quarantine.add(now, read.key, read.offer.source, read.targets)
            return []
        return [FreeBlocks(read.targets)]

    def _may_begin(self, read: _Read) -> bool:
        """Before the claim is answered only what is described as the request's own chain is worth a read, and
        only from a source that owes nothing: one that is silent would get ever more blocks."""
        promised = isinstance(read.offer, OfferDescriptor) and read.offer.digest == read.chain.digest()
        return promised and not self._quarantine.owed_by(read.offer.source)

    def _release(self, read: _Read, *, done: bool) -> Send:
        release = Release(offer=read.offer.key, reader=read.key, seq=read.seq, done=done)
        return Send(read.offer.control_address, read.offer.source, release)

    def _greet(self, now: float, read: _Read) -> list[Effect]:
        """No read waits for a peer without a handshake under way, which has a deadline."""
        return self._peers.wanted(now, read.offer.control_address, read.offer.source)

    def _unposted(self, address: str) -> list[_Read]:
        reads = self._reads.values()
        return [r for r in reads if r.read_deadline is None and r.offer.control_address == address]


def _times(read: _Read) -> list[float]:
    """When each deadline of a read falls due."""
    times = [read.claim_deadline if read.matched_tokens is None else read.trust_until]
    if read.in_flight and read.read_deadline is not None:
        times.append(read.read_deadline)
    if read.seq:
        times.append(read.next_claim)
    if read.blocks is None:
        times.append(read.queue_deadline)
    return times
