"""A whole deployment in one process, for tests: engines with tiny models in exact mode, and a router.

Everything is real (HTTP, tickets, control plane, data plane, engine threads) except that the processes share
one: so a test can look inside, stop time at a chosen message, and start in a fraction of a second. Deaths of
processes are tested with `tests/processes.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp

from kvhandoff.core.clock import Clock, monotonic
from kvhandoff.core.records import BlockCounts
from kvhandoff.embedded.agent import EngineAgent
from kvhandoff.embedded.core import EngineCore
from kvhandoff.embedded.runner import TorchRunner, load_runner
from kvhandoff.embedded.server import create_app
from kvhandoff.embedded.text import TextProcessor
from kvhandoff.engine.facts import EngineFacts
from kvhandoff.handoff.settings import HandoffSettings
from kvhandoff.router.app import serve as serve_router
from kvhandoff.router.config import RouterConfig
from kvhandoff.transport.api import DataPlane
from kvhandoff.transport.mover import Mover
from kvhandoff.transport.planes import create_plane
from kvhandoff.transport.region import SharedRegion
from kvhandoff.web import serve as serve_engine

CLUSTER_KEY = f"key of the tests, {os.getpid()}".encode()
"""Runs beside each other are clusters of their own."""
MODEL = "tiny"
WAIT_S = 30.0
"""Deadline of every wait of a test; nothing waits that long unless the code is wrong, or the machine stands
still. Shorter than the leases of tests that show what is given back, not timed out: a minute."""
Transport = Literal["nixl", "shm"]


@dataclass
class LiveEngine:
    """One engine that runs in this process."""

    role: Literal["prefill", "decode", "both"]
    url: str
    agent: EngineAgent
    core: EngineCore
    runner: TorchRunner
    region: SharedRegion
    close: Callable[[], Any]

    def blocks(self) -> BlockCounts:
        return self.agent.blocks()

    def at_baseline(self) -> bool:
        """Every block is free or cached, or kept for a conversation's next turn until memory is short;
        nothing is owed."""
        counts = self.blocks()
        return counts.free + counts.cached + counts.retained == counts.total


@asynccontextmanager
async def engine(
    role: Literal["prefill", "decode", "both"],
    model_dir: Path,
    *,
    name: str | None = None,
    transport: Transport = "shm",
    num_blocks: int = 256,
    block_size: int = 16,
    dtype: str = "float32",
    exact: bool = True,
    settings: HandoffSettings | None = None,
    port: int = 0,
    control: str = "tcp://127.0.0.1:0",
    wrap_plane: Callable[[DataPlane], DataPlane] | None = None,
    clock: Clock = monotonic,
    traces: str | None = None,
    **core_options: Any,
) -> AsyncIterator[LiveEngine]:
    """An engine, running. `wrap_plane` may put something between the mover and the data plane; `clock` is all
    the time it knows (a timer that is due by it fires as soon as the agent is fed a `Tick`)."""
    runner = load_runner(
        model_dir,
        dtype=dtype,
        exact=exact,
        block_size=block_size,
        num_blocks=num_blocks,
        region_factory=SharedRegion.allocate,
    )
    region = runner.region
    assert isinstance(region, SharedRegion)
    core = EngineCore(runner, num_blocks=num_blocks, clock=clock, **core_options)
    facts = EngineFacts(
        engine_id=name or role,
        role=role,
        model=MODEL,
        model_fingerprint=runner.model_fingerprint,
        num_blocks=num_blocks,
    )
    make_plane = partial(create_plane, transport, facts.identity)
    mover = Mover(make_plane if wrap_plane is None else lambda: wrap_plane(make_plane()), region, clock)
    agent = EngineAgent(facts, core, mover, CLUSTER_KEY, control_bind=control, settings=settings, clock=clock)
    core.hooks = agent
    await agent.start()
    core.start()
    tracing, middlewares = AsyncExitStack(), []
    if traces is not None:
        from kvhandoff.embedded.traces import trace_engine

        middlewares.append(await tracing.enter_async_context(trace_engine(agent, traces, MODEL)))
    app = create_app(agent, core, TextProcessor.load(model_dir), MODEL, middlewares=middlewares)
    server = await serve_engine(app, "127.0.0.1", port, shutdown_s=0.5)
    closed = False

    async def close() -> None:
        nonlocal closed
        if closed:
            return
        closed = True
        await server.close()
        await asyncio.to_thread(core.close)
        await agent.close()
        await tracing.aclose()

    live = LiveEngine(role, f"http://127.0.0.1:{server.port}", agent, core, runner, region, close)
    try:
        yield live
    finally:
        await close()


def client() -> aiohttp.ClientSession:
    """A client that gives up in the end, so that a test which waits for an answer fails."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120.0))


@dataclass
class Cluster:
    """Engines and a router, and a client to talk to them."""

    prefill: list[LiveEngine]
    decode: list[LiveEngine]
    url: str
    session: aiohttp.ClientSession
    engines: list[LiveEngine] = field(init=False)

    def __post_init__(self) -> None:
        self.engines = self.prefill + self.decode

    async def post(
        self, body: dict[str, Any], *, chat: bool = False, url: str | None = None, path: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """(status, body) of one request that is not streamed; `url`: an engine instead of the router."""
        headers = {} if path is None else {"x-kvhandoff-path": path}
        endpoint = "/v1/chat/completions" if chat else "/v1/completions"
        async with self.session.post(
            (url or self.url) + endpoint, json={"model": MODEL, **body}, headers=headers
        ) as answer:
            return answer.status, await answer.json()

    async def tokens(self, prompt: Any, max_tokens: int = 8, **options: Any) -> list[int]:
        """Greedy token ids of a completion."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        extra = options.pop("body", {})
        status, answer = await self.post({**body, "return_token_ids": True, **extra}, **options)
        assert status == 200, answer
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    async def record(self, completion_id: str) -> dict[str, Any]:
        """What the router wrote down about a request."""
        async with self.session.get(f"{self.url}/v1/handoffs/{completion_id}") as answer:
            assert answer.status == 200, await answer.text()
            record: dict[str, Any] = await answer.json()
            return record

    async def settled(self, *engines: LiveEngine, within: float = WAIT_S) -> None:
        """Wait until the engines (default: all) are at their baseline."""
        await until(lambda: all(e.at_baseline() for e in engines or self.engines), within, self._where)

    def _where(self) -> str:
        return "; ".join(f"{e.agent.me}: {e.blocks()}" for e in self.engines)


@asynccontextmanager
async def cluster(
    model_dir: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    transport: Transport = "shm",
    prefill_options: dict[str, Any] | None = None,
    decode_options: dict[str, Any] | None = None,
    decode_dir: Path | None = None,
    router_options: dict[str, Any] | None = None,
    **engine_options: Any,
) -> AsyncIterator[Cluster]:
    """A deployment, ready for requests. The path is `pull` unless `router_options` says otherwise;
    `decode_dir`: the decode engines' model directory, where it is another one."""
    async with AsyncExitStack() as stack:

        async def start(role: Literal["prefill", "decode"], index: int, options: Any) -> LiveEngine:
            chosen = {"transport": transport, **engine_options, **(options or {})}
            model = decode_dir if decode_dir is not None and role == "decode" else model_dir
            return await stack.enter_async_context(engine(role, model, name=f"{role}-{index}", **chosen))

        prefills = [await start("prefill", i, prefill_options) for i in range(prefill)]
        decodes = [await start("decode", i, decode_options) for i in range(decode)]
        config = RouterConfig(
            prefill=tuple(e.url for e in prefills),
            decode=tuple(e.url for e in decodes),
            cluster_key=CLUSTER_KEY,
            port=0,
            **{"path": "pull", "pair_tests": "off", **(router_options or {})},
        )
        router = await serve_router(config)
        stack.push_async_callback(router.close)
        session = await stack.enter_async_context(client())
        yield Cluster(prefills, decodes, f"http://127.0.0.1:{router.port}", session)


async def until(
    condition: Callable[[], bool], within: float = WAIT_S, describe: Callable[[], str] = lambda: ""
) -> None:
    """Wait for a condition; fails after `within` seconds with what `describe` says."""
    try:
        async with asyncio.timeout(within):
            while not condition():  # noqa: ASYNC110  other threads' conditions have no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {within} s: {describe()}") from None
