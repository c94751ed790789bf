"""The embedded engine's legs: what its server asks of a request's KV side.

Used on the asyncio thread only, but for what the engine thread gives out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvhandoff.core.errors import RequestError, invalid
from kvhandoff.core.reasons import Reason
from kvhandoff.embedded.api import Engine, EngineRequest, TokenOutput
from kvhandoff.engine.leg_host import LegHost
from kvhandoff.engine.legs import KVLeg
from kvhandoff.handoff.tickets import Ticket


class AgentLeg(KVLeg):
    """Implements `api.Leg`."""

    def __init__(
        self, host: LegHost, engine: Engine, handoff_id: str, ticket: Ticket | None, params: dict[str, Any]
    ) -> None:
        """`ticket` has been admitted; `params` is what came beside it. Raises RequestError for token ids that
        are none."""
        super().__init__(host, handoff_id, ticket)
        self.prompt_token_ids: Sequence[int] | None = None
        if self.role == "decode":
            self.prompt_token_ids = _token_ids(params.get("prompt_token_ids"))
        self._engine = engine
        self._requests: list[EngineRequest] = []
        self._emit: Callable[[TokenOutput], None] | None = None
        self._refused = self._begun = False
        self._lock = threading.Lock()
        """Guards the two: the engine thread begins the answer, the asyncio thread may refuse it before."""

    def tokenized(self) -> None:
        """See `api.Leg`."""
        self.tokenized_at = self._host.clock()

    def submit(self, request: EngineRequest) -> None:
        """See `api.Leg`."""
        self.prepare(request)
        self._emit, request.on_output = request.on_output, self._on_output
        self._requests.append(request)
        self._engine.submit(request)
        self.entered()

    def submit_sibling(self, request: EngineRequest) -> None:
        """See `api.Leg`."""
        self._requests.append(request)
        self._engine.submit(request)

    def abort(self, request_id: str) -> None:
        """See `api.Leg`."""
        self._engine.abort(request_id)

    def first_token(self) -> None:
        """See `api.Leg`."""
        if self.first_token_at is None:
            self.first_token_at = self._host.clock()

    def cached_tokens(self) -> int:
        """The engine's own hit, or the prefill engine's when its KV was used."""
        if self.request is None:
            return 0
        stats = self.request.stats
        there = self.load.cached_tokens() if self.load is not None and stats.transferred_tokens else 0
        returned = stats.transferred_tokens if self.load is not None and self.load.history else 0
        return max(stats.cached_tokens + returned, there)

    async def response_params(self) -> dict[str, Any] | None:
        """See `api.Leg`."""
        if self.offering is None:
            return None
        self.first_token()
        offer = msgspec.to_builtins(self.offering.descriptor)
        return {"offer": offer, "prompt_token_ids": list(self._own.prompt_token_ids)}

    def finished(self, finish_reason: str | None, completion_tokens: int) -> None:
        """See `api.Leg`."""
        if not self.is_finished:
            self._abort_all()
        self.finish(finish_reason, completion_tokens)

    # -------------------------------------------------------------------------------- what the router asks

    def yields(self) -> bool:
        """Also while the prompt is computed for want of its KV, as long as nothing of the answer is out.
        Nothing is said any more then."""
        has_kv = self.load is not None and self.load.answered is not None and self.load.missed is None
        with self._lock:
            if self._begun or has_kv:
                return False
            self._refused = True
        # In this order: blocks that the drop frees at once are with the handoff side only after the abort.
        self._abort_all()
        self.drop_load(done=False)
        return True

    def withdrawn(self) -> None:
        """The request ends too."""
        self.finished("abort", 0)

    # ----------------------------------------------------------------------------------------- the rest

    def _run_without(self, reason: Reason, detail: str) -> None:
        """Or answer with the reason, if the ticket says so."""
        if self.ticket is None or self.ticket.on_miss == "recompute" or self._awaited.history:
            super()._run_without(reason, detail)
            return
        message = f"the prompt's KV can't be used ({reason}: {detail}) and on_miss is 'error'"
        error = RequestError(message, status=503, code=reason, kind="kv_miss")
        request_id = self._own.request_id
        if self._emit is not None:
            self._emit(TokenOutput(request_id, None, finish_reason="error", error=error))
        with self._lock:
            self._refused = True
        self._engine.abort(request_id)

    def _on_output(self, output: TokenOutput) -> None:
        """On the engine thread: pass on, unless the client was told of an error already, or another engine is
        to answer."""
        with self._lock:
            self._begun = self._begun or not self._refused
        if self._begun and not self._refused and self._emit is not None:
            self._emit(output)
        if output.finish_reason is not None:
            self._host.unbind_soon(output.request_id)

    def _abort_all(self) -> None:
        for request in self._requests:
            self._engine.abort(request.request_id)


def _token_ids(given: object) -> Sequence[int] | None:
    if given is None:
        return None
    try:
        return msgspec.convert(given, list[int])
    except msgspec.ValidationError as error:
        raise invalid(
            "kv_transfer_params.prompt_token_ids", given, f"a list of token ids ({error})"
        ) from error
