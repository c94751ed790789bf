"""Scripted vLLM engines: a server, and a connector's pages beside it. They differ from `engines.py` in what
vLLM does differently: nothing under /internal at the server, a ticket is obeyed or ignored but never refused,
salts are the body's, and ids come from the header or, of a response, from the body."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from aiohttp import web

from kvhandoff.core.errors import RequestError
from kvhandoff.handoff.tickets import Ticket
from tests.router.engines import MODEL, PROMPT_TOKENS, Leg, MockEngine, decode, offer_of, streamed


class MockVllmEngine(MockEngine):
    """One vLLM engine at two fixed ports, through all its lives."""

    def __init__(self, role: Literal["prefill", "decode"], engine_id: str) -> None:
        super().__init__(role, engine_id)
        self.integration = "vllm"
        self.script = prefill if role == "prefill" else answer
        self.side_port = 0

    @property
    def reported_role(self) -> str:
        return "both"  # vLLM's engines know no roles

    @property
    def address(self) -> str:
        return f"{self.url},internal={self.side_url}"

    @property
    def side_url(self) -> str:
        return f"http://127.0.0.1:{self.side_port}"

    async def start(self) -> None:
        self.side_port = await self.listen(self.side_port, self.pages())
        self.port = await self.listen(self.port, self.server())

    def server(self) -> list[web.RouteDef]:
        return [
            *super().server(),
            web.post("/v1/responses", self._leg),
        ]

    def admit(self, body: dict[str, Any]) -> Ticket | None:
        """The ticket that is obeyed; None for a plain request, a refused ticket's included."""
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError("cache_salt: it must be a non-empty string", param="cache_salt")
        params = body.get("kv_transfer_params")
        try:
            ticket = self.gatekeeper.admit(params["ticket"], self.clock()) if params else None
        except RequestError:
            return None
        return ticket if ticket is None or ticket.cache_salt == (salt or "") else None


async def prefill(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """Compute, offer, answer; without a ticket to obey, say so."""
    params: dict[str, Any] = {"error": "bad_ticket"}
    if leg.ticket is not None:
        offer = offer_of(engine, leg.ticket.key)
        params = {"offer": msgspec.to_builtins(offer), "prompt_token_ids": PROMPT_TOKENS}
        engine.note(leg, cached_tokens=1, computed_tokens=3, finish_reason="length")
    return web.json_response(_whole(leg, "x") | {"kv_transfer_params": params})


async def answer(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """As `decode`, also of a response, and of a plain request."""
    if leg.ticket is not None and "responses" not in leg.path:
        return await decode(engine, leg)
    if not leg.body.get("stream"):
        return web.json_response(_whole(leg, "Hello"))
    whole = _whole(leg, "Hello")
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": whole | {"status": "in_progress"}},
        {"type": "response.output_text.delta", "delta": ""},
        {"type": "response.output_text.delta", "delta": "Hello"},
        {"type": "response.completed", "response": whole},
    ]
    return await streamed(engine, leg, [_event(event) for event in events])


def _event(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _whole(leg: Leg, text: str) -> dict[str, Any]:
    if "responses" in leg.path:
        content = [{"type": "output_text", "text": text}]
        output = [{"type": "message", "role": "assistant", "content": content}]
        return {"id": leg.body["request_id"], "object": "response", "model": MODEL, "output": output}
    prefix = "chatcmpl" if leg.chat else "cmpl"
    choice = {"message": {"role": "assistant", "content": text}} if leg.chat else {"text": text}
    return {
        "id": f"{prefix}-{leg.headers['X-Request-Id']}",
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop"} | choice],
        "kv_transfer_params": None,
    }
