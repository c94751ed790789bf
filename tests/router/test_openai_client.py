"""The `openai` client against the router."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.router.engines import MODEL, failing


def client(c: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="none", max_retries=0)


async def test_chat(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        answer = await api.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=5)
        assert answer.choices[0].message.content == "Hello"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
        assert c.p.legs.get_nowait().body["max_tokens"] == 1
        assert c.d.legs.get_nowait().body["max_completion_tokens"] == 5
        assert (await c.record(answer.id))["path"] == "pull"


async def test_chat_stream(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        stream = await api.chat.completions.create(model=MODEL, messages=messages, stream=True)
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hel", "lo"]
        record = await c.record(chunks[0].id)
        assert record["id"] == chunks[0].id
        assert record["ttft_s"] == pytest.approx(sum(record["phases"].values()), abs=1e-3)


async def test_completion_stream(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        stream = await api.completions.create(model=MODEL, prompt="one two three four", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["", "Hel", "lo"]


async def test_errors(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        with pytest.raises(openai.NotFoundError, match="model: got 'gpt', allowed is tiny") as missing:
            await api.completions.create(model="gpt", prompt="p")
        assert missing.value.code == "model_not_found"
        c.p.script = failing(400, "context_length_exceeded")
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(model=MODEL, prompt="one two three four")
        assert refused.value.code == "context_length_exceeded"


async def test_models(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        assert [model.id async for model in await api.models.list()] == [MODEL]
