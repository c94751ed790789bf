"""The destination's side of a pull: reads, verified by claims, and the quarantine of their target blocks.

A read waits for two things that run side by side: the bytes (*transfer*) and the proof that they are the
right ones (*claim*). Each has its own states; the read ends when both are in, or as soon as one can't be.

    claim      event                            effect                     next
    ---------  -------------------------------  -------------------------  --------
    WAITING    peer is up, life as described    send claim                 ASKED
    WAITING    peer unusable, or another life   miss                       (ended)
    WAITING    peer is up, blocks ≠ tokens      miss: bad_reference        (ended)
    ASKED      retry due                        send claim                 ASKED
    ASKED      granted                          trust until the asking     GRANTED
                                                + lease − margin
    ASKED      declined                         miss: why                  (ended)
    ASKED      granted, other blocks            miss: bad_reference        (ended)
    ASKED      deadline                         miss: claim_timeout        (ended)
    GRANTED    renewal due                      send claim                 GRANTED
    GRANTED    granted                          trust longer               GRANTED
    GRANTED    declined                         miss: why                  (ended)
    GRANTED    trust over, bytes not in         miss: lease_lapsed         (ended)

    transfer   event                            effect                     next
    ---------  -------------------------------  -------------------------  --------
    NO_BLOCKS  allocated                        -                          READY
    READY      peer is up, and digests are      post the read              POSTED
               equal or the claim is granted
    POSTED     landed                           -                          LANDED
    POSTED     failed                           miss: transfer_failed      (ended)
    POSTED     deadline                         miss: read_timeout         (ended)

    GRANTED and LANDED: landed while trusted → loaded, release; else → miss: lease_lapsed.
    Ended or dropped while POSTED: the target blocks are quarantined until landed or failed, then freed.

Rules of docs/protocol.md upheld here: *right KV or none*: `_resolve` is the only place that says `Loaded`;
*no use after free* of one's own targets: `_let_go` frees only what no posted transfer can still reach;
*no wait without a deadline*: `_expire`, which names the next step of each; *every fallback has a reason*.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason, ReasonKind
from kvhandoff.core.spans import coalesce, to_blocks
from kvhandoff.handoff.events import (
    Effect,
    FreeBlocks,
    Loaded,
    Missed,
    PostRead,
    ReadAllocated,
    ReadWanted,
    Send,
)
from kvhandoff.handoff.messages import Claim, ClaimDeclined, ClaimGranted, OfferDescriptor, Release
from kvhandoff.handoff.peers import Peer, PeerBook
from kvhandoff.handoff.settings import HandoffSettings


@dataclass(slots=True)
class _Read:
    key: HandoffKey
    descriptor: OfferDescriptor
    chain: TokenChain
    # claim
    seq: int = 0
    """0: WAITING."""
    asked_at: dict[int, float] = field(default_factory=dict)
    """Sequence number → when that claim was sent; the lease counts from there."""
    claim_deadline: float = 0.0
    next_claim: float = 0.0
    retry_s: float = 0.0
    matched_tokens: int | None = None
    """None until GRANTED."""
    trust_until: float = 0.0
    # transfer
    blocks: tuple[int, ...] | None = None
    """None: NO_BLOCKS. All prompt blocks; those from `cached_blocks` on belong to the ledger."""
    cached_blocks: int = 0
    read_deadline: float | None = None
    """None until POSTED."""
    landed_at: float | None = None

    @property
    def targets(self) -> tuple[int, ...]:
        return () if self.blocks is None else self.blocks[self.cached_blocks :]

    @property
    def in_flight(self) -> bool:
        return self.read_deadline is not None and self.landed_at is None


class ReadLedger:
    """All reads of one engine. Time comes in with each call, in seconds of the engine's own clock."""

    def __init__(self, settings: HandoffSettings, peers: PeerBook) -> None:
        self._settings = settings
        self._peers = peers
        self._reads: dict[HandoffKey, _Read] = {}
        self._quarantine: dict[HandoffKey, tuple[int, ...]] = {}
        self._unfenced: dict[HandoffKey, Identity] = {}
        """Quarantined reads that timed out, and the peer that owes the fence."""

    def loading(self) -> list[int]:
        """Targets of reads under way."""
        return [block for read in self._reads.values() for block in read.targets]

    def quarantined(self) -> list[int]:
        """Targets of ended reads whose transfer has no fence yet."""
        return [block for blocks in self._quarantine.values() for block in blocks]

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        return min((time for read in self._reads.values() for time in _times(read)), default=None)

    # ------------------------------------------------------------------------------ the engine's events

    def wanted(self, now: float, event: ReadWanted) -> list[Effect]:
        """A request with an offer has arrived. Raises ValueError on a key in use."""
        if event.read in self._reads or event.read in self._quarantine:
            raise ValueError(f"read {event.read} is under way already")
        read = _Read(event.read, event.descriptor, event.chain)
        self._reads[read.key] = read
        source = read.descriptor.source
        if source in self._unfenced.values():
            detail = f"an earlier read from {source} timed out and has no fence yet"
            return self._miss(read, Reason.PEER_UNREACHABLE, detail)
        if self._peers.up(read.descriptor.control_address, source) is None:
            return self._greet(now, read)
        return self._ask(now, read)

    def allocated(self, now: float, event: ReadAllocated) -> list[Effect]:
        """The engine has blocks for the prompt; a read that has ended meanwhile needs none."""
        read = self._reads.get(event.read)
        if read is None:
            targets = event.blocks[event.cached_blocks :]
            return [FreeBlocks(targets)] if targets else []
        read.blocks, read.cached_blocks = event.blocks, event.cached_blocks
        return self._post(now, read)

    def dropped(self, key: HandoffKey, *, done: bool) -> list[Effect]:
        """The request ended, or needs no KV."""
        read = self._reads.pop(key, None)
        return [] if read is None else [*self._let_go(read), self._release(read, done=done)]

    def landed(self, now: float, key: HandoffKey) -> list[Effect]:
        """The fence of a transfer that went well."""
        read = self._reads.get(key)
        if read is None or not read.in_flight:
            return self._fenced(key)
        read.landed_at = now
        return self._resolve(read)

    def failed(self, now: float, key: HandoffKey, error: str) -> list[Effect]:
        """The fence of a transfer that did not."""
        read = self._reads.get(key)
        if read is None or not read.in_flight:
            return self._fenced(key)
        read.read_deadline = None
        source = read.descriptor.source
        effects = self._miss(read, Reason.TRANSFER_FAILED, f"from {source}: {error}")
        if not any(other.in_flight and other.descriptor.source == source for other in self._reads.values()):
            effects += self._peers.lost(source)
            effects += self.peer_ended(now, source, Reason.PEER_LOST)
        return effects

    # --------------------------------------------------------------------------------- the peer's events

    def peer_up(self, now: float, peer: Peer) -> list[Effect]:
        """The handshake is complete: claim and read what waited for it."""
        effects: list[Effect] = []
        for read in self._unposted(peer.address):
            if read.descriptor.source == peer.identity:
                effects += self._ask(now, read) if read.seq == 0 else self._post(now, read)
            else:
                detail = f"offered by {read.descriptor.source}, {peer.identity} answers at {peer.address}"
                effects += self._miss(read, Reason.EPOCH_CHANGED, detail)
        return effects

    def peer_unusable(self, address: str, reason: Reason, detail: str) -> list[Effect]:
        """No handshake with whoever is at `address`."""
        return [effect for read in self._unposted(address) for effect in self._miss(read, reason, detail)]

    def peer_ended(self, now: float, life: Identity, reason: Reason) -> list[Effect]:
        """Nothing more will come from the source of these reads."""
        reads = [read for read in self._reads.values() if read.descriptor.source == life]
        effects = [effect for read in reads for effect in self._miss(read, reason, f"{life} is gone")]
        # Its handshake may be the one that reads from the life after it wait for.
        for read in self._reads.values():
            if read.read_deadline is None:
                effects += self._greet(now, read)
        return effects

    def granted(self, now: float, sender: Identity, answer: ClaimGranted) -> list[Effect]:
        """The offer stands for `matched_tokens` of the request and is pinned."""
        read = self._reads.get(answer.reader)
        if read is None or sender != read.descriptor.source or answer.seq not in read.asked_at:
            return []
        if answer.spans != read.descriptor.spans:
            detail = f"described as blocks {read.descriptor.spans}, {sender} has {answer.spans}"
            return self._miss(read, Reason.BAD_REFERENCE, detail)
        asked_at = read.asked_at[answer.seq]
        read.asked_at = {seq: at for seq, at in read.asked_at.items() if seq > answer.seq}
        known = read.chain.n_tokens if read.matched_tokens is None else read.matched_tokens
        read.matched_tokens = min(answer.matched_tokens, known)
        read.trust_until = max(read.trust_until, asked_at + answer.lease_s * (1 - self._settings.margin))
        read.next_claim = asked_at + answer.lease_s / 3
        read.retry_s = self._settings.retry_s
        return [*self._post(now, read), *self._resolve(read)]

    def declined(self, sender: Identity, answer: ClaimDeclined) -> list[Effect]:
        """The offer is gone, or never stood for this request."""
        read = self._reads.get(answer.reader)
        if read is None or sender != read.descriptor.source:
            return []
        return self._miss(read, answer.reason, f"declined by {sender}")

    def tick(self, now: float) -> list[Effect]:
        """Send again, renew, give up: whatever is due."""
        return [effect for read in list(self._reads.values()) for effect in self._expire(now, read)]

    # ----------------------------------------------------------------------------------------- the steps

    def _ask(self, now: float, read: _Read) -> list[Effect]:
        """Claim and read from a peer that is up: its blocks are as large as this engine's."""
        described, n_tokens = sum(count for _, count in read.descriptor.spans), read.descriptor.n_tokens
        if described != -(-n_tokens // read.chain.block_size):
            return self._miss(read, Reason.BAD_REFERENCE, f"{described} blocks for {n_tokens} tokens")
        read.claim_deadline = now + self._settings.claim_s
        read.retry_s = self._settings.retry_s
        return [self._claim(now, read), *self._post(now, read)]

    def _claim(self, now: float, read: _Read) -> Send:
        read.seq += 1
        read.asked_at[read.seq] = now
        read.next_claim = now + read.retry_s
        read.retry_s *= 2
        claim = Claim(offer=read.descriptor.key, reader=read.key, chain=read.chain, seq=read.seq)
        return Send(read.descriptor.control_address, read.descriptor.source, claim)

    def _post(self, now: float, read: _Read) -> list[Effect]:
        """Post once there are blocks and a peer; before the grant only if digests promise a full match."""
        descriptor = read.descriptor
        if read.blocks is None or read.read_deadline is not None:
            return []
        peer = self._peers.up(descriptor.control_address, descriptor.source)
        if peer is None:
            return self._greet(now, read)
        if read.matched_tokens is None and descriptor.digest != read.chain.digest():
            return []
        if any(
            first < 0 or count < 1 or first + count > peer.num_blocks for first, count in descriptor.spans
        ):
            detail = f"{descriptor.spans} is not within the {peer.num_blocks} blocks of {descriptor.source}"
            return self._miss(read, Reason.BAD_REFERENCE, detail)
        tokens = read.chain.n_tokens if read.matched_tokens is None else read.matched_tokens
        end = min(-(-tokens // read.chain.block_size), len(read.blocks))
        remote = to_blocks(descriptor.spans)[read.cached_blocks : end]
        if not remote:
            return self._miss(
                read, Reason.CHAIN_MISMATCH, f"{read.cached_blocks} blocks are cached here already"
            )
        read.read_deadline = now + self._settings.read_s
        copies = coalesce(remote, read.blocks[read.cached_blocks : read.cached_blocks + len(remote)])
        return [PostRead(read.key, descriptor.source, tuple(copies))]

    def _resolve(self, read: _Read) -> list[Effect]:
        """Right KV or none: the chain has matched, and the bytes came while the claim was trusted."""
        if read.matched_tokens is None or read.landed_at is None:
            return []
        if read.landed_at > read.trust_until:
            late = read.landed_at - read.trust_until
            return self._miss(
                read, Reason.LEASE_LAPSED, f"the bytes came {late:.3f} s after the claim's lease"
            )
        if read.matched_tokens <= read.cached_blocks * read.chain.block_size:
            detail = f"{read.matched_tokens} of {read.chain.n_tokens} tokens match, as many are cached here"
            return self._miss(read, Reason.CHAIN_MISMATCH, detail)
        del self._reads[read.key]
        return [Loaded(read.key, read.matched_tokens), self._release(read, done=True)]

    def _expire(self, now: float, read: _Read) -> list[Effect]:
        if read.in_flight and now >= (read.read_deadline or 0.0):
            self._unfenced[read.key] = read.descriptor.source
            detail = f"not landed within {self._settings.read_s} s, from {read.descriptor.source}"
            return self._miss(read, Reason.READ_TIMEOUT, detail)
        if read.seq == 0:
            return []  # the handshake has the deadline
        if read.matched_tokens is None and now >= read.claim_deadline:
            detail = f"no answer from {read.descriptor.source} within {self._settings.claim_s} s"
            return self._miss(read, Reason.CLAIM_TIMEOUT, detail)
        if read.matched_tokens is not None and now >= read.trust_until:
            return self._miss(read, Reason.LEASE_LAPSED, f"{read.descriptor.source} did not renew the claim")
        return [self._claim(now, read)] if now >= read.next_claim else []

    def _miss(self, read: _Read, reason: Reason, detail: str) -> list[Effect]:
        """Nothing can be used. The request hears of it before its target blocks are freed: until then they
        are its own. The source is told, unless it said so itself."""
        del self._reads[read.key]
        effects = [Missed(read.key, reason, detail), *self._let_go(read)]
        if reason.kind is not ReasonKind.DECLINE:
            effects.append(self._release(read, done=True))
        return effects

    def _let_go(self, read: _Read) -> list[Effect]:
        """No use after free: targets of a transfer in flight wait for its fence."""
        if not read.targets:
            return []
        if read.in_flight:
            self._quarantine[read.key] = read.targets
            return []
        return [FreeBlocks(read.targets)]

    def _fenced(self, key: HandoffKey) -> list[Effect]:
        self._unfenced.pop(key, None)
        blocks = self._quarantine.pop(key, None)
        return [] if blocks is None else [FreeBlocks(blocks)]

    def _release(self, read: _Read, *, done: bool) -> Send:
        release = Release(offer=read.descriptor.key, reader=read.key, done=done)
        return Send(read.descriptor.control_address, read.descriptor.source, release)

    def _greet(self, now: float, read: _Read) -> list[Effect]:
        """No read waits for a peer without a handshake under way, which has a deadline."""
        return self._peers.wanted(now, read.descriptor.control_address, read.descriptor.source)

    def _unposted(self, address: str) -> list[_Read]:
        reads = self._reads.values()
        return [r for r in reads if r.read_deadline is None and r.descriptor.control_address == address]


def _times(read: _Read) -> list[float]:
    """When each deadline of a read falls due."""
    times = [read.read_deadline] if read.in_flight and read.read_deadline is not None else []
    if read.seq:
        times.append(
            min(read.next_claim, read.claim_deadline if read.matched_tokens is None else read.trust_until)
        )
    return times
