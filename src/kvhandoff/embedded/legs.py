"""One request's KV side on one engine: its ticket, what comes in (`loads.py`), what goes out (`offering.py`),
what is kept for the next turn, and its record.

Used on the asyncio thread only. The agent (`agent.py`) makes legs, and calls the `on_…` methods when the
protocol or the engine has news of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.errors import RequestError, invalid
from kvhandoff.core.ids import HandoffKey
from kvhandoff.core.phases import Phase, cut
from kvhandoff.core.reasons import Reason, ReasonKind
from kvhandoff.core.records import LegRecord
from kvhandoff.embedded.api import EngineRequest, TokenOutput
from kvhandoff.embedded.leg_host import LegHost
from kvhandoff.embedded.loads import Load, load_of
from kvhandoff.embedded.offering import Offering
from kvhandoff.handoff.events import Retained
from kvhandoff.handoff.messages import Commit
from kvhandoff.handoff.tickets import Ticket
from kvhandoff.transport.mover import Moved

_log = logging.getLogger(__name__)


class AgentLeg:
    """Implements `api.Leg`."""

    def __init__(self, host: LegHost, handoff_id: str, ticket: Ticket | None, params: dict[str, Any]) -> None:
        """`ticket` has been admitted; `params` is what came beside it. Raises RequestError for token ids that
        are none."""
        self.handoff_id = handoff_id
        self.key = ticket.key if ticket is not None else HandoffKey(handoff_id, 0)  # type: ignore[arg-type]
        self.role: Literal["prefill", "decode", "local"] = "local"
        if ticket is not None and ticket.leg in ("prefill", "decode"):
            self.role = ticket.leg
        self.cache_salt = ticket.cache_salt if ticket is not None else None
        self.prompt_token_ids: Sequence[int] | None = None
        if self.role == "decode":
            self.prompt_token_ids = _token_ids(params.get("prompt_token_ids"))
        self._host = host
        self._ticket = ticket
        self.load = load_of(host, ticket) if ticket is not None else None
        self.offering: Offering | None = None
        if ticket is not None and self.role == "prefill":
            self.offering = Offering(host, self.key, grows=ticket.push, peers=ticket.peers)
        self._requests: list[EngineRequest] = []
        self._emit: Callable[[TokenOutput], None] | None = None
        self._refused = self._begun = False
        self._lock = threading.Lock()
        """Guards the two: the engine thread begins the answer, the asyncio thread may refuse it before."""
        self._in_engine = False
        self._finished = False
        self._last_record: LegRecord | None = None
        self._reasons: list[Reason] = []
        self._retained_tokens = 0
        # readings of the engine's clock
        self._opened = host.clock()
        self._tokenized: float | None = None
        self._first_token: float | None = None

    # ------------------------------------------------------------------------------- the server's calls

    def tokenized(self) -> None:
        """See `api.Leg`."""
        self._tokenized = self._host.clock()

    def submit(self, request: EngineRequest) -> None:
        """See `api.Leg`."""
        host = self._host
        chain = host.core.chain(request.prompt_token_ids, request.cache_salt)
        request.chain = chain
        request.retain = self._ticket is not None and self._ticket.retain is not None
        for part in (self.load, self.offering):
            if part is not None:
                part.prepare(request)
        self._emit, request.on_output = request.on_output, self._on_output
        self._requests.append(request)
        host.core.submit(request)
        host.bind(request.request_id, self)
        self._in_engine = True
        if self.offering is not None:
            self.offering.begin(chain)
        if self.load is not None:
            self.load.wanted(request, chain)

    def submit_sibling(self, request: EngineRequest) -> None:
        """See `api.Leg`."""
        self._requests.append(request)
        self._host.core.submit(request)

    @property
    def is_finished(self) -> bool:
        """Whether the server is done with it."""
        return self._finished

    def abort(self, request_id: str) -> None:
        """See `api.Leg`."""
        self._host.core.abort(request_id)

    def first_token(self) -> None:
        """See `api.Leg`."""
        if self._first_token is None:
            self._first_token = self._host.clock()

    def cached_tokens(self) -> int:
        """The engine's own hit, or the prefill engine's when its KV was used."""
        if not self._requests:
            return 0
        stats = self._requests[0].stats
        there = self.load.cached_tokens() if self.load is not None and stats.transferred_tokens else 0
        returned = stats.transferred_tokens if self.load is not None and self.load.history else 0
        return max(stats.cached_tokens + returned, there)

    async def response_params(self) -> dict[str, Any] | None:
        """See `api.Leg`."""
        if self.offering is None:
            return None
        self.first_token()
        offer = msgspec.to_builtins(self.offering.descriptor)
        return {"offer": offer, "prompt_token_ids": list(self._requests[0].prompt_token_ids)}

    def yields(self) -> bool:
        """Give the request up to another decode engine, if nothing of the answer is out and the KV is not in:
        its source still has it then. Nothing is said any more; whoever asked closes the connection."""
        has_kv = self.load is not None and self.load.answered is not None and self.load.missed is None
        with self._lock:
            if self._begun or has_kv:
                return False
            self._refused = True
        self._drop_load(done=False)
        for request in self._requests:
            self._host.core.abort(request.request_id)
        return True

    def finished(self, finish_reason: str | None, completion_tokens: int) -> None:
        """See `api.Leg`."""
        if self._finished:
            return
        self._finished = True
        for request in self._requests:
            self._host.core.abort(request.request_id)
        # The source need not wait for this engine's step to end. Blocks that this frees reach the engine
        # after the abort, which leaves them with the handoff side.
        self._drop_load(done=False)
        self._last_record = self._record(finish_reason, completion_tokens)
        # After a stop string, or without a client, the engine has still to say what it retains.
        if not (self._in_engine and self._requests[0].retain):
            self._host.ended(self, self._last_record)

    # ----------------------------------------------------------------------------- news from the engine

    def on_grown(self, blocks: Sequence[int]) -> None:
        """The next full blocks of a prompt that is pushed are computed."""
        self._offers.on_grown(blocks)

    def on_offer_abandoned(self) -> None:
        """The engine will not complete the offer."""
        self._offers.on_abandoned()

    def on_offered(self, blocks: Sequence[int], first_token: int) -> None:
        """The prompt is computed. If the router has left, nobody will come for it."""
        stats = self._requests[0].stats
        self._offers.on_offered(blocks, first_token, stats, nobody_comes=self._finished)

    def on_retained(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """The turn has ended; what it computed is kept for the next one."""
        retention = self._ticket.retain if self._ticket is not None else None
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
        self._reasons.append(self._awaited.why_skipped(self._requests[0]))
        self._drop_load(done=True)

    def on_abandoned(self) -> None:
        """The request ended while its KV was on the way."""
        self._awaited.on_abandoned()

    def on_ended(self) -> None:
        """The engine is done with the leg's own request. If that had not even got blocks, its load is still
        open, and would be renewed for ever."""
        self._in_engine = False
        self._drop_load(done=False)
        if self._last_record is not None and self._requests[0].retain:
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
        """No KV: compute the prompt here, or answer with the reason, as the ticket says."""
        load = self._awaited
        load.on_missed(reason)
        self._reasons.append(reason)
        level = logging.WARNING if reason.kind is ReasonKind.FAILURE else logging.INFO
        _log.log(level, "%s: %s, %s", self.key, reason, detail)
        request_id = self._requests[0].request_id
        if self._ticket is not None and self._ticket.on_miss == "error" and not load.history:
            message = f"the prompt's KV can't be used ({reason}: {detail}) and on_miss is 'error'"
            error = RequestError(message, status=503, code=reason, kind="kv_miss")
            if self._emit is not None:
                self._emit(TokenOutput(request_id, None, finish_reason="error", error=error))
            with self._lock:
                self._refused = True
            self._host.core.abort(request_id)
        elif load.allocated:
            self._host.core.load_failed(request_id, reason)

    # ----------------------------------------------------------------------------------------- the rest

    @property
    def _awaited(self) -> Load:
        assert self.load is not None, "only told of legs with a load"
        return self.load

    @property
    def _offers(self) -> Offering:
        assert self.offering is not None, "only told of legs with an offer"
        return self.offering

    def _on_output(self, output: TokenOutput) -> None:
        """On the engine thread: pass on, unless the client was told of an error already, or another engine is
        to answer."""
        with self._lock:
            self._begun = self._begun or not self._refused
        if self._begun and not self._refused and self._emit is not None:
            self._emit(output)
        if output.finish_reason is not None:
            self._host.unbind_soon(output.request_id)

    def _drop_load(self, *, done: bool) -> None:
        if self.load is not None:
            self.load.drop(done=done)

    def _record(self, finish_reason: str | None, completion_tokens: int) -> LegRecord:
        first = self._requests[0] if self._requests else None
        record = LegRecord(
            handoff_id=self.handoff_id,
            attempt=self.key.attempt,
            leg=self.role,
            engine_id=self._host.me.engine_id,
            epoch=self._host.me.epoch,
            total_s=self._host.clock() - self._opened,
            completion_tokens=completion_tokens,
            retained_tokens=self._retained_tokens,
            reasons=list(self._reasons),
            finish_reason=finish_reason,
        )
        if self.load is not None:
            self.load.account(record, self._host.core.layout.block_bytes)
        if self.offering is not None:
            record.blocks = self.offering.n_blocks
        if first is not None:
            stats = first.stats
            record.prompt_tokens = len(first.prompt_token_ids)
            record.cached_tokens = stats.cached_tokens
            record.transferred_tokens = stats.transferred_tokens
            record.computed_tokens = stats.computed_tokens
            record.prefill_chunks = stats.prefill_chunks
            record.first_token_reused = stats.first_token_reused
            record.phases = cut(self._opened, self._marks(first))
        return record

    def _marks(self, request: EngineRequest) -> list[tuple[Phase, float | None]]:
        """When each phase ended, in their order."""
        stats, load = request.stats, self.load
        history = load is not None and load.history
        returned = stats.runnable_at or None if history else None
        if self.role == "prefill":
            return [
                (Phase.PREFILL_TOKENIZE, self._tokenized),
                (Phase.PREFILL_QUEUE, stats.admitted_at or None),
                (Phase.RETURN, returned),
                (Phase.PREFILL_COMPUTE, stats.prefilled_at or None),
                (Phase.PREFILL_OFFER, self._first_token),
            ]
        forward = None if history else load
        moved = forward.moved if forward is not None else None
        loaded_at = forward.answered if forward is not None and forward.allocated else None
        pushed_at = loaded_at if forward is not None and forward.push else None  # or the end of waiting
        tail_s = forward.commit.tail_s if forward is not None and forward.commit is not None else 0.0
        return [
            (Phase.DECODE_TOKENIZE, self._tokenized),
            (Phase.DECODE_QUEUE, stats.admitted_at or None),
            (Phase.RETURN, returned),
            (Phase.AWAIT_PREFILL, pushed_at - tail_s if pushed_at is not None else None),
            (Phase.WRITE_TAIL, pushed_at),
            (Phase.POST, moved.posted_at if moved else None),
            (Phase.WIRE, moved.done_at if moved else None),
            (Phase.CLAIM, loaded_at if pushed_at is None else None),
            (Phase.DETECT, stats.runnable_at or None),
            (Phase.RECOMPUTE, stats.prefilled_at or None),
            (Phase.FIRST_STEP, self._first_token),
        ]


def _token_ids(given: object) -> Sequence[int] | None:
    if given is None:
        return None
    try:
        return msgspec.convert(given, list[int])
    except msgspec.ValidationError as error:
        raise invalid(
            "kv_transfer_params.prompt_token_ids", given, f"a list of token ids ({error})"
        ) from error
