"""One stock vLLM engine as the router knows it: whether it answers, what it serves, which connector it runs,
the legs reserved on it.

It reports no state: nothing is known of its queue, its blocks, or its lives.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import msgspec

from kvhandoff.core.clock import Clock
from kvhandoff.core.errors import describe
from kvhandoff.router.alarm import Alarm
from kvhandoff.router.breaker import Circuit
from kvhandoff.router.config import Timeouts
from kvhandoff.router.engine import MISSED_POLLS, Role, refuses_connection
from kvhandoff.router.policy import TYPICAL_TOKENS, EngineView
from kvhandoff.router.stranger import server_named
from kvhandoff.router.upstream_config import UpstreamAddress, UpstreamConfig, UpstreamConnector
from kvhandoff.router.upstream_probe import ConnectorCheck

log = logging.getLogger(__name__)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class _NotServing(Exception):
    """Something answers, but not with a 200."""


class _NoModels(Exception):
    """Something answers, but not with a list of models."""


class UpstreamEngine:
    """Follows one engine. Used on the event loop's thread only."""

    def __init__(
        self,
        address: UpstreamAddress,
        role: Role,
        session: aiohttp.ClientSession,
        timeouts: Timeouts,
        clock: Clock,
        connector: UpstreamConnector | None,
    ) -> None:
        """`connector`: the one that it has to run; None: any, or none."""
        self.address = address
        self.url = address.url
        self.role = role
        self.problem: str | None = "not asked yet"
        """Why it gets no legs; None when it is healthy."""
        self.models: dict[str, int | None] = {}
        """Names that it serves, as it last said, and their longest contexts in tokens."""
        self.reserved = 0
        self.chosen = 0
        self.silence = Alarm()
        """Rings when it stops answering."""
        self.circuit = Circuit(str(self), clock)
        self._check = connector and ConnectorCheck(address, role, connector, session, clock)
        self._session = session
        self._poll_s = timeouts.poll_s
        self._missed = 0

    @property
    def healthy(self) -> bool:
        return self.problem is None

    @property
    def transfer_mode(self) -> str | None:
        """`pull` or `push`, as it has said; None: it has not, or was not asked."""
        return self._check.mode if self._check else None

    def __str__(self) -> str:
        return f"{self.role} engine at {self.url}"

    def view(self, model: str) -> EngineView:
        """What the policies see, for a request for `model`."""
        return EngineView(
            url=self.url,
            model=model if model in self.models else "",
            healthy=self.healthy,
            block_size=0,
            load=self.reserved * TYPICAL_TOKENS,
            chosen=self.chosen,
            waiting=0,
            room=0,
        )

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Count one leg here while the context lasts, from the decision on."""
        self.reserved += 1
        self.chosen += 1
        try:
            yield
        finally:
            self.reserved -= 1

    def down(self, why: str) -> None:
        """Nothing listens there: no more legs until it answers again."""
        self._missed = MISSED_POLLS
        self._gone(why)

    async def poll(self) -> None:
        """Ask for its health, for its models, and when it comes up for its connector; a failure shows in
        `problem`. A refused connection makes it unhealthy at once, silence when it has lasted for some
        polls."""
        try:
            async with asyncio.timeout(self._poll_s):
                await self._get("/health")
                served = await self._served()
            model = served.data[0].id if served.data else ""
            problem = await self._check.problem(model) if self._check else None
        except _NotServing as error:
            self.down(str(error))
        except TimeoutError:
            self._miss(f"no answer in {self._poll_s} s")
        except _NoModels as error:
            self._miss(str(error))
        except (aiohttp.ClientError, OSError) as error:
            if refuses_connection(error):
                self.down(describe(error))
            else:
                self._miss(f"no usable answer: {describe(error)}")
        else:
            self.models = {model.id: model.max_model_len for model in served.data}
            self._missed = 0
            self._set_problem(problem)

    async def _served(self) -> _Models:
        body, who = await self._get("/v1/models")
        try:
            return _models.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _NoModels(f"{who} answers /v1/models with no list of models ({error})") from error

    async def _get(self, path: str) -> tuple[bytes, str]:
        """The body of a 200, and whose it is."""
        async with self._session.get(self.url + path, allow_redirects=False) as answer:
            body, who = await answer.read(), server_named(answer.headers)
        if answer.status != 200:
            raise _NotServing(
                f"{who} answers {path} with status {answer.status}, a vLLM engine that serves with 200"
            )
        return body, who

    def _miss(self, why: str) -> None:
        self._missed += 1
        if self._missed >= MISSED_POLLS or not self.models:
            self._gone(why)

    def _gone(self, why: str) -> None:
        if self._check:
            self._check.forget()
        self._set_problem(why)
        self.silence.ring()

    def _set_problem(self, problem: str | None) -> None:
        if problem != self.problem:
            log.log(logging.WARNING if problem else logging.INFO, "%s: %s", self, problem or "healthy")
        self.problem = problem


class UpstreamFleet:
    """All engines. `start` and `close` it on the event loop that uses it."""

    def __init__(self, config: UpstreamConfig, session: aiohttp.ClientSession, clock: Clock) -> None:
        checked = config.prefill and config.pair_tests != "off"  # without prefill engines nobody hands over
        connector = config.connector if checked else None

        def engine(address: UpstreamAddress, role: Role) -> UpstreamEngine:
            return UpstreamEngine(address, role, session, config.timeouts, clock, connector)

        self.prefill = [engine(address, "prefill") for address in config.prefill]
        self.decode = [engine(address, "decode") for address in config.decode]
        self.by_url = {engine.url: engine for engine in self.engines}
        self._interval_s = config.poll_interval_s
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def engines(self) -> list[UpstreamEngine]:
        return [*self.prefill, *self.decode]

    def models(self) -> dict[str, int | None]:
        """Names that a decode engine serves, or served when last seen, and their contexts."""
        return {name: longest for engine in self.decode for name, longest in engine.models.items()}

    def resting(self) -> set[str]:
        """URLs of engines whose legs have failed of late: to be avoided."""
        return {engine.url for engine in self.engines if engine.circuit.rests}

    async def start(self) -> None:
        """Ask every engine once, then go on asking in the background."""
        await self.poll(self.engines)
        self._tasks = [asyncio.create_task(self._follow(engine)) for engine in self.engines]

    async def close(self) -> None:
        """End the background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def poll(self, engines: list[UpstreamEngine]) -> None:
        """Ask each of them now, concurrently."""
        await asyncio.gather(*(engine.poll() for engine in engines))

    async def _follow(self, engine: UpstreamEngine) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await engine.poll()
