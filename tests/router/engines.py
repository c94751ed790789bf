"""Scripted engines: they speak the engines' HTTP, check tickets as engines do, and wait for events only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web

from kvhandoff.core.clock import monotonic
from kvhandoff.core.errors import RequestError
from kvhandoff.core.ids import EngineId, HandoffId, HandoffKey, Identity, completion_id, new_epoch
from kvhandoff.core.phases import Phase, PhaseTimer
from kvhandoff.core.records import BlockCounts, EngineState, LegRecord
from kvhandoff.handoff.messages import OfferDescriptor
from kvhandoff.handoff.tickets import Ticket, TicketGate, TicketKey

T = TypeVar("T")

CLUSTER_KEY = b"the cluster's own key"
MODEL = "tiny"
WAIT_S = 30.0
"""Deadline of every wait of a test; nothing waits that long unless the code is wrong, or the machine stands
still."""
PROMPT_TOKENS = [5, 6, 7, 8]


async def soon(awaitable: Awaitable[T]) -> T:
    """The result, within the deadline of tests."""
    return await asyncio.wait_for(awaitable, WAIT_S)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, within the deadline of tests."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - any condition, on either side of a socket
            await asyncio.sleep(0.001)


@dataclass
class Leg:
    """One request that an engine got."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]
    ticket: Ticket | None
    timer: PhaseTimer
    request: web.Request = field(repr=False)

    @property
    def chat(self) -> bool:
        return "chat" in self.path


Script = Callable[["MockEngine", Leg], Awaitable[web.StreamResponse]]


class MockEngine:
    """One engine at a fixed port, through all its lives."""

    def __init__(self, role: Literal["prefill", "decode"], engine_id: str) -> None:
        self.engine_id = engine_id
        self.role: str = role
        self.script: Script = prefill if role == "prefill" else decode
        """What the next legs do."""
        self.legs: asyncio.Queue[Leg] = asyncio.Queue()
        self.cancelled: asyncio.Queue[Leg] = asyncio.Queue()
        """Legs whose connection was closed before they were answered."""
        self.withdrawn: asyncio.Queue[Ticket] = asyncio.Queue()
        self.yielded: asyncio.Queue[Ticket] = asyncio.Queue()
        self.begun = False
        """Decode legs have begun to answer, and yield no more."""
        self.peers: asyncio.Queue[Ticket] = asyncio.Queue()
        self.gate = asyncio.Event()
        """What `held` scripts wait for."""
        self.records: list[LegRecord] = []
        self.cursors: list[int] = []
        """`after` of each state request."""
        self.model = MODEL
        self.load = 0
        self.waiting = 0
        self.progress: int | None = None
        self.free = 8
        self.keeps = 100
        """Tokens of each turn that is to be retained."""
        self.clock_offset = 1000.0 * len(engine_id)
        """No two machines' clocks agree."""
        self.port = 0
        self.state_script: Callable[[], Awaitable[None]] | None = None
        self.withdraw_script: Callable[[], Awaitable[None]] | None = None
        self.health = 200
        self.yield_script: Callable[[], Awaitable[None]] | None = None
        """Before the answer to a yield that is obeyed."""
        self.integration: Literal["embedded", "vllm"] = "embedded"
        self._runners: list[web.AppRunner] = []
        self.new_life()

    def new_life(self) -> None:
        self.identity = Identity(EngineId(self.engine_id), new_epoch())
        self.gatekeeper = TicketGate(TicketKey(CLUSTER_KEY), self.identity)
        self.records = []

    def clock(self) -> float:
        return monotonic() + self.clock_offset

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def reported_role(self) -> str:
        """In its state report."""
        return self.role

    @property
    def address(self) -> str:
        """What the router is told."""
        return self.url

    async def start(self) -> None:
        self.port = await self.listen(self.port, self.pages() + self.server())

    def pages(self) -> list[web.RouteDef]:
        """For the router."""
        return [
            web.get("/internal/state", self._state),
            web.post("/internal/withdraw", self._withdraw),
            web.post("/internal/yield", self._yield),
            web.post("/internal/peers", self._peers),
        ]

    def server(self) -> list[web.RouteDef]:
        """For legs."""
        legs = [web.post(path, self._leg) for path in ("/v1/completions", "/v1/chat/completions")]
        return [*legs, web.get("/health", self._health)]

    async def listen(self, port: int, routes: list[web.RouteDef]) -> int:
        """Serve them; returns the port."""
        app = web.Application(client_max_size=2**26)
        app.add_routes(routes)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        self._runners.append(runner)
        return int(runner.addresses[0][1])

    async def kill(self) -> None:
        """As `kill -9`: nothing listens, all connections are reset."""
        runners, self._runners = self._runners, []
        for runner in runners:
            for site in list(runner.sites):
                await site.stop()
            assert runner.server is not None
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    async def restart(self) -> None:
        """Another life at the same port."""
        await self.kill()
        self.new_life()
        await self.start()

    def note(self, leg: Leg, **changes: Any) -> None:
        """Write down a leg, as an engine does when it has answered."""
        assert leg.ticket is not None
        record = LegRecord(
            handoff_id=leg.ticket.key.handoff_id,
            attempt=leg.ticket.key.attempt,
            leg=leg.ticket.leg,  # type: ignore[arg-type]
            engine_id=self.engine_id,
            epoch=self.identity.epoch,
            phases=dict(leg.timer.seconds),
            total_s=leg.timer.total,
            prompt_tokens=len(PROMPT_TOKENS),
        )
        for name, value in changes.items():
            setattr(record, name, value)
        self.records.append(record)

    async def _state(self, request: web.Request) -> web.Response:
        if self.state_script is not None:
            await self.state_script()
        after = int(request.query["after"])
        self.cursors.append(after)
        state = EngineState(
            engine_id=self.engine_id,
            epoch=self.identity.epoch,
            role=self.reported_role,  # type: ignore[arg-type]
            model=self.model,
            model_fingerprint="f",
            max_model_len=4096,
            block_size=16,
            control_address=f"tcp://127.0.0.1:{self.port + 1}",
            data_plane="shm",
            now=self.clock(),
            running=self.load,
            waiting=self.waiting,
            loading=0,
            blocks=BlockCounts(
                total=8, free=self.free, cached=0, used=0, offered=0, loading=0, quarantined=0
            ),
            records=self.records[after:],
            cursor=len(self.records),
            integration=self.integration,
            progress=self.progress,
        )
        return web.Response(body=msgspec.json.encode(state), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _yield(self, request: web.Request) -> web.Response:
        if self.begun:
            error = {"message": "it has begun", "code": "leg_begun", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=409)
        answer = await self._obey(request, self.yielded)
        if self.yield_script is not None:
            await self.yield_script()
        return answer

    async def _withdraw(self, request: web.Request) -> web.Response:
        if self.withdraw_script is not None:
            await self.withdraw_script()
        return await self._obey(request, self.withdrawn)

    async def _peers(self, request: web.Request) -> web.Response:
        return await self._obey(request, self.peers)

    async def _obey(self, request: web.Request, done: asyncio.Queue[Ticket]) -> web.Response:
        try:
            ticket = self.gatekeeper.admit((await request.json())["ticket"], self.clock())
        except RequestError as error:
            return web.json_response(error.body(), status=error.status)
        done.put_nowait(ticket)
        return web.json_response({})

    def admit(self, body: dict[str, Any]) -> Ticket | None:
        """The ticket in a leg's body. Raises RequestError for one that is not obeyed."""
        params = body.get("kv_transfer_params")
        return self.gatekeeper.admit(params["ticket"], self.clock()) if params else None

    async def _leg(self, request: web.Request) -> web.StreamResponse:
        timer = PhaseTimer(self.clock)
        body = msgspec.json.decode(await request.read())
        try:
            ticket = self.admit(body)
        except RequestError as error:
            return web.json_response(error.body(), status=error.status)
        leg = Leg(request.path, body, request.headers, ticket, timer, request)
        self.legs.put_nowait(leg)
        try:
            return await self.script(self, leg)
        except asyncio.CancelledError:
            self.cancelled.put_nowait(leg)
            raise


def offer_of(engine: MockEngine, key: HandoffKey) -> OfferDescriptor:
    return OfferDescriptor(
        key=key,
        source=engine.identity,
        control_address="tcp://127.0.0.1:1",
        spans=((0, 1),),
        n_tokens=len(PROMPT_TOKENS),
        digest="d",
    )


def completion(leg: Leg, text: str) -> dict[str, Any]:
    assert leg.ticket is not None
    message = {"message": {"role": "assistant", "content": text}} if leg.chat else {"text": text}
    return {
        "id": completion_id(leg.ticket.key.handoff_id, chat=leg.chat),
        "object": "chat.completion" if leg.chat else "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None} | message],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6},
    }


def events(leg: Leg, *texts: str | None) -> list[bytes]:
    """One event per text; None is a chat's role-only chunk."""
    assert leg.ticket is not None
    made = []
    for text in texts:
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        if leg.chat:
            choice["delta"] = {"role": "assistant", "content": ""} if text is None else {"content": text}
        else:
            choice["text"] = text or ""
        event = {
            "id": completion_id(leg.ticket.key.handoff_id, chat=leg.chat),
            "object": "chat.completion.chunk" if leg.chat else "text_completion",
            "created": 1,
            "model": MODEL,
            "choices": [choice],
        }
        made.append(b"data: " + msgspec.json.encode(event) + b"\n\n")
    return made


DONE = b"data: [DONE]\n\n"


# ---- scripts ----


async def prefill(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """Compute, offer, answer."""
    assert leg.ticket is not None
    assert leg.ticket.leg == "prefill"
    leg.timer.mark(Phase.PREFILL_QUEUE)
    leg.timer.mark(Phase.PREFILL_COMPUTE)
    offer = offer_of(engine, leg.ticket.key)
    params = {"offer": msgspec.to_builtins(offer), "prompt_token_ids": PROMPT_TOKENS}
    leg.timer.mark(Phase.PREFILL_OFFER)
    engine.note(leg, cached_tokens=1, computed_tokens=3, finish_reason="length")
    return web.json_response(completion(leg, "x") | {"kv_transfer_params": params})


async def held(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """As usual, but after the gate."""
    await engine.gate.wait()
    return await (prefill if engine.role == "prefill" else decode)(engine, leg)


async def decode(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """Answer with "Hello", streamed in two pieces if asked for."""
    if leg.body.get("stream"):
        return await streamed(engine, leg, [*events(leg, None, "Hel", "lo"), DONE])
    leg.timer.mark(Phase.DECODE_QUEUE)
    leg.timer.mark(Phase.FIRST_STEP)
    _account(engine, leg)
    return web.json_response(completion(leg, "Hello"))


async def streamed(
    engine: MockEngine,
    leg: Leg,
    pieces: list[bytes],
    *,
    before: Callable[[int], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """These pieces; `before` each one waits for whatever the test wants."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(leg.request)
    leg.timer.mark(Phase.DECODE_QUEUE)
    for index, piece in enumerate(pieces):
        if before is not None:
            await before(index)
        await response.write(piece)
        if index == 0:
            leg.timer.mark(Phase.FIRST_STEP)
    if leg.request.transport is None or leg.request.transport.is_closing():
        return response  # the script has cut the connection itself
    _account(engine, leg)
    await response.write_eof()
    return response


def _account(engine: MockEngine, leg: Leg) -> None:
    """The leg's record; its time after the first token is in its total only."""
    if leg.ticket is None:
        return
    pulled = leg.ticket.offer is not None or leg.ticket.push_from is not None
    engine.note(
        leg,
        total_s=engine.clock() - leg.timer.started,
        cached_tokens=0,
        transferred_tokens=3 if pulled else 0,
        computed_tokens=1 if pulled else 4,
        completion_tokens=2,
        bytes=4096 if pulled else 0,
        blocks=1 if pulled else 0,
        descriptors=1 if pulled else 0,
        retained_tokens=engine.keeps if leg.ticket.retain else 0,
        finish_reason="stop",
    )


def failing(status: int, code: str = "boom") -> Script:
    """An error body with this status."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        error = RequestError(f"{engine.engine_id} says no", status=status, code=code)
        return web.json_response(error.body(), status=status)

    return script


async def reset(engine: MockEngine, leg: Leg) -> web.StreamResponse:
    """The connection is reset after the request has been read."""
    assert leg.request.transport is not None
    leg.request.transport.abort()
    return web.Response()


def once(first: Script) -> Script:
    """This script for one leg, then the usual one."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        engine.script = prefill if engine.role == "prefill" else decode
        return await first(engine, leg)

    return script


def key_of(handoff_id: str, attempt: int = 0) -> HandoffKey:
    return HandoffKey(HandoffId(handoff_id), attempt)
