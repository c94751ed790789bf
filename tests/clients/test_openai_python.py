"""The `openai` Python client. All that depends on scripted answers is in `router/test_openai_client.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.clients.deployment import Deployment

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
FACTS = (
    "You answer in one short sentence. Some facts: Paris is the capital of France and lies on the Seine. "
    "Rome is the capital of Italy and lies on the Tiber. Vienna is the capital of Austria and lies on the "
    "Danube. Bern is the capital of Switzerland and lies on the Aare. Lisbon is the capital of Portugal and "
    "lies on the Tagus."
)
TURNS = ("Where does Paris lie?", "And Rome?", "And Vienna?", "Which of them is in Austria?")


@pytest.fixture
def api(up: Deployment, record_property: Callable[[str, object], None]) -> openai.OpenAI:
    record_property("client", "openai (Python)")
    record_property("version", openai.__version__)
    return openai.OpenAI(base_url=up.api, api_key="none", max_retries=0)


def test_chat(up: Deployment, api: openai.OpenAI) -> None:
    create: Any = api.chat.completions.create
    answer = create(model=up.model, messages=QUESTION, temperature=0, max_completion_tokens=20)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    record = up.record(answer.id)
    assert (record["path"], record["kv_source"]) == ("pull", "transferred")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        record["prompt_tokens"],
        record["completion_tokens"],
    )
    for path in ("push", "local"):
        headers = {"x-kvhandoff-path": path}
        same = create(model=up.model, messages=QUESTION, temperature=0, extra_headers=headers)
        assert same.choices[0].message.content == "The capital of France is Paris."
        assert up.record(same.id)["path"] == path


def test_stream_with_usage(up: Deployment, api: openai.OpenAI) -> None:
    stream = api.chat.completions.create(
        model=up.model,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert [len(chunk.choices) for chunk in chunks[-2:]] == [1, 0]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_completions(up: Deployment, api: openai.OpenAI) -> None:
    whole = api.completions.create(
        model=up.model, prompt="One, two, three, four, five,", temperature=0, max_tokens=6
    )
    stream = api.completions.create(
        model=up.model, prompt="One, two, three, four, five,", temperature=0, max_tokens=6, stream=True
    )
    assert whole.choices[0].text.startswith(" six, seven")
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_choices_logprobs_stop_and_seed(up: Deployment, api: openai.OpenAI) -> None:
    create: Any = api.chat.completions.create
    several = create(model=up.model, messages=QUESTION, n=3, seed=5, max_tokens=8, temperature=1)
    again = create(model=up.model, messages=QUESTION, n=3, seed=5, max_tokens=8, temperature=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]

    sure = create(
        model=up.model, messages=QUESTION, temperature=0, max_tokens=7, logprobs=True, top_logprobs=2
    )
    tokens = sure.choices[0].logprobs.content
    assert "".join(each.token for each in tokens) == sure.choices[0].message.content
    assert all(each.logprob <= 0 and each.top_logprobs[0].token == each.token for each in tokens)

    stopped = create(model=up.model, messages=QUESTION, temperature=0, stop=[" France"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
        "The capital of",
        "stop",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_conversation(
    up: Deployment, api: openai.OpenAI, stream: bool, record_property: Callable[[str, object], None]
) -> None:
    """A client that sends nothing but its messages has return from its second turn on."""
    before = up.counts()
    messages: list[Any] = [{"role": "system", "content": FACTS + (" Be kind." if stream else "")}]
    records = []
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        if stream:
            chunks = list(
                api.chat.completions.create(
                    model=up.model, messages=messages, temperature=0, max_tokens=24, stream=True
                )
            )
            name, text = chunks[0].id, "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        else:
            answer = api.chat.completions.create(
                model=up.model, messages=messages, temperature=0, max_tokens=24
            )
            name, text = answer.id, answer.choices[0].message.content or ""
        assert text
        messages.append({"role": "assistant", "content": text})
        records.append(up.record(name))
    assert [record["history"] is not None for record in records] == [False, True, True, True]
    assert [record["reused_tokens"]["returned"] > 0 for record in records] == [False, True, True, True]
    changes = up.since(before)
    assert changes("return_lookups_total", result="hit") == len(TURNS) - 1
    record_property("figures", changes.figures())


def test_errors(up: Deployment, api: openai.OpenAI) -> None:
    create: Any = api.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    refused = {
        "temperature": {"temperature": -1},
        "messages": {"messages": []},
        "tools": {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]},
        "response_format": {"response_format": {"type": "json_object"}},
        "max_tokens": {"max_tokens": 10**6},
    }
    for param, fields in refused.items():
        with pytest.raises(openai.BadRequestError) as wrong:
            create(**({"model": up.model, "messages": QUESTION} | fields))
        assert wrong.value.param == param


async def test_timeouts_and_closed_streams(up: Deployment, api: openai.OpenAI) -> None:
    """A client that leaves ends its legs; the engines serve on."""
    before = await asyncio.to_thread(up.counts)
    long: Any = {
        "model": up.model,
        "messages": QUESTION,
        "max_tokens": 1500,
        "extra_body": {"ignore_eos": True},
    }
    async with openai.AsyncOpenAI(base_url=up.api, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**long, timeout=0.5)
        stream: Any = await client.chat.completions.create(**long, stream=True)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
        several = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=up.model, messages=QUESTION, temperature=0, max_tokens=12
                )
                for _ in range(6)
            )
        )
    assert all("Paris" in (answer.choices[0].message.content or "") for answer in several)
    changes = await asyncio.to_thread(up.since, before)
    assert (changes.answered(), changes.others()) == (6, {"499": 2})
