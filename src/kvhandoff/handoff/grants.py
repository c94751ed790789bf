"""The destination's side of a push: grants, the commits that complete them, and the fences that end them.

    state        event                                      effect                                 next
    -----------  -----------------------------------------  -------------------------------------  -----------
    (none)       wanted, source is up                       send grant without blocks              QUEUED
    (none)       wanted, no peer yet                        send hello, send grant without blocks  QUEUED
    (none)       wanted, source owes an overdue fence       miss: peer_unreachable, release        (none)
    (none)       allocated                                  free                                   (none)
    QUEUED       allocated                                  send grant without blocks              ALLOCATED
    QUEUED       allocated, source up and heard             send grant                             GRANTED
    QUEUED       progress                                   -                                      QUEUED
    QUEUED       source is up                               -                                      QUEUED
    QUEUED       another life is up there                   miss: epoch_changed, release           (none)
    QUEUED       source unusable                            miss: why, release                     (none)
    QUEUED       allocated, the wrong number                ValueError                             QUEUED
    QUEUED       no blocks in time                          miss: queue_timeout, release           (none)
    QUEUED       renewal due                                send grant without blocks              QUEUED
    QUEUED       dropped                                    release                                (none)
    QUEUED       fenced                                     miss: why                              (none)
    QUEUED       no sign of life in time                    miss: push_timeout, release            (none)
    QUEUED       source gone, it seems                      miss: why, release                     (none)
    QUEUED       source's processes have ended              miss: epoch_changed                    (none)
    ALLOCATED    progress, source is up                     send grant                             GRANTED
    ALLOCATED    progress, no peer yet                      -                                      ALLOCATED
    ALLOCATED    source is up, and heard                    send grant                             GRANTED
    ALLOCATED    source is up, not heard                    -                                      ALLOCATED
    ALLOCATED    another life is up there                   miss: epoch_changed, free, release     (none)
    ALLOCATED    source unusable                            miss: why, free, release               (none)
    ALLOCATED    renewal due                                send grant without blocks              ALLOCATED
    ALLOCATED    dropped                                    free, release                          (none)
    ALLOCATED    fenced                                     miss: why, free                        (none)
    ALLOCATED    no sign of life in time                    miss: push_timeout, free, release      (none)
    ALLOCATED    source gone, it seems                      miss: why, free, release               (none)
    ALLOCATED    source's processes have ended              miss: epoch_changed, free              (none)
    GRANTED      progress                                   -                                      GRANTED
    GRANTED      renewal due                                send grant                             GRANTED
    GRANTED      commit, ranks are missing                  -                                      GRANTED
    GRANTED      commit of the last rank                    loaded, release                        (none)
    GRANTED      commit of other content                    miss: commit_mismatch, send revoke     QUARANTINED
    GRANTED      commit of no rank, or of another sender    -                                      GRANTED
    GRANTED      dropped                                    send revoke, release                   QUARANTINED
    GRANTED      fenced                                     miss: why, free                        (none)
    GRANTED      no sign of life in time                    miss: push_timeout, send revoke        QUARANTINED
    GRANTED      source gone, it seems                      miss: why, send revoke                 QUARANTINED
    GRANTED      source's processes have ended              miss: epoch_changed, free              (none)
    QUARANTINED  retry due                                  send revoke                            QUARANTINED
    QUARANTINED  fence overdue                              noted: fence_overdue                   QUARANTINED
    QUARANTINED  fenced                                     free                                   (none)
    QUARANTINED  commit of the last rank                    free                                   (none)
    QUARANTINED  commit, ranks are missing                  -                                      QUARANTINED
    QUARANTINED  hello of the source's next life,           send revoke                            QUARANTINED
                 elsewhere
    QUARANTINED  hello of another, or from the known place  -                                      QUARANTINED
    QUARANTINED  source's processes have ended              free                                   (none)

Misuse, refused with ValueError: QUEUED, ALLOCATED, GRANTED, QUARANTINED: wanted; ALLOCATED, GRANTED,
QUARANTINED: allocated.

ALLOCATED: there are blocks, and the source has not been told which. To be heard is to have said `Progress`.

A grant that names blocks is permission to write into them until the source says that nothing more will: by
all ranks' commits, by `Fenced`, or by having ended. So none is named to a life that has not answered this
very grant, or that this engine does not know: its end would never be heard of. No lease, no timeout and no
broken connection ends it.

Rules of docs/protocol.md upheld here: *right KV or none*: `committed` is the only place that says `Loaded`,
after every rank's commit of the right count and digest; *no use after free*: `_let_go` quarantines what was
granted; *no wait without a deadline*: a source that lives says so (`Progress`), however long its queue, and
one that is silent is given up; a fence is asked for until it comes."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.reasons import Reason
from kvhandoff.core.spans import to_spans
from kvhandoff.handoff.events import (
    Effect,
    FreeBlocks,
    LoadAllocated,
    Loaded,
    Missed,
    Noted,
    PushWanted,
    Send,
)
from kvhandoff.handoff.messages import Commit, Fenced, Grant, OfferRef, Progress, Release, Revoke
from kvhandoff.handoff.peers import Peer, PeerBook
from kvhandoff.handoff.settings import HandoffSettings


@dataclass(slots=True)
class _Push:
    """One load while its request waits for it."""

    key: HandoffKey
    offer: OfferRef
    chain: TokenChain
    number: int
    queue_deadline: float
    silent_at: float
    """When the source is given up, unless it gives a sign of life."""
    next_grant: float
    retry_s: float
    blocks: tuple[int, ...] | None = None
    """None: QUEUED. All prompt blocks; those from `cached_blocks` on belong to the ledger."""
    cached_blocks: int = 0
    heard: bool = False
    """The source has answered this grant."""
    named: bool = False
    """GRANTED: the source knows the blocks, and may write into them."""
    commits: dict[int, Commit] = field(default_factory=dict)
    """By rank."""

    @property
    def targets(self) -> tuple[int, ...]:
        return () if self.blocks is None else self.blocks[self.cached_blocks :]


@dataclass(slots=True)
class _Quarantined:
    """Granted blocks whose request has gone on without them."""

    push: _Push
    address: str
    """Where the fence is asked for."""
    overdue_at: float
    next_revoke: float
    retry_s: float
    overdue: bool = False


class GrantLedger:
    """All grants that one engine has given. Time comes in with each call, on the engine's own clock."""

    def __init__(self, settings: HandoffSettings, peers: PeerBook) -> None:
        self._settings = settings
        self._peers = peers
        self._next_number = 0
        self._pushes: dict[int, _Push] = {}
        self._quarantine: dict[int, _Quarantined] = {}

    def __contains__(self, key: HandoffKey) -> bool:
        quarantined = any(entry.push.key == key for entry in self._quarantine.values())
        return quarantined or self._of(key) is not None

    def __len__(self) -> int:
        """Pushes whose requests wait for them."""
        return len(self._pushes)

    def granted(self) -> list[int]:
        """Blocks that a source may write into, or soon will, for a request that waits for them."""
        return [block for push in self._pushes.values() for block in push.targets]

    def quarantined(self) -> list[int]:
        """Blocks that a source may still write into, and nobody waits for."""
        return [block for entry in self._quarantine.values() for block in entry.push.targets]

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        times = [time for push in self._pushes.values() for time in _times(push)]
        for entry in self._quarantine.values():
            times.append(entry.next_revoke if entry.overdue else min(entry.next_revoke, entry.overdue_at))
        return min(times, default=None)

    # ------------------------------------------------------------------------------ the engine's events

    def wanted(self, now: float, event: PushWanted) -> list[Effect]:
        """A request that an offer's source is to write to has arrived. Raises ValueError on a key in use."""
        if event.load in self:
            raise ValueError(f"load {event.load} is under way already")
        settings, source = self._settings, event.offer.source
        push = _Push(
            key=event.load,
            offer=event.offer,
            chain=event.chain,
            number=self._next_number,
            queue_deadline=now + settings.queue_s,
            silent_at=now + settings.rendezvous_s,
            next_grant=now,
            retry_s=settings.retry_s,
        )
        self._next_number += 1
        self._pushes[push.number] = push
        if any(entry.overdue and entry.push.offer.source == source for entry in self._quarantine.values()):
            return self._miss(now, push, Reason.PEER_UNREACHABLE, f"{source} owes the fence of another grant")
        return [*self._peers.wanted(now, event.offer.control_address, source), self._grant(now, push)]

    def allocated(self, now: float, event: LoadAllocated) -> list[Effect]:
        """The engine has blocks for the prompt. Raises ValueError when it had some already, and for more or
        fewer than the chain has: a grant stands for the whole prompt."""
        push = self._of(event.load)
        if push is None:
            raise ValueError(f"load {event.load} had blocks, which are in quarantine")
        if push.blocks is not None:
            raise ValueError(f"load {push.key} has blocks already: {push.blocks}")
        if len(event.blocks) != push.chain.n_blocks:
            allowed = f"as many as the chain has, {push.chain.n_blocks}"
            raise ValueError(f"load {push.key}: got {len(event.blocks)} blocks, allowed are {allowed}")
        push.blocks, push.cached_blocks = event.blocks, event.cached_blocks
        push.retry_s = self._settings.retry_s
        return [self._grant(now, push)]

    def dropped(self, now: float, key: HandoffKey, *, done: bool) -> list[Effect]:
        """The request ended, or needs no KV."""
        push = self._of(key)
        if push is None:
            return []
        del self._pushes[push.number]
        return [*self._let_go(now, push), self._release(push, done=done)]

    # --------------------------------------------------------------------------------- the peer's events

    def progressed(self, now: float, sender: Identity, answer: Progress) -> list[Effect]:
        """The source lives."""
        push = self._pushes.get(answer.number)
        if push is not None and sender == push.offer.source:
            push.silent_at = now + self._settings.progress_s
            push.retry_s = self._settings.retry_s
            push.next_grant = now + min(answer.lease_s, self._settings.progress_s) / 3
            push.heard = True
            return self._name(now, push)
        return []

    def committed(self, now: float, sender: Identity, commit: Commit) -> list[Effect]:
        """One rank has written all."""
        entry = self._quarantine.get(commit.number)
        push = entry.push if entry is not None else self._pushes.get(commit.number)
        if push is None or sender != push.offer.source or not push.named:
            return []
        if not 0 <= commit.rank < commit.ranks:
            return []
        expected = push.chain.n_blocks - push.cached_blocks, push.chain.digest()
        if entry is None and (commit.blocks, commit.digest) != expected:
            detail = f"{commit.blocks} blocks of {commit.digest} by rank {commit.rank}, expected {expected}"
            return self._miss(now, push, Reason.COMMIT_MISMATCH, detail)
        push.commits[commit.rank] = commit
        push.silent_at = now + self._settings.progress_s
        if len(push.commits) < max(other.ranks for other in push.commits.values()):
            return []
        if entry is not None:
            return self._fenced(push, Reason.REVOKED, "")
        del self._pushes[push.number]
        return [Loaded(push.key, push.chain.n_tokens, commit), self._release(push, done=True)]

    def fenced(self, now: float, sender: Identity, answer: Fenced) -> list[Effect]:
        """Nothing will be written any more."""
        entry = self._quarantine.get(answer.number)
        push = entry.push if entry is not None else self._pushes.get(answer.number)
        if push is None or sender != push.offer.source:
            return []
        return self._fenced(push, answer.reason, f"{sender} writes nothing more")

    def peer_up(self, now: float, peer: Peer) -> list[Effect]:
        """The handshake is complete."""
        effects: list[Effect] = []
        for push in self._at(peer.address):
            if push.offer.source == peer.identity:
                effects += self._name(now, push)
            elif not push.named:
                detail = f"wanted from {push.offer.source}, {peer.identity} answers at {peer.address}"
                effects += self._miss(now, push, Reason.EPOCH_CHANGED, detail)
        return effects

    def peer_unusable(self, now: float, address: str, reason: Reason, detail: str) -> list[Effect]:
        """No handshake with whoever is at `address`."""
        unnamed = [push for push in self._at(address) if not push.named]
        return [effect for push in unnamed for effect in self._miss(now, push, reason, detail)]

    def peer_gone(self, now: float, address: str, reason: Reason) -> list[Effect]:
        """The connection to a source broke, or another engine answers there. Not a fence."""
        detail = f"the source at {address} is gone"
        return [e for push in self._at(address) for e in self._miss(now, push, reason, detail)]

    def peer_died(self, life: Identity) -> list[Effect]:
        """All processes of the source have ended, for certain: a fence."""
        pushes = [*self._pushes.values(), *(entry.push for entry in self._quarantine.values())]
        over = [push for push in pushes if push.offer.source == life]
        why = Reason.EPOCH_CHANGED, f"{life} has ended"
        return [effect for push in over for effect in self._fenced(push, *why)]

    def peer_moved(self, now: float, sender: Identity, address: str) -> list[Effect]:
        """Another life of an engine is heard of: if it is alive now, it says what became of the one that owes
        fences."""
        effects: list[Effect] = []
        for entry in self._quarantine.values():
            source = entry.push.offer.source
            if source.engine_id == sender.engine_id and source != sender and entry.address != address:
                entry.address = address
                effects.append(self._revoke(now, entry))
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Send again, renew, give up: whatever is due."""
        effects = [effect for push in list(self._pushes.values()) for effect in self._expire(now, push)]
        for entry in self._quarantine.values():
            if not entry.overdue and now >= entry.overdue_at:
                entry.overdue = True
                source, blocks = entry.push.offer.source, len(entry.push.targets)
                effects.append(Noted(entry.push.key, Reason.FENCE_OVERDUE, f"{blocks} blocks, from {source}"))
            if now >= entry.next_revoke:
                effects.append(self._revoke(now, entry))
        return effects

    # ----------------------------------------------------------------------------------------- the steps

    def _of(self, key: HandoffKey) -> _Push | None:
        return next((push for push in self._pushes.values() if push.key == key), None)

    def _at(self, address: str) -> list[_Push]:
        return [push for push in self._pushes.values() if push.offer.control_address == address]

    @property
    def _floor(self) -> int:
        return min([*self._pushes, *self._quarantine], default=self._next_number)

    def _grant(self, now: float, push: _Push) -> Send:
        push.next_grant = now + push.retry_s
        push.retry_s *= 2
        source = push.offer.source
        known = push.heard and self._peers.up(push.offer.control_address, source) is not None
        push.named = push.named or (known and push.blocks is not None)
        grant = Grant(
            offer=push.offer.key,
            reader=push.key,
            number=push.number,
            floor=self._floor,
            chain=push.chain,
            first_block=push.cached_blocks,
            spans=to_spans(push.targets) if push.named else None,
        )
        return Send(push.offer.control_address, source, grant)

    def _name(self, now: float, push: _Push) -> list[Effect]:
        """Tell the source which blocks, if that has become possible."""
        if push.named or push.blocks is None:
            return []
        grant = self._grant(now, push)
        return [grant] if push.named else []

    def _revoke(self, now: float, entry: _Quarantined) -> Send:
        entry.next_revoke = now + entry.retry_s
        entry.retry_s = min(2 * entry.retry_s, self._settings.revoke_cap_s)
        push = entry.push
        revoke = Revoke(offer=push.offer.key, reader=push.key, number=push.number, floor=self._floor)
        return Send(entry.address, push.offer.source, revoke)

    def _release(self, push: _Push, *, done: bool) -> Send:
        release = Release(offer=push.offer.key, reader=push.key, seq=push.number, done=done)
        return Send(push.offer.control_address, push.offer.source, release)

    def _expire(self, now: float, push: _Push) -> list[Effect]:
        source = push.offer.source
        if now >= push.silent_at:
            return self._miss(now, push, Reason.PUSH_TIMEOUT, f"no sign of life from {source}")
        if push.blocks is None and now >= push.queue_deadline:
            detail = f"no blocks within {self._settings.queue_s} s"
            return self._miss(now, push, Reason.QUEUE_TIMEOUT, detail)
        if now < push.next_grant:
            return []
        # No push waits to be named without a handshake under way, which has a deadline.
        greeting = [] if push.named else self._peers.wanted(now, push.offer.control_address, source)
        return [*greeting, self._grant(now, push)]

    def _miss(self, now: float, push: _Push, reason: Reason, detail: str) -> list[Effect]:
        """Nothing can be used. The request hears of it before its target blocks are freed."""
        del self._pushes[push.number]
        effects: list[Effect] = [Missed(push.key, reason, detail), *self._let_go(now, push)]
        if not push.named:
            effects.append(self._release(push, done=False))
        return effects

    def _let_go(self, now: float, push: _Push) -> list[Effect]:
        """No use after free: what was named waits for its fence."""
        if not push.named:
            return [FreeBlocks(push.targets)] if push.targets else []
        settings = self._settings
        entry = _Quarantined(
            push,
            push.offer.control_address,
            now + settings.fence_s,
            next_revoke=now,
            retry_s=settings.retry_s,
        )
        self._quarantine[push.number] = entry
        return [self._revoke(now, entry)]

    def _fenced(self, push: _Push, reason: Reason, detail: str) -> list[Effect]:
        """Its blocks are free; a request that still waits for them hears of it before."""
        free: list[Effect] = [FreeBlocks(push.targets)] if push.targets else []
        if self._quarantine.pop(push.number, None) is not None:
            return free
        del self._pushes[push.number]
        return [Missed(push.key, reason, detail), *free]


def _times(push: _Push) -> list[float]:
    """When each deadline of a push falls due."""
    times = [push.silent_at, push.next_grant]
    return [*times, push.queue_deadline] if push.blocks is None else times
