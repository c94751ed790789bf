"""Legs of each role, errors of the engine, and the endpoints beside completions."""

from __future__ import annotations

import asyncio
import json
from threading import current_thread, main_thread
from typing import Any

import pytest
from openai import APIStatusError, NotFoundError

from kvhandoff.core.errors import ConfigError, unavailable
from kvhandoff.embedded.api import TokenOutput
from kvhandoff.embedded.server import Limits, create_app
from kvhandoff.embedded.text import TextProcessor
from kvhandoff.web import serve
from tests.embedded.fake_agent import BLOCKS, FakeAgent, FakeEngine, tokens
from tests.embedded.serving import CHAT, COMPLETIONS, DEADLINE, MODEL, ids_of, serving, tiny_text

EOS = 2
USER: Any = [{"role": "user", "content": "hi"}]
PROMPT_IDS = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


# -- legs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prefill_leg(path: str) -> None:
    """Field cases 31 and 32: exactly one token, in one piece, whatever the body says."""
    body = {
        "prompt": "hi",
        "messages": USER,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 3,
        "max_tokens": 500,
        "max_completion_tokens": 400,
        "min_tokens": 5,
        "kv_transfer_params": {"leg": "prefill"},
    }
    async with serving(tokens(ids_of("x"))) as server:
        status, answer = await server.post(path, body)
        request = await server.request()
    assert status == 200
    assert (request.params.max_tokens, request.params.min_tokens) == (1, 1)
    assert len(answer["choices"]) == 1
    expected = PROMPT_IDS if path == CHAT else ids_of("hi")
    assert answer["kv_transfer_params"] == {"offer": None, "prompt_token_ids": expected}
    [leg] = server.agent.legs
    assert leg.calls == ["tokenized", "submit", "first_token", "response_params", "finished"]
    assert leg.outcome == ("length", 1)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_decode_leg_takes_the_prompt_as_it_was(path: str) -> None:
    """Field case 38: not tokenized again, not rendered again. The ticket's salt is the only one."""
    params = {"leg": "decode", "prompt_token_ids": [7, 8, 9], "salt": "router's"}
    body = {"prompt": "hi", "messages": USER, "kv_transfer_params": params, "cache_salt": "client's"}
    async with serving(tokens(ids_of("x"))) as server:
        status, answer = await server.post(path, body)
        request = await server.request()
    assert status == 200
    assert list(request.prompt_token_ids) == [7, 8, 9]
    assert request.cache_salt == "router's"
    assert "kv_transfer_params" not in answer
    assert answer["usage"]["prompt_tokens"] == 3


async def test_salt_without_a_router_is_the_bodys() -> None:
    async with serving(tokens(ids_of("x"))) as server:
        await server.post(COMPLETIONS, {"prompt": "hi", "cache_salt": "mine"})
        assert (await server.request()).cache_salt == "mine"
        await server.post(COMPLETIONS, {"prompt": "hi"})
        assert (await server.request()).cache_salt == ""


# -- errors and the rest ----------------------------------------------------------------------------------


async def test_engine_refuses() -> None:
    async with serving() as server:
        server.agent.refuse = unavailable("pool is full", code="pool_full")
        for stream in (False, True):
            status, answer = await server.post(COMPLETIONS, {"prompt": ["a", "b"], "stream": stream})
            assert (status, answer["error"]["code"]) == (503, "pool_full")
    assert [leg.outcome for leg in server.agent.legs] == [("error", 0)] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_error_before_anything_is_sent(stream: bool) -> None:
    error = unavailable("the step failed", code="step_failed")

    def script(request: Any) -> Any:
        yield TokenOutput(request.request_id, None, finish_reason="error", error=error)

    async with serving(script) as server:
        with pytest.raises(APIStatusError) as caught:
            await server.client.chat.completions.create(model=MODEL, messages=USER, stream=stream)
    assert caught.value.status_code == 503
    assert caught.value.code == "step_failed"
    assert [leg.outcome for leg in server.agent.legs] == [("error", 0)]
    assert "first_token" not in server.agent.legs[0].calls


async def test_engine_ends_the_request() -> None:
    def script(request: Any) -> Any:
        yield TokenOutput(request.request_id, 50)
        yield TokenOutput(request.request_id, None, finish_reason="abort")

    async with serving(script) as server:
        status, answer = await server.post(COMPLETIONS, {"prompt": "hi"})
    assert (status, answer["error"]["code"]) == (503, "engine_aborted")
    assert server.agent.legs[0].outcome == ("error", 1)


async def test_silent_engine() -> None:
    async with serving(limits=Limits(silence_s=0.05)) as server:
        status, answer = await server.post(COMPLETIONS, {"prompt": "hi"})
    assert (status, answer["error"]["code"]) == (504, "engine_timeout")
    assert server.agent.legs[0].outcome == ("error", 0)


async def test_a_bug_is_a_500_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Any) -> Any:
        raise AssertionError("not reached")

    async with serving(script) as server:
        server.agent.refuse = ZeroDivisionError("secret detail")  # type: ignore[assignment]
        status, answer = await server.post(COMPLETIONS, {"prompt": "hi"})
        assert (status, answer["error"]["code"]) == (500, "internal_error")
        assert "secret" not in json.dumps(answer)
        assert "secret detail" in caplog.text
        server.agent.refuse, server.agent.script = None, tokens(ids_of("x"))
        status, _ = await server.post(COMPLETIONS, {"prompt": "hi"})
        assert status == 200


async def test_models_and_operations() -> None:
    async with serving(max_model_len=99) as server:
        models = await server.client.models.list()
        assert [(m.id, m.model_dump()["max_model_len"]) for m in models.data] == [(MODEL, 99)]
        assert await server.client.models.retrieve(MODEL) == models.data[0]
        with pytest.raises(NotFoundError) as refused:
            await server.client.models.retrieve("someone/else")
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        async with server.session.get("/health") as response:
            assert response.status == 200
        async with server.session.get("/metrics") as response:
            assert await response.text() == "kvhandoff_up 1\n"
            assert response.content_type == "text/plain"
        async with server.session.get("/debug/kv") as response:
            blocks = await response.json()
            assert blocks["total"] == BLOCKS.total
            assert blocks["quarantined"] == 0
        async with server.session.get("/internal/about") as response:
            assert await response.json() == {"integration": "embedded"}
        async with server.session.get("/internal/state?after=41") as response:
            state = await response.json()
            assert (state["cursor"], state["blocks"]["free"], state["role"]) == (41, BLOCKS.free, "both")
        for part, code in ((server.agent, "data_plane_ended"), (server.engine, "engine_stopped")):
            part.healthy = False
            for where in ("/health", "/internal/state"):
                async with server.session.get(where) as response:
                    assert response.status == 503
                    assert (await response.json())["error"]["code"] == code


async def test_router_tickets() -> None:
    async with serving() as server:
        assert await server.post("/internal/withdraw", {"ticket": "a.b"}) == (200, {})
        assert await server.post("/internal/peers", {"ticket": "c.d"}) == (200, {})
        assert server.agent.tickets == [("withdraw", "a.b"), ("peers", "c.d")]
        for path in ("/internal/withdraw", "/internal/peers"):
            status, answer = await server.post(path, {"ticket": "bad"})
            assert (status, answer["error"]["code"]) == (403, "bad_ticket")
            assert answer["error"]["param"] == "ticket"
            assert answer["error"]["message"].startswith("ticket: ")
            assert "kv_transfer_params" not in answer["error"]["message"]
            status, answer = await server.post(path, {"token": "a.b"})
            assert (status, answer["error"]["param"]) == (400, "body")


async def test_port_in_use() -> None:
    app = create_app(FakeAgent(), FakeEngine(), tiny_text(), MODEL)
    first = await serve(app, "127.0.0.1", 0)
    with pytest.raises(ConfigError, match=f"port {first.port}.*in use"):
        await serve(create_app(FakeAgent(), FakeEngine(), tiny_text(), MODEL), "127.0.0.1", first.port)
    await asyncio.wait_for(first.close(), DEADLINE)


async def test_long_prompts_are_tokenized_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    original = TextProcessor.encode

    def encode(self: TextProcessor, text: str, *, add_special_tokens: bool) -> list[int]:
        threads.append(current_thread() is main_thread())
        return original(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextProcessor, "encode", encode)
    async with serving(tokens([50]), max_model_len=50_000) as server:
        for prompt in ("short", "long " * 1000):
            status, _ = await server.post(COMPLETIONS, {"prompt": prompt})
            assert status == 200
            status, _ = await server.post(CHAT, {"messages": [{"role": "user", "content": prompt}]})
            assert status == 200
    assert threads == [True, True, False, False]
