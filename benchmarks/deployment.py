"""Prefill and decode engines and routers as a user would start them, and a client that measures.

The processes are `kvhandoff engine` and `kvhandoff router`; the client is this process. It streams, and its
time to the first token ends with the first event that has content. Everything else is in the router's record
of the request.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvhandoff.cli.children import Child
from kvhandoff.cli.common import CLUSTER_KEY_ENV
from kvhandoff.core.records import BlockCounts
from kvhandoff.router.endpoints import Endpoint
from kvhandoff.router.policy import PATH_HEADER, RETURN_HEADER
from kvhandoff.router.policy import Path as HandoffPath
from kvhandoff.router.records import RequestRecord
from kvhandoff.router.stream import FirstContent

MODEL = "benchmarked"
DEADLINE_S = 30.0
"""For a record to be complete, and for engines to be idle."""
LONGEST_S = 900.0
"""For one answer."""
POLL_S = 0.02
BLOCK_SIZE = 16
ONE_ROUTER: Mapping[str, Sequence[str]] = MappingProxyType({"router": ()})

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is started."""

    model_dir: Path
    transport: str
    threads: int
    """Of each engine."""
    kv_gib: float
    """Of each engine."""
    chunk: int
    """Prompt tokens in a step, and so in a chunk."""
    prefill_cache: bool
    decode_cache: bool
    decode_engines: int = 1
    decode_kv_gib: float | None = None
    """Of each decode engine; None: as the others."""
    exact: bool = False
    """Logits don't depend on what else runs."""

    def engines(self) -> dict[str, str]:
        """Roles by name."""
        several = self.decode_engines > 1
        names = [f"decode-{index}" for index in range(self.decode_engines)] if several else ["decode"]
        return {"prefill": "prefill"} | dict.fromkeys(names, "decode")

    def engine(self, name: str) -> list[str]:
        """The command line of one engine."""
        role = self.engines()[name]
        cache = self.prefill_cache if role == "prefill" else self.decode_cache
        kv_gib = self.kv_gib if role == "prefill" or self.decode_kv_gib is None else self.decode_kv_gib
        return [
            *("engine", "--role", role, "--engine-id", name, "--log-level", "warning"),
            *("--model", str(self.model_dir), "--model-name", MODEL, "--transport", self.transport),
            *("--threads", str(self.threads), "--kv-memory", str(kv_gib)),
            "--exact" if self.exact else "--no-exact",
            *("--block-size", str(BLOCK_SIZE)),
            *("--max-step-tokens", str(self.chunk), "--prefix-cache" if cache else "--no-prefix-cache"),
        ]

    def kept(self, history: int) -> int:
        """Tokens of a turn, prompt and answer, that its decode engine keeps: those of full blocks. The last
        one was sampled, and never computed."""
        return (history - 1) // BLOCK_SIZE * BLOCK_SIZE

    def conditions(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {
            "model": self.model_dir.name,
            "transport": self.transport,
            "threads_of_each_engine": self.threads,
            "kv_gib_of_each_engine": self.kv_gib,
            "kv_gib_of_each_decode_engine": self.decode_kv_gib or self.kv_gib,
            "exact": self.exact,
            "block_tokens": BLOCK_SIZE,
            "chunk_tokens": self.chunk,
            "prefill_prefix_cache": self.prefill_cache,
            "decode_prefix_cache": self.decode_cache,
            "engines": f"1 prefill, {self.decode_engines} decode, and a router: processes of this host",
        }


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request of a client."""

    prompt: Sequence[int]
    path: HandoffPath
    max_tokens: int
    conversation: str | None = None
    fetch: bool = False
    """Whether its conversation's history is to be returned, and this turn kept."""

    def body(self) -> dict[str, Any]:
        named = {} if self.conversation is None else {"conversation_id": self.conversation}
        sampling = {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": MODEL, "prompt": list(self.prompt), **sampling, **named}

    def headers(self) -> dict[str, str]:
        return {PATH_HEADER: self.path, RETURN_HEADER: "on" if self.fetch else "off"}


@dataclass(frozen=True)
class Answer:
    """What the client saw, and what the router wrote down."""

    ttft_s: float
    """From before the request is sent to the first content, on the client's clock."""
    record: RequestRecord


@dataclass
class Deployment:
    """The running processes, seen by a client. Not for use inside an event loop."""

    setup: Setup
    engines: Mapping[str, str]
    """URLs by name, the prefill engine first."""
    routers: Mapping[str, str]
    """URLs by name; the first one is asked unless another is named."""
    session: aiohttp.ClientSession = field(repr=False)
    _runner: asyncio.Runner = field(repr=False)

    def train(self, questions: Sequence[Question], every_s: float) -> list[Answer]:
        """Send one request every `every_s` seconds, whether or not those before have been answered; returns
        when all are, and the engines are idle. Raises RuntimeError when one gets no answer."""
        return self._runner.run(self._train(questions, every_s))

    def ask(self, question: Question) -> Answer:
        """One request, from idle to idle."""
        [answer] = self.train([question], 0.0)
        return answer

    def answer_tokens(self, question: Question) -> list[int]:
        """The answer's token ids, of a request that is not measured."""
        return self._runner.run(self._answer_tokens(question))

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run it on the event loop of `session`."""
        return self._runner.run(work)

    async def record(self, name: str, router: str) -> RequestRecord:
        """The complete record of a response. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                async with self.session.get(f"{self.routers[router]}/v1/handoffs/{name}") as answer:
                    record = msgspec.json.decode(await answer.read(), type=RequestRecord)
                if not record.incomplete:
                    return record
                await asyncio.sleep(POLL_S)

    async def idle(self) -> None:
        """Wait until no block is held, but for turns that are kept. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            for url in self.engines.values():
                while not _is_idle(await self.blocks(url)):  # noqa: ASYNC110  another process has no event
                    await asyncio.sleep(POLL_S)

    async def blocks(self, engine: str) -> BlockCounts:
        """Of an engine, by its URL."""
        async with self.session.get(f"{engine}/debug/kv") as answer:
            return msgspec.json.decode(await answer.read(), type=BlockCounts)

    @property
    def _router(self) -> str:
        return next(iter(self.routers))

    async def _train(self, questions: Sequence[Question], every_s: float) -> list[Answer]:
        bodies = [msgspec.json.encode(question.body() | {"stream": True}) for question in questions]
        started = time.monotonic()

        async def send(index: int) -> tuple[float, str]:
            await asyncio.sleep(max(0.0, started + index * every_s - time.monotonic()))
            return await self._stream(bodies[index], questions[index].headers())

        seen = await asyncio.gather(*(send(index) for index in range(len(questions))))
        answers = [Answer(ttft_s, await self.record(name, self._router)) for ttft_s, name in seen]
        await self.idle()
        return answers

    async def _stream(self, body: bytes, headers: dict[str, str]) -> tuple[float, str]:
        """(seconds to the first content, id of the response)."""
        scan, ttft_s, started = FirstContent(Endpoint.COMPLETIONS), None, time.monotonic()
        async with self._post(body, headers) as answer:
            async for piece in answer.content.iter_any():
                if ttft_s is None and scan.feed(piece):
                    ttft_s = time.monotonic() - started
        if ttft_s is None or scan.response_id is None:
            raise RuntimeError(f"an answer without content: {scan.response_id}")
        return ttft_s, scan.response_id

    async def _answer_tokens(self, question: Question) -> list[int]:
        body = msgspec.json.encode(question.body() | {"return_token_ids": True})
        async with self._post(body, question.headers()) as answer:
            token_ids: list[int] = (await answer.json())["choices"][0]["token_ids"]
        await self.idle()
        return token_ids

    @asynccontextmanager
    async def _post(self, body: bytes, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        url = f"{self.routers[self._router]}/v1/completions"
        async with self.session.post(
            url, data=body, headers=headers | {"Content-Type": "application/json"}
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {await answer.text()}")
            yield answer


def _is_idle(blocks: BlockCounts) -> bool:
    return blocks.free + blocks.cached + blocks.retained == blocks.total


@contextmanager
def deployment(setup: Setup, routers: Mapping[str, Sequence[str]] = ONE_ROUTER) -> Iterator[Deployment]:
    """Start it, and end it; `routers`: flags by name, of routers in front of the same engines.

    Raises ChildFailed or ConfigError when a process doesn't come up.
    """
    with asyncio.Runner() as runner:
        context = _deployment(setup, routers, runner)
        made = runner.run(context.__aenter__())
        try:
            yield made
        finally:
            runner.run(context.__aexit__(None, None, None))


@asynccontextmanager
async def _deployment(
    setup: Setup, routers: Mapping[str, Sequence[str]], runner: asyncio.Runner
) -> AsyncIterator[Deployment]:
    environment = {**os.environ, CLUSTER_KEY_ENV: secrets.token_hex(32)}
    roles = setup.engines()
    engines = [Child(name, setup.engine(name), environment) for name in roles]
    children = list(engines)
    timeout = aiohttp.ClientTimeout(total=LONGEST_S)
    connector = aiohttp.TCPConnector(limit=0)  # a train never waits for a connection
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        try:
            started = await asyncio.gather(*(child.start() for child in engines))
            urls = {name: facts["url"] for name, facts in zip(roles, started, strict=True)}
            named = [part for name, url in urls.items() for part in (f"--{roles[name]}", url)]
            quiet = ("--log-level", "warning", "--pair-tests", "off")
            fronts = {
                name: Child(name, ["router", *quiet, *named, *flags], environment)
                for name, flags in routers.items()
            }
            children += fronts.values()
            served = {name: (await child.start())["url"] for name, child in fronts.items()}
            yield Deployment(setup, urls, served, session, runner)
        finally:
            for child in reversed(children):  # the routers first: they have nobody to wait for
                await child.stop()
