"""The whole way: OpenAI clients, the router, signed tickets, stock vLLM engines."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.vllm.fleet import Fleet, fleet
from tests.vllm.marks import both, gqa
from tests.vllm.pair import CHAT, Pair, greedy, read_stream

pytestmark = pytest.mark.asyncio(loop_scope="session")

ways = pytest.mark.parametrize("way", ["pull", "push"])
paths = pytest.mark.parametrize("path", ["pull", "push", "local"])


@pytest_asyncio.fixture(loop_scope="session")
async def routed(pair: Pair) -> AsyncIterator[Fleet]:
    """A router before the pair."""
    async with fleet(pair) as made:
        yield made


@both
@paths
async def test_completion(routed: Fleet, path: str) -> None:
    question = await routed.pair.question(300)
    answer = await routed.ask(question.prompt, question.max_tokens, path)
    assert answer["choices"][0]["token_ids"] == question.expected
    record = await routed.record(answer["id"])
    assert (record["path"], record["attempts"], record["reasons"]) == (path, 1, ["forced"])
    assert record["reused_tokens"]["transferred"] == (0 if path == "local" else 299)
    # The last token is computed on the decode engine, whatever came.
    expected = {"prefill": 0, "decode": 300} if path == "local" else {"prefill": 300, "decode": 1}
    assert record["computed_tokens"] == expected


@gqa
@paths
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_chat(routed: Fleet, path: str, streamed: bool) -> None:
    """Same text and same usage as vLLM alone."""
    content = f"{routed.pair.rng.random()}: please tell me about the river Seine and about Paris. " * 4
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 16}
    body |= {"temperature": 0, "ignore_eos": True}
    alone = await routed.pair.post(routed.pair.p, {**body, "cache_salt": "alone, routed"}, endpoint=CHAT)
    expected = alone.choices[0]["message"]["content"]
    if streamed:
        answer = await routed.stream(body, path=path, endpoint=CHAT)
        assert (answer.text, answer.finish_reason) == (expected, "length")
    else:
        whole = await routed.chat(**body, path=path)
        assert whole["choices"][0]["message"]["content"] == expected
        assert whole["usage"] == alone.body["usage"]
        record = await routed.record(whole["id"])
        moved = 0 if path == "local" else whole["usage"]["prompt_tokens"] - 1
        assert record["reused_tokens"]["transferred"] == moved


@both
@ways
async def test_conversation(routed: Fleet, way: str) -> None:
    """Return and forward combined: a turn answered by the decode engine alone, then three whose prefill
    engine reads what was kept; nothing is computed twice."""
    talk = {"conversation_id": f"talk {routed.pair.rng.random()}"}
    question = await routed.pair.question(150, 40)
    answer = await routed.ask(question.prompt, 40, "local", **talk)
    assert answer["choices"][0]["token_ids"] == question.expected
    block = (await routed.pair.d.state()).block_size
    for turn in range(3):
        begins = question.transcript
        kept = (len(begins) - 1) // block * block
        question = await routed.pair.question(len(begins) + 70, 80, begins=begins)
        answer = await routed.ask(question.prompt, 80, way, **talk)
        assert answer["choices"][0]["token_ids"] == question.expected, f"turn {turn + 2}"
        record = await routed.record(answer["id"])
        reused, computed = record["reused_tokens"], record["computed_tokens"]
        assert reused["returned"] >= 64
        assert reused["returned"] + reused["prefill_cache"] == kept
        assert reused["decode_cache"] == (kept if routed.pair.prefix_cache else 0)
        assert computed == {"prefill": len(question.prompt) - kept, "decode": 1}


@gqa
@ways
async def test_stream_with_usage(routed: Fleet, way: str) -> None:
    """Field case 37: the last chunk counts each token once."""
    question = await routed.pair.question(150, 10)
    fields = {"stream_options": {"include_usage": True}}
    body = {**greedy(question.prompt, 10, **fields), "model": "tiny", "stream": True}
    async with routed.pair.session.post(
        f"{routed.url}/v1/completions", json=body, headers={"x-kvhandoff-path": way}
    ) as answer:
        streamed = await read_stream(answer)
    assert streamed.token_ids == question.expected
    assert streamed.usage is not None
    assert (streamed.usage["prompt_tokens"], streamed.usage["completion_tokens"]) == (150, 10)


@gqa
async def test_clients_parameters_are_stripped(routed: Fleet) -> None:
    """Field case 60."""
    question = await routed.pair.question(150)
    steering = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "ticket": "x.y"}
    answer = await routed.ask(question.prompt, question.max_tokens, "pull", kv_transfer_params=steering)
    assert answer["choices"][0]["token_ids"] == question.expected
    assert answer.get("kv_transfer_params") is None


@gqa
@ways
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None, "max_completion_tokens": 12},
        {"min_tokens": 5},
        {"n": 2, "temperature": 1.0, "top_k": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["\u0001 never said"]},
        {"response_format": {"type": "json_object"}},
        {"frequency_penalty": 0.5},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_chat_fields(routed: Fleet, way: str, fields: dict[str, Any]) -> None:
    """Field cases 31 and 32: what a chat may ask for comes out as vLLM alone gives it."""
    content = f"{routed.pair.rng.random()}: what is the capital of France? " * 6
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 12}
    body = {name: value for name, value in {**body, **fields}.items() if value is not None}
    alone = await routed.pair.post(routed.pair.d, {**body, "cache_salt": "alone, fields"}, endpoint=CHAT)
    assert alone.status == 200, alone.body
    status, answer = await routed.post(body, path=way, endpoint=CHAT)
    assert status == 200, answer
    for got, expected in zip(answer["choices"], alone.choices, strict=True):
        assert got["message"]["content"] == expected["message"]["content"]
        assert got["finish_reason"] == expected["finish_reason"]
    assert answer["usage"]["completion_tokens"] == alone.body["usage"]["completion_tokens"]
    assert (await routed.record(answer["id"]))["reused_tokens"]["transferred"] > 0


_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


_BEGUN_CALL = re.compile(r'<tool_call>\s*{\s*"name"\s*:\s*"weather"')
"""Of a call that did not come to its end; where it has spaces is the model's choice."""


@gqa
@ways
async def test_forced_tool_call(routed: Fleet, way: str) -> None:
    """The form that was asked for, and the same as vLLM alone (a random model says nothing of use in it); the
    prefill leg's one token is no obstacle."""
    content = f"{routed.pair.rng.random()}: what is the weather in Paris? " * 6
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 60,
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    alone = await routed.pair.post(routed.pair.d, {**body, "cache_salt": "alone, tools"}, endpoint=CHAT)
    assert alone.status == 200, alone.body
    status, answer = await routed.post(body, path=way, endpoint=CHAT)
    assert status == 200, answer
    message, wanted = answer["choices"][0]["message"], alone.choices[0]["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
    assert calls == ["weather"] or _BEGUN_CALL.match(message["content"]), message
    assert _without_ids(message) == _without_ids(wanted)
    assert (await routed.record(answer["id"]))["reused_tokens"]["transferred"] > 0


def _without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A call that came to its end has an id of chance. One that did not is no call, but the content, and
    vLLM leaves the field out."""
    calls = [{**call, "id": None} for call in message.get("tool_calls") or []]
    return {**message, "tool_calls": calls}


@gqa
@ways
async def test_responses(routed: Fleet, way: str) -> None:
    content = f"{routed.pair.rng.random()}: what is the capital of France? " * 6
    body = {"input": content, "temperature": 0, "max_output_tokens": 12, "model": "tiny"}
    async with routed.pair.session.post(
        f"{routed.pair.d.url}/v1/responses", json={**body, "cache_salt": "alone, responses"}
    ) as answer:
        alone = await answer.json()
    assert alone["output"], alone
    status, routed_answer = await routed.post(body, path=way, endpoint="/v1/responses")
    assert status == 200, routed_answer
    assert _output_text(routed_answer) == _output_text(alone)
    assert (await routed.record(routed_answer["id"]))["reused_tokens"]["transferred"] > 0


def _output_text(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item.get("content", [])]
