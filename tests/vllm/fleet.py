"""A router, in the test's process, before the engines of a pair: the whole way of a client's request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvhandoff.router.app import serve
from kvhandoff.router.config import RouterConfig
from tests.vllm.engines import MODEL, START_S, VllmEngine, eventually
from tests.vllm.pair import CHAT, COMPLETIONS, Pair, Streamed, greedy, read_stream


def address(engine: VllmEngine) -> str:
    """As the command line names an engine whose connector listens at another port than vLLM."""
    return f"{engine.url},internal={engine.side_url}"


@dataclass
class Fleet:
    """What a client sees, and what the router wrote down."""

    pair: Pair
    url: str

    async def post(
        self, body: dict[str, Any], *, path: str = "auto", endpoint: str = COMPLETIONS
    ) -> tuple[int, dict[str, Any]]:
        """(status, body) of one request that is not streamed."""
        async with self.pair.session.post(
            self.url + endpoint, json={"model": MODEL, **body}, headers={"x-kvhandoff-path": path}
        ) as answer:
            return answer.status, await answer.json()

    async def ask(self, prompt: Sequence[int], max_tokens: int, path: str, **fields: Any) -> dict[str, Any]:
        """The answer to a completion that must succeed."""
        status, answer = await self.post(greedy(prompt, max_tokens, **fields), path=path)
        assert status == 200, answer
        return answer

    async def stream(
        self, body: dict[str, Any], *, path: str = "auto", endpoint: str = COMPLETIONS
    ) -> Streamed:
        """One streamed request with one choice."""
        async with self.pair.session.post(
            self.url + endpoint,
            json={"model": MODEL, **body, "stream": True},
            headers={"x-kvhandoff-path": path},
        ) as answer:
            return await read_stream(answer)

    async def chat(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        """The answer to a chat that must succeed."""
        path = fields.pop("path", "auto")
        body = {"messages": messages, "temperature": 0, "ignore_eos": True, **fields}
        status, answer = await self.post(body, path=path, endpoint=CHAT)
        assert status == 200, answer
        return answer

    async def record(self, completion_id: str) -> dict[str, Any]:
        """The router's account of a request."""
        async with self.pair.session.get(f"{self.url}/v1/handoffs/{completion_id}") as answer:
            assert answer.status == 200, await answer.text()
            record: dict[str, Any] = await answer.json()
            return record

    async def healthy(self) -> None:
        """Wait until the router says that both engines are."""

        async def all_healthy() -> bool:
            async with self.pair.session.get(f"{self.url}/ready") as answer:
                return all(engine["healthy"] for engine in (await answer.json())["engines"])

        await eventually(all_healthy, START_S, every=0.2)


@asynccontextmanager
async def fleet(pair: Pair, **options: Any) -> AsyncIterator[Fleet]:
    """A router that knows both engines."""
    config = RouterConfig(
        prefill=(address(pair.p),),
        decode=(address(pair.d),),
        cluster_key=pair.cluster_key,
        port=0,
        pair_tests="off",
        **options,
    )
    router = await serve(config)
    try:
        made = Fleet(pair, f"http://127.0.0.1:{router.port}")
        await made.healthy()
        yield made
    finally:
        await router.close()
