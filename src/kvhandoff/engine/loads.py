"""One request's KV coming in: pulled from an offer, pushed by its source, or read from a turn's history.

Used on the asyncio thread only, between the engine, which lends the target blocks, and the protocol,
which says when they hold the right KV."""

from __future__ import annotations

from collections.abc import Sequence

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.reasons import Reason
from kvhandoff.core.records import LegRecord
from kvhandoff.engine.api import KVRequest
from kvhandoff.engine.leg_host import LegHost
from kvhandoff.handoff.events import LoadAllocated, LoadDropped, PushWanted, ReadWanted
from kvhandoff.handoff.messages import Commit, HistoryRef, OfferDescriptor, OfferRef
from kvhandoff.handoff.tickets import Ticket
from kvhandoff.transport.mover import Moved


class Load:
    """From `wanted` to the KV being in, missed, or not needed any more."""

    def __init__(self, host: LegHost, key: HandoffKey, source: OfferRef, *, push: bool) -> None:
        self.source = source
        self.push = push
        self.missed: Reason | None = None
        self.allocated = False
        """The engine has given it blocks, and waits for `load_finished` or `load_failed`."""
        self.commit: Commit | None = None
        self.moved: Moved | None = None
        self.answered: float | None = None
        """When it was clear that the KV is in, or won't come; on the engine's clock."""
        self._host = host
        self._key = key
        self._open = self._loaded = False
        self._targets: tuple[int, ...] = ()
        self._grants = 0
        self._request_id = ""

    @property
    def history(self) -> bool:
        """Whether it brings back what an earlier turn left, not what a prefill leg computed for this one."""
        return isinstance(self.source, HistoryRef)

    def prepare(self, request: KVRequest) -> None:
        """Have the engine ask for the KV."""
        request.load = True
        if isinstance(self.source, HistoryRef):
            request.load_tokens = self.source.n_tokens
            request.load_gain = self._host.min_return_tokens

    def wanted(self, request: KVRequest, chain: TokenChain) -> None:
        """The request has been submitted."""
        self._request_id = request.request_id
        gain = self._host.min_return_tokens if self.history else 1
        if self._reach(request) < gain:
            return  # the engine will skip it: nobody is asked
        self._open = True
        if self.push:
            self._host.feed(PushWanted(self._key, self.source, chain))
        else:
            self._host.feed(ReadWanted(self._key, self.source, chain, gain))

    def why_skipped(self, request: KVRequest) -> Reason:
        """The engine's own cache holds all that it could bring, or all but too little; or all logits of the
        prompt are wanted, so that it has to be computed anyway."""
        if request.wants_prompt_logprobs:
            return Reason.PROMPT_LOGPROBS
        size = self._host.core.layout.block_size
        cached = not self.history or request.stats.cached_tokens >= self._reach(request) // size * size
        return Reason.ALREADY_CACHED if cached else Reason.RETURN_TOO_SHORT

    def _reach(self, request: KVRequest) -> int:
        """How many tokens it can bring at most; the prompt's last one is computed in any case, unless the
        token after it comes too."""
        prompt = len(request.prompt_token_ids)
        return min(self.source.n_tokens, prompt - 1) if isinstance(self.source, HistoryRef) else prompt

    def cached_tokens(self) -> int:
        """How many tokens the source did not have to compute, if it said so."""
        if self.commit is not None:
            return self.commit.cached_tokens
        return self.source.cached_tokens if isinstance(self.source, OfferDescriptor) else 0

    # ----------------------------------------------------------------------------- news from the engine

    def on_allocated(self, blocks: Sequence[int], cached_blocks: int) -> None:
        """The engine has blocks for the prompt. A load that was missed before is answered now."""
        self.allocated = True
        self._targets = tuple(blocks[cached_blocks:])
        if self.missed is not None:  # the engine gives the targets up before the protocol frees them
            self._host.core.load_failed(self._request_id, self.missed)
        elif self.push:
            self._grants += 1
        self._host.feed(LoadAllocated(self._key, tuple(blocks), cached_blocks))

    def on_abandoned(self) -> None:
        """The request ended while its KV was on the way. If the KV had just arrived, the engine had not heard
        of it and left the blocks here."""
        if self._loaded:
            self._host.core.release_blocks(self._targets)
        self.drop(done=False)

    def drop(self, *, done: bool) -> None:
        """Nobody waits for it any more."""
        if self._open:
            self._open = False
            self._host.feed(LoadDropped(self._key, done))

    # --------------------------------------------------------------------------- news from the protocol

    def on_loaded(self, tokens: int, commit: Commit | None) -> None:
        """The KV is in and verified."""
        self._open, self._loaded, self.commit = False, True, commit
        self.answered = self._host.clock()
        first = self.source.first_token if isinstance(self.source, OfferDescriptor) else None
        if commit is not None:
            first = commit.first_token
        self._host.core.load_finished(self._request_id, tokens, first)

    def on_missed(self, reason: Reason) -> None:
        """No KV will come."""
        self._open, self.missed = False, reason
        self.answered = self._host.clock()

    # ----------------------------------------------------------------------------------------- the record

    def account(self, record: LegRecord, block_bytes: int) -> None:
        """Write down what it moved."""
        record.blocks = len(self._targets)
        record.grants = self._grants
        if self.moved is not None:
            record.bytes, record.descriptors = self.moved.bytes, self.moved.descriptors
        if self.commit is not None:
            record.bytes = self.commit.blocks * block_bytes
            record.early_bytes = self.commit.early_blocks * block_bytes
            record.write_chunks = self.commit.chunks


def load_of(host: LegHost, ticket: Ticket) -> Load | None:
    """The load that a ticket asks for. None for what this engine has retained itself: that is in its prefix
    cache, if it keeps one."""
    if ticket.leg == "decode" and ticket.push_from is not None:
        return Load(host, ticket.key, ticket.push_from, push=True)
    if ticket.leg == "decode" and ticket.offer is not None:
        return Load(host, ticket.key, ticket.offer, push=False)
    history = ticket.history
    if ticket.leg in ("prefill", "local") and history is not None and history.source != host.me:
        return Load(host, ticket.key, history, push=False)
    return None
