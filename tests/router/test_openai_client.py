"""The `openai` client, unmodified, against the router: what it sends reaches the engine, what the engine
answers reaches it, and errors come as its own exceptions. Real engines: `tests/clients`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from aiohttp import web
from pydantic import BaseModel

from tests.router.callers import KEYS, security
from tests.router.engines import (
    DONE,
    MODEL,
    WAIT_S,
    Leg,
    MockEngine,
    completion,
    decode,
    events,
    failing,
    held,
    soon,
    streamed,
    until,
)

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def client(c: Any, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key=key, max_retries=0, **options)


def answering(**fields: Any) -> Any:
    """A script that answers with these fields in place of the usual ones."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        return web.json_response(completion(leg, "Hello") | fields)

    return script


def chunks_of(leg: Leg, *changes: dict[str, Any]) -> list[bytes]:
    """A chat's chunks, each with these fields."""
    chunk = json.loads(events(leg, "")[0][6:])
    return [b"data: " + msgspec.json.encode(chunk | change) + b"\n\n" for change in changes]


async def test_chat(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=5)
        assert answer.choices[0].message.content == "Hello"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
        assert c.p.legs.get_nowait().body["max_tokens"] == 1
        assert c.d.legs.get_nowait().body["max_completion_tokens"] == 5
        assert (await c.record(answer.id))["path"] == "pull"


async def test_chat_stream(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        stream = await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hel", "lo"]
        record = await c.record(chunks[0].id)
        assert record["id"] == chunks[0].id
        assert record["ttft_s"] == pytest.approx(sum(record["phases"].values()), abs=1e-3)


async def test_completion_stream(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        stream = await api.completions.create(model=MODEL, prompt="one two three four", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["", "Hel", "lo"]


async def test_stream_with_usage(cluster: Any) -> None:
    """The last chunk has no choices (field case 37)."""
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        end = chunks_of(leg, {"choices": [], "usage": usage})
        return await streamed(engine, leg, [*events(leg, None, "Hello"), *end, DONE])

    async with cluster() as c, client(c) as api:
        c.d.script = script
        stream = await api.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert [len(chunk.choices) for chunk in chunks] == [1, 1, 0]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.model_dump(exclude_none=True) == usage
        assert c.d.legs.get_nowait().body["stream_options"] == {"include_usage": True}


ASKED: dict[str, Any] = {
    "n": 2,
    "logprobs": True,
    "top_logprobs": 3,
    "stop": ["\n", "END"],
    "seed": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": -100},
    "user": "somebody",
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "extra_body": {"top_k": 3, "min_tokens": 2, "chat_template_kwargs": {"enable_thinking": False}},
}


@pytest.mark.parametrize("path", ["pull", "push", "local"])
@pytest.mark.parametrize("field", ASKED)
async def test_what_is_asked_reaches_the_decode_engine(cluster: Any, field: str, path: str) -> None:
    async with cluster() as c, client(c, default_headers={"x-kvhandoff-path": path}) as api:
        create: Any = api.chat.completions.create
        await create(model=MODEL, messages=MESSAGES, **{field: ASKED[field]})
        body = (await soon(c.d.legs.get())).body
        wanted = ASKED[field] if field == "extra_body" else {field: ASKED[field]}
        assert {name: body[name] for name in wanted} == wanted
        assert body["messages"] == MESSAGES


async def test_choices_and_logprobs(cluster: Any) -> None:
    token = {"token": "Hel", "bytes": [72, 101, 108], "logprob": -0.25}
    choices = [
        {
            "index": index,
            "finish_reason": "length",
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": [token | {"top_logprobs": [token]}], "refusal": None},
        }
        for index, text in enumerate(["Hel", "Goodb"])
    ]
    async with cluster() as c, client(c) as api:
        c.d.script = answering(choices=choices)
        answer = await api.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=1
        )
        assert [choice.message.content for choice in answer.choices] == ["Hel", "Goodb"]
        for choice in answer.choices:
            assert choice.finish_reason == "length"
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert choice.logprobs.content[0].top_logprobs[0].logprob == -0.25


async def test_tool_calls(cluster: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    async with cluster() as c, client(c) as api:
        c.d.script = answering(choices=[{"index": 0, "finish_reason": "tool_calls", "message": message}])
        create: Any = api.chat.completions.create
        answer = await create(model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice="auto")
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls[0].model_dump() == call
        # The next turn carries the call and its result, as the client keeps them.
        result = {"role": "tool", "tool_call_id": "c1", "content": "Sunny, 21 degrees"}
        c.d.script = decode
        await create(model=MODEL, messages=[*MESSAGES, choice.message, result], tools=[WEATHER])
        sent = [(await soon(c.d.legs.get())).body["messages"] for _ in range(2)][1]
        assert sent[1]["tool_calls"] == [call]
        assert sent[2] == result


async def test_tool_calls_in_a_stream(cluster: Any) -> None:
    """The client puts a call together from its deltas; a call is content, so that it ends the TTFT."""

    def delta(**fields: Any) -> dict[str, Any]:
        call = {"index": 0} | fields
        return {"choices": [{"index": 0, "finish_reason": None, "delta": {"tool_calls": [call]}}]}

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        calls = chunks_of(
            leg,
            delta(id="c1", type="function", function={"name": "weather", "arguments": ""}),
            delta(function={"arguments": '{"city":'}),
            delta(function={"arguments": '"Zürich"}'}),
            {"choices": [{"index": 0, "finish_reason": "tool_calls", "delta": {}}]},
        )
        return await streamed(engine, leg, [*events(leg, None), *calls, DONE])

    async with cluster() as c, client(c) as api:
        c.d.script = script
        tools: Any = [WEATHER]
        async with api.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=tools) as stream:
            answer = await stream.get_final_completion()
        calls = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        assert calls is not None
        assert (calls[0].id, calls[0].function.name) == ("c1", "weather")
        assert json.loads(calls[0].function.arguments) == {"city": "Zürich"}
        assert (await c.record(answer.id))["ttft_s"] is not None


class Place(BaseModel):
    """What a client wants its answers to be."""

    city: str
    country: str


async def test_json_schema(cluster: Any) -> None:
    """`parse` sends the schema of a class, and reads the answer into it."""
    content = '{"city": "Paris", "country": "France"}'
    message = {"role": "assistant", "content": content}
    async with cluster() as c, client(c) as api:
        c.d.script = answering(choices=[{"index": 0, "finish_reason": "stop", "message": message}])
        answer = await api.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Place)
        assert answer.choices[0].message.parsed == Place(city="Paris", country="France")
        sent = (await soon(c.d.legs.get())).body["response_format"]
        assert (sent["type"], sent["json_schema"]["name"]) == ("json_schema", "Place")
        assert sent["json_schema"]["schema"]["required"] == ["city", "country"]


async def test_raw_response(cluster: Any) -> None:
    """The header is what the client calls its request id, which its users quote."""
    async with cluster() as c, client(c) as api:
        raw = await api.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES)
        answer = raw.parse()
        assert raw.request_id is not None
        assert answer.id == f"chatcmpl-{raw.request_id}"
        assert answer._request_id == raw.request_id
        assert (await c.record(raw.request_id))["status"] == 200


async def test_models(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        assert [model.id async for model in await api.models.list()] == [MODEL]
        assert (await api.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("other")


# ---- errors ----


async def test_errors(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        with pytest.raises(openai.NotFoundError, match="model: got 'gpt', allowed is tiny") as missing:
            await api.completions.create(model="gpt", prompt="p")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        assert missing.value.request_id is not None
        c.p.script = failing(400, "context_length_exceeded")
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(model=MODEL, prompt="one two three four")
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (401, openai.AuthenticationError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
    ],
)
async def test_an_engines_refusal_is_the_clients(cluster: Any, status: int, raised: Any) -> None:
    async with cluster() as c, client(c) as api:
        c.d.script = failing(status, "why")
        with pytest.raises(raised) as refused:
            await api.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert (refused.value.status_code, refused.value.code) == (status, "why")


async def test_no_engine(cluster: Any) -> None:
    async with cluster() as c, client(c) as api:
        await c.d.kill()
        with pytest.raises(openai.InternalServerError) as failed:
            await api.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert (failed.value.status_code, failed.value.code) == (503, "no_decode_engine")


async def test_keys(cluster: Any, tmp_path: Path) -> None:
    limited = security(tmp_path, {"max_concurrency": 1, "models": [MODEL]})
    async with cluster(security=limited) as c:
        async with client(c, key="sk-wrong") as api:
            with pytest.raises(openai.AuthenticationError) as unknown:
                await api.models.list()
            assert unknown.value.code == "invalid_api_key"
        async with client(c, key=KEYS["acme"]) as api:
            with pytest.raises(openai.PermissionDeniedError):
                await api.chat.completions.create(model="other", messages=MESSAGES)
            c.d.script = held
            first = asyncio.create_task(api.chat.completions.create(model=MODEL, messages=MESSAGES))
            await soon(c.d.legs.get())
            with pytest.raises(openai.RateLimitError) as limit:
                await api.chat.completions.create(model=MODEL, messages=MESSAGES)
            assert limit.value.response.headers["Retry-After"] == "1"
            c.d.gate.set()
            assert (await soon(first)).choices[0].message.content == "Hello"


async def test_an_error_inside_a_stream(cluster: Any) -> None:
    """An engine that breaks off in the middle: the client raises, it does not take the text for whole."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        async def cut(index: int) -> None:
            if index == 2:
                await until(lambda: engine.gate.is_set())
                assert leg.request.transport is not None
                leg.request.transport.abort()

        return await streamed(engine, leg, events(leg, None, "Hel", "lo"), before=cut)

    async with cluster(timeouts={"record_s": 0.05}) as c, client(c) as api:
        c.d.script = script
        stream = await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        texts: list[str | None] = []

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content)
                if texts == ["", "Hel"]:
                    c.d.gate.set()

        with pytest.raises(openai.APIError, match="ended before its answer was complete"):
            await read()
        assert texts == ["", "Hel"]


async def test_client_that_gives_up(cluster: Any) -> None:
    """Its own timeout ends both legs (field case 30)."""
    async with cluster() as c, client(c, timeout=httpx2.Timeout(10.0, read=1.0)) as api:
        c.d.script = held
        with pytest.raises(openai.APITimeoutError):
            await api.chat.completions.create(model=MODEL, messages=MESSAGES)
        leg = await soon(c.d.cancelled.get())
        await c.at_rest()
        record = await c.record(leg.ticket.key.handoff_id)
        assert (record["status"], "client_aborted" in record["reasons"]) == (499, True)


async def test_client_that_tries_again(cluster: Any) -> None:
    """Its own retries are new requests, each with a record."""
    async with cluster(max_attempts=1) as c:
        api = openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="none", max_retries=2)
        calls = 0

        async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
            nonlocal calls
            calls += 1
            return await (failing(500) if calls == 1 else decode)(engine, leg)

        async with api:
            c.d.script = script
            answer = await api.chat.completions.create(
                model=MODEL, messages=MESSAGES, extra_headers={"x-kvhandoff-path": "local"}
            )
        assert (answer.choices[0].message.content, calls) == ("Hello", 2)


@asynccontextmanager
async def endless(c: Any) -> AsyncIterator[None]:
    """The decode engine sends text without end."""

    async def script(engine: MockEngine, leg: Leg) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(leg.request)
        while True:
            await response.write(events(leg, "more ")[0])
            await asyncio.sleep(0.001)

    c.d.script = script
    yield


@pytest.mark.parametrize("stop", ["close", "break"])
async def test_client_that_closes_a_stream(cluster: Any, stop: str) -> None:
    async with cluster() as c, client(c) as api, endless(c):
        stream = await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async with stream if stop == "break" else asyncio.timeout(WAIT_S):
            async for chunk in stream:
                assert chunk.choices[0].delta.content == "more "
                break
        await stream.close()
        leg = await soon(c.d.cancelled.get())
        await c.at_rest()
        assert (await c.record(leg.ticket.key.handoff_id))["status"] == 499
        c.d.script = decode
        answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello"


async def test_the_synchronous_client(cluster: Any) -> None:
    def ask(url: str) -> tuple[str | None, list[str | None]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
            answer = api.chat.completions.create(model=MODEL, messages=MESSAGES)
            stream = api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            return answer.choices[0].message.content, [chunk.choices[0].delta.content for chunk in stream]

    async with cluster() as c:
        assert await asyncio.to_thread(ask, c.url) == ("Hello", ["", "Hel", "lo"])
