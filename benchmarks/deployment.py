"""A prefill engine, a decode engine and a router as a user would start them, and a client that measures.

The processes are `kvhandoff engine` and `kvhandoff router`; the client is this process. It streams, and its
time to the first token ends with the first event that has content. Everything else is in the router's record
of the request.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def engine(self, role: str) -> list[str]:
        """The command line of one engine."""
        cache = self.prefill_cache if role == "prefill" else self.decode_cache
        return [
            *("engine", "--role", role, "--engine-id", role, "--log-level", "warning"),
            *("--model", str(self.model_dir), "--model-name", MODEL, "--transport", self.transport),
            *("--threads", str(self.threads), "--kv-memory", str(self.kv_gib)),
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
            "block_tokens": BLOCK_SIZE,
            "chunk_tokens": self.chunk,
            "prefill_prefix_cache": self.prefill_cache,
            "decode_prefix_cache": self.decode_cache,
            "engines": "1 prefill, 1 decode, 1 router: processes of this host",
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
    _runner: asyncio.Runner = field(repr=False)
    _session: aiohttp.ClientSession = field(repr=False)
    _engines: Sequence[str] = field(repr=False)
    """Their URLs."""
    _router: str = field(repr=False)

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

    async def _train(self, questions: Sequence[Question], every_s: float) -> list[Answer]:
        bodies = [msgspec.json.encode(question.body() | {"stream": True}) for question in questions]
        started = time.monotonic()

        async def send(index: int) -> tuple[float, str]:
            await asyncio.sleep(max(0.0, started + index * every_s - time.monotonic()))
            return await self._stream(bodies[index], questions[index].headers())

        seen = await asyncio.gather(*(send(index) for index in range(len(questions))))
        answers = [Answer(ttft_s, await self._record(name)) for ttft_s, name in seen]
        await self._idle()
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
        await self._idle()
        return token_ids

    @asynccontextmanager
    async def _post(self, body: bytes, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        url = f"{self._router}/v1/completions"
        async with self._session.post(
            url, data=body, headers=headers | {"Content-Type": "application/json"}
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {await answer.text()}")
            yield answer

    async def _record(self, name: str) -> RequestRecord:
        """The complete record of a response. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                async with self._session.get(f"{self._router}/v1/handoffs/{name}") as answer:
                    record = msgspec.json.decode(await answer.read(), type=RequestRecord)
                if not record.incomplete:
                    return record
                await asyncio.sleep(POLL_S)

    async def _idle(self) -> None:
        """Wait until no block is held, but for turns that are kept. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            for url in self._engines:
                while not await self._is_idle(url):  # noqa: ASYNC110  another process has no event
                    await asyncio.sleep(POLL_S)

    async def _is_idle(self, url: str) -> bool:
        async with self._session.get(f"{url}/debug/kv") as answer:
            blocks = msgspec.json.decode(await answer.read(), type=BlockCounts)
        return blocks.free + blocks.cached + blocks.retained == blocks.total


@contextmanager
def deployment(setup: Setup) -> Iterator[Deployment]:
    """Start it, and end it. Raises ChildFailed or ConfigError when a process doesn't come up."""
    with asyncio.Runner() as runner:
        context = _deployment(setup, runner)
        made = runner.run(context.__aenter__())
        try:
            yield made
        finally:
            runner.run(context.__aexit__(None, None, None))


@asynccontextmanager
async def _deployment(setup: Setup, runner: asyncio.Runner) -> AsyncIterator[Deployment]:
    environment = {**os.environ, CLUSTER_KEY_ENV: secrets.token_hex(32)}
    roles = ("prefill", "decode")
    engines = [Child(role, setup.engine(role), environment) for role in roles]
    children = list(engines)
    timeout = aiohttp.ClientTimeout(total=LONGEST_S)
    connector = aiohttp.TCPConnector(limit=0)  # a train never waits for a connection
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        try:
            urls = [facts["url"] for facts in await asyncio.gather(*(child.start() for child in engines))]
            named = [part for role, url in zip(roles, urls, strict=True) for part in (f"--{role}", url)]
            quiet = ("--log-level", "warning", "--pair-tests", "off")
            router = Child("router", ["router", *quiet, *named], environment)
            children.append(router)
            yield Deployment(setup, runner, session, urls, (await router.start())["url"])
        finally:
            for child in reversed(children):  # the router first: it has nobody to wait for
                await child.stop()
