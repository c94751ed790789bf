"""Engines as real processes, to be killed: what `tests/cluster.py` can't show.

A forkserver has loaded torch, transformers and the engine once; each engine is a fork of it and serves a tiny
model in a fraction of a second. The router and the client stay in the test's process, where a test can look
at them. All engines end with the test, whatever happens: the fixture kills them, and should the test's
process itself die, the forkserver ends and the kernel kills its children.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from kvhandoff.core.records import BlockCounts, EngineState
from kvhandoff.embedded.api import SequenceStep
from kvhandoff.embedded.process import EngineConfig, Started, prepare, run_engine
from kvhandoff.router.app import serve as serve_router
from kvhandoff.router.config import RouterConfig
from kvhandoff.web import Server, run_main
from tests.cluster import CLUSTER_KEY, MODEL, Cluster, Transport, client

DEADLINE = 30.0
START_S = 120.0
"""For an engine to serve: the first one waits for the forkserver to load torch, perhaps from a cold disk."""
_told: list[Callable[[], None]] = []
_PR_SET_PDEATHSIG = 1

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(
    [
        "kvhandoff.embedded.agent",
        "kvhandoff.embedded.runner",
        "kvhandoff.embedded.server",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
        "tests.preload",
    ]
)


class EngineProcess:
    """One engine, through the lives of its process. Started again, it keeps its name and its addresses."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.run: Callable[[EngineConfig, Connection], None] = serve
        """What the next process runs: a function that can be imported by its name."""
        self.url = ""
        self.epoch = ""
        self._process: Any = None

    async def start(self, **changes: Any) -> None:
        """Start it, or start it again with changes to its configuration, and wait until it serves."""
        assert self._process is None, f"{self.config.engine_id} runs"
        self.config = replace(self.config, **changes)
        news, theirs = _forkserver.Pipe(duplex=False)
        self._process = _forkserver.Process(target=self.run, args=(self.config, theirs), daemon=True)
        with theirs:
            self._process.start()
        with news:
            started = await asyncio.to_thread(_receive, news, self.config.engine_id)
        self.url, self.epoch = started.url, started.epoch
        port = int(started.url.rsplit(":", 1)[1])
        self.config = replace(self.config, port=port, control=started.control_address)

    async def restart(self, **changes: Any) -> None:
        """Kill it and start it again; `port=0` and `control=ANY_PORT` move it to other addresses."""
        self.kill()
        await self.start(**changes)

    def kill(self) -> None:
        """As kill -9 does; returns when the process is gone."""
        assert self._process is not None, f"{self.config.engine_id} does not run"
        self._process.kill()
        self._process.join(DEADLINE)
        assert self._process.exitcode == -signal.SIGKILL, self._process.exitcode
        self._process.close()
        self._process = None

    def freeze(self) -> None:
        """Stop it where it is: its connections stay up, and nothing answers."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self._process.pid, signal.SIGCONT)

    def hold(self) -> None:
        """Its model's next step waits, and those after it; it answers for its state meanwhile."""
        os.kill(self._process.pid, signal.SIGUSR1)

    def go_on(self) -> None:
        """End what `hold` began, and whatever else waits for this (`when_told_to_go_on`)."""
        os.kill(self._process.pid, signal.SIGUSR2)

    @property
    def alive(self) -> bool:
        """Whether the process that was started last still runs."""
        return self._process is not None and self._process.is_alive()

    def discard(self) -> None:
        """End it, however it is."""
        if self._process is not None:
            self._process.kill()
            self._process.join(DEADLINE)
            self._process.close()
            self._process = None


ANY_PORT = "tcp://127.0.0.1:0"


def _receive(news: Connection, name: str) -> Started:
    assert news.poll(START_S), f"{name} does not serve within {START_S} s"
    try:
        started: Started = news.recv()
    except EOFError:
        raise AssertionError(f"{name} ended before it served") from None
    return started


def serve(config: EngineConfig, news: Connection) -> None:
    """The engine's process."""
    _end_with_parent()
    prepare(exact=config.exact, threads=1)
    _hold_steps_when_told()

    def announce(started: Started) -> None:
        news.send(started)
        news.close()

    async def run() -> None:
        await run_engine(config, announce, asyncio.Event())

    run_main(run())


def when_told_to_go_on(then: Callable[[], None]) -> None:
    """In the engine's process, before it serves: what `go_on` does besides."""
    _told.append(then)


def _hold_steps_when_told() -> None:
    from kvhandoff.embedded.runner import TorchRunner

    open_, forward = threading.Event(), TorchRunner.forward

    def held(runner: TorchRunner, steps: Sequence[SequenceStep]) -> list[Any]:
        open_.wait()
        return forward(runner, steps)

    def go_on(*_: object) -> None:
        for then in (open_.set, *_told):
            then()

    open_.set()
    TorchRunner.forward = held  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: open_.clear())
    signal.signal(signal.SIGUSR2, go_on)


def _end_with_parent() -> None:
    """The forkserver ends when the test's process does; this process ends when the forkserver does, even if
    it is stopped."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == 1:
        sys.exit("the parent has ended already")


class Deployment(Cluster):
    """Engine processes, with a router and a client in the test's process."""

    def __init__(self, session: aiohttp.ClientSession, router_options: dict[str, Any]) -> None:
        super().__init__([], [], "", session)
        self.prefillers: list[EngineProcess] = []
        self.decoders: list[EngineProcess] = []
        self._options = router_options
        self._router: Server | None = None

    @property
    def processes(self) -> list[EngineProcess]:
        return self.prefillers + self.decoders

    async def start_router(self) -> None:
        """A router for the engines where they are now; ends the one before."""
        await self.stop_router()
        config = RouterConfig(
            prefill=tuple(engine.url for engine in self.prefillers),
            decode=tuple(engine.url for engine in self.decoders),
            cluster_key=CLUSTER_KEY,
            port=0,
            **{"path": "pull", "pair_tests": "off", **self._options},
        )
        self._router = await serve_router(config)
        self.url = f"http://127.0.0.1:{self._router.port}"

    async def stop_router(self) -> None:
        if self._router is not None:
            await self._router.close()
            self._router = None

    async def blocks(self, engine: EngineProcess) -> BlockCounts:
        """The engine's `/debug/kv`."""
        async with self.session.get(f"{engine.url}/debug/kv") as answer:
            return msgspec.json.decode(await answer.read(), type=BlockCounts)

    async def state(self, engine: EngineProcess) -> EngineState:
        """The engine's `/internal/state`, with the legs it remembers."""
        async with self.session.get(f"{engine.url}/internal/state") as answer:
            return msgspec.json.decode(await answer.read(), type=EngineState)

    async def at_baseline(self, *engines: EngineProcess, within: float = DEADLINE) -> None:
        """Wait until the engines (default: all) have every block free or cached, and no request."""

        async def settled() -> bool:
            for engine in engines or self.processes:
                state = await self.state(engine)
                if state.blocks.free + state.blocks.cached != state.blocks.total:
                    return False
                if state.running or state.waiting or state.loading:
                    return False
            return True

        async def where() -> str:
            held = [(e.config.engine_id, await self.blocks(e)) for e in engines or self.processes]
            return "; ".join(f"{name}: {blocks}" for name, blocks in held)

        await eventually(settled, within, where)

    async def healthy(self, within: float = DEADLINE) -> None:
        """Wait until the router says that all engines are."""

        async def all_healthy() -> bool:
            async with self.session.get(f"{self.url}/ready") as answer:
                ready = await answer.json()
            return all(engine["healthy"] for engine in ready["engines"])

        await eventually(all_healthy, within)


@asynccontextmanager
async def deployment(
    model_dir: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    transport: Transport = "shm",
    prefill_options: dict[str, Any] | None = None,
    decode_options: dict[str, Any] | None = None,
    router_options: dict[str, Any] | None = None,
    **engine_options: Any,
) -> AsyncIterator[Deployment]:
    """Engine processes and a router, ready for requests. The path is `pull` unless told otherwise."""

    def process(
        role: Literal["prefill", "decode"], index: int, options: dict[str, Any] | None
    ) -> EngineProcess:
        chosen = {"num_blocks": 256, **engine_options, **(options or {})}
        config = EngineConfig(
            model_dir=model_dir,
            model_name=MODEL,
            role=role,
            engine_id=f"{role}-{index}",
            cluster_key=CLUSTER_KEY,
            transport=transport,
            dtype="float32",
            exact=True,
            **chosen,
        )
        engine = EngineProcess(config)
        stack.callback(engine.discard)
        return engine

    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(client())
        made = Deployment(session, router_options or {})
        made.prefillers = [process("prefill", index, prefill_options) for index in range(prefill)]
        made.decoders = [process("decode", index, decode_options) for index in range(decode)]
        stack.push_async_callback(made.stop_router)
        await asyncio.gather(*(engine.start() for engine in made.processes))
        await made.start_router()
        yield made


async def _nothing() -> str:
    return ""


async def eventually(
    condition: Callable[[], Awaitable[bool]],
    within: float = DEADLINE,
    describe: Callable[[], Awaitable[str]] = _nothing,
) -> None:
    """Wait for a condition that has to be asked for; fails after `within` seconds, saying what `describe`
    says."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within):
            while not await condition():  # noqa: ASYNC110  other processes' conditions have no event
                await asyncio.sleep(0.01)
            return
    raise AssertionError(f"not within {within} s: {await describe()}")
