"""One embedded engine as a process: model, engine core, agent and server put together, and taken apart."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvhandoff.core.errors import ConfigError
from kvhandoff.core.urls import root_url
from kvhandoff.embedded.exact import prepare_environment
from kvhandoff.engine.names import hold_name
from kvhandoff.engine.register import Registrar, check_registration
from kvhandoff.handoff.settings import MIN_RETURN_TOKENS, HandoffSettings
from kvhandoff.transport.mover import Mover
from kvhandoff.transport.planes import PlaneKind, allocate_region, create_plane, default_kind

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

_log = logging.getLogger(__name__)

Transport = Literal["auto", "nixl", "shm"]

GIL_SWITCH_S = 0.0005
"""The engine thread gives the asyncio thread a turn after this long (Python's default is 5 ms): a claim that
comes in during a forward pass is answered between two of its operators, not after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine process, as the command line describes it."""

    model_dir: Path
    model_name: str
    role: Literal["prefill", "decode", "both"]
    engine_id: str
    cluster_key: bytes
    host: str = "127.0.0.1"
    port: int = 0
    control: str = "tcp://127.0.0.1:0"
    transport: Transport = "auto"
    dtype: str = "auto"
    exact: bool = False
    device: str = "cpu"
    block_size: int = 16
    kv_bytes: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int = 16
    max_step_tokens: int = 512
    prefix_cache: bool = True
    threads: int | None = None
    settings: HandoffSettings = field(default_factory=HandoffSettings)
    min_return_tokens: int = MIN_RETURN_TOKENS
    register: tuple[str, ...] = ()
    """Routers' URLs to register with."""
    register_url: str | None = None
    """Where they reach this engine, if not at `host` and `port`."""
    traces: str | None = field(default=None, repr=False)
    """Where spans are posted (OTLP over HTTP), as a whole URL; None: no traces."""

    def __post_init__(self) -> None:
        check_registration(self.register, self.role, self.register_url, self.host)


@dataclass(frozen=True, slots=True)
class Started:
    """Where a started engine listens."""

    url: str
    control_address: str
    epoch: str
    transport: str


def prepare(*, exact: bool, threads: int | None) -> None:
    """Set what torch reads when it loads; before anything imports it."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    prepare_environment(exact)
    sys.setswitchinterval(GIL_SWITCH_S)


def spare_collector() -> None:
    """Take all objects that exist now out of the garbage collector's sight: the model and the libraries are
    here to stay, and each full look at them holds up every thread for 0.2 s. Call it when all is loaded."""
    gc.collect()
    gc.freeze()


async def run_engine(config: EngineConfig, started: Callable[[Started], None], stop: asyncio.Event) -> None:
    """Serve until `stop`. Call `prepare` first. Raises ConfigError for what can't be served."""
    from kvhandoff.embedded.agent import EngineAgent
    from kvhandoff.embedded.core import EngineCore
    from kvhandoff.embedded.runner import load_runner
    from kvhandoff.embedded.server import create_app
    from kvhandoff.embedded.text import TextProcessor
    from kvhandoff.engine.facts import EngineFacts
    from kvhandoff.web import is_loopback, serve

    if not is_loopback(config.host):
        _log.warning(
            "host %s: requests without a ticket are served too; let only routers reach it", config.host
        )
    transport = choose_transport(config.transport)
    name = await asyncio.to_thread(hold_name, config.engine_id, config.cluster_key)
    text = TextProcessor.load(config.model_dir)
    runner = await asyncio.to_thread(
        load_runner,
        config.model_dir,
        dtype=config.dtype,
        exact=config.exact,
        block_size=config.block_size,
        device=config.device,
        num_blocks=config.num_blocks,
        kv_bytes=config.kv_bytes,
        region_factory=partial(allocate_region, transport),
    )
    region = runner.region
    core = EngineCore(
        runner,
        num_blocks=region.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        prefix_cache=config.prefix_cache,
    )
    facts = EngineFacts(
        engine_id=config.engine_id,
        role=config.role,
        model=config.model_name,
        model_fingerprint=runner.model_fingerprint,
        num_blocks=region.num_blocks,
    )
    mover = Mover(partial(create_plane, transport, facts.identity), region)
    agent = EngineAgent(
        facts,
        core,
        mover,
        config.cluster_key,
        control_bind=config.control,
        settings=config.settings,
        min_return_tokens=config.min_return_tokens,
    )
    core.hooks = agent
    await agent.start()
    core.start()
    server = None
    registration, traces = AsyncExitStack(), AsyncExitStack()
    try:
        middlewares: list[Middleware] = []
        if config.traces is not None:
            from kvhandoff.embedded.traces import trace_engine

            tracing = trace_engine(agent, config.traces, config.model_name)
            middlewares.append(await traces.enter_async_context(tracing))
        app = create_app(agent, core, text, config.model_name, middlewares=middlewares)
        server = await serve(app, config.host, config.port)
        url = root_url(config.host, server.port)
        spare_collector()
        if config.register:
            assert config.role != "both", "checked"
            registrar = Registrar(
                config.register,
                config.cluster_key,
                facts.identity,
                config.role,
                config.register_url or url,
            )
            await registration.enter_async_context(registrar)
        started(Started(url, agent.control_address, facts.epoch, transport))
        _log.info("%s engine %s serves %s at %s", config.role, facts.identity, config.model_name, url)
        await stop.wait()
    finally:
        await registration.aclose()
        if server is not None:
            await server.close()
        await asyncio.to_thread(core.close)
        await agent.close()
        await traces.aclose()
        name.close()


def choose_transport(wanted: Transport) -> PlaneKind:
    """NIXL where its wheel is installed, else shared memory. Raises ConfigError for NIXL without a wheel."""
    best = default_kind()
    if wanted == "nixl" != best:
        raise ConfigError(
            "transport: got 'nixl', but the extra is not installed: pip install kvhandoff[nixl]"
        )
    return best if wanted == "auto" else wanted
