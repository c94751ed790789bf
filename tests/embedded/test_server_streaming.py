"""Streams: events as the tokens come, and errors in the middle of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import APIError

from kvhandoff.core.errors import unavailable
from kvhandoff.embedded.api import EngineRequest
from kvhandoff.embedded.detokenize import StopStrings
from kvhandoff.embedded.generation import Choice, Run
from kvhandoff.embedded.openai import CompletionBody
from kvhandoff.web import run_main
from tests.embedded.fake_agent import FakeAgent, FakeLeg, tokens
from tests.embedded.serving import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Stream,
    give,
    ids_of,
    raw_connection,
    serving,
    soon,
    tiny_text,
)
from tests.embedded.test_openai_text import cut
from tests.tinymodels import VOCAB_SIZE

EOS = 2
USER: Any = [{"role": "user", "content": "hi"}]


async def test_chat_event_by_event() -> None:
    """One event per token, each sent before the next token is made; the role comes with the first."""
    async with serving() as server:
        stream = Stream(server, {"messages": USER}, CHAT)
        request = await server.request()
        h, i = ids_of("xy")
        assert not stream.answered
        give(request, h)
        role, first = await stream.next(), await stream.next()
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert first["choices"][0]["delta"] == {"content": "x"}
        give(request, i)
        second = await stream.next()
        assert second["choices"][0]["delta"] == {"content": "y"}
        assert second["choices"][0]["finish_reason"] is None
        give(request, EOS, finish_reason="stop", stop_token=EOS)
        last = await stream.next()
        assert last["choices"][0]["delta"] == {"content": ""}
        assert last["choices"][0]["finish_reason"] == "stop"
        assert await stream.next() == "[DONE]"
        assert await stream.next() is None
        assert {event["id"] for event in (role, first, second, last)} == {"chatcmpl-handoff0"}
        assert {event["object"] for event in (role, first, second, last)} == {"chat.completion.chunk"}
        assert all("usage" not in event for event in (role, first, second, last))
        leg = await server.leg()
        await soon(leg.ended.wait())
        assert leg.calls == ["tokenized", "submit", "first_token", "finished"]
        assert leg.outcome == ("stop", 3)


async def test_half_characters_and_possible_stops_are_held() -> None:
    async with serving() as server:
        stream = Stream(server, {"prompt": "hi", "stop": "yz"})
        request = await server.request()
        rocket, (x, y) = ids_of("🚀"), ids_of("xy")
        texts = []
        for token_id in [*rocket, y, x]:
            give(request, token_id)
            texts.append((await stream.next())["choices"][0]["text"])
        assert texts == ["", "", "", "🚀", "", "yx"]
        give(request, y)
        assert (await stream.next())["choices"][0]["text"] == ""
        give(request, *ids_of("z"))
        last = (await stream.next())["choices"][0]
        assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("", "stop", "yz")
        assert await stream.next() == "[DONE]"
        leg = await server.leg()
        await soon(leg.ended.wait())
        assert leg.aborted == [request.request_id]
        assert leg.outcome == ("stop", 8)


async def test_openai_client_stream_with_usage() -> None:
    text = "Grüße an alle 🚀"
    async with serving(tokens([*ids_of(text), EOS], "stop")) as server:
        stream = await server.client.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert content == text
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == len(ids_of(text)) + 1
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_continuous_usage() -> None:
    """What guidellm asks for: every event says how many tokens there were so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving() as server:
        stream = Stream(server, {"prompt": "hi", "stream_options": options})
        request = await server.request()
        for count, token_id in enumerate(ids_of("xyx"), 1):
            give(request, token_id)
            usage = (await stream.next())["usage"]
            assert (usage["completion_tokens"], usage["prompt_tokens"]) == (count, len(ids_of("hi")))
        await stream.leave()


async def test_choices_are_told_apart() -> None:
    async with serving(tokens(ids_of("abc"))) as server:
        stream = await server.client.chat.completions.create(
            model=MODEL, messages=USER, stream=True, n=2, logprobs=True
        )
        texts, roles = ["", ""], [0, 0]
        async for chunk in stream:
            [choice] = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
    assert (texts, roles) == (["abc", "abc"], [1, 1])


async def test_echo_and_token_ids_in_a_stream() -> None:
    body = {"prompt": "hi", "echo": True, "logprobs": 0, "return_token_ids": True}
    async with serving(tokens(ids_of("ab"))) as server:
        events = await server.events(COMPLETIONS, body | {"stream": True})
    choices = [event["choices"][0] for event in events[:-1] if isinstance(event, dict)]
    assert "".join(choice["text"] for choice in choices) == "hiab"
    assert choices[0]["prompt_token_ids"] == ids_of("hi")
    assert [i for choice in choices for i in choice["token_ids"]] == ids_of("ab")
    offsets = [i for choice in choices for i in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


async def test_a_reader_that_is_behind_gets_several_tokens_at_once() -> None:
    async with serving() as server:
        stream = Stream(server, {"prompt": "hi", "max_tokens": 400, "logprobs": 0})
        request = await server.request()
        token_ids = ids_of("x") * 399
        for token_id in token_ids:
            give(request, token_id)
        give(request, token_ids[0], finish_reason="length")
        events = []
        while (event := await stream.next()) != "[DONE]":
            events.append(event)
    assert "".join(event["choices"][0]["text"] for event in events) == "x" * 400
    assert len(events) < 10


# -- errors in the middle ---------------------------------------------------------------------------------


async def test_error_in_the_middle_of_a_stream() -> None:
    async with serving() as server:
        stream = Stream(server, {"prompt": "hi"})
        request = await server.request()
        give(request, *ids_of("x"))
        assert (await stream.next())["choices"][0]["text"] == "x"
        error = unavailable("the step failed", code="step_failed")
        give(request, None, finish_reason="error", error=error)
        assert await stream.next() == error.body()
        assert await stream.next() is None
        leg = await server.leg()
        await soon(leg.ended.wait())
        assert leg.outcome == ("error", 1)
        # The connection is still good for another request.
        server.agent.script = tokens(ids_of("ok"))
        status, answer = await server.post(COMPLETIONS, {"prompt": "hi"})
        assert (status, answer["choices"][0]["text"]) == (200, "ok")


async def test_an_error_event_is_the_last_thing_on_the_wire() -> None:
    body = b'{"prompt": "hi", "stream": true}'
    head = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving() as server, raw_connection(server.port, head + body) as (reader, _):
        request = await server.request()
        give(request, *ids_of("x"))
        await soon(reader.readuntil(b'"text":"x"'))
        give(request, None, finish_reason="abort")
        rest = await soon(reader.read())
    assert b"HTTP/1.1" not in rest
    assert rest.endswith(b"\r\n0\r\n\r\n")
    assert b"[DONE]" not in rest


async def test_openai_client_sees_an_error_in_the_middle() -> None:
    async with serving() as server:
        task = asyncio.create_task(
            server.client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        )
        request = await server.request()
        give(request, *ids_of("x"))
        stream = await soon(task)
        give(request, None, finish_reason="abort")
        with pytest.raises(APIError, match="ended this request"):
            async for _ in stream:
                pass


async def test_refused_sibling_in_a_stream() -> None:
    """The sibling is refused before anything was sent: an HTTP error, and the first sequence ends too."""
    async with serving() as server:
        task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "hi", "n": 2, "stream": True}))
        request = await server.request()
        server.agent.refuse = unavailable("pool is full", code="pool_full")
        give(request, *ids_of("x"))
        status, answer = await soon(task)
        assert (status, answer["error"]["code"]) == (503, "pool_full")
        assert server.agent.legs[0].outcome == ("error", 1)


@pytest.mark.parametrize("scenario", [test_chat_event_by_event, test_error_in_the_middle_of_a_stream])
def test_on_the_loop_of_production(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Engines run on uvloop where there is one; pytest runs the tests on asyncio's own loop."""
    run_main(scenario())


# -- any tokens, any stop strings -------------------------------------------------------------------------


@given(st.data())
def test_pieces_of_a_choice_are_the_cut_text(data: st.DataObject) -> None:
    """Whatever the tokens and the stop strings: the pieces are the whole text, cut where a reference cuts."""
    text = tiny_text()
    token_ids = data.draw(st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=25))
    whole = text.decode(token_ids)
    parts = [whole[a : a + n] for a in range(len(whole)) for n in (1, 2, 5)]
    stops = data.draw(
        st.lists(st.one_of(st.sampled_from(parts), st.text(min_size=1, max_size=3)), max_size=3)
    )
    include = data.draw(st.booleans())
    body = CompletionBody(prompt="", stop=stops, include_stop_str_in_output=include)
    run = Run(FakeLeg(FakeAgent(), None))
    choice = Choice(0, run, body, text, StopStrings(stops) if stops else None)
    run.choices = [choice]
    shown, pieces = "", []
    for output in tokens(token_ids)(EngineRequest(choice.request_id, [5], run.params, lambda _: None)):
        pieces.append(choice.accept(output))
        shown += pieces[-1].text
        if choice.finish_reason is not None:
            break
    expected, stop = cut(whole, stops, include=include)
    assert shown == expected
    assert choice.finish_reason == ("length" if stop is None else "stop")
    assert pieces[-1].stop_reason == stop
    assert run.completion_tokens == sum(len(piece.token_ids) for piece in pieces)
