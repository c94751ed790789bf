"""The handoff side of a vLLM engine: a thread of vLLM's core process with an event loop of its own.

    vLLM's main thread ───Side────▶ Driver ──▶ HandoffAgent ──▶ RankedMover ──▶ every worker
                                      └─ side server: the pages that the router and the operator ask for

It goes on while a step runs, and does not wait for steps: claims, grants and leases have their own clock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Protocol

from aiohttp import web

from kvhandoff.core.urls import bracketed, root_url
from kvhandoff.engine.agent import HandoffAgent
from kvhandoff.engine.api import EngineControl, KVHooks
from kvhandoff.engine.facts import EngineFacts
from kvhandoff.engine.internal import Internal
from kvhandoff.engine.leg_host import LegHost
from kvhandoff.engine.loops import hand_over
from kvhandoff.engine.names import await_further_ranks, hold_name
from kvhandoff.engine.register import Registrar
from kvhandoff.handoff.tickets import Ticket
from kvhandoff.transport.mover import BlockMover
from kvhandoff.vllm.leg import VllmLeg
from kvhandoff.vllm.settings import PluginSettings
from kvhandoff.web import errors, run_main, serve

_log = logging.getLogger(__name__)


class ReportingMover(BlockMover, Protocol):
    """A mover whose ranks can be made to report to vLLM."""

    def report(self, request_id: str, *, failed: bool, bad_blocks: Sequence[int]) -> None:
        """See `RankedMover`."""
        ...


class Driver:
    """Implements `side.Side`."""

    def __init__(self, settings: PluginSettings, facts: EngineFacts, core: EngineControl) -> None:
        self._settings = settings
        self._facts = facts
        self._core = core
        self._started: Future[None] = Future()
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None

    # ----------------------------------------------------------------------- Side (vLLM's main thread, any)

    @property
    def hooks(self) -> KVHooks:
        """See `Side`."""
        return self._agent

    @property
    def host(self) -> LegHost:
        """See `Side`."""
        return self._agent

    def admit(self, signed: object) -> Ticket:
        """See `Side`."""
        return self._agent.admit(signed)

    def refused(self) -> None:
        """See `Side`."""
        self._agent.refused()

    def enter(self, leg: VllmLeg) -> bool:
        """See `Side`."""
        return hand_over(self._loop, self._enter, leg)

    def finish(self, leg: VllmLeg, finish_reason: str, completion_tokens: int) -> None:
        """See `Side`."""
        assert leg.request is not None, "prepared"
        hand_over(self._loop, leg.finish, finish_reason, completion_tokens)
        self._agent.unbind_soon(leg.request.request_id)

    def report(self, request_id: str, *, failed: bool, bad_blocks: Sequence[int]) -> None:
        """See `Side`."""
        self._mover.report(request_id, failed=failed, bad_blocks=bad_blocks)

    def _enter(self, leg: VllmLeg) -> None:
        self._agent.open(leg)
        leg.entered()

    # ----------------------------------------------------------------------------------------- life

    def start(self, make_mover: Callable[[], ReportingMover]) -> None:
        """Returns when peers and the router are answered. `make_mover` is called on the event loop.

        Raises ConfigError or TransportError.
        """
        self._thread = threading.Thread(target=self._run, args=(make_mover,), name="kvhandoff", daemon=True)
        self._thread.start()
        self._started.result()

    def close(self) -> None:
        """Stop talking and moving."""
        if self._thread is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, make_mover: Callable[[], ReportingMover]) -> None:
        try:
            run_main(self._serve(make_mover))
        except BaseException as error:  # noqa: BLE001  whoever waits for the start raises it
            if self._started.done():
                _log.critical("the handoff side of %s has ended", self._facts.engine_id, exc_info=error)
            else:
                self._started.set_exception(error)

    async def _serve(self, make_mover: Callable[[], ReportingMover]) -> None:
        self._loop = asyncio.get_running_loop()
        settings, extra = self._settings, self._settings.extra
        key = extra.cluster_key()
        async with AsyncExitStack() as stack:
            # Before anybody is answered: a former life of this name has ended.
            stack.callback((await asyncio.to_thread(hold_name, settings.engine_id, key)).close)
            ranks = len(self._facts.processes)
            await asyncio.to_thread(await_further_ranks, settings.engine_id, ranks, key)
            self._mover = make_mover()
            self._agent = HandoffAgent(
                self._facts,
                self._core,
                self._mover,
                key,
                control_bind=f"tcp://{bracketed(extra.host)}:{extra.control_port}",
                settings=extra.handoff,
                min_return_tokens=extra.min_return_tokens,
            )
            await self._agent.start()
            stack.push_async_callback(self._agent.close)
            app = web.Application(middlewares=[errors])
            app.add_routes(Internal(self._agent, self._core).routes())
            server = await serve(app, extra.host, settings.port)
            stack.push_async_callback(server.close)
            _log.info(
                "engine %s: handoff at %s and %s",
                self._agent.me,
                root_url(extra.host, server.port),
                self._agent.control_address,
            )
            if extra.register:
                assert extra.role != "both", "checked"
                assert extra.register_url is not None, "checked"
                registrar = Registrar(
                    extra.register,
                    key,
                    self._agent.me,
                    extra.role,
                    extra.register_url,
                    internal=root_url(extra.host, server.port),
                )
                await stack.enter_async_context(registrar)
            self._started.set_result(None)
            await self._stop.wait()
