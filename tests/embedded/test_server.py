"""Whole answers: what the engine is asked, and what the client gets, through the openai client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvhandoff.embedded.api import EngineRequest, TokenOutput
from kvhandoff.embedded.chat import Message, template_messages
from tests.embedded.fake_agent import tokens
from tests.embedded.serving import CHAT, COMPLETIONS, MODEL, give, ids_of, serving, soon, tiny_text

EOS = 2
USER: Any = [{"role": "user", "content": "hi"}]
PROMPT_IDS = ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_chat() -> None:
    async with serving(tokens([*ids_of("Grüße 🚀"), EOS], "stop")) as server:
        answer = await server.client.chat.completions.create(
            model=MODEL, messages=USER, max_completion_tokens=40, temperature=0.5, seed=3
        )
        request = await server.request()
    assert list(request.prompt_token_ids) == PROMPT_IDS
    assert (request.params.max_tokens, request.params.temperature, request.params.seed) == (40, 0.5, 3)
    assert answer.id == "chatcmpl-handoff0"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Grüße 🚀")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.usage is not None
    n = len(ids_of("Grüße 🚀")) + 1
    assert answer.usage.prompt_tokens == len(PROMPT_IDS)
    assert answer.usage.completion_tokens == n
    assert answer.usage.total_tokens == len(PROMPT_IDS) + n
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    [leg] = server.agent.legs
    assert leg.calls == ["tokenized", "submit", "first_token", "finished"]
    assert leg.outcome == ("stop", n)


async def test_completion() -> None:
    async with serving(tokens(ids_of(" there"))) as server:
        answer = await server.client.completions.create(model=MODEL, prompt="hi")
        request = await server.request()
    assert list(request.prompt_token_ids) == ids_of("hi")
    assert request.params.max_tokens == 16
    assert answer.id == "cmpl-handoff0"
    assert answer.object == "text_completion"
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, " there", "length")]


async def test_chat_content_parts_and_template_variables() -> None:
    """guidellm sends parts; chat_template_kwargs and add_generation_prompt reach the template."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    async with serving(tokens(ids_of("x"))) as server:
        await server.post(CHAT, body)
        joined = await server.request()
        await server.post(CHAT, body | {"add_generation_prompt": False})
        bare = await server.request()
        await server.post(CHAT, body | {"chat_template_kwargs": {"add_generation_prompt": False}})
        also_bare = await server.request()
    rendered = "<|im_start|>user\none\ntwo<|im_end|>\n"
    assert list(joined.prompt_token_ids) == ids_of(rendered + "<|im_start|>assistant\n")
    assert list(bare.prompt_token_ids) == list(also_bare.prompt_token_ids) == ids_of(rendered)


async def test_continue_final_message() -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer is"}]
    async with serving(tokens(ids_of(" 4"))) as server:
        await server.post(CHAT, {"messages": messages, "continue_final_message": True})
        request = await server.request()
    assert list(request.prompt_token_ids) == PROMPT_IDS + ids_of("The answer is")


def test_past_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", content="2", tool_call_id="1"),
    ]
    assert template_messages(messages) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call | {"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]


async def test_several_prompts_and_choices() -> None:
    """One leg per prompt; siblings after their first one's first token; every prompt counts once."""
    async with serving(tokens(ids_of("abc"))) as server:
        answer = await server.client.completions.create(
            model=MODEL, prompt=["hi", "there"], n=2, seed=5, max_tokens=3
        )
    assert [(c.index, c.text) for c in answer.choices] == [(i, "abc") for i in range(4)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids_of("hi")) + len(ids_of("there"))
    assert answer.usage.completion_tokens == 12
    for leg, prompt in zip(server.agent.legs, ["hi", "there"], strict=True):
        assert leg.calls == ["tokenized", "submit", "submit_sibling", "first_token", "finished"]
        assert [r.params.seed for r in leg.requests] == [5, 6]
        assert all(list(r.prompt_token_ids) == ids_of(prompt) for r in leg.requests)
    ids = [request.request_id for leg in server.agent.legs for request in leg.requests]
    assert len(set(ids)) == 4


async def test_siblings_wait_for_the_first_token() -> None:
    async with serving() as server:
        task = asyncio.create_task(server.post(COMPLETIONS, {"prompt": "hi", "n": 3, "max_tokens": 2}))
        first = await server.request()
        assert server.agent.arrived.empty()
        a, b = ids_of("ab")
        give(first, a)
        siblings = [await server.request(), await server.request()]
        give(siblings[1], b)
        give(first, b, finish_reason="length")
        give(siblings[0], b, finish_reason="length")
        give(siblings[1], a, finish_reason="length")
        _, answer = await soon(task)
    assert [c["text"] for c in answer["choices"]] == ["ab", "b", "ba"]
    assert answer["usage"]["completion_tokens"] == 5


async def test_stop_string_over_token_borders() -> None:
    """Cut before the stop string; the sequence is aborted; tokens that were under way are ignored."""
    async with serving() as server:
        task = asyncio.create_task(
            server.post(COMPLETIONS, {"prompt": "hi", "stop": ["Oslo", "he do"], "max_tokens": 50})
        )
        request = await server.request()
        for token_id in ids_of("jumps over the dogs"):
            give(request, token_id)
        leg = await server.leg()
        status, answer = await soon(task)
        assert status == 200
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "jumps over t",
        "stop",
        "he do",
    )
    assert leg.aborted == [request.request_id]
    assert leg.outcome is not None
    assert leg.outcome[0] == "stop"


async def test_stop_string_in_the_output_and_min_tokens() -> None:
    body = {"prompt": "hi", "stop": "o", "max_tokens": 50}
    async with serving(tokens(ids_of("dog x fox y"))) as server:
        _, shown = await server.post(COMPLETIONS, body | {"include_stop_str_in_output": True})
        _, hidden = await server.post(COMPLETIONS, body)
        _, later = await server.post(COMPLETIONS, body | {"min_tokens": 4})
    assert shown["choices"][0]["text"] == "do"
    assert hidden["choices"][0]["text"] == "d"
    assert later["choices"][0]["text"] == "dog x f"


async def test_unfinished_stop_string_is_given_out_at_the_end() -> None:
    async with serving(tokens(ids_of("the en"))) as server:
        _, answer = await server.post(COMPLETIONS, {"prompt": "hi", "stop": "end"})
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("the en", "length")


async def test_stop_tokens() -> None:
    """EOS and stop tokens aren't text; a stop token of the request is named, and shown on demand."""
    [x] = ids_of("x")
    body = {"prompt": "hi", "stop_token_ids": [x]}
    async with serving(tokens([*ids_of("ab"), x], "stop")) as server:
        _, hidden = await server.post(COMPLETIONS, body)
        _, shown = await server.post(COMPLETIONS, body | {"include_stop_str_in_output": True})
        server.agent.script = tokens([*ids_of("ab"), EOS], "stop")
        _, eos = await server.post(COMPLETIONS, body)
        _, special = await server.post(
            COMPLETIONS, body | {"include_stop_str_in_output": True, "skip_special_tokens": False}
        )
    texts = [answer["choices"][0]["text"] for answer in (hidden, shown, eos, special)]
    assert texts == ["ab", "abx", "ab", "ab<|im_end|>"]
    reasons = [answer["choices"][0]["stop_reason"] for answer in (hidden, shown, eos, special)]
    assert reasons == [x, x, None, None]
    assert eos["usage"]["completion_tokens"] == 3


async def test_chat_logprobs() -> None:
    ids = ids_of("ü!")
    assert len(ids) == 3
    async with serving(tokens(ids)) as server:
        answer = await server.client.chat.completions.create(
            model=MODEL, messages=USER, logprobs=True, top_logprobs=2
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-token_id / 8 for token_id in ids]
    raw = [bytes(entry.bytes or []) for entry in logprobs.content]
    assert b"".join(raw) == "ü!".encode()
    assert [entry.token for entry in logprobs.content] == ["\ufffd", "\ufffd", "!"]
    top = logprobs.content[2].top_logprobs
    assert [(t.token, t.logprob) for t in top] == [
        (tiny_text().token_bytes.text(ids[2] + rank), -(ids[2] + rank) / 8) for rank in range(2)
    ]


async def test_completion_logprobs_and_echo() -> None:
    """Offsets count characters of `text`; the prompt's first token has no logprob."""
    prompt, generated = ids_of("the 中"), ids_of(" é!")
    body = {"prompt": "the 中", "logprobs": 1, "max_tokens": 9}
    async with serving(tokens(generated)) as server:
        _, plain = await server.post(COMPLETIONS, body)
        _, echoed = await server.post(COMPLETIONS, body | {"echo": True})
        _, from_ids = await server.post(COMPLETIONS, body | {"echo": True, "prompt": prompt})
        _, text_only = await server.post(COMPLETIONS, {"prompt": "the 中", "echo": True, "max_tokens": 9})
    logprobs = plain["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" ", "\ufffd", "\ufffd", "!"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-i / 8 for i in generated]
    assert logprobs["top_logprobs"][0] == {" ": -generated[0] / 8}
    assert plain["choices"][0]["text"] == " é!"

    choice = echoed["choices"][0]
    assert choice == from_ids["choices"][0]
    assert choice["text"] == text_only["choices"][0]["text"] == "the 中 é!"
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(prompt) + len(generated)
    assert logprobs["token_logprobs"] == [None, *(-i / 8 for i in prompt[1:]), *(-i / 8 for i in generated)]
    assert logprobs["top_logprobs"][0] is None
    raw = [tiny_text().token_bytes[token_id] for token_id in prompt + generated]
    before = [b"".join(raw[:position]) for position in range(len(raw))]
    assert logprobs["text_offset"] == [len(start.decode(errors="ignore")) for start in before]
    assert "prompt_logprobs" not in choice
    assert text_only["choices"][0]["logprobs"] is None


async def test_echo_without_generation() -> None:
    """How evaluation harnesses score a text: echo, logprobs and max_tokens 0."""
    async with serving(tokens(ids_of("z"))) as server:
        _, answer = await server.post(
            COMPLETIONS, {"prompt": "hi there", "echo": True, "logprobs": 0, "max_tokens": 0}
        )
        request = await server.request()
    assert (request.params.max_tokens, request.params.prompt_logprobs) == (1, 0)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi there", "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids_of("hi there"))
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_and_token_ids() -> None:
    body = {"prompt": "hi", "prompt_logprobs": 1, "return_token_ids": True}
    async with serving(tokens(ids_of("ab"))) as server:
        _, completion = await server.post(COMPLETIONS, body)
        _, chat = await server.post(CHAT, {**body, "messages": USER})
    [choice] = completion["choices"]
    assert choice["token_ids"] == ids_of("ab")
    assert choice["prompt_token_ids"] == ids_of("hi")
    i = ids_of("hi")[1]
    assert choice["prompt_logprobs"] == [
        None,
        {str(i): {"logprob": -i / 8, "rank": 1, "decoded_token": "i"}},
    ]
    assert chat["prompt_token_ids"] == PROMPT_IDS
    assert chat["choices"][0]["token_ids"] == ids_of("ab")
    assert len(chat["prompt_logprobs"]) == len(PROMPT_IDS)


async def test_prompt_details_of_several_prompts() -> None:
    body = {"prompt": ["hi", "there"], "n": 2, "return_token_ids": True}
    async with serving(tokens(ids_of("x"))) as server:
        _, answer = await server.post(COMPLETIONS, body)
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [ids_of("hi"), ids_of("hi"), ids_of("there"), ids_of("there")]


async def test_an_end_without_a_token() -> None:
    """An empty answer, and no first token; the other choices are made all the same."""

    def script(request: EngineRequest) -> Iterable[TokenOutput]:
        yield TokenOutput(request.request_id, None, finish_reason="length")

    async with serving(script) as server:
        _, answer = await server.post(COMPLETIONS, {"prompt": "hi", "n": 2})
    assert [choice["text"] for choice in answer["choices"]] == ["", ""]
    assert answer["usage"]["completion_tokens"] == 0
    assert server.agent.legs[0].calls == ["tokenized", "submit", "submit_sibling", "finished"]


async def test_tokens_as_ids_and_infinite_logprobs() -> None:
    def script(request: EngineRequest) -> Iterable[TokenOutput]:
        [output] = tokens([99])(request)
        assert output.logprob is not None
        yield replace(output, logprob=replace(output.logprob, logprob=float("-inf")))

    async with serving(script) as server:
        _, answer = await server.post(
            COMPLETIONS, {"prompt": "hi", "logprobs": 0, "return_tokens_as_token_ids": True}
        )
    logprobs = answer["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["token_id:99"], [-9999.0])
