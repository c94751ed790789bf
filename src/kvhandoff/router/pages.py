"""The pages that every front of the router has, whatever connector its engines have."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from typing import ClassVar

from kvhandoff.core.errors import RequestError
from kvhandoff.router import wire
from kvhandoff.router.access import CALLER
from kvhandoff.router.body import unknown_model
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.metrics import RouterMetrics
from kvhandoff.router.records import Draft, Records, RequestRecord
from kvhandoff.router.wire import json_response

Answering = Awaitable[wire.Response | wire.StreamResponse]

PROMETHEUS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


class Pages(ABC):
    """OpenAI's pages, and those about the router itself."""

    OWNER: ClassVar[str]
    """Of the models, as OpenAI lists them."""

    def __init__(self, max_records: int) -> None:
        """`max_records`: how many are kept."""
        self._started = int(time.time())
        self._max_records = max_records
        self._metrics = RouterMetrics()
        self._records = Records(
            max_records,
            on_reason=self._metrics.count_reason,
            on_closed=self._metrics.count_request,
            on_settled=self._settled,
        )
        self._metrics.show_in_flight(lambda: self._records.running)

    @abstractmethod
    def _served(self) -> Mapping[str, int | None]:
        """The fleet's models, and their contexts; None: not known."""

    @abstractmethod
    def _carry(self, request: wire.Request, endpoint: Endpoint) -> Answering:
        """The answer to a completion's request."""

    def _settled(self, draft: Draft, record: RequestRecord) -> None:
        """A request's record is complete."""
        self._metrics.observe(record)

    def refused(self, code: str) -> None:
        """A request had no key, or none for its page."""
        self._metrics.count_refused(code)

    def chat_completions(self, request: wire.Request) -> Answering:
        return self._carry(request, Endpoint.CHAT)

    def completions(self, request: wire.Request) -> Answering:
        return self._carry(request, Endpoint.COMPLETIONS)

    def responses(self, request: wire.Request) -> Answering:
        return self._carry(request, Endpoint.RESPONSES)

    async def models(self, request: wire.Request) -> wire.Response:
        """The models that the caller may use, as OpenAI lists them."""
        served = request[CALLER].models(self._served())
        data = [self._model(name, served[name]) for name in sorted(served)]
        return json_response({"object": "list", "data": data})

    async def model(self, request: wire.Request) -> wire.Response:
        """One of them; its name may have slashes."""
        name, served = request.match_info["id"], request[CALLER].models(self._served())
        request[CALLER].check_model(name)
        if name not in served:
            raise unknown_model(name, served)
        return json_response(self._model(name, served[name]))

    def _model(self, name: str, longest: int | None) -> dict[str, object]:
        facts: dict[str, object] = {"id": name, "object": "model", "created": self._started}
        return facts | {"owned_by": self.OWNER} | ({} if longest is None else {"max_model_len": longest})

    def _draft(self, request: wire.Request) -> Draft:
        """The request whose id stands in the path, under way or ended. Raises RequestError (404)."""
        identifier = request.match_info["id"]
        draft = self._records.get(identifier)
        if draft is None or not request[CALLER].sees(draft.tenant):  # no word of others' requests
            why = (
                f"id: got {identifier[:80]!r}, allowed is the id of a request under way, or of one of the "
                f"last {self._max_records} responses"
            )
            raise RequestError(why, status=404, param="id", code="handoff_not_found")
        return draft

    async def health(self, request: wire.Request) -> wire.Response:
        """The router itself runs."""
        return json_response({"status": "ok"})
