"""Bad input: every one an OpenAI error body that names the field, and the service stays up."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kvhandoff.embedded.server import Limits
from kvhandoff.embedded.text import TextProcessor
from tests.embedded.fake_agent import tokens
from tests.embedded.serving import CHAT, COMPLETIONS, Serving, ids_of, raw_connection, serving, soon
from tests.tinymodels import VOCAB_SIZE

USER = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Serving]:
    async with serving(tokens(ids_of("fine")), limits=Limits(body_bytes=2**20)) as running:
        yield running


def both(fields: dict[str, Any], param: str) -> list[Any]:
    """The same wrong field on both endpoints."""
    shown = json.dumps(fields)[:50]
    return [
        pytest.param(CHAT, {"messages": USER, **fields}, param, id=f"chat {shown}"),
        pytest.param(COMPLETIONS, {"prompt": "hi", **fields}, param, id=f"completion {shown}"),
    ]


BAD: list[Any] = [
    *both({"max_tokens": -1}, "max_tokens"),
    *both({"max_tokens": "5"}, "max_tokens"),
    *both({"max_tokens": 1.5}, "max_tokens"),
    *both({"max_tokens": True}, "max_tokens"),
    *both({"max_tokens": 0}, "max_tokens"),
    *both({"max_tokens": 10**30}, "max_tokens"),
    *both({"max_tokens": 512}, "max_tokens"),
    *both({"min_tokens": -1}, "min_tokens"),
    *both({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    *both({"temperature": -0.1}, "temperature"),
    *both({"temperature": "hot"}, "temperature"),
    *both({"top_p": 0}, "top_p"),
    *both({"top_p": 1.01}, "top_p"),
    *both({"top_k": -2}, "top_k"),
    *both({"n": 0}, "n"),
    *both({"n": 129}, "n"),
    *both({"seed": 2**63}, "seed"),
    *both({"seed": "x"}, "seed"),
    *both({"stop": ""}, "stop"),
    *both({"stop": "x" * 1025}, "stop"),
    *both({"stop": 5}, "stop"),
    *both({"stop": ["a", ""]}, "stop[1]"),
    *both({"stop": ["a"] * 65}, "stop"),
    *both({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    *both({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    *both({"ignore_eos": "yes"}, "ignore_eos"),
    *both({"prompt_logprobs": 21}, "prompt_logprobs"),
    *both({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    *both({"stream": 1}, "stream"),
    *both({"stream_options": {"include_usage": True}}, "stream_options"),
    *both({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    *both({"stream": True, "stream_options": []}, "stream_options"),
    *both({"cache_salt": 7}, "cache_salt"),
    *both({"model": 7}, "model"),
    *both({"kv_transfer_params": "x"}, "kv_transfer_params"),
    *both({"kv_transfer_params": {"ticket": "bad"}}, "kv_transfer_params"),
    # would change the answer, and isn't supported
    *both({"presence_penalty": 0.5}, "presence_penalty"),
    *both({"frequency_penalty": -1}, "frequency_penalty"),
    *both({"repetition_penalty": 1.1}, "repetition_penalty"),
    *both({"min_p": 0.1}, "min_p"),
    *both({"logit_bias": {"5": 1}}, "logit_bias"),
    *both({"best_of": 2}, "best_of"),
    *both({"use_beam_search": True}, "use_beam_search"),
    *both({"response_format": {"type": "json_object"}}, "response_format"),
    *both({"guided_json": {"type": "object"}}, "guided_json"),
    *both({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    *both({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    # chat
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (CHAT, {"messages": IMAGE}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": USER, "max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": 512, "max_tokens": 1}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "logprobs": 1}, "logprobs"),
    (CHAT, {"messages": USER, "top_logprobs": 1}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "messages"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"self": 1}}, "messages"),
    (CHAT, {"messages": USER, "echo": True}, "echo"),
    (
        CHAT,
        {"messages": USER, "add_generation_prompt": True, "continue_final_message": True},
        "add_generation_prompt",
    ),
    # completions
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "hi"}}, "prompt"),
    (COMPLETIONS, {"prompt": ["hi", 5]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [5, "hi"]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [True]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
    (COMPLETIONS, {"prompt": [[1], 2]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [2, VOCAB_SIZE]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 9, "n": 128}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", "b"], "kv_transfer_params": {"leg": "local"}}, "kv_transfer_params"),
    (COMPLETIONS, {"prompt": "hi", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "hi", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "hi", "suffix": "end"}, "suffix"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_bad_field(server: Serving, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = await server.post(path, body)
    error = answer["error"]
    assert (status, error["param"]) == (403 if error["code"] == "bad_ticket" else 400, param)
    assert error["message"].startswith(param)
    assert error["type"] in ("invalid_request_error", "permission_error")
    assert all(leg.outcome == ("error", 0) for leg in server.agent.legs)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("raw", "status", "said"),
    [
        (b"{", 400, "not valid JSON"),
        (b"hello", 400, "not valid JSON"),
        (b'{"prompt": NaN}', 400, "not valid JSON"),
        (b'{"prompt": "\xff"}', 400, "not valid JSON"),
        (b'{"prompt": "\\ud800"}', 400, "not valid JSON"),
        (b"", 400, "not valid JSON (it is empty)"),
        (b"[1e400]", 400, "body: got [1e400], allowed are numbers of up to 1.8e308"),
        (b"[" * 100_000, 400, "not valid JSON (it is nested too deeply)"),
        (b'{"prompt": ' + b"[" * 100_000, 400, "not valid JSON (it is nested too deeply)"),
        (b"[]", 400, "a JSON object"),
        (b'"prompt"', 400, "a JSON object"),
        (b'{"prompt": "' + b"x" * 2**20 + b'"}', 413, "1048576 bytes"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/internal/withdraw", "/internal/peers"])
async def test_bad_body(server: Serving, path: str, raw: bytes, status: int, said: str) -> None:
    got, answer = await server.post(path, raw)
    assert answer["error"]["param"] == "body"
    if path.startswith("/internal") and got == 400:
        assert answer["error"]["message"].startswith("body")
        return
    assert got == status
    assert said in answer["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("seed", b"9" * 5000, "9" * 30),
        ("temperature", b"1e400", "1e400"),
        ("prompt", b'["hi", {"a": 1e400}]', '["hi", {"a": 1e400}]'),
    ],
)
async def test_numbers_that_nothing_holds(server: Serving, field: str, value: bytes, shown: str) -> None:
    status, answer = await server.post(COMPLETIONS, b'{"model": null, "%b": %b}' % (field.encode(), value))
    assert (status, answer["error"]["param"]) == (400, field)
    message = answer["error"]["message"]
    assert message.startswith(f"{field}: got {shown}")
    assert message.endswith(", allowed are numbers of up to 1.8e308")
    assert len(message) < 150


@pytest.mark.asyncio(loop_scope="module")
async def test_a_message_is_short_whatever_was_sent(server: Serving) -> None:
    for value in ({f"name {i}" * 9: ["x" * 999] * 9 for i in range(9)}, "x" * 999, [["x" * 99] * 9] * 9):
        status, answer = await server.post(COMPLETIONS, {"prompt": "hi", "logit_bias": value})
        assert status == 400
        assert answer["error"]["message"].startswith("logit_bias: got ")
        assert len(answer["error"]["message"]) < 300


TOKEN_RANGE = f"token ids from 0 to {VOCAB_SIZE - 1}"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt: got '', allowed is a text of at least one token"),
        (
            {"prompt": []},
            "prompt: got [], allowed is a string, an array of strings, an array of token ids",
        ),
        ({"prompt": [-1]}, f"prompt: got -1, allowed is {TOKEN_RANGE}"),
        ({"prompt": [5, VOCAB_SIZE]}, f"prompt: got {VOCAB_SIZE}, allowed is {TOKEN_RANGE}"),
        ({"prompt": [5, "x"]}, "prompt[1]: got 'x', allowed is a token id"),
        ({"prompt": [True]}, "prompt[0]: got true, allowed is a string, a token id or an array of token ids"),
        ({"prompt": ["x", 5]}, "prompt[1]: got 5, allowed is a string or an array of token ids"),
        ({"max_tokens": "5"}, "max_tokens: got '5', allowed is a whole number, 1 or more, below 2^31"),
        ({"max_tokens": -1}, "max_tokens: got -1, allowed is a whole number, 1 or more, below 2^31"),
        ({"min_tokens": 0.5}, "min_tokens: got 0.5, allowed is a whole number, 0 or more, below 2^31"),
        ({"temperature": "x"}, "temperature: got 'x', allowed is a number, 0 (greedy) or more"),
        ({"top_p": 0}, "top_p: got 0, allowed is a number, more than 0, up to 1"),
        (
            {"top_k": -2},
            "top_k: got -2, allowed is a whole number below 2^31, 0 or -1 for all",
        ),
        ({"seed": 2**63}, f"seed: got {2**63}, allowed is a whole number, -2^63 to 2^63 - 1"),
        ({"n": None, "logprobs": "2"}, "logprobs: got '2', allowed is a whole number, 0 to 20"),
        ({"n": []}, "n: got [], allowed is a whole number, 1 to 128"),
        ({"prompt": None}, "prompt: got null, allowed is a string, an array of strings"),
        ({"stop": [""]}, "stop[0]: got '', allowed is a string of length >= 1"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options: got {'include_usage': true}, allowed is null unless stream is true",
        ),
        ({"stop": 5}, "stop: got 5, allowed is a string or an array or null"),
        (
            {"stop_token_ids": [-1]},
            "stop_token_ids[0]: got -1, allowed is a whole number, 0 or more, below 2^31",
        ),
        ({"stop_token_ids": 5}, "stop_token_ids: got 5, allowed is an array or null"),
    ],
)
async def test_what_is_allowed(server: Serving, fields: dict[str, Any], message: str) -> None:
    status, answer = await server.post(COMPLETIONS, {"prompt": "hi", **fields})
    assert status == 400
    assert answer["error"]["message"].startswith(message)


@pytest.mark.asyncio(loop_scope="module")
async def test_bad_encoding(server: Serving) -> None:
    """Packed bodies are refused unread: a small one could unpack into a huge one."""
    status, answer = await server.post(
        COMPLETIONS, gzip.compress(b'{"prompt": "hi"}'), headers={"Content-Encoding": "gzip"}
    )
    assert (status, answer["error"]["message"]) == (415, "Content-Encoding: got 'gzip', allowed is none")


async def test_broken_chunks() -> None:
    """A body whose framing is garbage is HTTP's own 400; the next client is served."""
    async with serving(tokens(ids_of("ok"))) as running:
        head = b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}"
        async with raw_connection(running.port, head) as (reader, _):
            assert b" 400 " in await soon(reader.readline())
        status, _ = await running.post(COMPLETIONS, {"prompt": "hi"})
        assert status == 200
        assert [leg.outcome for leg in running.agent.legs] == [("length", 2)]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_unknown_model(server: Serving, path: str) -> None:
    status, answer = await server.post(path, {"prompt": "hi", "messages": USER, "model": "gpt-9"})
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert answer["error"]["param"] == "model"
    assert "gpt-9" in answer["error"]["message"]
    _, answer = await server.post(path, {"prompt": "hi", "messages": USER, "model": "x" * 999})
    assert len(answer["error"]["message"]) < 200


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_supported"),
        ("DELETE", "/v1/models", 405, "method_not_supported"),
        ("GET", "/internal/state?after=-1", 400, None),
        ("GET", "/internal/state?after=x", 400, None),
        ("GET", "/internal/state?after=%C2%B2", 400, None),
    ],
)
async def test_wrong_url(server: Serving, method: str, path: str, status: int, code: str | None) -> None:
    async with server.session.request(method, path) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == code


LONG = "The quick brown fox. " * 200


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": LONG}, "prompt"),
        (COMPLETIONS, {"prompt": ["hi", LONG]}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 512}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 100_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
async def test_prompt_too_long(server: Serving, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = await server.post(path, body)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    prompt = body.get("prompt")
    count = len(prompt) if isinstance(prompt, list) and len(prompt) > 2 else len(ids_of(LONG))
    assert "maximum context length is 512 tokens" in error["message"]
    if path == COMPLETIONS:
        assert f"{count} input tokens" in error["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_huge_prompt_is_refused_without_tokenizing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(TextProcessor, "encode", encode)
    text = "long prompt " * 850_000  # 10 MB
    body = {"prompt": text, "messages": [{"role": "user", "content": text}]}
    async with serving() as big:
        status, answer = await big.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "at least" in answer["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_the_server_is_still_well(server: Serving) -> None:
    """After all of the above (tests run in order) a plain request works, and every leg was finished."""
    status, answer = await server.post(COMPLETIONS, {"prompt": "hi"})
    assert (status, answer["choices"][0]["text"]) == (200, "fine")
    assert all(leg.outcome is not None for leg in server.agent.legs)


@pytest.mark.asyncio(loop_scope="module")
async def test_values_without_effect(server: Serving) -> None:
    """Field values that have no effect are fine, and unknown fields are ignored."""
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_p": 0,
        "logit_bias": {},
        "logit_processors": None,
        "best_of": 1,
        "n": 1,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "stop": None,
        "user": "u",
        "metadata": {"a": 1},
        "no_such_field": [1, 2],
        "guided_json": None,
        "model": None,
        "seed": -5,
        "temperature": 0,
        "top_k": -1,
        "stream": False,
        "stream_options": None,
        "kv_transfer_params": None,
    }
    for path in (CHAT, COMPLETIONS):
        status, answer = await server.post(path, {"prompt": "hi", "messages": USER, **neutral})
        assert status == 200, answer


async def test_too_large_bodies_are_refused_unread() -> None:
    async with (
        serving(limits=Limits(body_bytes=1000)) as running,
        raw_connection(running.port, b"Content-Length: 1001\r\n\r\n") as (reader, _),
    ):
        assert b" 413 " in await soon(reader.readline())


async def test_slow_and_broken_uploads() -> None:
    """A body that doesn't come in time is 408; a client that leaves in the middle of one is no trouble."""
    async with serving(tokens(ids_of("ok")), limits=Limits(read_s=0.05)) as running:
        head = b"Content-Length: 100\r\n\r\n{"
        async with raw_connection(running.port, head) as (reader, _):
            assert (await soon(reader.readuntil(b"\r\n\r\n"))).startswith(b"HTTP/1.1 408")
        async with raw_connection(running.port, head):
            pass
        status, _ = await running.post(COMPLETIONS, {"prompt": "hi"})
        assert status == 200
        assert len(running.agent.legs) == 1
