"""One request's KV side on one engine: its ticket, its read or offer, and its record.

Used on the asyncio thread only. The agent (`agent.py`) makes legs, and calls the `on_…` methods when the
protocol or the engine has news of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from kvhandoff.core.chain import TokenChain
from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import RequestError, invalid
from kvhandoff.core.ids import HandoffKey, Identity
from kvhandoff.core.phases import Phase, cut
from kvhandoff.core.reasons import Reason, ReasonKind
from kvhandoff.core.records import LegRecord
from kvhandoff.core.spans import to_spans
from kvhandoff.embedded.api import EngineControl, EngineRequest, TokenOutput
from kvhandoff.handoff.events import Event, Offered, LoadAllocated, LoadDropped, ReadWanted, Withdrawn
from kvhandoff.handoff.messages import OfferDescriptor
from kvhandoff.handoff.tickets import Ticket
from kvhandoff.transport.mover import Moved

_log = logging.getLogger(__name__)


class LegHost(Protocol):
    """What a leg needs of the agent it belongs to."""

    core: EngineControl
    clock: Clock
    me: Identity
    control_address: str

    def feed(self, event: Event) -> None:
        """Give the protocol an event."""
        ...

    def bind(self, request_id: str, leg: AgentLeg) -> None:
        """Tell the leg what the engine says of this request, until `unbind_soon`."""
        ...

    def unbind_soon(self, request_id: str) -> None:
        """The engine says no more of this request. Called on the engine thread."""
        ...

    def ended(self, leg: AgentLeg, record: LegRecord) -> None:
        """The leg is over."""
        ...


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
        self._offer = ticket.offer if ticket is not None else None
        self._requests: list[EngineRequest] = []
        self._chain: TokenChain | None = None
        self._descriptor: OfferDescriptor | None = None
        self._emit: Callable[[TokenOutput], None] | None = None
        self._refused = False
        self._read_open = self._loaded = self._allocated = False
        self._targets: tuple[int, ...] = ()
        self._moved: Moved | None = None
        self._finished = False
        self.missed: Reason | None = None
        self._reasons: list[Reason] = []
        self._blocks = 0
        # readings of the engine's clock
        self._opened = host.clock()
        self._tokenized: float | None = None
        self._answered: float | None = None
        """The claim and the bytes were both in, or one of them could not be."""
        self._first_token: float | None = None

    # ------------------------------------------------------------------------------- the server's calls

    def tokenized(self) -> None:
        """See `api.Leg`."""
        self._tokenized = self._host.clock()

    def submit(self, request: EngineRequest) -> None:
        """See `api.Leg`."""
        host = self._host
        if self.role != "local":
            self._chain = request.chain = host.core.chain(request.prompt_token_ids, request.cache_salt)
        request.offer = self.role == "prefill"
        request.load = self._offer is not None
        self._emit, request.on_output = request.on_output, self._on_output
        self._requests.append(request)
        host.core.submit(request)
        host.bind(request.request_id, self)
        if self._offer is not None and self._chain is not None:
            self._read_open = True
            host.feed(ReadWanted(self.key, self._offer, self._chain))

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
        there = self._offer.cached_tokens if self._offer is not None and stats.transferred_tokens else 0
        return max(stats.cached_tokens, there)

    async def response_params(self) -> dict[str, Any] | None:
        """See `api.Leg`."""
        if self.role != "prefill":
            return None
        self.first_token()
        offer = msgspec.to_builtins(self._descriptor)
        return {"offer": offer, "prompt_token_ids": list(self._requests[0].prompt_token_ids)}

    def finished(self, finish_reason: str | None, completion_tokens: int) -> None:
        """See `api.Leg`."""
        if self._finished:
            return
        self._finished = True
        for request in self._requests:
            self._host.core.abort(request.request_id)
        # The source need not wait for this engine's step to end. Blocks that this frees reach the engine
        # after the abort, which leaves them with the handoff side.
        self._drop_read(done=False)
        self._host.ended(self, self._record(finish_reason, completion_tokens))

    # ----------------------------------------------------------------------------- news from the engine

    def on_offered(self, request_id: str, blocks: Sequence[int]) -> None:
        """The prompt is computed: offer its blocks."""
        chain, stats = self._chain, self._requests[0].stats
        assert chain is not None
        self._blocks = len(blocks)
        self._descriptor = OfferDescriptor(
            key=self.key,
            source=self._host.me,
            control_address=self._host.control_address,
            spans=to_spans(blocks),
            n_tokens=chain.n_tokens,
            digest=chain.digest(),
            cached_tokens=stats.cached_tokens,
        )
        self._host.feed(Offered(self.key, chain, tuple(blocks)))
        if self._finished:  # the router has left: nobody will come
            self._host.feed(Withdrawn(self.key))

    def on_allocated(self, request_id: str, blocks: Sequence[int], cached_blocks: int) -> None:
        """The engine has blocks for the prompt. A read that was missed before is answered now."""
        self._allocated = True
        self._targets = tuple(blocks[cached_blocks:])
        self._blocks = len(self._targets)
        if self.missed is not None:  # the engine gives the targets up before the protocol frees them
            self._host.core.load_failed(request_id, self.missed)
        self._host.feed(LoadAllocated(self.key, tuple(blocks), cached_blocks))

    def on_skipped(self, request_id: str) -> None:
        """The engine's own cache holds the prompt."""
        self._reasons.append(Reason.ALREADY_CACHED)
        self._drop_read(done=True)

    def on_abandoned(self, request_id: str) -> None:
        """The request ended while its KV was on the way. If the KV had just arrived, the engine had not heard
        of it and left the blocks here."""
        if self._loaded:
            self._host.core.release_blocks(self._targets)
        self._drop_read(done=False)

    def on_ended(self) -> None:
        """The engine is done with the leg's own request. If that had not even got blocks, its read is still
        open, and would be renewed for ever."""
        self._drop_read(done=False)

    # --------------------------------------------------------------------------- news from the protocol

    def on_moved(self, moved: Moved) -> None:
        """The transfer has ended."""
        self._moved = moved

    def on_loaded(self, tokens: int) -> None:
        """The KV is in and verified."""
        self._read_open, self._loaded = False, True
        self._answered = self._host.clock()
        self._host.core.load_finished(self._requests[0].request_id, tokens)

    def on_missed(self, reason: Reason, detail: str) -> None:
        """No KV: compute the prompt here, or answer with the reason, as the ticket says."""
        self._read_open = False
        self._answered = self._host.clock()
        self.missed = reason
        self._reasons.append(reason)
        level = logging.WARNING if reason.kind is ReasonKind.FAILURE else logging.INFO
        _log.log(level, "%s: %s, %s", self.key, reason, detail)
        request_id = self._requests[0].request_id
        if self._ticket is not None and self._ticket.on_miss == "error":
            message = f"the prompt's KV can't be used ({reason}: {detail}) and on_miss is 'error'"
            error = RequestError(message, status=503, code=reason, kind="kv_miss")
            if self._emit is not None:
                self._emit(TokenOutput(request_id, None, finish_reason="error", error=error))
            self._refused = True
            self._host.core.abort(request_id)
        elif self._allocated:
            self._host.core.load_failed(request_id, reason)

    # ----------------------------------------------------------------------------------------- the rest

    def _on_output(self, output: TokenOutput) -> None:
        """On the engine thread: pass on, unless the client was told of an error already."""
        if not self._refused and self._emit is not None:
            self._emit(output)
        if output.finish_reason is not None:
            self._host.unbind_soon(output.request_id)

    def _drop_read(self, *, done: bool) -> None:
        if self._read_open:
            self._read_open = False
            self._host.feed(LoadDropped(self.key, done=done))

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
            bytes=self._moved.bytes if self._moved else 0,
            blocks=self._blocks,
            descriptors=self._moved.descriptors if self._moved else 0,
            reasons=list(self._reasons),
            finish_reason=finish_reason,
        )
        if first is not None:
            stats = first.stats
            record.prompt_tokens = len(first.prompt_token_ids)
            record.cached_tokens = stats.cached_tokens
            record.transferred_tokens = stats.transferred_tokens
            record.computed_tokens = stats.computed_tokens
            record.prefill_chunks = stats.prefill_chunks
            record.phases = cut(self._opened, self._marks(first))
        return record

    def _marks(self, request: EngineRequest) -> list[tuple[Phase, float | None]]:
        """When each phase ended, in their order."""
        stats, moved = request.stats, self._moved
        if self.role == "prefill":
            return [
                (Phase.PREFILL_TOKENIZE, self._tokenized),
                (Phase.PREFILL_QUEUE, stats.admitted_at or None),
                (Phase.PREFILL_COMPUTE, stats.prefilled_at or None),
                (Phase.PREFILL_OFFER, self._first_token),
            ]
        return [
            (Phase.DECODE_TOKENIZE, self._tokenized),
            (Phase.DECODE_QUEUE, stats.admitted_at or None),
            (Phase.POST, moved.posted_at if moved else None),
            (Phase.WIRE, moved.done_at if moved else None),
            (Phase.CLAIM, self._answered if self._allocated else None),
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
