"""Scripted stock vLLM engines: what upstream's connectors answer, by mode. They check what they are sent no
more than upstream's do, and wait for events only."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from kvhandoff.router.config import Timeouts
from kvhandoff.router.upstream import serve_upstream
from kvhandoff.router.upstream_config import UpstreamAddress, UpstreamConfig

MODEL = "tiny"
WAIT_S = 10.0
"""Deadline of every wait of a test; nothing waits that long unless the code is wrong."""

PULL_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What upstream's prefill engine is sent when there is nothing to read."""


PROBE_PROMPT = [1, 2, 3, 4]
"""Of the legs by which the router finds out what an engine runs."""


@dataclass
class UpstreamLeg:
    """One request that an engine got."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    request: web.Request = field(repr=False)

    @property
    def params(self) -> Any:
        return self.body.get("kv_transfer_params")

    @property
    def request_id(self) -> str:
        return self.headers["X-Request-Id"]

    def whole(self, text: str, params: dict[str, Any] | None) -> dict[str, Any]:
        """An answer that is not streamed."""
        chat = "chat" in self.path
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if self.body.get("return_token_ids"):
            choice["token_ids"] = list(text.encode())
        answer = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{self.request_id}", "choices": [choice]}
        return answer | {"kv_transfer_params": params}


Script = Callable[["UpstreamMock", UpstreamLeg], Awaitable[web.StreamResponse]]


class UpstreamMock:
    """One engine."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.script = script
        """What the next legs do."""
        self.legs: asyncio.Queue[UpstreamLeg] = asyncio.Queue()
        self.cancelled: asyncio.Queue[UpstreamLeg] = asyncio.Queue()
        """Legs whose connection was closed before they were answered."""
        self.gate = asyncio.Event()
        """What `held` scripts wait for."""
        self.health = 200
        self.polls = 0
        """How often it was asked for it."""
        self.transfer_mode: str | None = "pull"
        """Of its connector; empty: vLLM is too old to name it; None: it has no connector."""
        self.probes: asyncio.Queue[UpstreamLeg] = asyncio.Queue()
        """Legs that ask for its connector."""
        self.probed: Script = answer_probe
        """What it answers them."""
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def reference(self) -> dict[str, Any]:
        """What it answers about its blocks: of the shape of upstream's."""
        return {
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": self.name,
            "remote_port": 5600,
            "tp_size": 1,
        }

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._leg),
                web.post("/v1/chat/completions", self._leg),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def leg(self) -> UpstreamLeg:
        """The next one that it got."""
        return await asyncio.wait_for(self.legs.get(), WAIT_S)

    async def _health(self, request: web.Request) -> web.Response:
        self.polls += 1
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 4096}, {"id": "alias"}]})

    async def _leg(self, request: web.Request) -> web.StreamResponse:
        leg = UpstreamLeg(request.path, msgspec.json.decode(await request.read()), request.headers, request)
        if leg.body.get("prompt") == PROBE_PROMPT:
            self.probes.put_nowait(leg)
            return await self.probed(self, leg)
        self.legs.put_nowait(leg)
        try:
            return await self.script(self, leg)
        except asyncio.CancelledError:
            self.cancelled.put_nowait(leg)
            raise


async def answer_probe(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
    """As an engine of either role answers a prefill leg, by its connector."""
    assert (leg.path, leg.body["max_tokens"], leg.params) == ("/v1/completions", 1, PULL_PREFILL)
    assert leg.body["model"] == MODEL
    if engine.transfer_mode is None:
        return await plain(engine, leg)
    named = {"transfer_mode": engine.transfer_mode} if engine.transfer_mode else {}
    return web.json_response(leg.whole("x", {"do_remote_prefill": True, **engine.reference, **named}))


async def prefill(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
    """A prefill leg's answer."""
    reference = {"do_remote_prefill": True, "do_remote_decode": False, **engine.reference}
    return web.json_response(leg.whole("x", reference))


async def decode(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
    """A decode leg's answer; one that is not streamed has the reference of a bidirectional engine."""
    if not leg.body.get("stream"):
        reference = {"do_remote_prefill": False, "do_remote_decode": True, **engine.reference}
        return web.json_response(leg.whole("hello", reference))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(leg.request)
    for text in ("hel", "lo"):
        event = {"id": f"cmpl-{leg.request_id}", "choices": [{"index": 0, "text": text}]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def held(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
    """Answers when the gate is opened."""
    await engine.gate.wait()
    return await decode(engine, leg)


async def waiting(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
    """As a decode engine that is pushed to: for ever, if nobody writes."""
    return await (decode if leg.params is None else held)(engine, leg)


async def plain(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
    """As an engine that hands nothing over."""
    return web.json_response(leg.whole("x", None))


async def failing(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
    """As an engine whose load failed under upstream's default policy."""
    return web.json_response({"error": {"message": "KV load failed"}}, status=500)


async def refusing(engine: UpstreamMock, leg: UpstreamLeg) -> web.StreamResponse:
    return web.json_response({"error": {"message": "temperature: no"}}, status=400)


class UpstreamCluster:
    """Engines, the router, and a client."""

    def __init__(
        self,
        prefill: list[UpstreamMock],
        decode: list[UpstreamMock],
        url: str,
        session: aiohttp.ClientSession,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.url = url
        self.session = session

    @property
    def p(self) -> UpstreamMock:
        return self.prefill[0]

    @property
    def d(self) -> UpstreamMock:
        return self.decode[0]

    async def post(
        self, *, chat: bool = False, headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[int, Any]:
        """(status, JSON body) of a request."""
        asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "a prompt"}
        body = {"model": MODEL, "max_tokens": 8} | asked | fields
        path = "/v1/chat/completions" if chat else "/v1/completions"
        data = io.BytesIO(json.dumps(body).encode())
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, **fields: Any) -> tuple[str, bytes]:
        """(handoff id, bytes) of a streamed completion."""
        body = {"model": MODEL, "prompt": "a prompt", "stream": True} | fields
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            return response.headers["X-Request-Id"], await response.read()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def record(self, identifier: str) -> dict[str, Any]:
        status, record = await self.get(f"/v1/handoffs/{identifier}")
        assert status == 200
        return record  # type: ignore[no-any-return]


@asynccontextmanager
async def upstream_cluster(
    connector: str = "nixl",
    *,
    n_prefill: int = 1,
    n_decode: int = 1,
    timeouts: dict[str, float] | None = None,
    clock: Callable[[], float] | None = None,
    prepare: Callable[[list[UpstreamMock], list[UpstreamMock]], None] = lambda prefill, decode: None,
    **config: Any,
) -> AsyncIterator[UpstreamCluster]:
    """A router between engines of one connector. `prepare` may change the prefill and the decode engines
    before the router sees them."""
    async with AsyncExitStack() as stack:
        prefills = [UpstreamMock(f"p{i}", prefill) for i in range(n_prefill)]
        decodes = [UpstreamMock(f"d{i}", decode) for i in range(n_decode)]
        for engine in prefills + decodes:
            engine.transfer_mode = "push" if connector == "nixl-push" else "pull"
        prepare(prefills, decodes)
        for engine in prefills + decodes:
            await engine.start()
            stack.push_async_callback(engine.stop)
        settings = UpstreamConfig(
            connector=connector,  # type: ignore[arg-type]
            prefill=tuple(
                UpstreamAddress.parse(f"{p.url},engine_id=p{i},side_channel=10.0.0.7:5601")
                for i, p in enumerate(prefills)
            ),
            decode=tuple(UpstreamAddress.parse(d.url) for d in decodes),
            port=0,
            timeouts=replace(Timeouts(), **(timeouts or {})),
            **{"poll_interval_s": 60.0, **config},
        )
        server = await serve_upstream(settings, **({} if clock is None else {"clock": clock}))
        stack.push_async_callback(server.close)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield UpstreamCluster(prefills, decodes, f"http://127.0.0.1:{server.port}", session)
