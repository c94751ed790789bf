"""One request's KV side on one engine: its ticket, what comes in (`loads.py`), what goes out (`offering.py`),
what is kept for the next turn, and its record.

A leg's life: made and prepared, on any thread; `entered`, `on_…` and `finish` on the asyncio thread. The
integration makes legs; the agent (`agent.py`) calls the `on_…` methods when the protocol or the engine has
news of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.ids import HandoffId, HandoffKey
from kvhandoff.core.phases import Phase, cut
from kvhandoff.core.reasons import Reason, ReasonKind
from kvhandoff.core.records import LegRecord
from kvhandoff.engine.api import KVRequest
from kvhandoff.engine.leg_host import LegHost
from kvhandoff.engine.loads import Load, load_of
from kvhandoff.engine.offering import Offering
from kvhandoff.handoff.events import Retained
from kvhandoff.handoff.messages import Commit
from kvhandoff.handoff.tickets import Ticket
from kvhandoff.transport.mover import Moved

_log = logging.getLogger(__name__)


class KVLeg:
    """What every integration's legs have in common."""

    def __init__(self, host: LegHost, handoff_id: str, ticket: Ticket | None) -> None:
        """`ticket` has been admitted; None: a plain request, served alone."""
        self.handoff_id = handoff_id
        self.key = ticket.key if ticket is not None else HandoffKey(HandoffId(handoff_id), 0)
        self.role: Literal["prefill", "decode", "local"] = "local"
        if ticket is not None and ticket.leg in ("prefill", "decode"):
            self.role = ticket.leg
        self.cache_salt = ticket.cache_salt if ticket is not None else None
        self.request: KVRequest | None = None
        self.ticket = ticket
        self.load = load_of(host, ticket) if ticket is not None else None
        self.on_account: Callable[[LegRecord], None] | None = None
        """Gets the leg's account when the leg is over: whoever traces it."""
        self.offering: Offering | None = None
        if ticket is not None and self.role == "prefill":
            self.offering = Offering(host, self.key, grows=ticket.push, peers=ticket.peers)
        # readings of the engine's clock
        self.opened_at = host.clock()
        self.tokenized_at: float | None = None
        self.first_token_at: float | None = None
        self._host = host
        self._in_engine = False
        self._finished = False
        self._last_record: LegRecord | None = None
        self._reasons: list[Reason] = []
        self._retained_tokens = 0

    def prepare(self, request: KVRequest) -> None:
        """This is the leg's request: have the engine load, offer and keep what the ticket says."""
        self.request = request
        request.chain = self._host.core.chain(request.prompt_token_ids, request.cache_salt)
        request.retain = self.ticket is not None and self.ticket.retain is not None
        for part in (self.load, self.offering):
            if part is not None:
                part.prepare(request)

    def entered(self) -> None:
        """The engine has taken the request."""
        request, chain = self._own, self._own.chain
        assert chain is not None, "prepare comes before"
        self._host.bind(request.request_id, self)
        self._in_engine = True
        if self.offering is not None:
            self.offering.begin(chain)
        if self.load is not None:
            self.load.wanted(request, chain)

    @property
    def is_finished(self) -> bool:
        """Whether its request has been answered, or given up."""
        return self._finished

    def yields(self) -> bool:
        """Give the request up to another decode engine, while its KV is awaited: its source still has it
        then. Whoever asked closes the connection."""
        if self.load is None or self.load.answered is not None:
            return False
        self.drop_load(done=False)
        return True

    def withdrawn(self) -> None:
        """Nobody waits for the answer, nor comes for the offer."""
        self.drop_load(done=False)

    def finish(self, finish_reason: str | None, completion_tokens: int) -> None:
        """The request has been answered, or given up; again is a no-op."""
        if self._finished:
            return
        self._finished = True
        # The source need not wait for this engine's step to end. Blocks that this frees reach the engine
        # after it has heard of the end, which leaves them with the handoff side.
        self.drop_load(done=False)
        self._last_record = self._record(finish_reason, completion_tokens)
        # After a stop string, or without a client, the engine has still to say what it retains.
        if not (self._in_engine and self._own.retain):
            self._host.ended(self, self._last_record)
        if self.on_account is not None:
            self.on_account(self._last_record)

    def drop_load(self, *, done: bool) -> None:
        """Nobody waits for what was to come in."""
        if self.load is not None:
            self.load.drop(done=done)

    # ----------------------------------------------------------------------------- news from the engine

    def on_grown(self, blocks: Sequence[int]) -> None:
        """The next full blocks of a prompt that is pushed are computed."""
        self._offers.on_grown(blocks)

    def on_offer_abandoned(self) -> None:
        """The engine will not complete the offer."""
        self._offers.on_abandoned()

    def on_offered(self, blocks: Sequence[int], first_token: int) -> None:
        """The prompt is computed. If the router has left, nobody will come for it."""
        self._offers.on_offered(blocks, first_token, self._own.stats, nobody_comes=self._finished)

    def on_retained(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """The turn has ended; what it computed is kept for the next one."""
        retention = self.ticket.retain if self.ticket is not None else None
        assert retention is not None, "only asked for by a ticket"
        block_size = self._host.core.layout.block_size
        chain = TokenChain(block_size, len(hashes) * block_size, tuple(hashes), b"")
        self._retained_tokens = chain.n_tokens
        self._host.feed(Retained(self.key, chain, tuple(blocks), retention))

    def on_allocated(self, blocks: Sequence[int], cached_blocks: int) -> None:
        """The engine has blocks for the prompt whose KV is awaited."""
        self._awaited.on_allocated(blocks, cached_blocks)

    def on_skipped(self) -> None:
        """The engine runs the request without its load."""
        self._reasons.append(self._awaited.why_skipped(self._own))
        self.drop_load(done=True)

    def on_abandoned(self) -> None:
        """The request ended while its KV was on the way."""
        self._awaited.on_abandoned()

    def on_ended(self) -> None:
        """The engine is done with the leg's own request. If that had not even got blocks, its load is still
        open, and would be renewed for ever."""
        self._in_engine = False
        self.drop_load(done=False)
        if self._last_record is not None and self._own.retain:
            self._last_record.retained_tokens = self._retained_tokens
            self._host.ended(self, self._last_record)

    # --------------------------------------------------------------------------- news from the protocol

    def on_moved(self, moved: Moved) -> None:
        """The transfer of a read has ended."""
        self._awaited.moved = moved

    def on_loaded(self, tokens: int, commit: Commit | None) -> None:
        """The KV is in and verified."""
        self._awaited.on_loaded(tokens, commit)

    def on_missed(self, reason: Reason, detail: str) -> None:
        """No KV: the prompt is computed here."""
        load = self._awaited
        load.on_missed(reason)
        self._reasons.append(reason)
        level = logging.WARNING if reason.kind is ReasonKind.FAILURE else logging.INFO
        _log.log(level, "%s: %s, %s", self.key, reason, detail)
        self._run_without(reason, detail)

    # ----------------------------------------------------------------------------------------- the rest

    @property
    def _own(self) -> KVRequest:
        assert self.request is not None, "only told of legs with a request"
        return self.request

    @property
    def _awaited(self) -> Load:
        assert self.load is not None, "only told of legs with a load"
        return self.load

    @property
    def _offers(self) -> Offering:
        assert self.offering is not None, "only told of legs with an offer"
        return self.offering

    def _run_without(self, reason: Reason, detail: str) -> None:
        """The engine computes the prompt, in other blocks."""
        if self._awaited.allocated:
            self._host.core.load_failed(self._own.request_id, reason)

    def _record(self, finish_reason: str | None, completion_tokens: int) -> LegRecord:
        record = LegRecord(
            handoff_id=self.handoff_id,
            attempt=self.key.attempt,
            leg=self.role,
            engine_id=self._host.me.engine_id,
            epoch=self._host.me.epoch,
            total_s=self._host.clock() - self.opened_at,
            completion_tokens=completion_tokens,
            retained_tokens=self._retained_tokens,
            reasons=list(self._reasons),
            finish_reason=finish_reason,
        )
        if self.load is not None:
            self.load.account(record, self._host.core.layout.block_bytes)
        if self.offering is not None:
            record.blocks = self.offering.n_blocks
        if self.request is not None:
            stats = self.request.stats
            record.prompt_tokens = len(self.request.prompt_token_ids)
            record.cached_tokens = stats.cached_tokens
            record.transferred_tokens = stats.transferred_tokens
            record.computed_tokens = stats.computed_tokens
            record.prefill_chunks = stats.prefill_chunks
            record.first_token_reused = stats.first_token_reused
            record.phases = cut(self.opened_at, self._marks(self.request))
        return record

    def _marks(self, request: KVRequest) -> list[tuple[Phase, float | None]]:
        """When each phase ended, in their order."""
        stats, load = request.stats, self.load
        history = load is not None and load.history
        returned = stats.runnable_at or None if history else None
        if self.role == "prefill":
            return [
                (Phase.PREFILL_TOKENIZE, self.tokenized_at),
                (Phase.PREFILL_QUEUE, stats.admitted_at or None),
                (Phase.RETURN, returned),
                (Phase.PREFILL_COMPUTE, stats.prefilled_at or None),
                (Phase.PREFILL_OFFER, self.first_token_at),
            ]
        forward = None if history else load
        moved = forward.moved if forward is not None else None
        loaded_at = forward.answered if forward is not None and forward.allocated else None
        pushed_at = loaded_at if forward is not None and forward.push else None  # or the end of waiting
        tail_s = forward.commit.tail_s if forward is not None and forward.commit is not None else 0.0
        return [
            (Phase.DECODE_TOKENIZE, self.tokenized_at),
            (Phase.DECODE_QUEUE, stats.admitted_at or None),
            (Phase.RETURN, returned),
            (Phase.AWAIT_PREFILL, pushed_at - tail_s if pushed_at is not None else None),
            (Phase.WRITE_TAIL, pushed_at),
            (Phase.POST, moved.posted_at if moved else None),
            (Phase.WIRE, moved.done_at if moved else None),
            (Phase.CLAIM, loaded_at if pushed_at is None else None),
            (Phase.DETECT, stats.runnable_at or None),
            (Phase.RECOMPUTE, stats.prefilled_at or None),
            (Phase.FIRST_STEP, self.first_token_at),
        ]
